"""The moving average of a loss curve."""

import pytest

from shardwise.report.curves import SMOOTHING, smoothed


def test_a_constant_stays_from_its_first_point_on() -> None:
    """Without TensorBoard's correction the first would be a tenth of it."""
    assert [y for _, y in smoothed([(n, 5.0) for n in range(4)])] == pytest.approx([5.0] * 4)


def test_recent_values_count_most_and_gaps_not_at_all() -> None:
    points = smoothed([(1, 1.0), (2, None), (3, 4.0)])
    expected = (SMOOTHING * 1.0 + 4.0) / (SMOOTHING + 1)
    assert points[1] == (2, None)
    assert points[2][1] == pytest.approx(expected)
