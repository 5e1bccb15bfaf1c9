from __future__ import annotations

from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from shardwise.engines.facts import PLAN_STYLES, Architecture, Facts
from shardwise.errors import Problem
from shardwise.space.rules import EVERY_RULE as RULES
from shardwise.space.rules import broken_rules, violations
from shardwise.strategy import Strategy

PLAN = frozenset({"colwise", "rowwise"})


def shape(*, plan_styles: frozenset[str] = PLAN, unplanned: bool = False, **parts: Any) -> Architecture:
    values = {"blocks": 32, "key_value_heads": 8, "flash_attention": True, **parts}
    return Architecture(plan_styles=plan_styles, unplanned_weights=unplanned, **values)


def facts(
    *,
    devices: Any = "cuda",
    world_size: int = 4,
    lora: bool = False,
    architecture: Architecture | None = None,
    capability: tuple[int, int] | None = (9, 0),
    **parts: Any,
) -> Facts:
    values = {"engine": "deepspeed", "stage": 2, "data_parallel": world_size, **parts}
    strategy = Strategy(**values)
    return Facts(
        strategy=strategy,
        devices=devices,
        world_size=world_size,
        global_batch=strategy.global_batch,
        lora=lora,
        architecture=architecture,
        capability=capability,
    )


def staged(**parts: Any) -> Facts:
    values = {"pipeline": 2, "data_parallel": 2, "accumulation": 4, **parts}
    return facts(engine="pipeline", stage=0, **values)


BROKEN = {
    "single-is-one-process": facts(engine="single", stage=0),
    "single-does-not-offload": facts(engine="single", stage=0, world_size=1, offload_optimizer="cpu"),
    "parameter-offload-needs-stage-3": facts(offload_parameters="cpu"),
    "optimizer-offload-needs-zero": facts(stage=0, offload_optimizer="cpu"),
    "nvme-needs-stage-3": facts(offload_optimizer="nvme", nvme_path="/nvme"),
    "nvme-needs-a-path": facts(stage=3, offload_optimizer="nvme"),
    "path-needs-nvme": facts(nvme_path="/nvme"),
    "fsdp-offloads-everything-to-the-host": facts(engine="fsdp2", stage=0, offload_optimizer="cpu"),
    "reshard-is-for-sharded-parameters": facts(reshard=False),
    "keeping-parameters-defeats-their-offload": facts(stage=3, reshard=False, offload_parameters="cpu"),
    "quantized-collectives-are-zero-3s": facts(quantized_weights=True),
    "quantized-collectives-need-a-gpu": facts(stage=3, quantized_weights=True, devices="cpu"),
    "quantized-gradients-are-fp16": facts(stage=3, quantized_gradients=True),
    "quantized-collectives-keep-parameters-on-the-gpu": facts(
        stage=3, quantized_weights=True, offload_parameters="cpu"
    ),
    "ddp-is-several-processes": facts(engine="ddp", stage=0, world_size=1),
    "ddp-does-not-offload": facts(engine="ddp", stage=0, offload_optimizer="cpu"),
    "ddp-zero1-is-several-processes": facts(engine="ddp-zero1", stage=0, world_size=1),
    "ddp-zero1-does-not-offload": facts(engine="ddp-zero1", stage=0, offload_optimizer="cpu"),
    "powersgd-and-fp16": facts(engine="ddp", stage=0, powersgd=4, precision="fp16"),
    "powersgd-is-ddps": facts(powersgd=4),
    "powersgd-or-reduce-dtype": facts(engine="ddp", stage=0, powersgd=4, reduce_dtype="bf16"),
    "8-bit-moments-are-of-data-parallel-ranks": facts(optimizer="adamw8bit", offload_optimizer="cpu"),
    "reduce-dtype-suits-the-precision": facts(reduce_dtype="fp16"),
    "reduce-dtype-needs-zero": facts(stage=0, reduce_dtype="fp32"),
    "single-reduces-nothing": facts(engine="single", stage=0, world_size=1, reduce_dtype="bf16"),
    "shard-group-divides-the-ranks": facts(engine="fsdp2", stage=0, shard_group=3),
    "shard-group-needs-sharded-parameters": facts(shard_group=2),
    "shard-group-keeps-parameters-on-the-gpu": facts(stage=3, shard_group=2, offload_parameters="cpu"),
    "hpz-needs-reshard": facts(stage=3, shard_group=2, reshard=False),
    "buckets-are-zeros": facts(engine="fsdp2", stage=0, bucket=50_000_000),
    "only-zero2-reduces-afterwards": facts(stage=3, overlap_comm=False),
    "tensor-parallel-is-deepspeed": facts(engine="fsdp2", stage=0, tensor_parallel=2, data_parallel=2),
    "tensor-parallel-divides-the-processes": facts(tensor_parallel=3, data_parallel=1),
    "tensor-parallel-and-lora": facts(tensor_parallel=2, data_parallel=2, lora=True),
    "tensor-parallel-divides-key-value-heads": facts(
        tensor_parallel=4, data_parallel=1, architecture=shape(key_value_heads=2)
    ),
    "tensor-parallel-needs-heads": facts(
        tensor_parallel=2, data_parallel=2, architecture=shape(key_value_heads=0, attends=False)
    ),
    "fp16-and-parameters-in-fp32": facts(precision="fp16", architecture=shape(fp32_parameters=True)),
    "tensor-parallel-needs-a-plan": facts(
        tensor_parallel=2, data_parallel=2, architecture=shape(plan_styles=frozenset())
    ),
    "tensor-parallel-and-unplanned-weights": facts(
        tensor_parallel=2, data_parallel=2, architecture=shape(unplanned=True)
    ),
    "tensor-parallel-is-for-zero-1-and-2": facts(stage=3, tensor_parallel=2, data_parallel=2),
    "bf16-needs-ampere": facts(capability=(7, 5)),
    "flash-attention-needs-ampere": facts(capability=(7, 0), precision="fp16", architecture=shape()),
    "fp16-needs-a-gpu": facts(precision="fp16", devices="cpu"),
    "fp16-needs-zero": facts(stage=0, precision="fp16"),
    "stages-need-the-pipeline-engine": facts(engine="fsdp2", stage=0, pipeline=2, data_parallel=2),
    "pipeline-divides-the-processes": staged(pipeline=3, data_parallel=1, accumulation=3),
    "pipeline-needs-two-stages": staged(pipeline=1, data_parallel=4),
    "pipeline-needs-a-block-a-stage": staged(architecture=shape(blocks=1)),
    "pipeline-needs-a-known-model": staged(architecture=shape(stages=False)),
    "1f1b-needs-a-micro-batch-a-stage": staged(pipeline=4, data_parallel=1, accumulation=2),
    "interleaved-rounds-are-even": staged(pipeline_schedule="interleaved", accumulation=5),
    "stages-divide-key-value-heads": staged(
        tensor_parallel=4, data_parallel=1, world_size=8, architecture=shape(key_value_heads=2)
    ),
    "stages-need-a-plan": staged(
        tensor_parallel=2, data_parallel=1, architecture=shape(plan_styles=frozenset())
    ),
    "stages-reduce-in-fp32": staged(reduce_dtype="bf16"),
    "pipeline-does-not-offload": staged(offload_optimizer="cpu"),
    "global-batch-divides": Facts(
        strategy=Strategy(engine="deepspeed", stage=2, data_parallel=4, micro_batch=2),
        devices="cuda",
        world_size=4,
        global_batch=9,
        lora=False,
    ),
}


