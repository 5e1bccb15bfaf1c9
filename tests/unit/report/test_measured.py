"""What steps measured, and when it is to be believed."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.report.compare import judge, measured


def step(seconds: float = 1.0, *, joules: float | None = 50.0, peak: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "tokens": 1000,
        "tokens_per_second_per_gpu": 500 / seconds,
        "tflops_per_gpu": 100 / seconds,
        "mfu": 0.4 / seconds,
        "mfu_unavailable": None,
        "loss": 2.0,
        "grad_norm": 1.0,
        "joules": joules,
        "joules_unavailable": None if joules is not None else "no GPU",
        "memory_allocated_bytes": [3, 4],
        "memory_reserved_bytes": [5, 6],
        "peak_memory_allocated_bytes": [peak, 2],
        "peak_memory_reserved_bytes": [peak + 1, 3],
        "outside_allocator_bytes": [7, 8],
        "host_memory_bytes": [1, 1],
        **more,
    }


def test_time_and_energy_are_of_the_steps_that_count() -> None:
    """The first is warm-up, the last two ran under the profiler."""
    steps = [step(9.0, peak=20), step(1.0), step(3.0, joules=250.0), step(90.0, peak=99), step(90.0)]
    found = measured(steps, warmup=1, count=2, processes=2)
    assert found["step_seconds"] == 2.0
    assert found["tokens_per_second_per_gpu"] == 2000 / 4.0 / 2
    assert found["tflops_per_gpu"] == pytest.approx(50)
    assert found["mfu"] == pytest.approx(0.2)
    assert found["joules_per_token"] == pytest.approx(300 / 2000)
    assert (found["peak_allocated_bytes"], found["peak_reserved_bytes"]) == (20, 21), (
        "warm-up's memory counts"
    )
    assert found["peak_reserved_bytes_by_rank"] == [21, 3]
    assert found["outside_allocator_bytes"] == 8
    assert len(found["loss"]) == 3


def test_what_there_is_not_is_null_with_its_reason() -> None:
    bare = {"joules": None, "mfu": None, "mfu_unavailable": "no GPU", "outside_allocator_bytes": None}
    found = measured([step(**bare), step(**bare)], warmup=1, processes=2)
    assert (found["joules_per_token"], found["mfu"], found["outside_allocator_bytes"]) == (None, None, None)
    assert found["joules_unavailable"] == "no reading" or found["joules_unavailable"] == "no GPU"
    assert (found["mfu_unavailable"], found["memory_of"]) == ("no GPU", "process")


def test_energy_of_an_instant_is_not_told() -> None:
    found = measured([step(0.1)] * 6, warmup=1, processes=2)
    assert found["joules_per_token"] is None
    assert "0.5 s" in found["joules_unavailable"]


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        ([1.0, 1.01, 0.99, 1.02, 1.0, 1.01], None),
        ([1.0] * 4, "only 4 steps were counted: use --steps 5 or more"),
        ([1.0, 1.2, 0.9, 1.3, 0.8, 1.1], "step times vary: their middle half spreads over"),
        ([1.0] * 9 + [2.0], "a few steps differ from the rest: the mean is +10% off the median"),
        ([1.2, 1.2, 1.2, 1.0, 1.0, 1.0], "the second half of the steps took 17% less"),
    ],
)
def test_the_verdict(seconds: list[float], reason: str | None) -> None:
    verdict, why = judge(seconds)
    assert verdict == ("valid" if reason is None else "noisy")
    assert any(reason in one for one in why) if reason else why == []
