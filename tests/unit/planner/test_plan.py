"""The plan as JSON: what other programs read."""

from __future__ import annotations

import json

import pytest

from shardwise.job.schema import Data, Job, Lora, Model, Train
from shardwise.planner.plan import Workload, in_words
from shardwise.strategy import Strategy

KEYS = {
    "schema", "hardware", "job", "objective", "margin_fraction", "memory_cap_bytes", "chosen", "alternatives",
    "skipped", "refused", "evidence",
    "nearest", "power", "pareto",
}  # fmt: skip


def test_the_json_has_every_key_of_schema_1(toy) -> None:
    plan = toy.plan("4xRTX4080")
    values = json.loads(json.dumps(plan.to_json()))
    assert set(values) == KEYS
    assert values["schema"] == 1
    chosen = values["chosen"]
    assert set(chosen) == {"strategy", "power_limit_watts", "fits", "tight", "why", "prediction"}
    assert chosen["fits"] is True
    assert set(chosen["prediction"]) == {"memory", "time", "energy"}
    memory = chosen["prediction"]["memory"]
    assert {
        "peak_reserved_bytes",
        "peak_allocated_bytes",
        "outside_allocator_bytes",
        "capacity_bytes",
    } <= set(memory)
    assert sum(memory["terms"].values()) == memory["peak_reserved_bytes"]
    assert {"step_seconds", "tokens_per_second_per_gpu", "exposed_communication_fraction"} <= set(
        chosen["prediction"]["time"]
    )
    assert chosen["prediction"]["energy"]["joules_per_token"] > 0
    assert all(set(option) == set(chosen) for option in values["alternatives"])
    assert all(not one["fits"] and one["why"] for one in values["skipped"])
    assert set(toy.plan("4xRTX3060", "zero0").to_json()) == KEYS


def test_days_follow_from_the_tokens_of_the_job_or_of_a_billion(toy) -> None:
    plan = toy.plan("4xRTX4080")
    speed = 4 * plan.chosen.prediction.time.tokens_per_second_per_gpu
    assert plan.tokens == 10**9
    assert plan.chosen.seconds(plan.tokens) == pytest.approx(1e9 / speed)


@pytest.mark.parametrize(
    ("train", "epoch_tokens", "total"),
    [
        (Train(steps=10, global_batch=8), None, 10 * 8 * 512),
        (Train(epochs=2.5), 1000, 2500),
        (Train(), 1000, 1000),
        (Train(epochs=2.5), None, None),
    ],
)
def test_the_tokens_of_a_job(train: Train, epoch_tokens: int | None, total: int | None) -> None:
    job = Job(
        name="a",
        model=Model(source="m", lora=Lora(rank=8)),
        data=Data(train="x", sequence_length=512),
        train=train,
    )
    workload = Workload.of(job, parameters=100, trainable_parameters=1, epoch_tokens=epoch_tokens)
    assert workload.total_tokens == total
    assert (workload.lora_rank, workload.sequence_length) == (8, 512)


def test_a_strategy_in_words() -> None:
    strategy = Strategy(engine="fsdp2", micro_batch=4, accumulation=2)
    assert in_words(strategy) == "fsdp2 with micro-batch 4, accumulation 2, no checkpointing"
    every = Strategy(engine="fsdp2", checkpoint_every=4)
    assert in_words(every).endswith("checkpointing one block in 4")
