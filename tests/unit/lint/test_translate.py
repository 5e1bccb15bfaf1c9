"""A configuration becomes the job that a planner would be asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.lint.read import read
from shardwise.lint.setup import Setup
from shardwise.lint.translate import translate
from shardwise.planner.sketch import sketch

SCRIPT = """
from peft import LoraConfig
from transformers import Trainer, TrainingArguments
TrainingArguments(per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
                  gradient_checkpointing=False, max_length=1024)
LoraConfig(r=8)
"""


def planned(*texts: str, gpus: int = 4, as_it_runs: bool = False) -> tuple[dict[str, Any], Any]:
    """The strategy and the job that the files ask for, and what is not in them."""
    documents = tuple(read(text, f"file{index}") for index, text in enumerate(texts))
    setup = Setup(documents=documents, asked_world_size=gpus)
    asked = next(translate(setup, as_it_runs=as_it_runs))
    job = sketch("llama-2-7b", asked.changes, world_size=gpus).job
    return job.model_dump(), asked


def test_auto_is_what_the_script_and_accelerate_make_of_it() -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    job, asked = planned(json.dumps(config), SCRIPT)
    assert (job["strategy"]["engine"], job["strategy"]["stage"]) == ("deepspeed", 2)
    assert (job["train"]["micro_batch"], job["train"]["global_batch"]) == (4, 32)
    assert (job["train"]["precision"], job["train"]["checkpointing"]) == ("bf16", "none")
    assert (job["model"]["lora"]["rank"], job["data"]["sequence_length"]) == (8, 1024)
    assert asked.assumed[0] == "stage 2, the meaning of `auto` in Accelerate"
    assert [one[:31] for one in asked.assumed[1:]] == ["adapters on all linear layers: "]
    assert asked.left_out == ("reduce_bucket_size auto: simulated with 500,000,000",)
    assert job["strategy"]["bucket"] is None, "which is that"


@pytest.mark.parametrize(
    ("targets", "planned_for"),
    [
        ('["q_proj", "v_proj"]', ["q_proj", "v_proj"]),
        ('("q_proj", "v_proj")', ["q_proj", "v_proj"]),
        ('list(["q_proj"])', ["q_proj"]),
        ('"all-linear"', "all-linear"),
    ],
)
def test_adapters_are_planned_for_the_layers_that_a_script_names(targets: str, planned_for: Any) -> None:
    script = SCRIPT.replace("LoraConfig(r=8)", f"LoraConfig(r=8, target_modules={targets})")
    job, asked = planned(json.dumps({"zero_optimization": {"stage": 2}}), script)
    assert job["model"]["lora"]["targets"] == planned_for
    assert not any("adapters" in one for one in asked.assumed)


@pytest.mark.parametrize(
    ("zero", "bucket", "left_out"),
    [
        ({"stage": 2, "reduce_bucket_size": 5e7, "allgather_bucket_size": 5e7}, 50_000_000, ()),
        ({"stage": 3, "reduce_bucket_size": 2e8, "allgather_bucket_size": 5e7}, 200_000_000, ()),
        ({"stage": 1}, None, ()),  # DeepSpeed's own default is ours, but for an optimizer on the host
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, 500_000_000, ()),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1e8}, 100_000_000, ()),
        (
            {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": "auto"},
            None,
            ("reduce_bucket_size auto: simulated with 100,000,000",),
        ),
        (
            {"stage": 1, "reduce_bucket_size": 5e7, "allgather_bucket_size": 200_000_000},
            50_000_000,
            ("allgather_bucket_size 200000000: simulated with 50,000,000",),
        ),
        (
            {"stage": 1, "reduce_bucket_size": 1000},
            1_000_000,
            ("reduce_bucket_size 1000: simulated with 1,000,000",),
        ),
    ],
)
def test_buckets_are_as_large_as_the_file_says(
    zero: dict[str, object], bucket: int | None, left_out: tuple[str, ...]
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    job, asked = planned(json.dumps(config))
    assert job["strategy"]["bucket"] == bucket
    assert asked.left_out == left_out


@pytest.mark.parametrize(
    ("zero", "optimizer", "parameters"),
    [
        ({"stage": 2, "cpu_offload": True}, "cpu", "none"),
        ({"stage": 2, "cpu_offload": False}, "none", "none"),
        ({"stage": 3, "cpu_offload": True, "cpu_offload_param": True}, "cpu", "cpu"),
    ],
)
def test_offloading_by_its_earlier_name_is_simulated(
    zero: dict[str, object], optimizer: str, parameters: str
) -> None:
    job, _ = planned(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    found = job["strategy"]
    assert (found["offload_optimizer"], found["offload_parameters"]) == (optimizer, parameters)


@pytest.mark.parametrize(
    ("stage", "overlaps", "left_out"),
    [(1, True, ("overlap_comm false: simulated with true",)), (2, False, ())],
)
def test_overlap_is_simulated_as_written_under_zero_2(
    stage: int, overlaps: bool, left_out: tuple[str, ...]
) -> None:
    zero = {"stage": stage, "overlap_comm": False}
    job, asked = planned(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}))
    assert job["strategy"]["overlap_comm"] is overlaps
    assert asked.left_out == left_out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlap_that_is_left_out_is_deepspeeds_default_where_a_file_is_to_run(stage: int) -> None:
    """A job that is made from the file, as by `init`, has its own."""
    config = json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}})
    job, asked = planned(config, as_it_runs=True)
    assert job["strategy"]["overlap_comm"] is (stage != 2)
    simulated = ("overlap_comm false, DeepSpeed's default: simulated with true",)
    assert asked.left_out == (simulated if stage == 1 else ())
    job, asked = planned(config)
    assert (job["strategy"]["overlap_comm"], asked.left_out) == (True, ())


def test_sizes_follow_from_each_other() -> None:
    config = {"train_batch_size": 64, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}
    job, _ = planned(json.dumps(config))
    assert (job["train"]["micro_batch"], job["train"]["global_batch"]) == (4, 64)
    assert job["train"]["precision"] == "fp32", "DeepSpeed's default"


def test_rows_that_the_gpus_cannot_share_are_not_promised() -> None:
    _, asked = planned('{"train_batch_size": 7, "zero_optimization": {"stage": 2}}')
    assert "4 rows per step: train_batch_size 7 is impossible with 4 processes" in asked.assumed
    _, asked = planned('{"train_batch_size": 8, "zero_optimization": {"stage": 2}}')
    assert not any("is impossible" in words for words in asked.assumed)


@pytest.mark.parametrize(("size", "gpus", "group"), [(4, 8, 4), (8, 8, 0), (3, 8, 0), (1, 8, 0)])
def test_hpz_is_planned_where_its_groups_divide_the_gpus(size: int, gpus: int, group: int) -> None:
    config = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": size}}
    job, asked = planned(json.dumps(config), gpus=gpus)
    assert job["strategy"]["shard_group"] == group
    assert asked.left_out == ()


def test_places_and_what_is_kept_after_the_forward_pass() -> None:
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
        "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 1e15,
        "stage3_max_reuse_distance": 1e15,
        "zero_quantized_weights": True,
    }
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    job, asked = planned(json.dumps(config))
    strategy = job["strategy"]
    assert (strategy["offload_optimizer"], strategy["offload_parameters"]) == ("nvme", "cpu")
    assert strategy["reshard"] is False
    assert asked.left_out == ("zero_optimization.zero_quantized_weights: not simulated",)
    zero["stage"] = 2
    zero["offload_optimizer"] = {"device": "cpu"}
    job, _ = planned(json.dumps(config))
    assert job["strategy"]["offload_parameters"] == "none", "DeepSpeed does nothing there"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
            "deepspeed_config: {zero_stage: 3, offload_optimizer_device: cpu}\n",
            {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu", "offload_parameters": "none"},
        ),
        (
            "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
            "fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}\n",
            {"engine": "fsdp2", "reshard": False},
        ),
        (
            "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 4\n"
            "fsdp_config:\n  fsdp_version: 2\n  fsdp_offload_params: true\n"
            "  fsdp_activation_checkpointing: true\n",
            {"engine": "fsdp2", "offload_parameters": "cpu"},
        ),
    ],
)
def test_accelerates_own_sections(text: str, expected: dict[str, Any]) -> None:
    job, _ = planned(text)
    assert expected.items() <= job["strategy"].items()
    assert job["train"]["precision"] == "bf16"
    assert job["train"]["micro_batch"] is None, "the planner chooses"
    assert job["train"]["checkpointing"] == ("full" if "activation_checkpointing" in text else "auto")
