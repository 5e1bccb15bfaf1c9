"""What DeepSpeed cannot combine, read in DeepSpeed 0.19.8."""

from functools import partial
from math import gcd

from shardwise.engines.facts import PLAN_STYLES, Architecture, Facts, Rule

DEEPSPEED = "deepspeed>=0.19,<0.20"
_of_deepspeed = partial(Rule, versions=DEEPSPEED)


def _cut(facts: Facts) -> Architecture | None:
    """The model, where tensor parallelism would cut it and its architecture is known."""
    return facts.architecture if facts.strategy.tensor_parallel > 1 else None


def _lacks_a_plan(facts: Facts) -> bool:
    shape = _cut(facts)
    return bool(shape and shape.attends and (not shape.plan_styles or shape.plan_styles - PLAN_STYLES))


def _plan_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    unknown = sorted(facts.architecture.plan_styles - PLAN_STYLES)
    if not unknown:
        return "transformers has no plan of how to cut this architecture's layers"
    ways = ", ".join(unknown)
    return f"transformers' plan for this architecture cuts layers in ways AutoTP does not know: {ways}"


def _keeps_fp32(facts: Facts) -> bool:
    return facts.architecture is not None and facts.architecture.fp32_parameters


def _splits_a_head(facts: Facts) -> bool:
    shape = _cut(facts)
    return bool(shape and shape.attends and shape.key_value_heads % facts.strategy.tensor_parallel)


def _quantizes(facts: Facts) -> bool:
    return facts.strategy.quantized_weights or facts.strategy.quantized_gradients


def _heads_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    heads, degree = facts.architecture.key_value_heads, facts.strategy.tensor_parallel
    return f"{degree} GPUs cannot share {heads} key-value heads equally: AutoTP would cut through heads"


def _heads_fix(facts: Facts) -> str:
    assert facts.architecture is not None
    both = gcd(facts.architecture.key_value_heads, facts.world_size)
    degree = max(n for n in range(1, facts.strategy.tensor_parallel + 1) if both % n == 0)
    return f"tensor_parallel: {degree}"


