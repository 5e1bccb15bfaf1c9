from __future__ import annotations

import re
from itertools import product
from typing import Any

import pytest

from shardwise.job.strategies import with_degree
from shardwise.strategy import Strategy


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        ({"engine": "single"}, "single"),
        ({"engine": "deepspeed", "stage": 1, "offload_optimizer": "cpu"}, "zero1-offload"),
        ({"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"}, "zero2-offload"),
        ({"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu"}, "zero3-offload-optimizer"),
        ({"engine": "deepspeed", "stage": 3, "offload_parameters": "cpu"}, "zero3-offload-parameters"),
        (
            {
                "engine": "deepspeed",
                "stage": 3,
                "offload_optimizer": "nvme",
                "offload_parameters": "cpu",
            },
            "zero3-nvme-optimizer-offload-parameters",
        ),
        ({"engine": "deepspeed", "stage": 3, "reshard": False}, "zero3-noreshard"),
        ({"engine": "fsdp2", "reshard": False}, "fsdp2-noreshard"),
        ({"engine": "fsdp2", "shard_group": 8}, "fsdp2-hsdp8"),
        ({"engine": "ddp", "powersgd": 4}, "ddp-powersgd4"),
        (
            {
                "engine": "deepspeed",
                "stage": 3,
                "shard_group": 8,
                "quantized_weights": True,
                "quantized_gradients": True,
            },
            "zero3-hpz8-qwz-qgz",
        ),
        ({"engine": "fsdp2", "shard_group": 8, "reduce_dtype": "bf16"}, "fsdp2-hsdp8-reduce-bf16"),
        ({"engine": "fsdp2", "shard_group": 8, "reshard": False}, "fsdp2-hsdp8-noreshard"),
        (
            {"engine": "deepspeed", "stage": 3, "shard_group": 4, "offload_optimizer": "cpu"},
            "zero3-hpz4-offload-optimizer",
        ),
        ({"engine": "deepspeed", "stage": 1, "tensor_parallel": 4}, "autotp4-zero1"),
    ],
)
def test_the_name_says_what_is_special(parts: dict[str, Any], name: str) -> None:
    assert Strategy(**parts).name == name


@pytest.mark.parametrize(
    "name",
    ["autotp2-zero1", "autotp8-zero2", "zero3-hpz4", "fsdp2-hsdp8", "fsdp2-hsdp8-noreshard", "pp2-zero1"],
)
def test_a_name_with_a_number_says_the_parts(name: str) -> None:
    parts = with_degree(name)
    assert Strategy(**parts, **({"stage": 1} if parts["engine"] == "pipeline" else {})).name == name
    assert with_degree(name.replace(re.findall(r"(?<=[a-z])[248]", name)[0], "0")) == {}


def test_no_two_strategies_share_a_name() -> None:
    places = ("none", "cpu", "nvme")
    strategies = [
        Strategy(
            engine="deepspeed",
            stage=stage,
            offload_optimizer=optimizer,  # type: ignore[arg-type]
            offload_parameters=parameters,  # type: ignore[arg-type]
            reshard=reshard,
            tensor_parallel=degree,
        )
        for stage, optimizer, reshard, degree in product(range(4), places, (True, False), (1, 2, 4))
        for parameters in (places if stage == 3 else ("none",))
    ]
    assert len({strategy.name for strategy in strategies}) == len(strategies) == 108


@pytest.mark.parametrize(
    ("place", "stored", "bucket", "size"),
    [
        ("none", 500_000_000, None, 500_000_000),
        ("none", 100_000_000, 100_000_000, 100_000_000),
        ("cpu", 500_000_000, 500_000_000, 500_000_000),
        ("cpu", 100_000_000, None, 100_000_000),
        ("nvme", None, None, 100_000_000),
    ],
)
def test_a_bucket_that_was_always_written_down_is_the_usual_one(
    place: str, stored: int | None, bucket: int | None, size: int
) -> None:
    """Runs and plans from before decision 0112 have 5e8, whatever the engine."""
    stored_strategy = {"engine": "deepspeed", "stage": 2, "offload_optimizer": place, "bucket": stored}
    found = Strategy.from_json(stored_strategy)
    assert (found.bucket, found.bucket_size) == (bucket, size)


@pytest.mark.parametrize("bucket", [0, -1, 10**12])
def test_a_stored_bucket_that_no_job_may_have_is_no_strategy(bucket: int) -> None:
    with pytest.raises(ValueError, match="no strategy has these values"):
        Strategy.from_json({"engine": "deepspeed", "stage": 2, "bucket": bucket})
