"""One thing that was looked at: what was found, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "problem", "skipped"]

STATUSES: tuple[Status, ...] = ("problem", "warning", "ok", "skipped")
"""Worst first."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A finding. `problem`: training cannot run; `warning`: something is slower or missing."""

    name: str
    status: Status
    finding: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """What it was concluded from, in JSON's types; the unit is in the key."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "status": self.status,
            "finding": self.finding,
            "fix": self.fix,
            "facts": dict(self.facts),
        }


def count(checks: Sequence[Check]) -> dict[Status, int]:
    """How many there are of each status."""
    return {status: sum(one.status == status for one in checks) for status in STATUSES}


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """By status, and within one in the order given."""
    return sorted(checks, key=lambda one: STATUSES.index(one.status))


def ready(checks: Sequence[Check]) -> bool:
    """Whether training can run."""
    return all(one.status != "problem" for one in checks)
