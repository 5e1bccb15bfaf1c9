"""Time and energy of a step as curves over the power limit, estimated from noisy windows.

A Gaussian process (Rasmussen and Williams 2006, chapters 2 and 5) over the logarithm of the limit. It needs
no shape: a curve falls, is flat, or has its minimum inside. Values at limits that were not measured follow
from their neighbours, with an error that grows with the distance. How much a curve bends, and how much
windows at one limit differ, is not known: several answers are weighed by how well they explain the windows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]

AMPLITUDES = (0.15, 0.3, 0.6)
"""Of the logarithm: an A40 or V100 takes up to 4 times as long at its lowest limit as at its highest."""
SPREADS = (0.004, 0.01, 0.025, 0.06)  # standard deviation of windows at the same limit
REACH = 0.5  # in logarithms of watts: limits 65 % apart say little of each other
LEVEL = 1.0  # the curve's own height is not known
DRIFT = 0.003  # a window's drift since the one before (temperature), as a random walk


@dataclass(frozen=True)
class Curve:
    """An estimate of log values at all limits, as curves that may all be the true one."""

    drawn: Values
    """Shape (samples, limits)."""
    spread: float
    """Standard deviation of windows at the same limit."""

    @property
    def mean(self) -> Values:
        return np.asarray(self.drawn.mean(0))

    @property
    def variance(self) -> Values:
        return np.asarray(self.drawn.var(0))

    def ratio(self, index: int, other: int) -> tuple[float, float]:
        """Value at `index` over value at `other`, and the standard deviation of that ratio's logarithm."""
        differences = self.drawn[:, index] - self.drawn[:, other]
        return math.exp(differences.mean()), float(differences.std())


def estimate(positions: Values, measured: Sequence[int], values: Values, normal: Values) -> Curve:
    """The curve at `positions` (log watts), from one value for each window in the order in which they ran.

    `measured` is the index of the position of each window, `values` the logarithm of what it measured.
    `normal` is standard normal noise that the curves are drawn with, shape (samples, limits).
    """
    fits = [
        _fit(positions, np.asarray(measured), values - values[0], amplitude, spread)
        for amplitude, spread in product(AMPLITUDES, SPREADS)
    ]
    weights = np.exp([fit.likelihood - max(one.likelihood for one in fits) for fit in fits])
    weights /= weights.sum()
    samples = len(normal)
    share = (np.arange(samples) + 0.5) / samples
    which = np.minimum(np.searchsorted(weights.cumsum(), share), len(fits) - 1)
    drawn = np.concatenate(
        [fit.draw(normal[which == index]) for index, fit in enumerate(fits) if (which == index).any()]
    )
    spread = math.sqrt(sum(weight * fit.spread**2 for weight, fit in zip(weights, fits, strict=True)))
    return Curve(values[0] + drawn, spread)


@dataclass(frozen=True)
class _Fit:
    """The curve for one amplitude and spread."""

    spread: float
    likelihood: float
    """Logarithm, up to a constant."""
    mean: Values
    covariance: Values

    def draw(self, normal: Values) -> Values:
        scales, vectors = np.linalg.eigh(self.covariance)
        return np.asarray(self.mean + (normal * np.sqrt(np.maximum(scales, 0.0))) @ vectors.T)


def _fit(
    positions: Values, index: NDArray[np.int64], values: Values, amplitude: float, spread: float
) -> _Fit:
    order, places = np.arange(len(index), dtype=np.float64), positions[index]
    between = _similarity(places, places, amplitude) + DRIFT**2 * np.minimum(order[:, None], order[None, :])
    between += np.diag(np.full(len(index), spread**2))
    towards = _similarity(positions, places, amplitude)
    weights = np.linalg.solve(between, towards.T)
    explained = values @ np.linalg.solve(between, values)
    return _Fit(
        spread=spread,
        likelihood=-0.5 * float(explained + np.linalg.slogdet(between)[1]),
        mean=weights.T @ values,
        covariance=_similarity(positions, positions, amplitude) - towards @ weights,
    )


def _similarity(one: Values, other: Values, amplitude: float) -> Values:
    """Covariance of the curve between two lists of positions: Matérn's, once differentiable."""
    scaled = math.sqrt(3) * np.abs(one[:, None] - other[None, :]) / REACH
    return np.asarray(LEVEL**2 + amplitude**2 * (1 + scaled) * np.exp(-scaled))
