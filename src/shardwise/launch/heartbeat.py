"""Signs of life: each rank notes its step and phase in a small mapped file, and the launcher watches them.

A mark is two stores into memory. A rank that makes none for longer than its phase may take hangs: then the
stacks of all ranks are kept, and the rank that the others wait for is named.
"""

import faulthandler
import mmap
import os
import signal
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from shardwise.errors import JobError, MachineError, Problem
from shardwise.launch import flight
from shardwise.launch.spec import Worker

SECONDS = "SHARDWISE_HANG_SECONDS"
DEFAULT_SECONDS = 60.0
USUAL = 10.0  # A step may take so many times the usual one
PATIENCE = {
    "preparing": 1440.0,  # the model and the data are read, text is tokenised: hours
    "building": 30.0,
    "the first steps": 30.0,  # kernels are compiled, the ranks connect
    "training": 1.0,
    "evaluating": 10.0,  # for each micro-batch
    "saving": 30.0,
    "ending": 30.0,
}
"""By phase: how long a rank may be silent, in units of SHARDWISE_HANG_SECONDS."""
FIRST_STEPS = 2
_STEPPING = ("the first steps", "training")
STOP_SHARE = 1 / 3  # of the limit, after a stop was asked for: batch systems kill after 30 s
_HALTED_SHARE = 1 / 3  # of the limit, for a rank that is stopped by a signal: it does nothing at all
_LAYOUT = struct.Struct("<qqi")  # marks so far, step, phase
_LOOK_SECONDS, _DUMP_SECONDS, _PAUSE_SECONDS = 0.5, 1.0, 5.0
_WAITING = ("/torch/distributed/", "/deepspeed/comm/", "/training/process.py", "/torch/cuda/streams.py")
"""Where a rank that waits for others, or for its GPU, has its innermost frame."""

_mapped: mmap.mmap | None = None


def begin(folder: Path, rank: int) -> None:
    """In a rank: start to write marks, and write the stacks of all threads when SIGUSR2 comes."""
    global _mapped  # noqa: PLW0603 - a process has one heartbeat
    with _beat(folder, rank).open("w+b") as file:
        file.truncate(_LAYOUT.size)
        _mapped = mmap.mmap(file.fileno(), _LAYOUT.size)
    flight.begin(folder, rank)
    faulthandler.register(signal.SIGUSR2, file=_stack(folder, rank).open("w"), all_threads=True)
    mark("preparing")


def mark(phase: str, step: int = 0) -> None:
    """Note that this rank makes progress; does nothing without a launcher. The last step begun is kept."""
    if _mapped is not None:
        marks, last, _ = _LAYOUT.unpack_from(_mapped)
        _LAYOUT.pack_into(_mapped, 0, marks + 1, max(step, last), _PHASES.index(phase))


_PHASES = list(PATIENCE)


def least_seconds() -> float:
    """Of silence before a rank hangs, as the environment says; 0: never. JobError where it is no number."""
    text = os.environ.get(SECONDS, str(DEFAULT_SECONDS))
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds
    raise JobError(f"{SECONDS}={text} is no number of seconds", where=SECONDS, fix=f"{SECONDS}=60; 0: never")


