"""What needs less than a strategy that ran out of memory, and what is tried next."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from shardwise.job.schema import Job
from shardwise.job.source import Document, apply
from shardwise.planner.plan import Option, Plan
from shardwise.planner.relief import corrected, flags, following, leaner_unpredicted, reliefs, same_state
from shardwise.strategy import Strategy
from shardwise.units import GIB


def chosen(plan: Plan) -> Option:
    assert plan.chosen is not None
    return plan.chosen


def asked(plan: Plan, **parts: object) -> Option:
    """The plan's option with these parts of a strategy."""
    return next(o for o in plan.options if o.strategy == replace(o.strategy, **parts))  # type: ignore[arg-type]


def needed(option: Option) -> int:
    return option.prediction.memory.needed_bytes


def test_what_the_failed_one_took_beyond_its_prediction_the_others_take_too(toy: Any) -> None:
    plan = toy.plan("4xRTX4090")
    first = chosen(plan)
    free = first.prediction.memory.capacity_bytes - needed(first)
    assert corrected(first, 0) == first
    assert corrected(first, free // 2).fit in ("fits", "tight")
    assert corrected(first, free).fit == "tight"
    assert corrected(first, free + 1).fit == "no"


def test_the_next_is_the_fastest_that_fits_after_the_correction(toy: Any) -> None:
    plan = toy.plan("4xRTX4090")
    failed = chosen(plan)
    beyond = failed.prediction.memory.capacity_bytes - needed(failed) + GIB
    found = following(
        failed, plan.options, tried=[failed.strategy], beyond_bytes=beyond, hardware=plan.hardware
    )
    assert found is not None
    assert needed(found) + beyond <= 0.95 * failed.prediction.memory.capacity_bytes
    speed = found.prediction.time.tokens_per_second_per_gpu
    for option in plan.options:
        if needed(option) + beyond <= 0.95 * failed.prediction.memory.capacity_bytes:
            assert option.prediction.time.tokens_per_second_per_gpu <= 1.006 * speed
    again = following(
        failed,
        plan.options,
        tried=[failed.strategy, found.strategy],
        beyond_bytes=beyond,
        hardware=plan.hardware,
    )
    assert again is not None
    assert again.strategy not in (failed.strategy, found.strategy)


def test_where_nothing_fits_there_is_no_next(toy: Any) -> None:
    plan = toy.plan("4xRTX4090")
    failed = min(plan.options, key=needed)
    for beyond in (0, 100 * GIB):
        found = following(failed, plan.options, tried=[], beyond_bytes=beyond, hardware=plan.hardware)
        assert found is None, "the leanest ran out already"
    found = following(chosen(plan), plan.options, tried=[], beyond_bytes=100 * GIB, hardware=plan.hardware)
    assert found is None, "more was missing than any other saves"


def test_reliefs_are_fewer_rows_more_checkpointing_and_another_kind(toy: Any) -> None:
    plan = toy.plan("4xRTX4090")
    failed = asked(
        plan, engine="deepspeed", stage=2, offload_optimizer="none", micro_batch=2, checkpoint_every=2
    )
    found = reliefs(failed, plan.options, beyond_bytes=0, hardware=plan.hardware)
    rows, checkpointing, kind = (option.strategy for option in found)
    assert (rows.name, rows.micro_batch, rows.checkpoint_every) == ("zero2", 1, 2)
    assert (checkpointing.name, checkpointing.micro_batch, checkpointing.checkpoint_every) == ("zero2", 2, 1)
    assert kind.name != "zero2"
    assert all(needed(option) < needed(failed) for option in found)
    assert all(s.global_batch == failed.strategy.global_batch for s in (rows, checkpointing, kind))


ZERO2 = Strategy(engine="deepspeed", stage=2, data_parallel=2, micro_batch=4, accumulation=2)


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"micro_batch": 1, "accumulation": 8}, True),
        ({"checkpoint_every": 1}, True),
        ({"reshard": False}, True),
        ({"stage": 3}, False),
        ({"offload_optimizer": "cpu"}, False),
        ({"data_parallel": 4}, False),
    ],
)
def test_a_state_is_read_by_what_lays_it_out_alike(change: dict[str, object], same: bool) -> None:
    assert same_state(ZERO2, replace(ZERO2, **change)) is same  # type: ignore[arg-type]


def test_without_predictions_rows_go_first_then_checkpointing() -> None:
    order = leaner_unpredicted(ZERO2)
    assert [(s.stage, s.micro_batch, s.accumulation, s.checkpoint_every) for s in order] == [
        (2, 2, 4, 0),
        (2, 1, 8, 0),
        (2, 1, 8, 1),
    ]
    assert leaner_unpredicted(order[-1]) == []
    odd = replace(ZERO2, micro_batch=6, accumulation=1)
    assert [(s.micro_batch, s.accumulation) for s in leaner_unpredicted(odd)] == [(3, 2), (1, 6), (1, 6)]
    third = replace(ZERO2, micro_batch=5, accumulation=1)
    assert [s.global_batch for s in leaner_unpredicted(third)] == [10, 10], "2 rows would drop one"


def test_weights_that_stayed_gathered_are_resharded_last() -> None:
    gathered = Strategy(engine="fsdp2", reshard=False, data_parallel=2, checkpoint_every=1)
    assert leaner_unpredicted(gathered) == [replace(gathered, reshard=True)]
    assert leaner_unpredicted(replace(gathered, reshard=True)) == []
    assert all(same_state(gathered, other) for other in leaner_unpredicted(gathered))


@pytest.mark.parametrize(
    "other",
    [
        replace(ZERO2, micro_batch=2, checkpoint_every=1),
        replace(ZERO2, stage=3, offload_optimizer="cpu", checkpoint_every=4),
        replace(ZERO2, stage=0, engine="fsdp2", reshard=False),
    ],
)
def test_the_flags_make_a_job_of_the_other_strategy(other: Strategy) -> None:
    """As the shell would take them apart, and the job file's reader would read them."""
    said = flags(ZERO2, other)
    changes = [shlex.split(flag)[1] for flag in said]
    document = Document(
        name="job.yaml", values={"name": "x", "model": {"source": "m"}, "data": {"train": "t"}}
    )
    apply(document, changes)
    assert document.problems == []
    job = Job.model_validate(document.values)
    if other.name != ZERO2.name:
        assert not isinstance(job.strategy, str)
        assert (job.strategy.engine, job.strategy.reshard) == (other.engine, other.reshard)
        assert job.strategy.offload_optimizer == other.offload_optimizer
    expected = {0: "none" if ZERO2.checkpoint_every else "auto", 1: "full"}
    assert job.train.checkpointing == expected.get(other.checkpoint_every, other.checkpoint_every)
    assert job.train.micro_batch == (None if other.micro_batch == 4 else other.micro_batch)
