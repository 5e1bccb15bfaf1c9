"""The slowest of several GPUs: expected maxima of normal values, against exact ones from tables."""

from __future__ import annotations

import pytest

from shardwise.simulate.time.step import slowest


@pytest.mark.parametrize(("gpus", "exact"), [(2, 0.5642), (8, 1.4236), (100, 2.5076), (1000, 3.2414)])
def test_the_slowest_is_the_expected_maximum(gpus: int, exact: float) -> None:
    """Harter 1961, Expected Values of Normal Order Statistics."""
    assert slowest(gpus, 0.05) == pytest.approx(1 + 0.05 * exact, abs=0.0015)


def test_one_gpu_waits_for_nobody() -> None:
    assert slowest(1, 0.5) == pytest.approx(1.0)


def test_equal_gpus_do_not_wait() -> None:
    assert slowest(1024, 0.0) == 1.0
