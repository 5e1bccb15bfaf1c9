"""When a checkpoint is written: at once, or by a thread while training goes on (decision 0069).

The thread does all that the store does (checkpoint.py), the agreement between ranks included: that has a
process group of its own. One checkpoint is written at a time; the next one waits for it.
"""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import Engine
from shardwise.hardware.detect import host_memory_bytes
from shardwise.training.process import Ranks
from shardwise.units import size

SWITCH = "SHARDWISE_BACKGROUND_SAVES"  # In the environment. 0: training waits
SHARE = 0.9
"""Of the host's available memory, the most that copies of the state may take."""
LONG_SECONDS = 1.0  # A wait for the checkpoint before that is worth a line


@dataclass
class Progress:
    """The position of the training; a checkpoint carries it in addition to the engine's state."""

    step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    best: int | None = None  # The evaluated step with the lowest loss, where that is to be kept


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is on disk."""

    step: int
    size_bytes: int
    seconds: float  # Training stood still
    background_seconds: float | None = None  # Then it went on, while a thread wrote


class Saver:
    """Saves with `save`, or, where there is one, with `stage`, which returns what a thread has to do."""

    def __init__(
        self,
        save: Callable[[Progress], int],
        stage: Callable[[Progress], Callable[[], int]] | None = None,
        *,
        quiet: bool = False,
    ) -> None:
        """`quiet`: another rank says how long it waited."""
        self._save, self._stage, self._quiet = save, stage, quiet
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[Saved] | None = None

    @property
    def ended(self) -> bool:
        """Whether a thread has written a checkpoint, or failed to, that `wait` did not yet tell of."""
        return self._writing is not None and self._writing.done()

    def save(self, progress: Progress, *, wait: bool) -> list[Saved]:
        """Save, in the background if possible and not `wait`. Returns what is on disk since last asked."""
        began, step = time.perf_counter(), progress.step
        before = self.wait()
        waited = time.perf_counter() - began
        if before and waited > LONG_SECONDS and not self._quiet:
            what = f"step {step}: waited {waited:.0f} s for the checkpoint of step {before[0].step}"
            print(f"{what}, which was still being written", file=sys.stderr, flush=True)
        if wait or self._stage is None:
            size = self._save(progress)
            return [*before, Saved(step=step, size_bytes=size, seconds=time.perf_counter() - began)]
        commit = self._stage(progress)
        stood = time.perf_counter()

        def write() -> Saved:
            size = commit()
            wrote = time.perf_counter() - stood
            return Saved(step=step, size_bytes=size, seconds=stood - began, background_seconds=wrote)

        self._writing = self._thread.submit(write)
        return before

    def wait(self) -> list[Saved]:
        """What a thread was writing, once it has. Raises what ended it."""
        writing, self._writing = self._writing, None
        return [] if writing is None else [writing.result()]


def reserve(copy: HostCopy, engine: Engine, ranks: Ranks) -> str | None:
    """Take the host memory for copies of the state. Or why training waits while it is written. Collective."""
    why = next((why for why in ranks.gather(_why_not(engine)) if why), None)
    if why is None and (named := engine.named_state()):
        copy.reserve(HostCopy.bytes_of(named[0]))
    return why


def _why_not(engine: Engine) -> str | None:
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH} is 0"
    named = engine.named_state()
    if named is None:
        return "DeepSpeed writes the state on NVMe itself"
    if engine.world.local_disks:
        return "each node has a disk of its own"
    tensors, parts = named
    if any(part.cut is not None and part.cut.dim < 0 for part in parts.values()):
        return "complete weights can be gathered on the GPUs alone"
    needed = HostCopy.bytes_of(tensors) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = min(psutil.virtual_memory().available, host_memory_bytes())
    if needed > SHARE * free:
        return f"a copy of the state takes {size(needed)} of host memory, of which {size(free)} are free"
    return None
