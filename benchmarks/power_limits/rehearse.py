"""One search for a power limit on curves that are known: what it chooses, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shardwise.power.objective import Objective
from shardwise.power.search import Search, Window

WAIT_STEPS = 1  # before the first change of a limit, as in Zeus' optimizer
TICK_SECONDS = 0.1  # granularity of NVML's energy counter, at most
TICK_DEVIATION = TICK_SECONDS / math.sqrt(6)  # of the difference of two ends, each off by up to a tick


@dataclass(frozen=True)
class Record:
    """Seconds and joules of a step at each limit, from the lowest limit to the highest."""

    name: str
    gpus: int
    limits: list[int]
    seconds: NDArray[np.float64]
    joules: NDArray[np.float64]
    held: list[bool] | None = None
    """Whether the limit acts; None if the device does not say."""

    def regrets(self, objective: Objective) -> NDArray[np.float64]:
        """True regret of each limit; for `time` in seconds alone."""
        if objective.kind == "time":
            return self.seconds / self.seconds.min() - 1
        return objective.regrets(self.seconds, self.joules, self.limits[-1])


@dataclass(frozen=True)
class Noise:
    """Errors of a window: relative standard deviations, counter ticks, and a drift over the search."""

    relative: float = 0.0
    ticks: bool = False
    drift_per_window: float = 0.0
    """Share by which energy grows from window to window (temperature)."""


@dataclass(frozen=True)
class Outcome:
    watts: int
    regret: float
    windows: int
    levels: int
    steps: int
    """With warm-up."""
    seconds: float
    expected_regret: float


def rehearse(record: Record, objective: Objective, noise: Noise, generator: np.random.Generator) -> Outcome:
    search = Search(record.limits, objective)
    steps, seconds, last = WAIT_STEPS, WAIT_STEPS * float(record.seconds[-1]), 0
    while (request := search.ask()) is not None:
        index = record.limits.index(request.watts)
        step_seconds = float(record.seconds[index])
        warmup = max(request.warmup_steps, math.ceil(request.warmup_seconds / step_seconds))
        measured = max(request.steps, math.ceil(request.seconds / step_seconds))
        passed = measured + (warmup if request.watts != last else 0)
        steps, seconds, last = steps + passed, seconds + passed * step_seconds, request.watts
        length = measured * step_seconds
        errors = noise.relative * generator.standard_normal(2)
        errors[1] += noise.ticks * TICK_DEVIATION / length * generator.standard_normal()
        errors[1] += noise.drift_per_window * len(search.windows)
        search.tell(
            Window(
                watts=request.watts,
                steps=measured,
                seconds=length * math.exp(errors[0]),
                joules=measured * float(record.joules[index]) * math.exp(errors[1]),
                held=None if record.held is None else record.held[index],
            )
        )
    choice = search.choice()
    return Outcome(
        watts=choice.watts,
        regret=float(record.regrets(objective)[record.limits.index(choice.watts)]),
        windows=len(search.windows),
        levels=len({window.watts for window in search.windows}),
        steps=steps,
        seconds=seconds,
        expected_regret=choice.expected_regret,
    )
