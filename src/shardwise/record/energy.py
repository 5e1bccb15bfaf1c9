"""What a run has used in all its launches: `energy/meter.json` in its folder.

The events do not have it: a resumed run drops the steps after its checkpoint, whose energy was used.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.folders import replace_json
from shardwise.record.read import text_of
from shardwise.units import JOULES_PER_KWH

FOLDER = "energy"
METER = f"{FOLDER}/meter.json"
WRITE_SECONDS = 10.0  # between two writes: what a killed launch loses


@dataclass(frozen=True, kw_only=True)
class Used:
    """Energy of all GPUs, without host, network and power supplies."""

    joules: float = 0.0
    error_joules: float = 0.0  # at most: readings are up to 0.2 s old at both ends of each launch
    seconds: float = 0.0  # that were measured
    phases: Mapping[str, float] | None = None  # joules by phase: see energy.PHASES
    host: Mapping[str, float] | None = None  # joules of all nodes' `cpu` and `dram`, where they can be read
    host_unavailable: Mapping[str, str] | None = None  # why one of them cannot be
    simulated: bool = False

    @property
    def kwh(self) -> float:
        return self.joules / JOULES_PER_KWH

    def plus(self, other: "Used") -> "Used":
        mine, others, others_host = self.phases or {}, other.phases or {}, other.host or {}
        return Used(
            joules=self.joules + other.joules,
            error_joules=self.error_joules + other.error_joules,
            seconds=self.seconds + other.seconds,
            phases={name: mine.get(name, 0.0) + others.get(name, 0.0) for name in {**mine, **others}},
            host=others_host if self.host is None else _both(self.host, others_host),
            host_unavailable={**(self.host_unavailable or {}), **(other.host_unavailable or {})},
            simulated=other.simulated,
        )


def _both(mine: Mapping[str, float], others: Mapping[str, float]) -> dict[str, float]:
    """A part that one launch could not read has no sum."""
    return {part: joules + others[part] for part, joules in mine.items() if part in others}


def read_used(run_dir: Path) -> Used | None:
    """None where nothing was measured. CheckpointError for a damaged file."""
    path = run_dir / METER
    if not path.exists():
        return None
    try:
        values = json.loads(text_of(path))
        return Used(**{key: value for key, value in values.items() if key != "schema"})
    except (OSError, ValueError, TypeError, AttributeError):
        fix = "delete it: the energy used so far is then not counted"
        raise CheckpointError("the energy meter cannot be read", where=str(path), fix=fix) from None


def write_used(run_dir: Path, used: Used) -> None:
    """Replace the file at once."""
    (run_dir / FOLDER).mkdir(exist_ok=True)
    replace_json(run_dir / METER, {"schema": 1, **asdict(used)})
