"""What the machine's GPUs and a run do, sampled until a signal ends it."""

import signal
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from shardwise.device.find import find
from shardwise.errors import JobError, what_of
from shardwise.record.follow import newest_running
from shardwise.report.live.machine import Machine
from shardwise.report.live.run import ACTIVE, LiveRun

SCHEMA = 1
EVERY_SECONDS = 2.0
LEAST_SECONDS, MOST_SECONDS = 0.1, 86_400.0
RUNS = Path("runs")
LOOK_SECONDS = 10.0  # Between two searches for a running run, where none was named

ENDING = (signal.SIGINT, signal.SIGTERM)


Samples = Generator[dict[str, Any], None, None]


def monitor(run: Path | None = None, *, every_seconds: float = EVERY_SECONDS) -> Samples:
    """Yield samples of this machine and of a run: one now, then one every `every_seconds`.

    Ends after SIGINT or SIGTERM: they wait while a sample is used, so no row is written by halves. The GPUs
    are asked by the driver alone, without a CUDA context. Call it from the main thread.

    Args:
        run: a run folder; None: the newest one in `runs` that is running, if there is one.
        every_seconds: from one sample to the next.

    Raises:
        JobError: `run` is no run folder, or `every_seconds` is out of range.
    """
    if not LEAST_SECONDS <= every_seconds <= MOST_SECONDS:
        fix = f"{LEAST_SECONDS:g} to {MOST_SECONDS:.0f} seconds"
        raise JobError("samples cannot be taken so often or so rarely", where="--every", fix=fix)
    watched, machine = _Watched(run), Machine(find())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        began, number = time.monotonic(), 0
        while True:
            now = time.time()
            yield {"schema": SCHEMA, "time": now, **machine.sample(), **watched.look(now)}
            # of the times begin, begin + every, ... the next one
            number = max(number + 1, int((time.monotonic() - began) / every_seconds) + 1)
            wait = began + number * every_seconds - time.monotonic()
            if signal.sigtimedwait(ENDING, max(0.0, wait)) is not None:
                return
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class _Watched:
    """The run that was named, or the one that runs."""

    def __init__(self, named: Path | None) -> None:
        self._search = named is None
        self._run = None if named is None else LiveRun(named)
        self._searched: float | None = None
        self._ended = True  # the run of the last look, if there was one
        self._why = f"none is running in {RUNS}/; name its folder"

    def look(self, now: float) -> dict[str, Any]:
        if self._search and self._ended and (self._searched is None or now - self._searched >= LOOK_SECONDS):
            self._searched, found = now, newest_running(RUNS)
            if found is not None and (self._run is None or found != self._run.path):
                try:
                    self._run = LiveRun(found)
                except JobError as error:  # its files are being written: the next search finds it again
                    self._why = what_of(error)
        if self._run is None:
            return {"run": None, "run_unavailable": self._why}
        seen = self._run.look(now)
        self._ended = seen["status"] not in ACTIVE
        return {"run": seen, "run_unavailable": None}
