"""Whether this machine can train: checks as values, each with its finding and how to fix it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "warning", "problem", "unclear", "skipped"]
STATUSES: tuple[Status, ...] = ("problem", "unclear", "warning", "ok", "skipped")  # worst first


@dataclass(frozen=True)
class Check:
    """A finding.

    `problem`: training cannot run; `unclear`: not found out; `warning`: something is slower or missing.
    """

    name: str
    status: Status
    finding: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)  # JSON's types; keys name the units

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count(checks: Sequence[Check]) -> dict[Status, int]:
    """How many there are of each status."""
    return {status: sum(one.status == status for one in checks) for status in STATUSES}
