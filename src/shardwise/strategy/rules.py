"""What may be combined in a strategy. Each rule is a value: a reason, a source, the versions it holds for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwise.errors import Problem
from shardwise.job.schema import BUCKET
from shardwise.strategy.facts import PLAN_STYLES, Facts
from shardwise.units import processes

Words = str | Callable[[Facts], str]

# The rules' sources were read in DeepSpeed 0.19.8 and torch 2.13.
DEEPSPEED = "deepspeed>=0.19,<0.20"
TORCH = "torch>=2.10,<2.14"

AMPERE = (8, 0)
"""The first CUDA compute capability with bf16."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A combination that is refused."""

    name: str
    broken: Callable[[Facts], bool]
    reason: Words
    where: str
    fix: Words
    source: str
    """Where it says so: a package's source, its documentation, or arithmetic."""
    versions: str = ""
    """The library and the range of its versions that the rule holds for (PEP 440); empty where it depends on
    none."""


def broken_rules(facts: Facts) -> list[tuple[Rule, Problem]]:
    """Every rule the strategy breaks, with what it says of it."""
    return [
        (rule, Problem(what=_said(rule.reason, facts), where=rule.where, fix=_said(rule.fix, facts)))
        for rule in RULES
        if rule.broken(facts)
    ]


def violations(facts: Facts) -> list[Problem]:
    """What every broken rule says, all at once."""
    return [problem for _, problem in broken_rules(facts)]


def _said(words: Words, facts: Facts) -> str:
    return words if isinstance(words, str) else words(facts)


def _deepspeed(facts: Facts) -> bool:
    return facts.strategy.engine == "deepspeed"


def _offloads(facts: Facts) -> bool:
    return {facts.strategy.offload_optimizer, facts.strategy.offload_parameters} != {"none"}


def _uses_nvme(facts: Facts) -> bool:
    return "nvme" in (facts.strategy.offload_optimizer, facts.strategy.offload_parameters)


def _parallel(facts: Facts) -> bool:
    return _deepspeed(facts) and facts.strategy.tensor_parallel > 1


def _has_no_heads(facts: Facts) -> bool:
    return facts.architecture is not None and facts.architecture.key_value_heads == 0


def _lacks_a_plan(facts: Facts) -> bool:
    shape = facts.architecture
    if not _parallel(facts) or shape is None or _has_no_heads(facts):
        return False
    return not shape.plan_styles or bool(shape.plan_styles - PLAN_STYLES)


def _plan_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    unknown = sorted(facts.architecture.plan_styles - PLAN_STYLES)
    if not unknown:
        return "transformers has no plan of how to cut this architecture's layers"
    ways = ", ".join(unknown)
    return f"transformers' plan for this architecture cuts layers in ways AutoTP does not know: {ways}"


def _has_unplanned_weights(facts: Facts) -> bool:
    return _parallel(facts) and facts.architecture is not None and facts.architecture.unplanned_weights


def _splits_a_head(facts: Facts) -> bool:
    if not _parallel(facts) or facts.architecture is None or _has_no_heads(facts):
        return False
    return facts.architecture.key_value_heads % facts.strategy.tensor_parallel != 0


def _heads_reason(facts: Facts) -> str:
    assert facts.architecture is not None
    heads, degree = facts.architecture.key_value_heads, facts.strategy.tensor_parallel
    return f"{degree} GPUs cannot share {heads} key-value heads equally: AutoTP would cut through heads"


def _heads_fix(facts: Facts) -> str:
    assert facts.architecture is not None
    heads = facts.architecture.key_value_heads
    degree = max(n for n in range(1, facts.strategy.tensor_parallel + 1) if heads % n == 0)
    return f"tensor_parallel: {degree}"


def _before_ampere(facts: Facts) -> bool:
    return facts.capability is not None and facts.capability < AMPERE


def _needs_flash_attention(facts: Facts) -> bool:
    shape = facts.architecture
    return shape is not None and shape.flash_attention and facts.strategy.precision == "fp16"


def _capability(facts: Facts) -> str:
    assert facts.capability is not None
    return f"GPUs of compute capability {facts.capability[0]}.{facts.capability[1]}"


