"""Long curves are thinned without losing what stands out."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shardwise.report.curves import extremes, over_time, points


def test_least_largest_and_gaps_of_each_stretch_stay() -> None:
    values = [float(n % 7) for n in range(10_000)]
    values[1234], values[5678] = 99.0, -99.0
    values[42] = math.nan
    places = extremes(values, 100)
    assert len(places) <= 3 * 100 + 2
    assert {0, 42, 1234, 5678, 9999} <= set(places)
    assert places == sorted(set(places))


def test_a_short_curve_stays_as_it_is() -> None:
    assert extremes([1.0, None, 3.0], 1) == [0, 1, 2]
    assert extremes([None] * 50, 4)[0] == 0


def test_points_between_two_steps_have_one_more_on_each_side() -> None:
    both = np.array([(n, n / 3) for n in range(10)])
    assert points(both, 3, 5)["x"] == [2, 3, 4, 5, 6]
    assert points(both)["y"][1] == 0.3333333
    assert points(np.array([(1.0, math.nan), (2.0, math.inf)]))["y"] == [None, None]


@pytest.mark.parametrize("missing", [None, math.nan])
def test_power_is_of_neighbours_with_readings(missing: float | None) -> None:
    steps = [(1, 1.5, 3.0), (2, 1.5, 3.0), (3, 1.0, missing), (4, 1.9, 9.0), (5, 2.0, 9.0)]
    assert list(over_time(steps)) == [(2, 2, 3.0, 6.0), (5, 2, 3.9, 18.0)]
