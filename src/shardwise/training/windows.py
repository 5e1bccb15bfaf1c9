"""Windows of pure training steps, and what the power limit does in them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardwise.device import POWER_LIMIT, Device, Unavailable

FIRST_STEPS = 5  # of a launch: compilation, the allocator, caches; step 1 may have the longest rows
SETTLE_STEPS = 2  # after an interruption; on a GPU the readings of these two stand less than a step apart
STALL = 3.0  # a step that takes so many medians of its window waits for data or for another process
HELD_SECONDS, HELD_SAMPLES = 0.2, 3


@dataclass(frozen=True, kw_only=True)
class Measured:
    steps: int
    seconds: float
    joules: float  # of all GPUs


class Windows:
    """Cuts a run's steps into windows.

    A reading of the counters that comes with a step was taken when the GPU began the step before. So a window
    starts at the reading of the step after those that warm up, and lasts from reading to reading.
    """

    def __init__(self) -> None:
        self._skip, self._rest = FIRST_STEPS, 0.0
        self._need = (1, 0.0)
        self._from: Sequence[int] | None = None
        self._last: Sequence[int] | None = None
        self._seconds: list[float] = []
        self.interrupted = 0

    @property
    def measuring(self) -> bool:
        return self._from is not None

    def begin(
        self, *, steps: int, seconds: float, warmup_steps: int = 0, warmup_seconds: float = 0.0
    ) -> None:
        """The next windows have at least so many steps and seconds; without a warm-up, from the last step."""
        self._need = (steps, seconds)
        if warmup_steps or self._skip or self._rest > 0:
            self._pause(warmup_steps, warmup_seconds)
        else:
            self._from, self._seconds = self._last, []

    def interrupt(self) -> None:
        """What lies between the last step and the next one is no training."""
        self.interrupted += bool(self._seconds)
        self._pause(SETTLE_STEPS, 0.0)

    def add(self, seconds: float, millijoules: Sequence[int] | None) -> Measured | None:
        """One step, and the counters of all GPUs as they came with it; a window that it completes."""
        self._last = millijoules
        if millijoules is None:
            self.interrupt()
        elif self._from is not None:
            self._seconds.append(seconds)
            return self._cut(self._from, millijoules)
        elif self._skip or self._rest > 0:
            self._skip, self._rest = max(0, self._skip - 1), self._rest - seconds
        else:
            self._from = millijoules
        return None

    def _cut(self, start: Sequence[int], end: Sequence[int]) -> Measured | None:
        lengths = self._seconds
        used = [after - before for before, after in zip(start, end, strict=True)]
        if min(used) < 0 or (len(lengths) >= 3 and max(lengths) > STALL * median(lengths)):
            self.interrupt()
            return None
        if len(lengths) < self._need[0] or sum(lengths) < self._need[1] or not sum(used):
            return None
        self._from, self._seconds = end, []
        return Measured(steps=len(lengths), seconds=sum(lengths), joules=sum(used) / 1000.0)

    def _pause(self, steps: int, seconds: float) -> None:
        self._skip, self._rest = max(self._skip, steps), max(self._rest, seconds)
        self._from, self._seconds = None, []


class Held:
    """Whether the power limit holds clocks down, asked in a thread: an answer takes milliseconds."""

    def __init__(self, device: Device, uuids: Sequence[str]) -> None:
        self._device, self._uuids = device, uuids
        self._cap = sum(bit for bit, words in device.ordinary_clock_reasons.items() if words == POWER_LIMIT)
        self._seen: list[bool] = []
        self._ended = threading.Event()
        threading.Thread(target=self._sample, name="power-cap", daemon=True).start()

    def clear(self) -> None:
        """Forget what was seen: a window begins."""
        self._seen = []

    @property
    def value(self) -> bool | None:
        """None where the driver does not report it, or has not been asked often enough."""
        seen = self._seen
        if not self._cap:
            return None
        return True if any(seen) else False if len(seen) >= HELD_SAMPLES * len(self._uuids) else None

    def end(self) -> None:
        self._ended.set()

    def _sample(self) -> None:
        while not self._ended.wait(HELD_SECONDS):
            reasons = [self._device.read(uuid, "clock_reasons") for uuid in self._uuids]
            self._seen += [bool(int(one) & self._cap) for one in reasons if not isinstance(one, Unavailable)]
