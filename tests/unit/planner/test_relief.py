"""What needs less than a strategy that ran out of memory, and what is tried next."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import parts_of, settings_of, strategy_flag
from shardwise.engines.facts import Architecture
from shardwise.job.load import check_job
from shardwise.job.schema import Job
from shardwise.job.source import Document, apply
from shardwise.planner.plan import Option, Plan
from shardwise.planner.relief import corrected, flags, following, leaner_unpredicted, reliefs, same_state
from shardwise.space.candidates import candidates
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
        assert job.strategy != "auto"
        assert Strategy(**parts_of(job.strategy)).name == other.name
    expected = {0: "none" if ZERO2.checkpoint_every else "auto", 1: "full"}
    assert job.train.checkpointing == expected.get(other.checkpoint_every, other.checkpoint_every)
    assert job.train.micro_batch == (None if other.micro_batch == 4 else other.micro_batch)


SHAPE_8B = Architecture(
    blocks=32, key_value_heads=8, flash_attention=True, plan_styles=frozenset({"colwise", "rowwise"})
)


def allowed(job: Job, gpus: int, gpus_per_node: int) -> list[Strategy]:
    found, _ = candidates(
        job, world_size=gpus, gpus_per_node=gpus_per_node, capability=(9, 0), architecture=SHAPE_8B
    )
    return found


@pytest.mark.parametrize("lora", [None, {}])
@pytest.mark.parametrize(("gpus", "gpus_per_node"), [(1, 1), (2, 2), (4, 4), (4, 2)])
def test_the_flags_of_each_strategy_of_a_plan_leave_exactly_that_strategy(
    gpus: int, gpus_per_node: int, lora: dict[str, Any] | None
) -> None:
    """Pasted into a shell; as do all the parts written out, with the defaults among them."""
    job = Job.model_validate(
        {"name": "x", "model": {"source": "llama-3.1-8b", "lora": lora}, "data": {"train": "t"}}
    )
    strategies = allowed(job, gpus, gpus_per_node)
    assert len({one.name for one in strategies}) >= (6 if gpus == 1 else 12)
    for one in strategies:
        rest = flags(replace(one, micro_batch=0, checkpoint_every=-1), one)
        short = [word for flag in [strategy_flag(one), *rest] for word in shlex.split(flag)[1:]]
        full = [f"strategy={settings_of(one).model_dump_json()}", *short[1:]]
        for changes in (short, full):
            assert allowed(check_job(job, changes).job, gpus, gpus_per_node) == [one], changes


@pytest.mark.parametrize(
    ("strategy", "text"),
    [
        (ZERO2, "zero2"),
        (Strategy(engine="single"), "single"),
        (Strategy(engine="fsdp2", offload_optimizer="cpu", offload_parameters="cpu"), "fsdp2-offload"),
        (Strategy(engine="fsdp2", reshard=False), "fsdp2-noreshard"),
        (replace(ZERO2, bucket=10**8), '{"engine": "deepspeed", "stage": 2, "bucket": 100000000}'),
        (Strategy(engine="ddp", powersgd=4), '{"engine": "ddp", "powersgd": 4}'),
        (
            Strategy(engine="pipeline", stage=1, pipeline=2, pipeline_schedule="interleaved"),
            '{"engine": "pipeline", "pipeline": 2, "pipeline_schedule": "interleaved"}',
        ),
        (
            Strategy(engine="deepspeed", stage=3, offload_optimizer="nvme", nvme_path="/it's 1e3"),
            '{"engine": "deepspeed", "stage": 3, "offload_optimizer": "nvme", "nvme_path": "/it\'s 1e3"}',
        ),
    ],
)
def test_a_strategy_is_shown_by_its_name_or_the_parts_that_are_no_defaults(
    strategy: Strategy, text: str
) -> None:
    words = shlex.split(strategy_flag(strategy))
    assert words == ["--set", f"strategy={text}"]
    document = Document(
        name="job.yaml", values={"name": "x", "model": {"source": "m"}, "data": {"train": "t"}}
    )
    apply(document, words[1:])
    read = Job.model_validate(document.values).strategy
    assert read == (settings_of(strategy) if text.startswith("{") else text)


def test_another_bucket_is_another_strategy_to_paste() -> None:
    """Both are called zero2; without a flag the run would fail again as it did."""
    assert flags(replace(ZERO2, bucket=10**9), ZERO2) == ["--set strategy=zero2"]
