"""The learning rate: exact values at the points a user can check by hand."""

from contextlib import nullcontext

import pytest

from shardwise.errors import JobError
from shardwise.job.schema import Optimizer
from shardwise.training.loop import check_warmup, learning_rate, warmup_steps


def rates(optimizer: Optimizer, steps: int) -> list[float]:
    return [learning_rate(optimizer, step=step, steps=steps) for step in range(1, steps + 1)]


def test_warmup_rises_linearly_to_the_peak() -> None:
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=4)
    assert rates(optimizer, 10)[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3])


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_decay_ends_at_the_final_fraction(schedule: str) -> None:
    optimizer = Optimizer(learning_rate=1e-3, warmup_steps=2, schedule=schedule, final_fraction=0.1)
    assert rates(optimizer, 12)[-1] == pytest.approx(1e-4)


def test_halfway_values() -> None:
    linear = Optimizer(learning_rate=1.0, warmup_steps=0, schedule="linear", final_fraction=0.0)
    cosine = Optimizer(learning_rate=1.0, warmup_steps=0, schedule="cosine", final_fraction=0.0)
    assert learning_rate(linear, step=25, steps=100) == pytest.approx(0.75)
    assert learning_rate(cosine, step=25, steps=100) == pytest.approx(0.5 + 0.5 * 2**-0.5)


def test_wsd_is_stable_then_falls_as_the_square_root_over_the_last_fifth() -> None:
    wsd = Optimizer(learning_rate=1.0, warmup_steps=10, schedule="wsd", final_fraction=0.1)
    found = rates(wsd, 100)
    assert found[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert set(found[10:80]) == {1.0}
    assert found[84] == pytest.approx(0.1 + 0.9 * (1 - 0.5))  # a quarter of the decay: sqrt(1/4)
    assert found[99] == pytest.approx(0.1)


def test_constant_stays() -> None:
    optimizer = Optimizer(learning_rate=3e-4, warmup_steps=1, schedule="constant")
    assert set(rates(optimizer, 9)) == {3e-4}


def test_default_warmup_is_three_per_cent() -> None:
    assert warmup_steps(Optimizer(), 1000) == 30
    assert warmup_steps(Optimizer(warmup_steps=0), 1000) == 0


@pytest.mark.parametrize(
    ("share", "steps", "expected"), [(0.1, 105, 11), (0.03, 1000, 30), (0.9, 3, 2), (0.1, 1, 0)]
)
def test_a_share_is_rounded_up_as_transformers_does(share: float, steps: int, expected: int) -> None:
    """But a step is left, so that no share is refused for a short run."""
    optimizer = Optimizer(warmup_steps=share)
    assert warmup_steps(optimizer, steps) == expected
    check_warmup(optimizer, steps)


def test_one_step_of_training_is_never_at_zero() -> None:
    assert rates(Optimizer(learning_rate=1e-3), 1) == [pytest.approx(1e-4)]


@pytest.mark.parametrize(
    ("warmup", "steps", "ends"), [(4, 5, True), (5, 5, False), (0, 1, True), (None, 2, True)]
)
def test_a_warm_up_ends_within_the_run(warmup: int | None, steps: int, ends: bool) -> None:
    optimizer = Optimizer(warmup_steps=warmup)
    with nullcontext() if ends else pytest.raises(JobError, match="does not end within the 5 steps"):
        check_warmup(optimizer, steps)
