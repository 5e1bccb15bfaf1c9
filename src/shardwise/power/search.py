"""Chooses a GPU power limit while a job trains, from windows of its own steps at different limits.

The caller runs what `ask` requests and gives back what it measured with `tell`, until `ask` returns None.
Nothing here reads a device or a clock: a search is a function of its windows, saved and resumed with them.

The next limit is the one with the highest expected improvement (Jones et al. 1998) over the best so far, on
curves drawn from the estimate in `curve.py`; or the best so far again, if it is known less well. The search
ends when the expected regret of its choice is at most ENOUGH (decision 0040).
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from shardwise.errors import CheckpointError, JobError
from shardwise.power.curve import Curve, Values, estimate
from shardwise.power.objective import Objective

ENOUGH = 0.01  # expected regret at which a search ends: less than windows differ by
FIRST = (0.0, 1 / 3, 2 / 3)
"""Limits that are always measured, as shares of the range in log watts from the top."""
MOST_WINDOWS = 24
MOST_AT_ONE_LIMIT = 5
SAMPLES = 128
CLOSE = 1.06  # ratio of two limits below which the border of max-slowdown is known well enough
EQUAL = 0.01  # difference of time and energy below which two limits are equal
SLOWER = 1.15  # how far over the allowed time a limit must be for lower ones to be out: records jump by 0.1

WARMUP_STEPS, WARMUP_SECONDS = 2, 0.3  # one step is already queued on the GPU when the limit changes
WINDOW_STEPS, WINDOW_SECONDS = 4, 1.0  # repeated windows take twice the seconds
"""A reading is up to 0.2 s old: up to 0.1 s of a tick of the counter, and up to 0.1 s until it is sampled.
With both ages uniform at both ends, the standard deviation is sqrt(4 x 0.1^2 / 12) = 0.058 s: 5.8 % of 1 s,
2.9 % of 2 s. Limits that are close are measured again: the choice is as good as with 2 s from the start."""

DRIFTED = 0.05  # change of seconds or joules per step that counts as drift, if three spreads are less
DRIFTED_WINDOWS = 3


@dataclass(frozen=True, kw_only=True)
class Window:
    """Training steps without evaluation, save or stall, all at one limit, after the warm-up."""

    watts: int
    """The limit of each GPU."""
    steps: int
    """Optimizer steps, or any count of equal work."""
    seconds: float
    joules: float
    """Of all GPUs of the job."""
    held: bool | None = None
    """Whether the limit held clocks down at any time (NVML's SwPowerCap); None if that is not known."""

    def __post_init__(self) -> None:
        if self.steps < 1 or not (0 < self.seconds < math.inf and 0 < self.joules < math.inf):
            raise ValueError(f"a window needs steps, seconds and joules above 0, not {self}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """The next window: set `watts`, let the warm-up pass, and measure until steps and seconds are over."""

    watts: int
    warmup_steps: int
    warmup_seconds: float
    """Both have to pass, if the limit had to be changed."""
    steps: int
    seconds: float
    why: str


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best limit known so far."""

    watts: int
    expected_regret: float
    """How much better the best limit is expected to be, as a share of the objective."""
    reasons: tuple[str, ...]
    """Plain sentences, which compare it with the highest limit."""


@dataclass(frozen=True)
class _View:
    """What all windows together say."""

    levels: list[int]
    seconds: Curve
    joules: Curve
    regrets: Values
    """Shape (samples, levels)."""
    counts: NDArray[np.int64]
    """Windows of each level."""
    best: int
    """Index of the level with the least expected regret."""
    expected: float


@dataclass(frozen=True)
class _Saved:
    schema: int
    limits: list[int]
    rechecked: bool
    windows: list[Window] = field(default_factory=list)


class Search:
    """Asks for windows and chooses. Equal arguments and windows give equal answers."""

    def __init__(
        self,
        limits: Sequence[int],
        objective: Objective,
        *,
        windows: Sequence[Window] = (),
        rechecked: bool = False,
    ) -> None:
        """`limits`: watts that every GPU of the job accepts, in any order. `windows`: measured before."""
        if not limits or min(limits) <= 0:
            fix = "list limits in watts, or use auto"
            raise JobError(f"no usable power limits: {list(limits)}", where="energy.power_limits", fix=fix)
        self.limits = sorted(set(limits))
        self.objective = objective
        self.windows: list[Window] = []
        self.rechecked = rechecked
        self._normal = np.random.default_rng(0).standard_normal((2, SAMPLES, len(self.limits)))
        self._moved = 0
        for window in windows:
            self._add(window)
        self._next, self._why = self._decide()

    def ask(self) -> Request | None:
        """The next window to run; None when the search has ended."""
        if self._next is None:
            return None
        again = any(window.watts == self._next for window in self.windows)
        return Request(
            watts=self._next,
            warmup_steps=WARMUP_STEPS,
            warmup_seconds=WARMUP_SECONDS,
            steps=WINDOW_STEPS,
            seconds=2 * WINDOW_SECONDS if again else WINDOW_SECONDS,
            why=self._why,
        )

    def tell(self, window: Window) -> None:
        """Take a window, requested or not. ValueError: its limit is none of the search's."""
        self._add(window)
        self._next, self._why = self._decide()

    def choice(self) -> Choice:
        """The best limit so far; before the first window, the highest one."""
        if not self.windows:
            only = f"{self.limits[-1]} W, the highest limit: no window was measured."
            return Choice(watts=self.limits[-1], expected_regret=math.inf, reasons=(only,))
        view = self._view()
        best = self._measured_best(view)
        return Choice(
            watts=self._watts(view, best),
            expected_regret=float(view.regrets[:, best].mean()),
            reasons=tuple(self._reasons(view, best)),
        )

    def drifted(self, window: Window) -> bool:
        """Whether windows at the chosen limit have moved for good, so that one `recheck` is due.

        True after DRIFTED_WINDOWS windows in a row that are off in time or energy. Never for a recheck, nor
        for windows at other limits than the chosen one.
        """
        if self.rechecked or self._next is not None or not self.windows:
            return False
        view = self._view()
        best = self._measured_best(view)
        if window.watts != self._watts(view, best):
            return False
        off = any(
            abs(math.log(value / window.steps) - curve.mean[best]) > max(DRIFTED, 3 * curve.spread)
            for curve, value in ((view.seconds, window.seconds), (view.joules, window.joules))
        )
        self._moved = self._moved + 1 if off else 0
        return self._moved >= DRIFTED_WINDOWS

    def recheck(self) -> "Search":
        """A new search without the old windows, which never asks for another one."""
        return Search(self.limits, self.objective, rechecked=True)

    def to_json(self) -> str:
        """The search without its objective, which belongs to the job: windows serve any objective."""
        return json.dumps(asdict(_Saved(1, self.limits, self.rechecked, self.windows)), indent=1)

    @classmethod
    def from_json(cls, text: str, objective: Objective) -> "Search":
        """CheckpointError: the text is damaged. Whether it belongs to this job is for the caller to know."""
        try:
            saved = TypeAdapter(_Saved).validate_json(text)
            if saved.schema != 1:
                raise ValueError(f"its schema is {saved.schema}, not 1")
            return cls(saved.limits, objective, windows=saved.windows, rechecked=saved.rechecked)
        except (ValidationError, ValueError, JobError) as error:
            what = f"a saved search for a power limit cannot be read: {str(error).splitlines()[0]}"
            raise CheckpointError(what, fix="delete it; the search then begins again") from error

    def _add(self, window: Window) -> None:
        if window.watts not in self.limits:
            raise ValueError(f"{window.watts} W is none of the limits {self.limits}")
        self.windows.append(window)

    def _free_watts(self) -> int:
        """The lowest limit from which on limits are known not to act; the highest limit if none is."""
        held = max((one.watts for one in self.windows if one.held), default=0)
        free = [one.watts for one in self.windows if one.held is False and one.watts > held]
        return min(free, default=self.limits[-1])

    def _view(self) -> _View:
        """Limits that do not act are one level: the lowest of them."""
        free = self._free_watts()
        levels = [watts for watts in self.limits if watts <= free]
        measured = [levels.index(min(one.watts, free)) for one in self.windows]
        positions = np.log(np.asarray(levels, dtype=np.float64))
        per_step = np.log([[one.seconds / one.steps, one.joules / one.steps] for one in self.windows])
        seconds, joules = (
            estimate(positions, measured, values, normal[:, : len(levels)])
            for values, normal in zip(per_step.T, self._normal, strict=True)
        )
        order = np.random.default_rng(1).permutation(SAMPLES)  # time and energy are drawn apart
        regrets = np.full((SAMPLES, len(levels)), np.inf)
        open_levels = self._open_levels(seconds, joules, sorted(set(measured)))
        regrets[:, open_levels] = self.objective.regrets(
            np.exp(seconds.drawn[:, open_levels]),
            np.exp(joules.drawn[order][:, open_levels]),
            highest_watts=self.limits[-1],
        )
        expected = regrets.mean(0)
        best = int(expected.argmin())
        counts = np.bincount(measured, minlength=len(levels))
        return _View(levels, seconds, joules, regrets, counts, best, float(expected[best]))

    def _open_levels(self, seconds: Curve, joules: Curve, measured: list[int]) -> NDArray[np.int64]:
        """Levels that may be best: under a lower limit, a step is not faster and draws no more power.

        So levels between two that are equal in time and energy are equal too. And where time decides, nothing
        below a level that is clearly too slow is considered.
        """
        considered = np.ones(len(seconds.mean), dtype=bool)
        for low, high in pairwise(measured):
            change = max(abs(curve.mean[low] - curve.mean[high]) for curve in (seconds, joules))
            considered[low + 1 : high] = change > EQUAL
        if self.objective.kind in ("time", "max-slowdown"):
            allowed = SLOWER * (1 + (self.objective.max_slowdown or 0.0))
            slow = [one for one in measured if seconds.ratio(one, -1)[0] > allowed]
            considered[: max(slow, default=0)] = False
        return np.flatnonzero(considered)

    def _measured_best(self, view: _View) -> int:
        return int(np.where(view.counts > 0, view.regrets.mean(0), np.inf).argmin())

    def _watts(self, view: _View, index: int) -> int:
        """The limit of a level: of all that do not act, the highest, in case the load grows."""
        return self.limits[-1] if index == len(view.levels) - 1 else view.levels[index]

    def _decide(self) -> tuple[int | None, str]:
        """The next limit, or None when the search has ended; and why."""
        if len(self.limits) == 1:
            return None, "there is only one limit"
        first = self._first()
        if first is not None:
            return first, "the shape of the curve is not known yet"
        view = self._view()
        if len(self.windows) >= MOST_WINDOWS:
            return None, f"{len(self.windows)} windows were measured, and no more are allowed"
        if view.expected > ENOUGH:
            return self._rival(view)
        if not view.counts[view.best]:
            return view.levels[view.best], "it is expected to be best, and was not measured"
        if view.counts.max() == 1:
            return view.levels[view.best], "the best limit so far is measured again, to know the spread"
        between = self._border(view)
        if between is not None:
            return between, "the slowest limit that is allowed lies near it"
        return None, f"no other limit is expected to be more than {100 * ENOUGH:g} % better"

    def _first(self) -> int | None:
        """The next limit of the first few that is not measured yet."""
        done, free = {one.watts for one in self.windows}, self._free_watts()
        low, high = math.log(self.limits[0]), math.log(self.limits[-1])
        for share in FIRST:
            place = high + share * (low - high)
            nearest = min(self.limits, key=lambda watts: abs(math.log(watts) - place))
            if nearest not in done and (nearest <= free or not done):
                return nearest
        return None

    def _rival(self, view: _View) -> tuple[int | None, str]:
        """The level that is expected to improve most on the best one, or one that it is compared with.

        These are the best one and, where time at the highest limit counts, that limit: least known first.
        """
        best, full = view.best, view.counts >= MOST_AT_ONE_LIMIT
        gain = np.maximum(view.regrets[:, [best]] - view.regrets, 0.0).mean(0)
        gain[full & full[best]] = 0.0
        gain[best] = 0.0
        rival = int(gain.argmax())
        if not gain[rival] > 0:
            return None, f"the limits that may be best were measured {MOST_AT_ONE_LIMIT} times each"
        known = view.seconds.variance + view.joules.variance
        top = [len(view.levels) - 1] if self.objective.max_slowdown is not None else []
        index = max((one for one in [rival, best, *top] if not full[one]), key=lambda one: known[one])
        if index == rival:
            return view.levels[rival], f"it may be better than {view.levels[best]} W"
        return view.levels[index], "the limits compared are not known well enough"

    def _border(self, view: _View) -> int | None:
        """For max-slowdown, a level between the lowest one that is fast enough and the next one below it.

        Least energy is often there, and time need not change smoothly (records are not monotone).
        """
        if self.objective.max_slowdown is None:
            return None
        ratios = np.exp(view.seconds.mean - view.seconds.mean[-1])
        measured = np.flatnonzero(view.counts)
        fast = [index for index in measured if ratios[index] <= 1 + self.objective.max_slowdown]
        lowest = min(fast, default=len(view.levels) - 1)
        below = max((index for index in measured if index < lowest), default=None)
        if below is None or lowest - below < 2 or view.levels[lowest] / view.levels[below] < CLOSE:
            return None
        return view.levels[(lowest + int(below)) // 2]

    def _reasons(self, view: _View, best: int) -> list[str]:
        """What was chosen, by how much it is better, how sure that is, and why the search ended."""
        top, watts = len(view.levels) - 1, view.levels[best]
        said = [f"Objective: {self.objective.text()}."]
        if best == top:
            said.append(f"{self.limits[-1]} W, the highest limit, is best: lower limits do not gain.")
        else:
            changes = [
                f"{100 * (ratio - 1):+.1f} % {what} (± {100 * error:.1f} %)"
                for what, (ratio, error) in (
                    ("energy", view.joules.ratio(best, top)),
                    ("time", view.seconds.ratio(best, top)),
                )
            ]
            said.append(f"{watts} W, compared with {self.limits[-1]} W: {' and '.join(changes)} per step.")
        if view.levels[-1] < self.limits[-1]:
            said.append(f"Limits from {view.levels[-1]} W upwards do not act: the GPUs draw less.")
        expected = f"{100 * float(view.regrets[:, best].mean()):.1f} %"
        said.append(f"If all limits were known exactly, the best would be {expected} better on average.")
        if view.counts.max() > 1:
            energy, time = (f"{100 * curve.spread:.1f} %" for curve in (view.joules, view.seconds))
            said.append(f"Windows at the same limit differ by {energy} in energy and {time} in time.")
        levels = len({one.watts for one in self.windows})
        seconds = sum(one.seconds for one in self.windows)
        said.append(
            f"Measured: {levels} of {len(self.limits)} limits in {len(self.windows)} windows, "
            f"{sum(one.steps for one in self.windows)} steps and {seconds:.0f} s without warm-up."
        )
        said.append(f"{'The search ended' if self._next is None else 'The search goes on'}: {self._why}.")
        return said
