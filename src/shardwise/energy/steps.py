"""Joules of a step from the energy counters of all GPUs, read once with each step."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.energy.meter import Unavailable

FIRST = "no reading before the first step of a launch"
INTERRUPTED = "an evaluation or a save lies between the readings"


class StepJoules:
    """Differences between one step's readings and the next one's."""

    def __init__(self, unavailable: str | None = None) -> None:
        """`unavailable`: why there are no readings at all, where that is known."""
        self._unavailable = unavailable
        self._before: list[int] | None = None
        self._gap = FIRST

    def of_step(self, millijoules: Sequence[int | None]) -> float | Unavailable:
        """Energy of all GPUs since the step before. `millijoules` by rank; None: that GPU has no counter."""
        if self._unavailable is not None:
            return Unavailable(reason=self._unavailable)
        now = [reading for reading in millijoules if reading is not None]
        if len(now) < len(millijoules):
            self._before, self._gap = None, "the step before has no reading"
            return Unavailable(reason=f"rank {list(millijoules).index(None)} has no reading")
        before, self._before = self._before, now
        if before is None:
            return Unavailable(reason=self._gap)
        differences = [after - start for start, after in zip(before, now, strict=True)]
        if min(differences) < 0:
            return Unavailable(reason="an energy counter went backwards")
        return sum(differences) / 1000.0

    def interrupt(self) -> None:
        """Something else than the step used energy: the next step's difference is not its own."""
        self._before, self._gap = None, INTERRUPTED