def test_zero_plus_plus_is_allowed_where_its_kernels_read_what_is_there() -> None:
    assert violations(facts(stage=3, quantized_weights=True, shard_group=2)) == []
    half = {"stage": 3, "precision": "fp16", "quantized_gradients": True}
    assert violations(facts(**half)) == []
    [problem] = violations(facts(**half, reduce_dtype="fp32"))
    assert problem.where == "strategy.quantized_gradients"
    assert violations(facts(engine="fsdp2", stage=0, quantized_weights=True))


@pytest.mark.parametrize(
    ("precision", "allowed"),
    [
        ("bf16", {"auto", "bf16", "fp32"}),
        ("fp16", {"auto", "fp16", "fp32"}),
        ("fp32", {"auto", "bf16", "fp32"}),
    ],
)
def test_gradients_are_summed_in_fp32_or_in_a_format_that_holds_them(
    precision: str, allowed: set[str]
) -> None:
    kinds = ("auto", "bf16", "fp16", "fp32")
    found = {
        kind
        for kind in kinds
        if not violations(facts(engine="fsdp2", stage=0, precision=precision, reduce_dtype=kind))
    }
    assert found == allowed


@pytest.mark.parametrize(
    ("group", "ranks", "reason", "fix"),
    [
        (3, 8, "8 ranks cannot be divided into groups of 3", "strategy.shard_group: 2 or 4, or leave it out"),
        (1, 8, "groups of 1 share nothing", "strategy.shard_group: 2 or 4, or leave it out"),
        (8, 8, "one group of 8 is all ranks", "strategy.shard_group: 2 or 4, or leave it out"),
        (2, 2, "one group of 2 is all ranks", "leave it out"),
    ],
)
def test_a_group_that_does_not_fit_gets_the_sizes_that_do(
    group: int, ranks: int, reason: str, fix: str
) -> None:
    [problem] = violations(facts(engine="fsdp2", stage=0, world_size=ranks, shard_group=group))
    assert (problem.what, problem.fix) == (reason, fix)


