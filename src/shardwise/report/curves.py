"""Curves of many steps with few points: the least and the largest of each stretch stay, and so do gaps."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

STRETCHES = 400  # more would be narrower than a pixel of most charts
SMOOTHING = 0.9  # weight of the average so far
LEAST_SECONDS = 2.0  # of a point of power: shorter ones would show the ticks of the energy counter


def extremes(values: Sequence[float | None] | np.ndarray, stretches: int = STRETCHES) -> list[int]:
    """Places to draw: of each of `stretches` equal stretches the least, the largest and the first gap.

    The first and the last always; all where there are few. A gap is None or not a number.
    """
    count, length = len(values), -(-len(values) // stretches)
    if count <= 3 * stretches:
        return list(range(count))
    padded = np.full(length * stretches, np.nan)
    padded[:count] = values
    rows, begins = padded.reshape(stretches, length), np.arange(stretches) * length
    gaps = np.isnan(rows)
    least, largest = np.where(gaps, np.inf, rows).argmin(axis=1), np.where(gaps, -np.inf, rows).argmax(axis=1)
    found = {0, count - 1, *(begins + least), *(begins + largest)}
    found.update((begins + gaps.argmax(axis=1))[gaps.any(axis=1)])
    return sorted(int(place) for place in found if place < count)


def points(both: np.ndarray, first: float = -math.inf, last: float = math.inf) -> dict[str, Any]:
    """`x` and `y` to draw of rows of (x, y), between two x and one beyond each; a gap is None."""
    begin = max(0, int(np.searchsorted(both[:, 0], first)) - 1)
    end = int(np.searchsorted(both[:, 0], last, side="right")) + 1
    shown = both[[begin + place for place in extremes(both[begin:end, 1])]]
    y = [float(f"{one:.7g}") if math.isfinite(one) else None for one in shown[:, 1]]
    return {"x": shown[:, 0].tolist(), "y": y}


def smoothed(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """An exponential moving average over all but gaps, debiased as TensorBoard's."""
    average, count, found = 0.0, 0, []
    for x, y in points:
        if y is not None:
            average, count = SMOOTHING * average + (1 - SMOOTHING) * y, count + 1
        found.append((x, None if y is None else average / (1 - SMOOTHING**count)))
    return found


def over_time(steps: Iterable[Sequence[float | None]]) -> Iterator[tuple[float, int, float, float]]:
    """(last step, steps, seconds, joules) of neighbours with readings, LEAST_SECONDS or more together.

    `steps` are (step, seconds, joules); a joule that is missing is None or not a number.
    """
    count, seconds, joules = 0, 0.0, 0.0
    for step, took, used in steps:
        if step is None or took is None or used is None or math.isnan(used):
            count, seconds, joules = 0, 0.0, 0.0
            continue
        count, seconds, joules = count + 1, seconds + took, joules + used
        if seconds >= LEAST_SECONDS:
            yield step, count, seconds, joules
            count, seconds, joules = 0, 0.0, 0.0
