from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.engines.deepspeed.config import NEVER_RELEASE, deepspeed_config
from shardwise.job.schema import Optimizer
from shardwise.strategy import Strategy


def config(**parts: Any) -> dict[str, Any]:
    return deepspeed_config(Strategy(engine="deepspeed", **parts), Optimizer())


STRATEGIES: list[dict[str, Any]] = [
    {"stage": 0, "precision": "fp32"},
    {"stage": 1, "tensor_parallel": 2},
    {"stage": 1, "precision": "fp16"},
    {"stage": 2, "accumulation": 8, "offload_optimizer": "cpu"},
    {"stage": 3, "reshard": False},
    {"stage": 3, "shard_group": 2, "quantized_weights": True, "data_parallel": 4},
    {"stage": 3, "quantized_gradients": True, "precision": "fp16"},
    {"stage": 2, "reduce_dtype": "fp32"},
    {
        "stage": 3,
        "offload_optimizer": "nvme",
        "offload_parameters": "nvme",
        "nvme_path": "/nvme",
    },
]


@pytest.mark.parametrize("parts", STRATEGIES)
def test_it_is_strict_json_that_deepspeed_accepts_whole(parts: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    written = json.loads(json.dumps(config(**parts), allow_nan=False))
    assert written == config(**parts)
    assert '"auto"' not in json.dumps(written)
    assert "train_batch_size" not in written
    parsed = DeepSpeedConfig(dict(written))
    assert parsed.zero_optimization_stage == parts["stage"]
    assert parsed.gradient_clipping == 1.0
    assert not parsed.timers_config.enabled, "the process would wait for the GPU before every forward pass"
    for key, value in written["zero_optimization"].items():
        assert type(value) is not float, f"{key}: DeepSpeed refuses fractions where it wants integers"


@pytest.mark.parametrize(
    ("stage", "trained", "size"),
    [(1, None, 50_000_000), (2, 7_000_000, 7_000_000), (2, 1_153, 1_153), (3, 10**9, 50_000_000)],
)
def test_a_bucket_is_as_large_as_asked_and_as_there_is_to_reduce(
    stage: int, trained: int | None, size: int
) -> None:
    strategy = Strategy(engine="deepspeed", stage=stage, bucket=50_000_000)
    zero = deepspeed_config(strategy, Optimizer(), trainable_parameters=trained)["zero_optimization"]
    assert zero["reduce_bucket_size"] == size
    even = size if size % 2 == 0 else size + 1  # an odd one stops DeepSpeed
    assert zero.get("allgather_bucket_size") == (even if stage < 3 else None)


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_as_asked(overlap: bool) -> None:
    assert config(stage=2, overlap_comm=overlap)["zero_optimization"]["overlap_comm"] is overlap


def test_no_clipping_is_written_as_zero() -> None:
    assert config(stage=2, clip_norm=0.0)["gradient_clipping"] == 0.0


def test_precisions_exclude_each_other() -> None:
    for precision, bf16, fp16 in (("bf16", True, False), ("fp16", False, True), ("fp32", False, False)):
        made = config(stage=2, precision=precision)
        assert (made["bf16"]["enabled"], made["fp16"]["enabled"]) == (bf16, fp16)


def test_low_precision_gradients_accumulate_in_fp32_where_it_costs_no_traffic() -> None:
    for stage in (2, 3):
        assert config(stage=stage, accumulation=4)["data_types"] == {"grad_accum_dtype": "fp32"}
    for parts in (
        {"stage": 2},
        {"stage": 1, "accumulation": 4},
        {"stage": 0, "accumulation": 4},
        {"stage": 2, "accumulation": 4, "precision": "fp16"},
    ):
        assert "data_types" not in config(**parts)


def test_not_resharding_keeps_parameters_for_any_distance() -> None:
    zero = config(stage=3, reshard=False)["zero_optimization"]
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == NEVER_RELEASE
    assert zero["memory_efficient_linear"] is False
    assert config(stage=3)["zero_optimization"]["memory_efficient_linear"] is True


@pytest.mark.parametrize(("place", "elements"), [("none", 100_000_000), ("cpu", 1_000_000_000)])
def test_zero_3_steps_fewer_elements_at_once_on_the_gpu(place: str, elements: int) -> None:
    strategy = Strategy(engine="deepspeed", stage=3, offload_optimizer=place)
    config = deepspeed_config(strategy, Optimizer(), trainable_parameters=1, largest_parameter=1)
    assert config["zero_optimization"]["sub_group_size"] == elements


def test_the_compiled_cpu_optimizer_only_under_offload() -> None:
    assert config(stage=2)["optimizer"]["params"]["torch_adam"] is True
    assert "torch_adam" not in config(stage=2, offload_optimizer="cpu")["optimizer"]["params"]


def test_nvme_buffers_hold_the_largest_parameter() -> None:
    strategy = Strategy(engine="deepspeed", **STRATEGIES[-1])
    made = deepspeed_config(strategy, Optimizer(), largest_parameter=525_336_576)
    assert made["zero_optimization"]["offload_param"]["buffer_size"] == 525_336_576
    assert made["zero_optimization"]["offload_param"]["nvme_path"] == "/nvme"


def test_what_is_sent_is_named() -> None:
    zero = config(stage=3, shard_group=8, quantized_weights=True)["zero_optimization"]
    assert (zero["zero_hpz_partition_size"], zero["zero_quantized_weights"]) == (8, True)
    assert "zero_quantized_gradients" not in zero
    half = config(stage=3, quantized_gradients=True, precision="fp16")["zero_optimization"]
    assert half["zero_quantized_gradients"] is True
    assert config(stage=2, reduce_dtype="fp32")["communication_data_type"] == "fp32"
    assert "communication_data_type" not in config(stage=2)