def test_there_is_a_case_for_every_rule() -> None:
    assert BROKEN.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_refuses_its_case_and_no_other_rule_does(name: str) -> None:
    assert {rule.name for rule, _ in broken_rules(BROKEN[name])} == {name}


@pytest.mark.parametrize(
    "good",
    [
        facts(engine="single", stage=0, world_size=1, precision="fp16"),
        staged(architecture=shape(blocks=2)),
        staged(tensor_parallel=2, data_parallel=1, lora=True, architecture=shape()),
        staged(pipeline_schedule="gpipe", accumulation=1),
        staged(pipeline=4, data_parallel=1, pipeline_schedule="interleaved", accumulation=10, lora=True),
        facts(stage=0),
        facts(stage=1, precision="fp16"),
        facts(stage=2, offload_optimizer="cpu"),
        facts(stage=3, offload_optimizer="nvme", offload_parameters="nvme", nvme_path="/nvme"),
        facts(stage=3, offload_parameters="cpu"),
        facts(stage=3, reshard=False, lora=True),
        facts(architecture=shape()),
        facts(capability=(7, 0), precision="fp16", architecture=shape(flash_attention=False)),
        facts(capability=(7, 0), precision="fp32", architecture=shape()),
        facts(capability=(8, 0), precision="fp16", architecture=shape()),
        facts(capability=None),
        facts(engine="fsdp2", stage=0, reshard=False),
        facts(engine="fsdp2", stage=0, offload_optimizer="cpu", offload_parameters="cpu"),
        facts(devices="cpu", precision="bf16"),
        facts(stage=1, tensor_parallel=2, data_parallel=2, architecture=shape()),
        facts(tensor_parallel=4, data_parallel=1, offload_optimizer="cpu", architecture=shape()),
        facts(tensor_parallel=2, data_parallel=2),
    ],
    ids=lambda good: good.strategy.name,
)
def test_what_works_is_not_refused(good: Facts) -> None:
    assert violations(good) == []


def unevenly_shared(rows: int, ranks: int, micro: int | None, *, resuming: bool = False) -> list[Problem]:
    """What is wrong with so many rows a step on so many ranks under ZeRO-2."""
    asked = facts(devices="cpu", world_size=ranks, micro_batch=micro or 1, capability=None)
    return violations(replace(asked, global_batch=rows, micro_batch=micro, resuming=resuming))


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "what", "fix"),
    [
        (16, 3, None, "cannot be shared equally by 3 processes", "global_batch: 15 or 18, or --processes 2"),
        (2, 4, None, "cannot be shared equally by 4 processes", "global_batch: 4, or --processes 2"),
        (17, 2, None, "by 2 processes", "global_batch: 16 or 18, or --processes 1"),
        (16, 4, 8, "micro_batch 8 does not divide 4", "32, or train.micro_batch: 4, or --processes 2"),
    ],
)
def test_an_uneven_batch_is_told_in_the_numbers_that_were_written(
    rows: int, ranks: int, micro: int | None, what: str, fix: str
) -> None:
    [problem] = unevenly_shared(rows, ranks, micro)
    assert what in problem.what
    assert problem.fix.endswith(fix)


@pytest.mark.parametrize(
    ("rows", "ranks", "micro", "fix"),
    [
        (8, 3, None, "--processes 2"),
        (16, 4, 8, "train.micro_batch: 4, or --processes 2"),
        (6, 4, 4, "as many processes as divide 6"),
    ],
)
def test_a_resumed_run_is_not_advised_to_change_its_batch(
    rows: int, ranks: int, micro: int | None, fix: str
) -> None:
    assert [problem.fix for problem in unevenly_shared(rows, ranks, micro, resuming=True)] == [fix]


def test_a_degree_that_cuts_heads_is_answered_with_one_that_does_not() -> None:
    cut = facts(tensor_parallel=4, data_parallel=1, architecture=shape(key_value_heads=6))
    [problem] = [found for rule, found in broken_rules(cut) if rule.name.endswith("key-value-heads")]
    assert problem.what.startswith("4 GPUs cannot share 6 key-value heads")
    assert problem.fix == "tensor_parallel: 2", "3 divides the heads, and not the 4 processes"
    uneven = facts(tensor_parallel=3, data_parallel=1, world_size=4)
    fixes = {rule.name: found.fix for rule, found in broken_rules(uneven)}
    assert fixes["tensor-parallel-divides-the-processes"] == "tensor_parallel: 1 or 2 or 4"


