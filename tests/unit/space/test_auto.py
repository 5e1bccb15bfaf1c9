from __future__ import annotations

from typing import Any

import pytest

from shardwise.engines import parts_of
from shardwise.errors import JobError
from shardwise.job import schema
from shardwise.job.strategies import NAMED
from shardwise.space.auto import Situation, resolve, states_bytes
from shardwise.strategy import Strategy

GB = 10**9
SEVEN_B = 6_738_415_616


def pick(
    spec: Any = "auto",
    *,
    train: schema.Train | None = None,
    lora: bool = False,
    quantization: str = "none",
    **changes: Any,
) -> tuple[Strategy, list[str]]:
    values = {"name": "a", "model": {"source": "m"}, "data": {"train": "t"}}
    job = schema.Job.model_validate(values | ({"model": {"source": "m", "lora": {}}} if lora else {}))
    model = job.model.model_copy(update={"quantization": quantization})
    job = job.model_copy(update={"strategy": spec, "train": train or schema.Train(), "model": model})
    arguments: dict[str, Any] = {
        "world_size": 4,
        "devices": "cuda",
        "trainable_parameters": SEVEN_B,
        "total_parameters": SEVEN_B,
        "device_memory_bytes": 80 * GB,
        **changes,
    }
    return resolve(job, **arguments)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"device_memory_bytes": 140 * GB}, "zero2"),  # 2 P + 16 P / 4 = 40.4 GB of 84
        ({"device_memory_bytes": 68 * GB}, "zero2"),  # of 40.8
        ({"device_memory_bytes": 67 * GB}, "zero3"),  # of 40.2
        ({"device_memory_bytes": 48 * GB}, "zero3-offload"),  # 18 P / 4 = 30.3 GB of 28.8
        ({"device_memory_bytes": 24 * GB, "trainable_parameters": 40_000_000}, "zero2"),
        ({"world_size": 1, "device_memory_bytes": 80 * GB}, "zero2-offload"),
        ({"world_size": 1, "device_memory_bytes": 16 * GB}, "zero3-offload"),
        ({"world_size": 1, "trainable_parameters": 40_000_000}, "single"),
        ({"world_size": 1, "devices": "cpu", "device_memory_bytes": None}, "single"),
        ({"world_size": 2, "devices": "cpu", "device_memory_bytes": None}, "zero2"),
    ],
)
def test_auto_takes_the_first_strategy_whose_states_fit_in_60_percent(changes: dict, name: str) -> None:
    strategy, why = pick(**changes)
    assert strategy.name == name
    assert any(line.startswith(f"{name}:") for line in why)


def test_fp32_weights_count_double() -> None:
    train = schema.Train(precision="fp32")
    assert pick(device_memory_bytes=75 * GB)[0].name == "zero2"
    assert pick(train=train, device_memory_bytes=75 * GB)[0].name == "zero3"  # 4 P + 4 P = 53.9 GB of 45


def test_quantised_weights_count_what_they_take() -> None:
    """2 P are 13.5 GB, more than 60 % of 16 GB; in int8 6.7 GB are not, and 3.5 GB in NF4 fit 6 GB."""
    adapters = {"trainable_parameters": 40_000_000, "world_size": 1}
    assert pick(device_memory_bytes=16 * GB, **adapters)[0].name == "zero3-offload"
    assert pick(device_memory_bytes=16 * GB, quantization="int8", **adapters)[0].name == "single"
    assert pick(device_memory_bytes=7 * GB, quantization="nf4", **adapters)[0].name == "single"


@pytest.mark.parametrize("name", NAMED)
def test_a_named_strategy_has_the_name_it_was_asked_by(name: str) -> None:
    assert pick(name, world_size=1 if name == "single" else 4)[0].name == name


