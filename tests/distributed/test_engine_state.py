"""Saving, going on, and steps that are not finite."""

from __future__ import annotations

import pytest
from engine_worker import run_in_processes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("processes", "count"), [(1, 12), (2, 33), (4, 9)])
def test_a_resumed_run_has_the_same_bits(tmp_path, processes: int, count: int) -> None:
    results = run_in_processes("resume", processes=processes, folder=tmp_path, timeout=590)
    assert len(results) == count
    assert [name for name, same in results.items() if not same] == []


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_nan_is_reported_and_never_reaches_the_weights(tmp_path, processes: int) -> None:
    results = run_in_processes("not_finite", processes=processes, folder=tmp_path)
    expected = {"skipped": 1.0, "reported": True, "untouched": True, "later_skipped": 1.0}
    assert {name: found for name, found in results.items() if found != expected} == {}
