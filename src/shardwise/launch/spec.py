"""What the launcher hands to its worker processes: one JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A job, where its run folder is, and how it is to be run."""

    job: Mapping[str, Any]
    """The resolved job, as JSON values."""
    run_dir: str
    processes: int
    """Worker processes on this machine, one per GPU."""
    resume: bool = False
    max_steps: int | None = None
    """Stop after this step even if the job has more; the schedule stays the job's."""
    dry_run: bool = False
    """Show what would be run, with one process; write and train nothing."""
    as_json: bool = False
    """Print the plan of a dry run on stdout, as one JSON object."""
    memory_cap_bytes: int | None = None
    """Use no more than this much of each GPU."""
    measure_steps: int | None = None
    """Only measure: run so many steps whatever the job's length, evaluate and save nothing."""
    profile: str | None = None
    """Measure two more steps under torch.profiler, and write rank 0's Chrome trace of the second there."""
    on_oom: Literal["stop", "retry"] = "stop"
    """After a process ran out of GPU memory: end, or go on with a strategy that needs less."""
    chosen: Mapping[str, Any] | None = None
    """The launcher's choice for a retry, as plan.json's `chosen`: it holds whatever the job says."""
    command: Sequence[str] | None = None
    """What the user typed; for the run's record."""
    debug: bool = False
    """Print the traceback of the rank that failed."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> LaunchSpec:
        return LaunchSpec(**values)