RULES: tuple[Rule, ...] = (
    _of_deepspeed(
        name="parameter-offload-needs-stage-3",
        broken=lambda f: f.strategy.offload_parameters != "none" and f.strategy.stage < 3,
        reason="parameters can be offloaded only by ZeRO-3; DeepSpeed ignores the request at other stages",
        where="strategy.offload_parameters",
        fix="strategy.stage: 3, or offload_parameters: none",
        source="deepspeed/runtime/zero/config.py: offload_param, valid only with stage 3",
    ),
    _of_deepspeed(
        name="optimizer-offload-needs-zero",
        broken=lambda f: f.strategy.offload_optimizer != "none" and f.strategy.stage == 0,
        reason="the optimizer can be offloaded only from ZeRO-1 on; DeepSpeed ignores the request at stage 0",
        where="strategy.offload_optimizer",
        fix="strategy.stage: 2, or offload_optimizer: none",
        source="deepspeed/runtime/zero/config.py: offload_optimizer, valid with stages 1, 2, 3",
    ),
    _of_deepspeed(
        name="nvme-needs-stage-3",
        broken=lambda f: f.uses_nvme and f.strategy.stage < 3,
        reason="only ZeRO-3 offloads to NVMe; at other stages DeepSpeed takes host memory instead",
        where="strategy.offload_optimizer",
        fix="strategy.stage: 3, or offload_optimizer: cpu",
        source="deepspeed/runtime/zero/stage_1_and_2.py: any device but `none` is the CPU",
    ),
    _of_deepspeed(
        name="tensor-parallel-and-lora",
        broken=lambda f: f.strategy.tensor_parallel > 1 and f.lora,
        reason="AutoTP replaces the linear layers that carry the LoRA adapters: nothing would be trained",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1 (zero2, zero3 and fsdp2 train LoRA), or train all weights",
        source="deepspeed/module_inject/auto_tp.py, seen with DeepSpeed 0.19.8 and PEFT 0.21",
    ),
    _of_deepspeed(
        name="tensor-parallel-divides-key-value-heads",
        broken=_splits_a_head,
        reason=_heads_reason,
        where="strategy.tensor_parallel",
        fix=_heads_fix,
        source="deepspeed/module_inject/tp_shard.py: get_shard_size, which knows no heads without the config",
    ),
    _of_deepspeed(
        name="tensor-parallel-needs-heads",
        broken=lambda f: f.strategy.tensor_parallel > 1 and not f.attends,
        reason="AutoTP would cut Mamba's input projection across its two halves, and knows no Mamba",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero2, zero3 and fsdp2 train Mamba",
        source="deepspeed/module_inject: no policy names Mamba, whose in_proj has rows of x, then of z",
    ),
    _of_deepspeed(
        name="tensor-parallel-needs-a-plan",
        broken=_lacks_a_plan,
        reason=_plan_reason,
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero3 and fsdp2 spread a model over GPUs, too",
        source="deepspeed/module_inject/tp_plan_converter.py; transformers: base_model_tp_plan of a config",
    ),
    _of_deepspeed(
        name="tensor-parallel-and-unplanned-weights",
        broken=lambda f: bool((shape := _cut(f)) and shape.unplanned_weights),
        reason="weights between the cut layers, such as a norm of query and key, are not in transformers' "
        "plan for this model: AutoTP would not sum their gradients, and each GPU train them differently",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero3 and fsdp2 spread a model over GPUs, too",
        source="deepspeed/module_inject/auto_tp.py: register_replicated_grad_hooks, for what the plan names",
    ),
    Rule(
        name="tensor-parallel-is-for-zero-1-and-2",
        broken=lambda f: f.strategy.tensor_parallel > 1 and f.strategy.stage not in (1, 2),
        reason="tensor parallelism trains with ZeRO-1 and 2: at stage 0 the norm in fp32 would be that of "
        "one GPU's part, and ZeRO-3 shards blocks before AutoTP can cut them",
        where="strategy.stage",
        fix="strategy.stage: 1, or tensor_parallel: 1",
        source="shardwise.engines.deepspeed.runtime.engine",
    ),
    _of_deepspeed(
        name="hpz-needs-reshard",
        broken=lambda f: f.strategy.shard_group > 0 and not f.strategy.reshard,
        reason="hpZ makes the second gathering of weights cheap, and reshard: false leaves it out",
        where="strategy.shard_group",
        fix="leave shard_group out, or reshard: true",
        source="deepspeed/runtime/zero/partition_parameters.py: _partition_param_sec, called on release",
    ),
    _of_deepspeed(
        name="quantized-collectives-need-a-gpu",
        broken=lambda f: _quantizes(f) and f.devices == "cpu",
        reason="ZeRO++ quantises with a CUDA kernel, and on CPUs DeepSpeed stops",
        where="strategy.quantized_weights, strategy.quantized_gradients",
        fix="leave them out on CPUs",
        source="deepspeed/runtime/zero/partition_parameters.py: CUDAQuantizer, seen with 0.19.8",
    ),
    _of_deepspeed(
        name="quantized-gradients-are-fp16",
        broken=lambda f: (
            f.strategy.quantized_gradients and f.strategy.reduced_in(f.strategy.precision) != "fp16"
        ),
        reason="qgZ's kernel reads gradients as fp16: bf16 and fp32 would be taken for other numbers, "
        "without an error",
        where="strategy.quantized_gradients",
        fix="leave it out, or train.precision: fp16 without reduce_dtype",
        source="deepspeed/ops/csrc/quantization/pt_binding.cpp: ds_swizzle_quant casts to __half*",
    ),
    _of_deepspeed(
        name="quantized-collectives-keep-parameters-on-the-gpu",
        broken=lambda f: _quantizes(f) and f.strategy.offload_parameters != "none",
        reason="quantising offloaded parameters is neither planned nor tested",
        where="strategy.offload_parameters",
        fix="offload_parameters: none, or leave quantized_weights and quantized_gradients out",
        source="deepspeed/runtime/zero/partition_parameters.py: _all_gather_coalesced",
    ),
    _of_deepspeed(
        name="reduce-dtype-needs-zero",
        broken=lambda f: f.strategy.reduce_dtype != "auto" and f.strategy.stage == 0,
        reason="at stage 0 the memory of reducing in another format is not planned",
        where="strategy.reduce_dtype",
        fix="strategy.stage: 1, or leave reduce_dtype out",
        source="deepspeed/runtime/engine.py: allreduce_bucket",
    ),
    _of_deepspeed(
        name="fp16-needs-a-gpu",
        broken=lambda f: f.strategy.precision == "fp16" and f.devices == "cpu",
        reason="DeepSpeed does not train in fp16 on CPUs without fp16 arithmetic",
        where="train.precision",
        fix="train.precision: bf16 or fp32",
        source="deepspeed/accelerator/cpu_accelerator.py: is_fp16_supported",
    ),
    _of_deepspeed(
        name="fp16-needs-zero",
        broken=lambda f: f.strategy.precision == "fp16" and f.strategy.stage == 0,
        reason="at stage 0 DeepSpeed divides fp16 gradients by a loss scale that it never multiplied in",
        where="strategy.stage",
        fix="strategy: zero1 or zero2, or train.precision: bf16",
        source="deepspeed/runtime/engine.py 0.19.8: backward scales the loss for ZeRO's optimizers only",
    ),
    Rule(
        name="fp16-and-parameters-in-fp32",
        broken=lambda f: f.strategy.precision == "fp16" and _keeps_fp32(f),
        reason="Mamba's A_log, D and dt's bias are stepped outside DeepSpeed, which alone scales fp16's loss",
        where="train.precision",
        fix="train.precision: bf16, or strategy: fsdp2",
        source="shardwise.engines.runtime.parameters",
    ),
)
