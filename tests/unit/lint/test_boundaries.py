"""Rules at their limits: the last value that breaks a rule, and the first that does not."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from shardwise.lint.check import check
from shardwise.lint.finding import DEEPSPEED, holds_for
from shardwise.lint.read import read
from shardwise.lint.setup import ModelFacts, Setup

BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "timers": {"throughput": {"enabled": False}},
}
STAGE_3 = {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}
CPU = {"device": "cpu", "pin_memory": True}
ACCELERATE: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "num_machines": 1,
    "deepspeed_config": {"zero_stage": 2},
}
WIDE = ModelFacts(name="wide", hidden_size=8192, precision="bf16")
MIXTRAL = ModelFacts(name="m", model_type="mixtral", experts=True)
OTHER_MOE = ModelFacts(name="m", model_type="olmoe", experts=True)
NODES = {"asked_world_size": 16, "gpus_per_node": 8}


def zero(*, overlap_comm: bool | None = True, **keys: Any) -> dict[str, Any]:
    section = keys if overlap_comm is None else {**keys, "overlap_comm": overlap_comm}
    return {"zero_optimization": section}


def rules(values: dict[str, Any], **setup: Any) -> list[tuple[str, str]]:
    document = read(json.dumps({**BASE, **values}), "ds.json")
    return [(one.rule, one.severity) for one in check(Setup(documents=(document,), **setup)).findings]


def warmup(steps: int, total: int) -> dict[str, Any]:
    params = {"warmup_num_steps": steps, "total_num_steps": total}
    return {"scheduler": {"type": "WarmupDecayLR", "params": params}, **zero(stage=2)}


def size(degree: int) -> dict[str, Any]:
    return {"tensor_parallel": {"autotp_size": degree}, **zero(stage=1)}


CASES: tuple[tuple[dict[str, Any], dict[str, Any], list[tuple[str, str]]], ...] = (
    # without a stage there is one finding, not one for each key
    (zero(stage3_max_live_parameters=1e9), {}, [("stage-is-missing", "error")]),
    (zero(stage=2, stage3_max_live_parameters=1e9), {}, [("stage-3-key-below-stage-3", "warning")]),
    (zero(stage=2, zero_quantized_weights=False), {}, []),  # requests nothing
    (zero(stage=0, offload_param=CPU, overlap_comm=None), {}, [("offload-param-needs-stage-3", "error")]),
    (zero(stage=2, offload_param=CPU), {}, [("offload-param-needs-stage-3", "error")]),
    (zero(**STAGE_3, offload_param=CPU), {}, []),
    # 8 processes, 2 of which share each row: 4 micro-batches of 1
    ({"train_batch_size": 4, "sequence_parallel_size": 2, **zero(stage=2)}, {"asked_world_size": 8}, []),
    (
        {"train_batch_size": 8, "sequence_parallel_size": 2, **zero(stage=2)},
        {"asked_world_size": 8},
        [("batch-arithmetic", "error")],
    ),
    (zero(stage=2, zero_quantized_weights=True), {}, [("stage-3-key-below-stage-3", "warning")]),
    # buckets: of a wide model the cap counts, not its matrix
    (zero(**STAGE_3, reduce_bucket_size=1 << 24), {"model": WIDE}, []),
    (
        zero(**STAGE_3, reduce_bucket_size=(1 << 24) - 1),
        {"model": WIDE},
        [("small-reduce-bucket", "warning")],
    ),
    (zero(stage=2, reduce_bucket_size=2048 * 2048), {}, []),
    (zero(stage=2, reduce_bucket_size=2048 * 2048 - 1), {}, [("small-reduce-bucket", "warning")]),
    (zero(stage=0, reduce_bucket_size=1), {}, []),
    # overlap: off by default at stages 1 and 2 only, and of no use at stage 0
    (zero(overlap_comm=None, **STAGE_3), {}, []),
    (zero(overlap_comm=None, stage=1), {}, [("overlap-comm-default", "note")]),
    (zero(overlap_comm=False, stage=0), {}, []),
    (zero(overlap_comm=False, **STAGE_3), {}, [("overlap-comm-off", "warning")]),
    # offloading
    (zero(stage="auto", offload_param=CPU), {"asked_reader": "trainer"}, []),
    # tensor parallelism and groups
    (size(8), NODES, []),
    (size(16), NODES, [("tensor-parallel-divides-the-gpus", "warning")]),
    (zero(**STAGE_3, zero_hpz_partition_size=1), NODES, []),
    (zero(**STAGE_3, zero_hpz_partition_size=4), NODES, [("hpz-divides-the-gpus", "warning")]),
    (zero(**STAGE_3, zero_hpz_partition_size=3), NODES, [("hpz-divides-the-gpus", "error")]),
    (zero(**STAGE_3), {"model": MIXTRAL}, []),  # DeepSpeed knows its block
    (zero(**STAGE_3), {"model": OTHER_MOE}, [("experts-at-stage-3", "warning")]),
    (zero(stage=2), {"model": OTHER_MOE}, []),
    # schedules
    (warmup(100, 100), {}, []),
    (warmup(101, 100), {}, [("warmup-steps", "warning")]),
    # versions: a removed key is judged from the version that removed it
    ({"amp": {"enabled": False}, **zero(stage=2)}, {"deepspeed": "0.19.8"}, [("removed-key", "error")]),
    ({"amp": {"enabled": False}, **zero(stage=2)}, {"deepspeed": "0.19.7"}, []),
)


@pytest.mark.parametrize(("values", "setup", "expected"), CASES)
def test_a_rule_begins_and_ends_where_it_should(
    values: dict[str, Any], setup: dict[str, Any], expected: list[tuple[str, str]]
) -> None:
    assert rules(values, **setup) == expected


@pytest.mark.parametrize(
    ("total", "expected"), [(4, [("global-batch-alone", "note")]), (8, [("global-batch-alone", "warning")])]
)
def test_one_row_at_a_time_needs_no_micro_batch(total: int, expected: list[tuple[str, str]]) -> None:
    values = {**BASE, "train_batch_size": total, **zero(stage=2)}
    del values["train_micro_batch_size_per_gpu"], values["gradient_accumulation_steps"]
    document = read(json.dumps(values), "ds.json")
    found = check(Setup(documents=(document,), asked_world_size=4)).findings
    assert [(one.rule, one.severity) for one in found] == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"main_process_port": 65535}, []),
        ({"main_process_port": 65536}, ["accelerate-kind-of-value"]),
        ({"num_processes": 0}, ["accelerate-kind-of-value"]),
        ({"num_machines": 2, "main_process_ip": "10.0.0.1"}, []),
        ({"num_machines": 2, "main_process_ip": "10.0.0.1", "num_processes": 3}, ["accelerate-machines"]),
        ({"deepspeed_config": {"zero_stage": 1, "offload_optimizer_device": "cpu"}}, []),
        (
            {"deepspeed_config": {"zero_stage": 0, "offload_optimizer_device": "cpu"}},
            ["accelerate-offload-and-stage"],
        ),
    ],
)
def test_limits_in_accelerates_file(values: dict[str, Any], expected: list[str]) -> None:
    document = read(yaml.safe_dump({**ACCELERATE, **values}), "accelerate.yaml")
    assert [one.rule for one in check(Setup(documents=(document,))).findings] == expected


def test_rules_of_a_version_are_not_applied_to_the_next() -> None:
    wrong = {"zero_optimisation": {"stage": 2}}
    assert rules(wrong, deepspeed="0.19.8") == [("ignored-key", "error")]
    assert rules(wrong, deepspeed="0.20.0") == []


@pytest.mark.parametrize(
    ("versions", "installed", "holds"),
    [
        (DEEPSPEED, "0.18.9", False),
        (DEEPSPEED, "0.19", True),
        (DEEPSPEED, "0.19.8+cu130", True),
        (DEEPSPEED, "0.20", False),
        (DEEPSPEED, "0.20.0rc1", False),
        ("deepspeed>=0.19.7", "0.19.7", True),
        ("deepspeed>=0.19.7", "0.19.6", False),
        ("deepspeed<0.19.4", "0.19.4", False),
        ("accelerate>=1.0,<2", "0.19.8", True),  # of another library
        ("", "0.19.8", True),
    ],
)
def test_a_range_of_versions(versions: str, installed: str, holds: bool) -> None:
    assert holds_for(versions, "deepspeed", installed) is holds


@pytest.mark.parametrize(
    ("total", "near"), [(3, "8"), (7, "8"), (9, "8 or 16"), (15, "8 or 16"), (8, None), (16, None)]
)
def test_a_batch_of_no_rows_is_not_proposed(total: int, near: str | None) -> None:
    """8 processes: below one row each, only the larger batch is left."""
    values = {"train_batch_size": total, "bf16": {"enabled": True}, **zero(stage=2)}
    document = read(json.dumps(values), "ds.json")
    found = check(Setup(documents=(document,), asked_world_size=8)).findings
    fixes = [one.fix for one in found if one.rule == "batch-arithmetic"]
    instead = "remove it and give `train_micro_batch_size_per_gpu`"
    assert fixes == ([f"`train_batch_size`: {near}, or {instead}"] if near else [])


def test_a_fix_without_words_describes_its_change() -> None:
    documents = (
        read(json.dumps({**BASE, "scheduler": {"type": "WarmupDecayLR"}}), "ds.json"),
        read(yaml.safe_dump({**ACCELERATE, "mixed_precision": False}), "accelerate.yaml"),
        read("fsdp_config: {fsdp_version: 2, fsdp_use_orig_params: true}", "fsdp.yaml"),
    )
    fixes = {(one.rule, one.fix) for one in check(Setup(documents=documents)).findings}
    assert ("schedule-needs-a-parameter", '"total_num_steps": "auto"') in fixes
    assert ("accelerate-precision", "mixed_precision: 'no'") in fixes
    assert ("fsdp1-key-with-fsdp2", "remove it") in fixes


def test_a_hit_without_words_says_what_the_rule_says() -> None:
    values = {**BASE, "fp16": {"enabled": True}, **zero(stage=2)}
    (found,) = check(Setup(documents=(read(json.dumps(values), "ds.json"),))).findings
    assert found.what == "bf16 and fp16 are both on: DeepSpeed stops with an AssertionError"