class Seen(NamedTuple):
    """A rank of a run that hangs."""

    rank: int
    step: int
    phase: str
    marks: int
    halted: bool = False  # By SIGSTOP
    busy: bool = False  # It uses the processor
    frame: tuple[str, str] | None = None  # (file:line, function) of its main thread, innermost
    collective: str = ""  # In words, the last that it began

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks or its GPU, rather than doing something by itself."""
        if self.frame is None:
            return False
        place, function = self.frame
        in_backward = function == "_engine_run_backward"  # DDP waits there, in C++
        return any(part in place for part in _WAITING) or (in_backward and not self.busy)

    def in_words(self) -> str:
        """What it does, and where: `rank 0 waits in all_reduce (distributed_c10d.py:2806)`."""
        if self.halted:
            return f"rank {self.rank} is stopped (SIGSTOP)"
        does = f"rank {self.rank} {'waits' if self.waits or not self.busy else 'computes'}"
        does = f"{does} in {self.frame[1]} ({Path(self.frame[0]).name})" if self.frame else does
        return f"{does}; {self.collective}" if self.collective else does


def suspects(ranks: Sequence[Seen]) -> list[Seen]:
    """Those that the others wait for; all, where that cannot be seen."""
    halted = [one for one in ranks if one.halted]
    if halted:
        return halted
    active = [one for one in ranks if not one.waits]
    if len(active) > 1:  # a rank that waits in a library looks active, but does not compute
        active = [one for one in active if one.busy] or active
    behind = min((one.step, one.marks) for one in ranks)
    last = [one for one in ranks if (one.step, one.marks) == behind]
    return active if 0 < len(active) < len(ranks) else last


@dataclass
class _Rank:
    worker: Worker
    since: float
    raw: bytes = b""
    marks: int = 0
    step: int = 0
    phase: str = ""
    stepped: float = 0.0
    halted: float | None = None  # Since when
    ticks: int = 0  # Of the processor's time


@dataclass
class Pulse:
    """The heartbeats of this machine's ranks; ask `look` often."""

    workers: Sequence[Worker]
    least: float = field(default_factory=least_seconds)
    hung: bool = False

    def __post_init__(self) -> None:
        now = self._looked = time.monotonic()
        self._ranks = [_Rank(worker, now) for worker in self.workers]
        self._steps: deque[float] = deque(maxlen=50)  # seconds

    def last_step(self) -> int:
        """The last step that a rank has begun; 0 before the first."""
        for rank in self._ranks:
            self._read(rank, time.monotonic())
        return max((rank.step for rank in self._ranks), default=0)

    def look(self, *, requested: bool = False, alone: bool = True) -> None:
        """Read the marks; a rank that hangs gets a report. `requested`: the run was asked to stop.

        `alone`: no other machine has ranks of this run.
        """
        now = time.monotonic()
        gap = now - self._looked
        if self.least == 0 or gap < min(_LOOK_SECONDS, self.least / 10):
            return
        for rank in self._ranks:
            if gap > _PAUSE_SECONDS:  # this process did not run, so it did not see what the ranks did
                rank.since += gap
                rank.halted = None
            self._read(rank, now)
        self._looked = now
        running = [rank for rank in self._ranks if rank.worker.process.poll() is None]
        if self.hung or not running or any(worker.failed_at for worker in self.workers):
            return
        # A rank may wait for another that compiles or saves: the longest limit counts for all.
        limit = max(PATIENCE.get(rank.phase, float("inf")) for rank in running) * self.least
        # Of two steps the shorter one is usual: the first compiles kernels.
        limit = max(limit, USUAL * median_low(self._steps or [0.0]))
        silent = now - min(rank.since for rank in running)
        halted = max(now - (now if rank.halted is None else rank.halted) for rank in running)
        if silent > limit * (STOP_SHARE if requested else 1.0) or halted > self.least * _HALTED_SHARE:
            self._accuse(running, max(silent, halted), alone=alone)

    def _read(self, rank: _Rank, now: float) -> None:
        with suppress(OSError, struct.error, IndexError):
            raw = _beat(rank.worker.folder, rank.worker.rank).read_bytes()
            if raw != rank.raw:
                marks, step, phase = _LAYOUT.unpack(raw)
                if step > rank.step:
                    if rank.phase in _STEPPING and _PHASES[phase] in _STEPPING:
                        self._steps.append((now - rank.stepped) / (step - rank.step))
                    rank.stepped = now
                rank.raw, rank.since, rank.marks = raw, now, marks
                rank.halted = None
                rank.step, rank.phase = step, _PHASES[phase]
        state, ticks = _state(rank.worker)  # under cpulimit a rank is stopped in most looks, and goes on
        rank.halted = (rank.halted or now) if state == "T" and ticks == rank.ticks else None
        rank.ticks = ticks

    def _accuse(self, running: Sequence[_Rank], seconds: float, *, alone: bool) -> None:
        self.hung = True
        for rank in running:
            with suppress(ProcessLookupError):
                os.kill(rank.worker.process.pid, signal.SIGUSR2)
        time.sleep(_DUMP_SECONDS)
        folder = self.workers[0].folder
        flight.ask(folder, [rank.worker.rank for rank in running], seconds=2 * _DUMP_SECONDS)
        seen = [_seen(rank) for rank in running]
        found = suspects(seen)
        first, ranks = found[0], ", ".join(str(one.rank) for one in found)
        verb = f"rank {ranks} hangs" if len(found) == 1 else f"ranks {ranks} hang"
        headline = f"{verb} in step {first.step}, {first.phase}: no progress for {seconds:.0f} s"
        worker = next(worker for worker in self.workers if worker.rank == first.rank)
        fix = "the stacks of all ranks are in the logs; go on with --resume, or train with --supervise"
        problems = [Problem(what=first.in_words(), where=f"process {worker.process.pid}")]
        problems += [Problem(what=one.in_words()) for one in seen if one is not first]
        problems[-1] = replace(problems[-1], fix=fix)
        follows = not alone and all(one.waits for one in seen)
        worker.report = {**MachineError(headline, problems=problems).to_json(), "follows": follows}
        worker.failed_at = time.time()


def _seen(rank: _Rank) -> Seen:
    """What a rank does; its stacks go into its log."""
    worker = rank.worker
    state, _ = _state(worker)
    stacks = ""
    with suppress(OSError):
        stacks = _stack(worker.folder, worker.rank).read_text(encoding="utf-8", errors="replace")
    with suppress(OSError), worker.log.open("a", encoding="utf-8") as file:
        file.write(f"--- stacks of rank {worker.rank} when the run hung (state {state}) ---\n{stacks}")
    own = (worker.rank, rank.step, rank.phase, rank.marks)
    last = flight.last_collective(worker.folder, worker.rank)
    return Seen(*own, halted=state == "T", busy=state == "R", frame=innermost(stacks), collective=last)


def innermost(stacks: str) -> tuple[str, str] | None:
    """(file:line, function) of the main thread's innermost frame in what faulthandler wrote."""
    thread = stacks.rpartition("hread 0x")[2].splitlines()[1:2]  # the main thread comes last
    if not thread or not thread[0].startswith('  File "'):
        return None
    file, _, rest = thread[0].removeprefix('  File "').partition('", line ')
    line, _, function = rest.partition(" in ")
    return f"{file}:{line}", function


def _state(worker: Worker) -> tuple[str, int]:
    """Of a rank's main thread, as in proc(5): R runs, S and D wait, T was stopped; and its ticks so far."""
    with suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{worker.process.pid}/stat").read_text(encoding="ascii", errors="replace")
        values = stat.rpartition(") ")[2].split()
        return values[0], int(values[11]) + int(values[12])
    return "?", 0


def _beat(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.beat"


def _stack(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.stack"
