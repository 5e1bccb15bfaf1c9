"""What a launch is made of: its specification, its workers, and the seam to what starts them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shardwise.errors import ShardwiseError
from shardwise.folders import replace_json
from shardwise.launch.nodes import Nodes, Place


@dataclass(frozen=True, kw_only=True)
class LaunchSpec:
    """A job, where its run folder is, and how it is to be run."""

    job: Mapping[str, Any]  # The resolved job, as JSON values
    run_dir: str
    processes: int  # Worker processes on this machine, one per GPU
    nodes: Nodes | None = None  # The machines that train together; None: this one alone
    resume: bool = False
    resume_from: int | None = None  # The step of the checkpoint to resume from; None: of the newest
    trust_checkpoint: bool = False  # Load pickles of DeepSpeed whatever they name
    max_steps: int | None = None
    """Stop after this step even if the job has more; the schedule stays the job's."""
    dry_run: bool = False  # Show what would be run, with one process; write and train nothing
    as_json: bool = False  # Print the plan of a dry run on stdout, as one JSON object
    memory_cap_bytes: int | None = None  # Use no more than this much of each GPU
    measure_steps: int | None = None
    """Only measure: run so many steps whatever the job's length, evaluate and save nothing."""
    profile: str | None = None
    """Measure two more steps under torch.profiler, and write rank 0's Chrome trace of the second there."""
    on_oom: Literal["stop", "retry"] = "stop"
    """After a process ran out of GPU memory: end, or go on with a strategy that needs less."""
    chosen: Mapping[str, Any] | None = None
    """The choice for a resumed run or a retry, as plan.json's `chosen`: it holds whatever the job says."""
    command: Sequence[str] | None = None  # What the user typed; for the run's record
    debug: bool = False  # Print the traceback of the rank that failed

    @property
    def world_size(self) -> int:
        """Worker processes on all nodes, which have equally many."""
        return self.processes * (1 if self.nodes is None else self.nodes.count)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> LaunchSpec:
        nodes = values.get("nodes")
        return LaunchSpec(**{**values, "nodes": None if nodes is None else Nodes(**nodes)})


class Process(Protocol):
    """A started process; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float = ...) -> int: ...


@dataclass
class Worker:
    """A process of the run. `failed_at` and `report` are filled in by `look`."""

    rank: int
    process: Process
    folder: Path
    failed_at: float | None = None  # Unix seconds; None while it has not failed
    report: Mapping[str, Any] | None = None
    """The error it left: {"exit_code", "headline", "problems": [{"what", "where", "fix"}], "traceback"};
    after GPU memory ran out also "out_of_memory": `record.schema.OutOfMemory`; "follows", see below."""
    _looked_at: float = 0.0

    @property
    def log(self) -> Path:
        """File with what it printed; rank 0 prints to the terminal and has none."""
        return self.folder / f"rank-{self.rank}.log"

    @property
    def out_of_memory(self) -> Mapping[str, Any] | None:
        return None if self.report is None else self.report.get("out_of_memory")

    @property
    def follows(self) -> bool:
        """Whether its error follows from another rank's: it lost the connection."""
        return self.report is not None and bool(self.report.get("follows"))

    @property
    def traceback(self) -> str:
        return "" if self.report is None else str(self.report.get("traceback", ""))

    def look(self, now: float) -> bool:
        """Take note of an error report or an exit; True when the process has ended."""
        code = self.process.poll()
        if self.report is None:
            path = report_path(self.folder, self.rank)
            with suppress(OSError, ValueError):  # not there, or not yet complete
                self.report = json.loads(path.read_text(encoding="utf-8"))
                self.failed_at = path.stat().st_mtime
        if self.failed_at is None and code not in (None, 0):
            # It ended between the last look and now. The earlier moment keeps the errors of other ranks,
            # which follow from its end, behind it.
            self.failed_at = self._looked_at or now
        self._looked_at = now
        return code is not None

    def log_tail(self, lines: int = 40) -> str:
        """The last lines it printed; empty without a log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one set of workers ended."""

    code: int
    error: ShardwiseError | None = None
    out_of_memory: Mapping[str, Any] | None = None
    """`record.schema.OutOfMemory` of the worker that failed first, if that is the cause."""
    requested: bool = False  # The user asked the run to stop
    follows: bool = False  # The error is of a connection that another's end has cut
    failed_at: float = 0.0  # Unix seconds
    step: int = 0  # The last one that a rank has begun; 0 before the first
    traceback: str = ""
    log: Path | None = None  # The failed worker's log, which is kept; on the node that failed


class Launcher(Protocol):
    """Starts, stops and kills the workers of one machine."""

    def start(
        self,
        processes: int,
        module: str,
        spec: Path,
        *,
        place: Place | None = None,
        quiet: bool = False,
        debug: bool = False,
    ) -> list[Worker]:
        """Run `python -m module spec` in each process, with the variables torchrun sets.

        `place`: of these processes among those of all nodes. Error reports (`report_path`) and logs go next
        to `spec`; with `quiet` rank 0 has one, too. Raises MachineError when one cannot be started; then none
        is left running.
        """

    def stop(self, workers: Sequence[Worker]) -> None:
        """Ask them to save and end."""

    def kill(self, workers: Sequence[Worker]) -> None:
        """End them with what they started; returns when they have ended."""


def report_path(folder: Path, rank: int) -> Path:
    """File with the error of a rank."""
    return folder / f"rank-{rank}.json"


def write_report(folder: Path, rank: int, report: Mapping[str, Any]) -> None:
    """Leave a worker's error for the launcher, which never sees half of the file."""
    replace_json(report_path(folder, rank), report)
