"""Tensor parallelism (AutoTP), and ZeRO++ groups against the machines."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.edit import Drop
from shardwise.lint.finding import Hit, Rule
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.setup import Setup

TENSOR = "tensor_parallel"
PRESETS = ("llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3")
NO_TENSOR_PARALLEL = {
    "mamba": "its sizes do not match once they are split",
    "mamba2": "its sizes do not match once they are split",
    "gpt2": "AutoTP does not support it",
    "phi3": "its plan has a style that AutoTP refuses",
    "glm": "its plan has a style that AutoTP refuses",
    "glm4": "its plan has a style that AutoTP refuses",
    "olmo2": "its plan has a style that AutoTP refuses",
    "olmo3": "its plan has a style that AutoTP refuses",
    "mixtral": "its experts are not split",
    "qwen2_moe": "its plan has a style that AutoTP refuses",
    "qwen3_moe": "its plan has a style that AutoTP refuses",
}


def degree_of(document: Document) -> int:
    """GPUs that share a layer; 0 where tensor parallelism is off."""
    return int(document.number(TENSOR, "autotp_size") or 0)


def _size_is_zero(document: Document, _: Setup) -> Iterator[Hit]:
    section = document.section(TENSOR)
    if section and degree_of(document) < 1 and document.get(TENSOR, "autotp_size") is None:
        unknown = any(name in section for name in ("tp_size", "tensor_parallel_size", "size"))
        if not unknown:
            yield Hit(
                key=(TENSOR,),
                what="without `autotp_size` nothing is split: the section has no effect",
                fix='"autotp_size": 2 or more, or take the section out',
            )


def _divides(document: Document, setup: Setup) -> Iterator[Hit]:
    degree, world = degree_of(document), setup.world_size
    if degree > 1 and world is not None and world % degree:
        yield Hit(
            key=(TENSOR, "autotp_size"),
            what=f"{degree} does not divide {world} GPUs: a bare AssertionError in torch's mesh",
            fix=f"a divisor of {world}",
        )
    elif degree > 1 and setup.gpus_per_node is not None and degree > setup.gpus_per_node:
        yield Hit(
            key=(TENSOR, "autotp_size"),
            what=f"{degree} GPUs are more than one node's {setup.gpus_per_node}: every layer waits for the "
            "network twice",
            fix=f"at most {setup.gpus_per_node}",
            severity="warning",
        )


def _heads(document: Document, setup: Setup) -> Iterator[Hit]:
    degree, model = degree_of(document), setup.model
    if degree > 1 and model is not None and model.key_value_heads and model.key_value_heads % degree:
        heads = model.key_value_heads
        best = max(n for n in range(1, degree + 1) if heads % n == 0)
        yield Hit(
            key=(TENSOR, "autotp_size"),
            what=f"{degree} GPUs cannot share the {heads} key-value heads of {model.name}: some get none, "
            "or a head is cut",
            fix=f'"autotp_size": {best}',
        )


def _model(document: Document, setup: Setup) -> Iterator[Hit]:
    model = setup.model
    if degree_of(document) > 1 and model is not None and model.model_type in NO_TENSOR_PARALLEL:
        yield Hit(
            key=(TENSOR, "autotp_size"),
            what=f"AutoTP fails on {model.model_type}: {NO_TENSOR_PARALLEL[model.model_type]}",
            fix="ZeRO-3 spreads it over GPUs, too",
        )


def _lora(document: Document, setup: Setup) -> Iterator[Hit]:
    if degree_of(document) > 1 and setup.lora:
        yield Hit(
            key=(TENSOR, "autotp_size"),
            what="AutoTP replaces the linear layers that carry the LoRA adapters: nothing is trained, or "
            "it fails in the first step",
            fix="take `tensor_parallel` out (ZeRO-2 and 3 train LoRA), or train all weights",
        )


def _inner_size(document: Document, _: Setup) -> Iterator[Hit]:
    for name in ("tp", "tensor_parallel"):
        inner = document.number(TENSOR, name, "tp_size")
        if inner is not None and inner not in (1, degree_of(document)):
            yield Hit(
                key=(TENSOR, name, "tp_size"),
                what=f"{inner:g} is neither 1 nor autotp_size, {degree_of(document)}",
                fix="take it out: autotp_size decides",
                changes=(Drop(key=(TENSOR, name, "tp_size")),),
            )


def _dtype(document: Document, _: Setup) -> Iterator[Hit]:
    if document.has(TENSOR, "dtype"):
        yield Hit(
            key=(TENSOR, "dtype"),
            what="DeepSpeed wants a torch.dtype object here, which JSON has not: validation error",
            fix="take it out: bf16 and fp16 decide",
            changes=(Drop(key=(TENSOR, "dtype")),),
        )


def _preset(document: Document, _: Setup) -> Iterator[Hit]:
    name = document.get(TENSOR, "preset_model")
    if isinstance(name, str) and name.lower() not in PRESETS:
        yield Hit(
            key=(TENSOR, "preset_model"),
            what=f"DeepSpeed has no preset {name!r} and ignores it silently",
            fix=f"take it out (the model's own plan is used), or one of {', '.join(PRESETS)}",
            changes=(Drop(key=(TENSOR, "preset_model")),),
        )


def _with_stage_3(document: Document, _: Setup) -> Iterator[Hit]:
    if degree_of(document) > 1 and stage_of(document) == 3:
        yield Hit(
            key=(TENSOR, "autotp_size"), what="AutoTP stops above stage 2", fix="DeepSpeed 0.19.4 or later"
        )


def _hpz(document: Document, setup: Setup) -> Iterator[Hit]:
    key, world, node = (ZERO, "zero_hpz_partition_size"), setup.world_size, setup.gpus_per_node
    size = document.number(*key)
    if stage_of(document) != 3 or size is None or size <= 1 or world is None:
        return
    if world % size:
        yield Hit(
            key=key,
            what=f"{size:g} does not divide {world} GPUs; DeepSpeed accepts it",
            fix=f"the GPUs of a node{f': {node}' if node else ''}",
        )
    elif node is not None and size != node:
        yield Hit(
            key=key,
            what=f"the second copy of the parameters is meant to stay within a node of {node} GPUs",
            fix=f'"zero_hpz_partition_size": {node}',
            severity="warning",
        )


def _experts(document: Document, setup: Setup) -> Iterator[Hit]:
    model = setup.model
    by_default = ("mixtral", "qwen2_moe", "qwen3_moe")
    if (
        model is not None
        and model.experts
        and stage_of(document) == 3
        and model.model_type not in by_default
        and not document.section(ZERO, "leaf_module")
    ):
        yield Hit(
            key=(ZERO, "stage"),
            what=f"{model.name} has experts: a GPU whose tokens choose others gathers other weights, "
            "and all may wait for ever",
            fix='"leaf_module": {"classes": ["its sparse MoE block"]} in zero_optimization',
        )


RULES = (
    Rule(
        name="tensor-parallel-without-size",
        severity="error",
        kind="deepspeed",
        happens="`autotp_size` alone turns tensor parallelism on; its default is 0, off.",
        source="deepspeed/runtime/tensor_parallel/config.py: autotp_size",
        find=_size_is_zero,
    ),
    Rule(
        name="tensor-parallel-divides-the-gpus",
        severity="error",
        kind="deepspeed",
        happens="The groups have to be equal, and should stay within a node.",
        source="torch.distributed.device_mesh; run with 0.19.8",
        find=_divides,
    ),
    Rule(
        name="tensor-parallel-divides-the-heads",
        severity="error",
        kind="deepspeed",
        happens="A key-value head cannot be shared.",
        source="deepspeed/module_inject/tp_shard.py: get_shard_size",
        find=_heads,
    ),
    Rule(
        name="tensor-parallel-model",
        severity="error",
        kind="deepspeed",
        happens="AutoTP fails on these architectures, some of them only at the first step.",
        source="deepspeed/module_inject/auto_tp.py; run with 0.19.8 and transformers 5.23",
        find=_model,
    ),
    Rule(
        name="tensor-parallel-and-lora",
        severity="error",
        kind="deepspeed",
        happens="The adapters vanish.",
        source="deepspeed/module_inject/auto_tp.py; run with DeepSpeed 0.19.8 and PEFT 0.21",
        find=_lora,
    ),
    Rule(
        name="tensor-parallel-inner-size",
        severity="error",
        kind="deepspeed",
        happens="Two sizes that contradict each other.",
        source="deepspeed/runtime/tensor_parallel: tp.tp_size has to be 1 or autotp_size",
        find=_inner_size,
    ),
    Rule(
        name="tensor-parallel-dtype",
        severity="error",
        kind="deepspeed",
        happens="No JSON value is a torch.dtype.",
        source="deepspeed/runtime/tensor_parallel/config.py: dtype; run with 0.19.8",
        find=_dtype,
    ),
    Rule(
        name="tensor-parallel-preset",
        severity="warning",
        kind="deepspeed",
        happens="An unknown preset is ignored silently.",
        source="deepspeed/module_inject/autotp_config.py: AutoTPPresets.get_preset",
        find=_preset,
    ),
    Rule(
        name="tensor-parallel-at-stage-3",
        severity="error",
        kind="deepspeed",
        happens="Before 0.19.4 DeepSpeed refused it.",
        source="deepspeed/runtime/engine.py 0.19.3: assertion on the stage",
        versions="deepspeed<0.19.4",
        find=_with_stage_3,
    ),
    Rule(
        name="hpz-divides-the-gpus",
        severity="error",
        kind="deepspeed",
        happens="DeepSpeed does not check the size of ZeRO++'s second groups.",
        source="deepspeed/utils/groups.py: _create_zero_param_parallel_group; run with 3 on 2 processes",
        find=_hpz,
    ),
    Rule(
        name="experts-at-stage-3",
        severity="warning",
        kind="deepspeed",
        happens="ZeRO-3 gathers by the order in which modules run, which differs from GPU to GPU with "
        "experts: the run hangs unless their block is a leaf module.",
        source="https://github.com/deepspeedai/DeepSpeed/issues/7461; runtime/zero/leaf_module_config.py",
        find=_experts,
    ),
)
