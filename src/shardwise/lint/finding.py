"""A rule, the places that break it, and the findings that a user reads."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from packaging.requirements import Requirement

from shardwise.job.source import Key
from shardwise.lint.document import Document, Kind, place_in_cells
from shardwise.lint.edit import Change, Put, Rename, yaml_scalar
from shardwise.lint.setup import Setup

_GENERAL = ("enabled", "device", "type", "ratio")  # keys that many sections have
Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""The run fails or silently does something else; it costs speed, memory or safety; good to know."""

DEEPSPEED = "deepspeed>=0.19,<0.20"  # the versions whose source the rules were read from (0.19.0 to 0.19.8)


@dataclass(frozen=True)
class Hit:
    """A place that breaks a rule."""

    key: Key
    what: str = ""  # what the file says and what really happens; empty means the rule's `happens`
    fix: str = ""  # empty means the first of `changes`, in words
    changes: tuple[Change, ...] = ()  # what --fix does; empty if only the owner can decide
    severity: Severity | None = None  # if it differs from the rule's
    line: int | None = None
    source: str = ""  # if it differs from the rule's


Find = Callable[[Document, Setup], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong."""

    name: str
    severity: Severity
    kind: Kind  # the kind of files that it looks at
    happens: str  # what really happens when the rule is broken
    source: str
    versions: str  # the library and the range of its versions (PEP 440); empty if it depends on none
    find: Find
    runs: bool = False  # whether it reads a script as it runs, with functions in place of their calls


def rule(
    severity: Severity, source: str, versions: str = DEEPSPEED, kind: Kind = "deepspeed", runs: bool = False
) -> Callable[[Find], Rule]:
    """Declare a rule: the function's name is the rule's id, its docstring says what happens."""

    def declared(find: Find) -> Rule:
        name, happens = find.__name__.replace("_", "-"), " ".join((find.__doc__ or "").split())
        return Rule(name, severity, kind, happens, source, versions, find, runs)

    return declared


training_rule = partial(rule, versions="", kind="training")
job_rule = partial(rule, versions="", kind="job")
loop_rule = partial(training_rule, runs=True)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A hit with everything that the user needs."""

    rule: str
    severity: Severity
    file: str
    line: int = 1
    cell: int = 0  # of a notebook, counted from 1; lines then count from its first
    key: str = ""
    keys: tuple[str, ...] = ()  # all that it is about, if several
    named: str = ""  # the key at the beginning of `what`; empty if the rule's own words have it
    what: str
    fix: str
    source: str = ""
    versions: str = ""
    changes: tuple[Change, ...] = ()

    @property
    def fixable(self) -> bool:
        return bool(self.changes)

    @property
    def cause(self) -> str:
        return self.what.removeprefix(f"{self.named}: ")

    @property
    def where(self) -> str:
        place = f" cell {self.cell}, line {self.line}" if self.cell else f"{self.line}"
        return f"{self.file}:{place}" + (f": {self.key}" if self.key else "")

    def to_json(self) -> dict[str, Any]:
        names = "severity rule file cell line key keys what fix fixable source versions"
        return {name: getattr(self, name) for name in names.split()}


def finding(broken: Rule, document: Document, hit: Hit) -> Finding:
    """Return the finding for a hit in a document; of a script only names of arguments are edited."""
    what, key = hit.what or broken.happens.removesuffix("."), [*map(str, hit.key)]
    own = len(key) == 1 and "." in key[0]  # check's own name of a place
    shown = key[-2:] if key and key[-1] in _GENERAL else key[-1:]
    said = not key or "." in key[-1] or key[-1].endswith("Arguments")
    said = said or any(part.lower() in what.lower() for part in shown)
    named = "" if said else f"`{'.'.join(shown)}`"
    fix = hit.fix or _in_words(hit.changes[0], document)
    if document.syntax == "python":
        fix = fix.replace(": true", ": True").replace(": false", ": False")
    file, line = document.place(hit.line) if hit.line else (document.name, document.line(hit.key))
    file, line = document.set_at.get(hit.key, (file, line))
    cell, line = place_in_cells(document.cells if file == document.name else (), line)
    changes = hit.changes if document.syntax in ("json", "yaml") or _in_place(hit.changes) else ()
    return Finding(
        rule=broken.name,
        severity=hit.severity or broken.severity,
        file=file,
        line=line,
        cell=cell,
        key="" if own else ".".join(hit.key),
        named=named,
        what=f"{named}: {what}" if named else what,
        fix=fix,
        source=hit.source or broken.source,
        versions=broken.versions,
        changes=changes if file == document.name else (),
    )


def _in_place(changes: Sequence[Change]) -> bool:
    return all(isinstance(one, Rename) and one.line for one in changes)


def _in_words(change: Change, document: Document) -> str:
    if isinstance(change, Rename):
        return f"did you mean `{change.name}`?"
    if not isinstance(change, Put):
        return "remove it"
    name, value = change.key[-1], change.value
    written = repr(value) if document.syntax == "python" else json.dumps(value)
    return f"{name}: {yaml_scalar(value)}" if document.syntax == "yaml" else f'"{name}": {written}'


def holds_for(versions: str, library: str, installed: str) -> bool:
    """Whether a rule's range, `deepspeed>=0.19.7,<0.20`, holds for a version of that library."""
    if not versions.startswith(library):
        return True
    return Requirement(versions).specifier.contains(installed, prereleases=True)