def _bf16_fix(facts: Facts) -> str:
    flash = facts.architecture is not None and facts.architecture.flash_attention
    return f"train.precision: {'fp32' if flash else 'fp16 or fp32'}, or a GPU of compute capability 8.0"


def _batch_is_uneven(facts: Facts) -> bool:
    return facts.strategy.global_batch != facts.global_batch


def _uneven_reason(facts: Facts) -> str:
    rows, strategy = facts.global_batch, facts.strategy
    ranks = strategy.data_parallel
    takers = processes(ranks)
    if strategy.tensor_parallel > 1:
        takers = f"{ranks} groups of {processes(strategy.tensor_parallel)}"
    if rows % ranks:
        return f"the {rows} rows of a step (train.global_batch) cannot be shared equally by {takers}"
    return (
        f"train.micro_batch {strategy.micro_batch} does not divide {rows // ranks}, what each of {takers} "
        f"takes of the {rows} rows of a step (train.global_batch)"
    )


def _uneven_fix(facts: Facts) -> str:
    """The nearest numbers that work: rows, rows at a time, processes."""
    rows, ranks, micro = facts.global_batch, facts.strategy.data_parallel, facts.micro_batch or 1
    below = rows // (ranks * micro) * (ranks * micro)
    fixes = [f"train.global_batch: {' or '.join(str(n) for n in (below, below + ranks * micro) if n)}"]
    if rows % ranks == 0:
        divisor = max(n for n in range(1, micro + 1) if rows // ranks % n == 0)
        fixes.append(f"train.micro_batch: {divisor}")
    fewer = [n for n in range(1, ranks) if rows % (n * micro) == 0]
    if fewer and facts.strategy.tensor_parallel == 1:
        fixes.append(f"--processes {fewer[-1]}")
    return ", or ".join(fixes)


RULES: tuple[Rule, ...] = (
    Rule(
        name="single-is-one-process",
        broken=lambda f: f.strategy.engine == "single" and f.world_size != 1,
        reason="the single engine runs in one process, and there are several",
        where="strategy.engine",
        fix="--processes 1, or a strategy that shards: zero2, zero3, fsdp2",
        source="shardwise.engine.single",
    ),
    Rule(
        name="single-does-not-offload",
        broken=lambda f: f.strategy.engine == "single" and _offloads(f),
        reason="the single engine cannot offload",
        where="strategy.offload_optimizer, strategy.offload_parameters",
        fix="strategy: zero2-offload or zero3-offload; both run in one process, too",
        source="shardwise.engine.single",
    ),
    Rule(
        name="parameter-offload-needs-stage-3",
        broken=lambda f: _deepspeed(f) and f.strategy.offload_parameters != "none" and f.strategy.stage < 3,
        reason="parameters can be offloaded only by ZeRO-3; DeepSpeed ignores the request at other stages",
        where="strategy.offload_parameters",
        fix="strategy.stage: 3, or offload_parameters: none",
        source="deepspeed/runtime/zero/config.py: offload_param, valid only with stage 3",
        versions=DEEPSPEED,
    ),
    Rule(
        name="optimizer-offload-needs-zero",
        broken=lambda f: _deepspeed(f) and f.strategy.offload_optimizer != "none" and f.strategy.stage == 0,
        reason="the optimizer can be offloaded only from ZeRO-1 on; DeepSpeed ignores the request at stage 0",
        where="strategy.offload_optimizer",
        fix="strategy.stage: 2, or offload_optimizer: none",
        source="deepspeed/runtime/zero/config.py: offload_optimizer, valid with stages 1, 2, 3",
        versions=DEEPSPEED,
    ),
    Rule(
        name="nvme-needs-stage-3",
        broken=lambda f: _deepspeed(f) and _uses_nvme(f) and f.strategy.stage < 3,
        reason="only ZeRO-3 offloads to NVMe; at other stages DeepSpeed takes host memory instead",
        where="strategy.offload_optimizer",
        fix="strategy.stage: 3, or offload_optimizer: cpu",
        source="deepspeed/runtime/zero/stage_1_and_2.py: any device but `none` is the CPU",
        versions=DEEPSPEED,
    ),
    Rule(
        name="nvme-needs-a-path",
        broken=lambda f: _uses_nvme(f) and not f.strategy.nvme_path,
        reason="offloading to NVMe needs a folder",
        where="strategy.nvme_path",
        fix="strategy.nvme_path: a folder on a local NVMe disk",
        source="deepspeed/runtime/zero/offload_config.py: nvme_path",
        versions=DEEPSPEED,
    ),
    Rule(
        name="path-needs-nvme",
        broken=lambda f: bool(f.strategy.nvme_path) and not _uses_nvme(f),
        reason="nvme_path is given and nothing is offloaded to NVMe",
        where="strategy.nvme_path",
        fix="offload_optimizer: nvme, or leave nvme_path out",
        source="shardwise.job.schema",
    ),
    Rule(
        name="fsdp-offloads-everything-to-the-host",
        broken=lambda f: (
            f.strategy.engine == "fsdp2"
            and (f.strategy.offload_optimizer != f.strategy.offload_parameters or _uses_nvme(f))
        ),
        reason="FSDP2 offloads parameters and optimizer together, and to host memory only",
        where="strategy.offload_parameters",
        fix="offload_parameters: cpu, with offload_optimizer left out",
        source="torch.distributed.fsdp.CPUOffloadPolicy",
        versions=TORCH,
    ),
    Rule(
        name="reshard-is-for-sharded-parameters",
        broken=lambda f: (
            not f.strategy.reshard
            and not (f.strategy.engine == "fsdp2" or (_deepspeed(f) and f.strategy.stage == 3))
        ),
        reason="reshard: false means something only where parameters are sharded",
        where="strategy.reshard",
        fix="leave reshard out, or take ZeRO-3 or FSDP2",
        source="ZeRO-3: stage3_max_live_parameters; FSDP2: reshard_after_forward",
        versions=DEEPSPEED,
    ),
    Rule(
        name="keeping-parameters-defeats-their-offload",
        broken=lambda f: not f.strategy.reshard and f.strategy.offload_parameters != "none",
        reason="reshard: false keeps on the GPU what offload_parameters would move away",
        where="strategy.reshard",
        fix="leave reshard out, or offload_parameters: none",
        source="arithmetic",
    ),
    Rule(
        name="buckets-are-zeros",
        broken=lambda f: f.strategy.bucket != BUCKET and not (_deepspeed(f) and f.strategy.stage > 0),
        reason="bucket means something only where ZeRO reduces gradients",
        where="strategy.bucket",
        fix="leave bucket out, or take ZeRO-1, 2 or 3",
        source="deepspeed/runtime/zero/config.py: reduce_bucket_size",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-is-deepspeed",
        broken=lambda f: f.strategy.tensor_parallel > 1 and not _deepspeed(f),
        reason="tensor parallelism is DeepSpeed's AutoTP",
        where="strategy.tensor_parallel",
        fix="strategy.engine: deepspeed, or tensor_parallel: 1",
        source="shardwise.engine",
    ),
    Rule(
        name="tensor-parallel-divides-the-processes",
        broken=lambda f: f.world_size % f.strategy.tensor_parallel != 0,
        reason="tensor_parallel has to divide the number of processes",
        where="strategy.tensor_parallel",
        fix="a divisor of the number of processes",
        source="torch.distributed.device_mesh",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-and-lora",
        broken=lambda f: f.strategy.tensor_parallel > 1 and f.lora,
        reason="AutoTP replaces the linear layers that carry the LoRA adapters: nothing would be trained",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1 (zero2, zero3 and fsdp2 train LoRA), or train all weights",
        source="deepspeed/module_inject/auto_tp.py, seen with DeepSpeed 0.19.8 and PEFT 0.21",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-divides-key-value-heads",
        broken=_splits_a_head,
        reason=_heads_reason,
        where="strategy.tensor_parallel",
        fix=_heads_fix,
        source="deepspeed/module_inject/tp_shard.py: get_shard_size, which knows no heads without the config",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-needs-heads",
        broken=lambda f: _parallel(f) and _has_no_heads(f),
        reason="AutoTP would cut Mamba's input projection across its two halves, and knows no Mamba",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero2, zero3 and fsdp2 train Mamba",
        source="deepspeed/module_inject: no policy names Mamba, whose in_proj has rows of x, then of z",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-needs-a-plan",
        broken=_lacks_a_plan,
        reason=_plan_reason,
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero3 and fsdp2 spread a model over GPUs, too",
        source="deepspeed/module_inject/tp_plan_converter.py; transformers: base_model_tp_plan of a config",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-and-unplanned-weights",
        broken=_has_unplanned_weights,
        reason="weights between the cut layers, such as a norm of query and key, are not in transformers' "
        "plan for this model: AutoTP would not sum their gradients, and each GPU train them differently",
        where="strategy.tensor_parallel",
        fix="tensor_parallel: 1; zero3 and fsdp2 spread a model over GPUs, too",
        source="deepspeed/module_inject/auto_tp.py: register_replicated_grad_hooks, for what the plan names",
        versions=DEEPSPEED,
    ),
    Rule(
        name="tensor-parallel-is-for-zero-1-and-2",
        broken=lambda f: _parallel(f) and f.strategy.stage not in (1, 2),
        reason="tensor parallelism trains with ZeRO-1 and 2: at stage 0 the norm in fp32 would be that of "
        "one GPU's part, and ZeRO-3 shards blocks before AutoTP can cut them",
        where="strategy.stage",
        fix="strategy.stage: 1, or tensor_parallel: 1",
        source="shardwise.engine.deepspeed",
    ),
    Rule(
        name="bf16-needs-ampere",
        broken=lambda f: f.strategy.precision == "bf16" and _before_ampere(f),
        reason=lambda f: f"{_capability(f)} have no bf16 arithmetic",
        where="train.precision",
        fix=_bf16_fix,
        source="torch.cuda.is_bf16_supported(including_emulation=False): from compute capability 8.0",
        versions=TORCH,
    ),
    Rule(
        name="flash-attention-needs-ampere",
        broken=lambda f: _needs_flash_attention(f) and _before_ampere(f),
        reason=lambda f: f"{_capability(f)} have no flash attention, which this model attends with in fp16",
        where="train.precision",
        fix="train.precision: fp32, or a GPU of compute capability 8.0",
        source="torch, aten/.../flash_attn/flash_api.cpp: mha_varlen_fwd; shardwise.kernels.attention",
        versions=TORCH,
    ),
    Rule(
        name="fp16-needs-a-gpu",
        broken=lambda f: f.strategy.precision == "fp16" and _deepspeed(f) and f.devices == "cpu",
        reason="DeepSpeed does not train in fp16 on CPUs without fp16 arithmetic",
        where="train.precision",
        fix="train.precision: bf16 or fp32",
        source="deepspeed/accelerator/cpu_accelerator.py: is_fp16_supported",
        versions=DEEPSPEED,
    ),
    Rule(
        name="fp16-needs-zero",
        broken=lambda f: f.strategy.precision == "fp16" and _deepspeed(f) and f.strategy.stage == 0,
        reason="at stage 0 DeepSpeed divides fp16 gradients by a loss scale that it never multiplied in",
        where="strategy.stage",
        fix="strategy: zero1 or zero2, or train.precision: bf16",
        source="deepspeed/runtime/engine.py 0.19.8: backward scales the loss for ZeRO's optimizers only",
        versions=DEEPSPEED,
    ),
    Rule(
        name="fp16-and-parameters-in-fp32",
        broken=lambda f: f.strategy.precision == "fp16" and _deepspeed(f) and _has_no_heads(f),
        reason="Mamba's A_log, D and dt's bias are stepped beside DeepSpeed, which alone scales fp16's loss",
        where="train.precision",
        fix="train.precision: bf16, or strategy: fsdp2",
        source="shardwise.engine.whole",
    ),
    Rule(
        name="global-batch-divides",
        broken=_batch_is_uneven,
        reason=_uneven_reason,
        where="train.global_batch",
        fix=_uneven_fix,
        source="arithmetic",
    ),
)
