"""What a power limit is chosen for, as the regret of each limit: how much worse it is than the best one."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardwise.units import JOULES_PER_KWH, SECONDS_PER_HOUR

Values = NDArray[np.float64]
Kind = Literal["energy", "time", "eta", "cost", "max-slowdown"]

THRIFT = 0.02  # share of energy in `time`: of equally fast limits, the one that uses less energy is best


@dataclass(frozen=True, kw_only=True)
class Objective:
    """One objective, with the numbers that it needs, as job/contradictions.py sees to; others are None.

    energy: joules per step. time: seconds per step. eta: Zeus' cost `eta*E + (1-eta)*P_max*T` (You et al.,
    NSDI 2023), where P_max is the highest limit of all GPUs together. cost: energy and rent of the GPUs.
    max-slowdown: the least energy among limits that are at most `max_slowdown` slower than the highest limit.
    """

    kind: Kind
    gpus: int = 1
    """All GPUs of the job: energy is measured over all of them."""
    eta: float | None = None
    """From 0 (time) to 1 (energy)."""
    price_per_kwh: float | None = None
    price_per_gpu_hour: float | None = None
    """In the same currency as `price_per_kwh`."""
    max_slowdown: float | None = None
    """0.05: at most 5 % more seconds per step."""

    def regrets(self, seconds: Values, joules: Values, highest_watts: float) -> Values:
        """Regret of each limit: 0.02 is 2 % worse than the best limit of the same row.

        `seconds` and `joules` are per step; shape (..., limits), limits from the lowest to the highest.
        `highest_watts` is the highest limit of one GPU. For max-slowdown, a limit that is too slow has its
        excess of time as regret, unless its excess of energy is larger.
        """
        if self.max_slowdown is not None:
            allowed = (1 + self.max_slowdown) * seconds[..., -1:]
            least = np.where(seconds <= allowed, joules, np.inf).min(-1, keepdims=True)
            regrets = np.maximum(joules / least - 1, seconds / allowed - 1)
            return np.asarray(np.maximum(regrets, 0.0))
        cost = self._cost(seconds, joules, highest_watts)
        return np.asarray(cost / cost.min(-1, keepdims=True) - 1)

    def _cost(self, seconds: Values, joules: Values, highest_watts: float) -> Values:
        if self.kind == "time":
            return np.asarray(seconds ** (1 - THRIFT) * joules**THRIFT)
        if self.eta is not None:
            return self.eta * joules + (1 - self.eta) * highest_watts * self.gpus * seconds
        if self.price_per_kwh is not None and self.price_per_gpu_hour is not None:
            rent = self.price_per_gpu_hour * self.gpus * seconds / SECONDS_PER_HOUR
            return self.price_per_kwh * joules / JOULES_PER_KWH + rent
        return joules

    def text(self) -> str:
        """The objective as the end of a sentence."""
        if self.max_slowdown is not None:
            return f"least energy, at most {100 * self.max_slowdown:g} % slower than the highest limit"
        return {
            "energy": "least energy per step",
            "time": "least time per step",
            "eta": f"least eta*E + (1-eta)*P_max*T with eta {self.eta} and {self.gpus} GPUs",
            "cost": f"least cost at {self.price_per_kwh} per kWh and {self.price_per_gpu_hour} per GPU-hour",
        }[self.kind]
