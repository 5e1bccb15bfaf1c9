"""Tensor parallelism, groups, experts: AutoTP and ZeRO++ against the machines and the model."""

from collections.abc import Iterator

from shardwise.lint.document import AUTO, Document
from shardwise.lint.edit import Drop
from shardwise.lint.finding import Hit, rule
from shardwise.lint.rules.zero import ZERO, stage_of
from shardwise.lint.schema import names
from shardwise.lint.setup import Setup

TENSOR = "tensor_parallel"
SIZE = (TENSOR, "autotp_size")
_CONFIG = "deepspeed/runtime/tensor_parallel/config.py"


def degree_of(document: Document) -> int:
    """GPUs that share a layer; 0 if tensor parallelism is off."""
    return int(document.number(*SIZE) or 0)


@rule("error", f"{_CONFIG}: autotp_size")
def tensor_parallel_without_size(document: Document, _: Setup) -> Iterator[Hit]:
    """Only `autotp_size` turns tensor parallelism on; its default is 0, off."""
    section = document.section(TENSOR)
    unknown = any(name in section for name in ("tp_size", "tensor_parallel_size", "size"))
    if section and document.get(*SIZE) is None and not unknown:
        what = "without `autotp_size` nothing is split: the section has no effect"
        yield Hit((TENSOR,), what, '"autotp_size": 2 or more, or remove the section')


@rule("error", "torch.distributed.device_mesh; run with 0.19.8")
def tensor_parallel_divides_the_gpus(document: Document, setup: Setup) -> Iterator[Hit]:
    """The groups must be of equal size, and should stay within a node."""
    degree, world, node = degree_of(document), setup.world_size, setup.gpus_per_node
    if degree > 1 and world is not None and world % degree:
        what = f"{degree} does not divide {world} GPUs: a bare AssertionError in torch's mesh"
        yield Hit(SIZE, what, f"a divisor of {world}")
    elif degree > 1 and node is not None and degree > node:
        what = f"{degree} GPUs are more than one node's {node}: every layer waits for the network twice"
        yield Hit(SIZE, what, f"at most {node}", severity="warning")


@rule("error", "deepspeed/module_inject/tp_shard.py: get_shard_size")
def tensor_parallel_divides_the_heads(document: Document, setup: Setup) -> Iterator[Hit]:
    """A key-value head cannot be shared."""
    degree, model = degree_of(document), setup.model
    heads = model.key_value_heads if model is not None else None
    if degree > 1 and model is not None and heads and heads % degree:
        best = max(n for n in range(1, degree + 1) if heads % n == 0)
        what = f"{degree} GPUs cannot share the {heads} key-value heads of {model.name}: "
        yield Hit(SIZE, f"{what}some GPUs get none, or a head is cut", f'"autotp_size": {best}')


@rule("error", "deepspeed/module_inject/auto_tp.py; run with DeepSpeed 0.19.8 and PEFT 0.21")
def tensor_parallel_and_lora(document: Document, setup: Setup) -> Iterator[Hit]:
    """AutoTP replaces the layers with LoRA adapters: nothing is trained, or the first step fails."""
    if degree_of(document) > 1 and setup.lora:
        yield Hit(SIZE, fix="remove `tensor_parallel` (ZeRO-2 and 3 train LoRA), or train all weights")


@rule("warning", "deepspeed/module_inject/autotp_config.py: AutoTPPresets.get_preset")
def tensor_parallel_preset(document: Document, _: Setup) -> Iterator[Hit]:
    """DeepSpeed silently ignores a preset that it does not know: it splits by the model's own plan."""
    key, known = (TENSOR, "preset_model"), names("tensor_parallel_presets")
    name = document.get(*key)
    if isinstance(name, str) and name.lower() not in (*known, AUTO):
        yield Hit(key, fix=f"remove it, or one of {', '.join(known)}", changes=(Drop(key),))


@rule("error", "deepspeed/utils/groups.py: _create_zero_param_parallel_group; run with 3 on 2 processes")
def hpz_divides_the_gpus(document: Document, setup: Setup) -> Iterator[Hit]:
    """DeepSpeed does not check the size of ZeRO++'s second groups."""
    key, world, node = (ZERO, "zero_hpz_partition_size"), setup.world_size, setup.gpus_per_node
    size = document.number(*key)
    if stage_of(document) != 3 or size is None or size <= 1 or world is None:
        return
    if world % size:
        fix = f"the GPUs of a node{f': {node}' if node else ''}"
        yield Hit(key, f"{size:g} does not divide {world} GPUs; DeepSpeed accepts it", fix)
    elif node is not None and size != node:
        what = f"the second copy of the parameters should stay within a node of {node} GPUs"
        yield Hit(key, what, f'"zero_hpz_partition_size": {node}', severity="warning")


@rule("warning", "https://github.com/deepspeedai/DeepSpeed/issues/7461; runtime/zero/leaf_module_config.py")
def experts_at_stage_3(document: Document, setup: Setup) -> Iterator[Hit]:
    """ZeRO-3 gathers in the order of modules; it differs with experts: without leaf blocks the run hangs."""
    model = setup.model
    if model is None or not model.experts or document.section(ZERO, "leaf_module"):
        return
    if stage_of(document) == 3 and model.model_type not in ("mixtral", "qwen2_moe", "qwen3_moe"):
        what = f"{model.name} has experts: GPUs that choose others gather others, and all may wait forever"
        fix = '"leaf_module": {"classes": ["its sparse MoE block"]} in zero_optimization'
        yield Hit((ZERO, "stage"), what, fix)
