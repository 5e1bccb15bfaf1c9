"""A rule, what it says about a file, and what that file's owner reads."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from shardwise.lint.document import Document, Key, Kind
from shardwise.lint.edit import Change
from shardwise.lint.setup import Setup

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The run fails or silently does something else; it costs speed, memory or safety; good to know."""

DEEPSPEED = "deepspeed>=0.19,<0.20"
"""The range that the rules' sources were read in (0.19.0 to 0.19.8)."""


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A rule broken at one place."""

    key: Key
    what: str
    """What is there and what really happens."""
    fix: str
    changes: tuple[Change, ...] = ()
    """What --fix does; empty where only the owner can know."""
    severity: Severity | None = None
    """Where it is not the rule's own."""
    line: int | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One thing that can be wrong."""

    name: str
    severity: Severity
    kind: Kind
    """Of the files it looks at."""
    happens: str
    """What really happens when the rule is broken, for the page of all rules."""
    source: str
    versions: str = DEEPSPEED
    """The library and the range of its versions (PEP 440); empty where it depends on none."""
    find: Callable[[Document, Setup], Iterator[Hit]]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A hit, with everything its reader needs."""

    rule: str
    severity: Severity
    file: str
    line: int
    key: str
    what: str
    fix: str
    source: str
    versions: str
    changes: tuple[Change, ...] = ()

    @property
    def fixable(self) -> bool:
        return bool(self.changes)

    def to_json(self) -> dict[str, Any]:
        return {
            "severity": self.severity,
            "rule": self.rule,
            "file": self.file,
            "line": self.line,
            "key": self.key,
            "what": self.what,
            "fix": self.fix,
            "fixable": self.fixable,
            "source": self.source,
            "versions": self.versions,
        }


def finding(rule: Rule, document: Document, hit: Hit) -> Finding:
    """What a rule says of a document; a script is never edited."""
    return Finding(
        rule=rule.name,
        severity=hit.severity or rule.severity,
        file=document.name,
        line=hit.line or document.line(hit.key),
        key=".".join(hit.key),
        what=hit.what,
        fix=hit.fix,
        source=rule.source,
        versions=rule.versions,
        changes=hit.changes if document.syntax in ("json", "yaml") else (),
    )


def holds_for(versions: str, library: str, installed: str) -> bool:
    """Whether a rule's range, `deepspeed>=0.19.7,<0.20`, holds for a version of that library."""
    name, bounds = re.fullmatch(r"([a-z]*)(.*)", versions).groups()  # type: ignore[union-attr]
    if name != library:
        return True
    have = _numbers(installed)
    tests = {
        ">=": lambda limit: have >= limit,
        "<=": lambda limit: have <= limit,
        ">": lambda limit: have > limit,
        "<": lambda limit: have < limit,
    }
    pairs = re.findall(r"(>=|<=|>|<)([0-9.]+)", bounds)
    return all(tests[sign](_numbers(limit)) for sign, limit in pairs)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