def test_a_plan_that_autotp_cannot_follow_is_told_by_what_it_does_not_know() -> None:
    fused = shape(plan_styles=PLAN | {"rowwise_split_input"})
    [problem] = violations(facts(tensor_parallel=2, data_parallel=2, architecture=fused))
    assert problem.what.endswith("does not know: rowwise_split_input")


@pytest.mark.parametrize(
    ("model_type", "changes", "broken"),
    [
        ("llama", {}, set()),
        ("qwen3", {}, set()),  # its norms of query and key are in the plan
        ("gemma3_text", {"num_key_value_heads": 4}, set()),
        ("gpt2", {}, {"tensor-parallel-needs-a-plan"}),
        ("phi3", {}, {"tensor-parallel-needs-a-plan"}),
        ("cohere", {}, set()),
        ("cohere", {"use_qk_norm": True}, {"tensor-parallel-and-unplanned-weights"}),
        ("phi", {"qk_layernorm": True}, {"tensor-parallel-and-unplanned-weights"}),
        ("apertus", {}, {"tensor-parallel-and-unplanned-weights"}),
        ("mamba", {}, {"tensor-parallel-needs-heads"}),
    ],
)
def test_an_architecture_is_known_from_its_config(
    model_type: str, changes: dict[str, Any], broken: set[str]
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type, **changes)
    architecture = Architecture.of(config)
    assert architecture is not None
    found = broken_rules(facts(tensor_parallel=2, data_parallel=2, architecture=architecture))
    assert {rule.name for rule, _ in found} == broken
    attends = model_type != "mamba"
    assert (architecture.attends, architecture.fp32_parameters) == (attends, not attends)


def test_what_autotp_can_do_of_a_plan_is_what_deepspeed_says() -> None:
    from deepspeed.module_inject.tp_plan_converter import SUPPORTED_STYLES

    assert PLAN_STYLES == SUPPORTED_STYLES


@pytest.mark.parametrize(("flash", "fix"), [(True, "fp32"), (False, "fp16 or fp32")])
def test_an_old_gpu_is_told_which_precisions_are_left(flash: bool, fix: str) -> None:
    [problem] = violations(facts(capability=(7, 0), architecture=shape(flash_attention=flash)))
    assert problem.what == "GPUs of compute capability 7.0 have no bf16 arithmetic"
    assert problem.fix == f"train.precision: {fix}, or a GPU of compute capability 8.0"
    old = facts(capability=(7, 0), architecture=shape(flash_attention=flash), precision=fix[:4])
    assert violations(old) == []  # the advice is good


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.versions], ids=lambda rule: rule.name)
def test_a_rule_holds_for_the_installed_version_of_its_library(rule: Any) -> None:
    """A red one asks for reading the rule's source in the new version, then moving its range."""
    library = Requirement(rule.versions)
    assert library.specifier.contains(version(library.name), prereleases=True), rule.source


def test_a_rule_about_a_library_says_which_versions_it_is_for() -> None:
    for rule in RULES:
        assert bool(rule.versions) == rule.source.startswith(("deepspeed", "torch", "ZeRO-3")), rule.name


@pytest.mark.parametrize(
    ("model_type", "config", "expected"),
    [
        ("llama", {"num_hidden_layers": 32, "num_key_value_heads": 8}, (32, 8, True)),
        ("llama", {"num_hidden_layers": 12, "num_key_value_heads": None}, (12, 32, True)),
        ("llama", {"num_hidden_layers": 12, "attention_dropout": 0.1}, (12, 32, False)),
        ("gpt2", {"n_layer": 12}, (12, 12, False)),
        ("mamba", {"num_hidden_layers": 3}, (3, 0, False)),
    ],
)
def test_an_architecture_is_read_from_a_config(
    model_type: str, config: dict[str, Any], expected: tuple[int, int, bool]
) -> None:
    from transformers import AutoConfig

    read = Architecture.of(AutoConfig.for_model(model_type, **config))
    assert read is not None
    assert (read.blocks, read.key_value_heads, read.flash_attention) == expected


def test_a_config_that_is_no_decoders_has_no_architecture() -> None:
    assert Architecture.of(SimpleNamespace(hidden_size=64)) is None


def test_all_violations_come_at_once_each_with_key_and_fix() -> None:
    found = violations(facts(stage=0, offload_optimizer="nvme", reshard=False, precision="fp16"))
    assert len(found) == 5
    assert all(problem.where and problem.fix for problem in found)
