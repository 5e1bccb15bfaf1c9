"""A run's curves while it runs, for charts that can be zoomed into."""

import math
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwise.report.curves import over_time, points
from shardwise.report.live.run import LiveRun
from shardwise.units import GIB

DRAWN = ("loss", "memory_gib", "learning_rate", "grad_norm", "tokens_per_second")
"""Columns with a value a step, loss in nats a token; `memory_gib` is reserved by the worst rank."""
KEPT = (*DRAWN, "seconds", "joules")
WIDTH = 1 + len(KEPT)


class CurvesOfRun(LiveRun):
    """A LiveRun that keeps the values of all steps, as 64-bit numbers."""

    launches = 0
    """How often the file was begun: where it grows, what was read before no longer holds."""

    def _begin(self) -> None:
        super()._begin()
        self.launches += 1
        self._table, self._evals = array("d"), array("d")  # step and KEPT, one after the other; step and loss

    def _add(self, event: Mapping[str, Any]) -> None:
        super()._add(event)
        step = self._step
        if event["kind"] == "eval":
            self._evals.extend((event["step"], _number(event["loss"])))
        elif event["kind"] == "step" and step is not None:
            memory = None if step.peak_bytes is None else step.peak_bytes / GIB
            values = step.loss, memory, *map(event.get, KEPT[2:])
            self._table.extend(array("d", [step.number, *map(_number, values)]))  # all of them or none

    def size(self) -> tuple[int, int]:
        """Numbers of steps and evaluations: what `curves` takes as `after`."""
        return len(self._table) // WIDTH, len(self._evals) // 2

    def curves(
        self, first: float = -math.inf, last: float = math.inf, after: tuple[int, int] = (0, 0)
    ) -> dict[str, Any]:
        """`x` and `y` of DRAWN, `watts` of all GPUs, `eval_loss`; `after`: what is new since this `size`."""
        table, evals = (np.array(kept).reshape(-1, n) for kept, n in ((self._table, WIDTH), (self._evals, 2)))
        seen, new = table[after[0] - 1, 0] if after[0] else -1, table[after[0] :]
        power = [
            (step, used / time) for step, _, time, used in over_time(table[:, (0, -2, -1)]) if step > seen
        ]
        found = {name: new[:, (0, place)] for place, name in enumerate(DRAWN, start=1)}
        found |= {"watts": np.array(power).reshape(-1, 2), "eval_loss": evals[after[1] :]}
        return {
            name: points(both, first, last) for name, both in found.items() if not np.isnan(both[:, 1]).all()
        }


def _number(value: float | None) -> float:
    return math.nan if value is None else value