@pytest.mark.parametrize(
    ("train", "changes", "rows", "accumulation"),
    [
        ({"global_batch": 16}, {"devices": "cpu", "world_size": 2}, 4, 2),
        ({"global_batch": 12}, {"devices": "cpu", "world_size": 2}, 3, 2),
        ({"global_batch": 14}, {"devices": "cpu", "world_size": 2}, 1, 7),
        ({"global_batch": 16}, {}, 2, 2),
        ({"global_batch": 16}, {"device_memory_bytes": 24 * GB}, 1, 4),
        ({"global_batch": 16, "micro_batch": 4}, {}, 4, 1),
    ],
)
def test_accumulation_follows_from_the_global_batch(
    train: dict, changes: dict, rows: int, accumulation: int
) -> None:
    strategy, _ = pick(train=schema.Train(**train), **changes)
    assert (strategy.micro_batch, strategy.accumulation) == (rows, accumulation)
    assert strategy.global_batch == train["global_batch"]


def test_an_uneven_global_batch_is_refused_with_every_other_problem() -> None:
    spec = schema.StrategySpec(engine="fsdp2", stage=3, reshard=False, tensor_parallel=2)
    with pytest.raises(JobError) as caught:
        pick(spec, train=schema.Train(global_batch=9))
    assert {problem.where for problem in caught.value.problems} == {
        "strategy.stage",
        "strategy.tensor_parallel",
        "train.global_batch",
    }


@pytest.mark.parametrize(
    ("asked", "changes", "every"),
    [
        ("none", {}, 0),
        ("full", {}, 1),
        (3, {}, 3),
        ("auto", {"device_memory_bytes": 141 * GB}, 0),  # 40.4 GB of states, below a third
        ("auto", {"device_memory_bytes": 80 * GB}, 1),
        ("auto", {"device_memory_bytes": 24 * GB, "trainable_parameters": 10**6}, 1),
        ("auto", {"devices": "cpu", "device_memory_bytes": None}, 0),
    ],
)
def test_checkpointing(asked: Any, changes: dict, every: int) -> None:
    assert pick(train=schema.Train(checkpointing=asked), **changes)[0].checkpoint_every == every


def test_unset_parts_have_documented_defaults() -> None:
    assert pick(schema.StrategySpec(engine="deepspeed"))[0].stage == 2
    offloaded, _ = pick(schema.StrategySpec(engine="fsdp2", offload_parameters="cpu"))
    assert offloaded.name == "fsdp2-offload"
    assert offloaded.offload_optimizer == "cpu"


@pytest.mark.parametrize(
    ("spec", "each"),  # bytes a parameter on each of 4 GPUs, all of them trained, bf16
    [
        ("zero0", 2 + 16),
        ("zero1", 2 + 4 + 12 / 4),
        ("zero2", 2 + 16 / 4),
        ("zero3", 18 / 4),
        ("fsdp2", 18 / 4),
        ("zero2-offload", 2),
        ("zero3-offload", 0),
        (schema.StrategySpec(engine="deepspeed", stage=3, offload_optimizer="cpu"), 2 / 4),
        (schema.StrategySpec(engine="deepspeed", stage=1, tensor_parallel=2), (2 + 4 + 12 / 2) / 2),
        (schema.StrategySpec(engine="fsdp2", shard_group=2), 18 / 2),
        (schema.StrategySpec(engine="deepspeed", stage=3, shard_group=2), 18 / 4 + 2 / 2),
        (schema.StrategySpec(engine="ddp"), 18),
    ],
)
def test_states_of_a_strategy_on_each_gpu(spec: Any, each: float) -> None:
    situation = Situation(
        world_size=4,
        devices="cuda",
        device_memory_bytes=80 * GB,
        trainable_parameters=SEVEN_B,
        total_parameters=SEVEN_B,
        bytes_per_weight=2,
    )
    assert states_bytes(parts_of(spec), situation) == pytest.approx(each * SEVEN_B)


def test_a_gpu_without_bf16_is_refused_it() -> None:
    with pytest.raises(JobError) as caught:
        pick("zero2", capability=(7, 5))
    [problem] = caught.value.problems
    assert problem.where == "train.precision"
