"""Combinations that are refused whatever the engine; each engine has rules of its own.

A rule is a value: a reason, a source, the versions it holds for. Sources were read in DeepSpeed 0.19.8 and
torch 2.13.
"""

from functools import partial

from shardwise.engines import ENGINES, descriptor
from shardwise.engines.deepspeed.rules import DEEPSPEED
from shardwise.engines.descriptor import EngineSpec
from shardwise.engines.facts import Facts, Rule, Words
from shardwise.engines.fsdp2.spec import TORCH
from shardwise.errors import Problem
from shardwise.job.schema import BUCKET
from shardwise.strategy import Strategy
from shardwise.units import processes

_of_deepspeed, _of_torch = partial(Rule, versions=DEEPSPEED), partial(Rule, versions=TORCH)
AMPERE = (8, 0)  # The first CUDA compute capability with bf16


def broken_rules(facts: Facts) -> list[tuple[Rule, Problem]]:
    """Every rule that the strategy breaks, with the problem to show."""

    def text(words: Words) -> str:
        return words if isinstance(words, str) else words(facts)

    rules = [rule for rule in (*RULES, *_engine(facts).rules) if rule.broken(facts)]
    return [(r, Problem(what=text(r.reason), where=r.where, fix=text(r.fix))) for r in rules]


def violations(facts: Facts) -> list[Problem]:
    """The problems of all broken rules."""
    return [problem for _, problem in broken_rules(facts)]


def _engine(facts: Facts) -> EngineSpec:
    return descriptor(facts.strategy)


def _together(strategy: Strategy) -> int:
    return strategy.pipeline * strategy.tensor_parallel


def _before_ampere(facts: Facts, precision: str) -> bool:
    old = facts.capability is not None and facts.capability < AMPERE
    return old and facts.strategy.precision == precision


def _flash_attention(facts: Facts) -> bool:
    return facts.architecture is not None and facts.architecture.flash_attention


def _capability(facts: Facts) -> str:
    assert facts.capability is not None
    return f"GPUs of compute capability {facts.capability[0]}.{facts.capability[1]}"


def _bf16_fix(facts: Facts) -> str:
    others = "fp32" if _flash_attention(facts) else "fp16 or fp32"
    if facts.architecture is None:
        others = "fp32, or fp16 for a model that does not use flash attention"
    return f"train.precision: {others}, or a GPU of compute capability 8.0"


def _uneven_reason(facts: Facts) -> str:
    rows, strategy = facts.global_batch, facts.strategy
    ranks = strategy.data_parallel
    takers = processes(ranks)
    if strategy.world_size > ranks:
        takers = f"{ranks} groups of {processes(strategy.world_size // ranks)}"
    if rows % ranks:
        return f"the {rows} rows of a step (train.global_batch) cannot be shared equally by {takers}"
    return (
        f"train.micro_batch {strategy.micro_batch} does not divide {rows // ranks}, what each of {takers} "
        f"takes of the {rows} rows of a step (train.global_batch)"
    )


def _divisors(number: int) -> str:
    return " or ".join(str(n) for n in range(1, number + 1) if number % n == 0)


def _uneven_fix(facts: Facts) -> str:
    """The nearest numbers that work: rows, unless a run is resumed, rows at a time, processes."""
    rows, ranks, micro = facts.global_batch, facts.strategy.data_parallel, facts.micro_batch or 1
    below = rows // (ranks * micro) * (ranks * micro)
    batches = " or ".join(str(n) for n in (below, below + ranks * micro) if n)
    fixes = [] if facts.resuming else [f"train.global_batch: {batches}"]
    if rows % ranks == 0:
        divisor = max(n for n in range(1, micro + 1) if rows // ranks % n == 0)
        fixes.append(f"train.micro_batch: {divisor}")
    fewer = [n for n in range(1, ranks) if rows % (n * micro) == 0]
    if fewer and facts.strategy.world_size == ranks:
        fixes.append(f"--processes {fewer[-1]}")
    return ", or ".join(fixes) or f"as many processes as divide {rows}"


def _group_reason(facts: Facts) -> str:
    group, ranks = facts.strategy.shard_group, facts.strategy.data_parallel
    if group in (1, ranks):
        return f"groups of {group} share nothing" if group == 1 else f"one group of {ranks} is all ranks"
    return f"{ranks} ranks cannot be divided into groups of {group}"


def _group_fix(facts: Facts) -> str:
    ranks = facts.strategy.data_parallel
    sizes = [str(n) for n in range(2, ranks) if ranks % n == 0]
    return f"strategy.shard_group: {' or '.join(sizes)}, or leave it out" if sizes else "leave it out"


def _rounds_too_far(facts: Facts) -> bool:
    asked, precision = facts.strategy.reduce_dtype, facts.strategy.precision
    return asked not in ("auto", "fp32", precision) and (asked, precision) != ("bf16", "fp32")


RULES: tuple[Rule, ...] = (
    _of_deepspeed(
        name="nvme-needs-a-path",
        broken=lambda f: f.uses_nvme and not f.strategy.nvme_path,
        reason="offloading to NVMe needs a folder",
        where="strategy.nvme_path",
        fix="strategy.nvme_path: a folder on a local NVMe disk",
        source="deepspeed/runtime/zero/offload_config.py: nvme_path",
    ),
    Rule(
        name="path-needs-nvme",
        broken=lambda f: bool(f.strategy.nvme_path) and not f.uses_nvme,
        reason="nvme_path is given and nothing is offloaded to NVMe",
        where="strategy.nvme_path",
        fix="offload_optimizer: nvme, or leave nvme_path out",
        source="shardwise.job.schema",
    ),
    _of_deepspeed(
        name="reshard-is-for-sharded-parameters",
        broken=lambda f: not f.strategy.reshard and not _engine(f).shards(f.strategy.stage).parameters,
        reason="reshard: false means something only where parameters are sharded",
        where="strategy.reshard",
        fix="leave reshard out, or take ZeRO-3 or FSDP2",
        source="ZeRO-3: stage3_max_live_parameters; FSDP2: reshard_after_forward",
    ),
    Rule(
        name="keeping-parameters-defeats-their-offload",
        broken=lambda f: not f.strategy.reshard and f.strategy.offload_parameters != "none",
        reason="reshard: false keeps on the GPU what offload_parameters would move away",
        where="strategy.reshard",
        fix="leave reshard out, or offload_parameters: none",
        source="arithmetic",
    ),
    _of_deepspeed(
        name="shard-group-divides-the-ranks",
        broken=lambda f: (
            f.strategy.shard_group > 0
            and (f.strategy.shard_group in (1, f.world_size) or f.world_size % f.strategy.shard_group > 0)
        ),
        reason=_group_reason,
        where="strategy.shard_group",
        fix=_group_fix,
        source="torch.distributed.device_mesh; deepspeed/utils/groups.py: _create_zero_param_parallel_group",
    ),
    _of_deepspeed(
        name="shard-group-needs-sharded-parameters",
        broken=lambda f: f.strategy.shard_group > 0 and not _engine(f).shards(f.strategy.stage).parameters,
        reason="shard_group says who shares the weights, and here every rank has all of them",
        where="strategy.shard_group",
        fix="strategy.engine: fsdp2 (HSDP), or stage: 3 (hpZ)",
        source="deepspeed/runtime/zero/partition_parameters.py: _partition_param_sec, part of stage 3",
    ),
    _of_deepspeed(
        name="shard-group-keeps-parameters-on-the-gpu",
        broken=lambda f: f.strategy.shard_group > 0 and f.strategy.offload_parameters != "none",
        reason="with offloaded parameters a group's copy is in host memory, too (DeepSpeed), and sums of "
        "micro-batches are on the GPU (FSDP2): neither is planned or tested",
        where="strategy.shard_group",
        fix="leave shard_group out, or offload_parameters: none",
        source="deepspeed: _partition_param_sec; torch: foreach_reduce, partial_reduce_output",
    ),
    _of_deepspeed(
        name="quantized-collectives-are-zero-3s",
        broken=lambda f: (
            (f.strategy.quantized_weights or f.strategy.quantized_gradients)
            and not (_engine(f).quantizes_collectives and _engine(f).shards(f.strategy.stage).parameters)
        ),
        reason="ZeRO++ quantises what ZeRO-3 sends, and nothing else",
        where="strategy.quantized_weights, strategy.quantized_gradients",
        fix="strategy.engine: deepspeed with stage: 3, or leave them out",
        source="deepspeed/runtime/zero/stage3.py: all_to_all_quant_reduce, zero_quantized_weights",
    ),
    _of_torch(
        name="powersgd-is-ddps",
        broken=lambda f: f.strategy.powersgd > 0 and not _engine(f).compresses_gradients,
        reason="PowerSGD is a hook of DistributedDataParallel, which no other engine runs",
        where="strategy.powersgd",
        fix="strategy.engine: ddp, or leave powersgd out",
        source="torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    ),
    _of_torch(
        name="powersgd-or-reduce-dtype",
        broken=lambda f: f.strategy.powersgd > 0 and f.strategy.reduce_dtype != "auto",
        reason="PowerSGD's factors are sent in the format of the gradients",
        where="strategy.reduce_dtype",
        fix="leave one of powersgd and reduce_dtype out",
        source="torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook",
    ),
    Rule(
        name="reduce-dtype-suits-the-precision",
        broken=_rounds_too_far,
        reason="fp16 loses small gradients without fp16's loss scale, and bf16 the mantissa of fp16's",
        where="strategy.reduce_dtype",
        fix=lambda f: (
            f"strategy.reduce_dtype: fp32 or {'bf16' if f.strategy.precision != 'fp16' else 'fp16'}"
        ),
        source="arithmetic",
    ),
    _of_deepspeed(
        name="buckets-are-zeros",
        broken=lambda f: (
            f.strategy.bucket not in (None, BUCKET) and not _engine(f).has_buckets(f.strategy.stage)
        ),
        reason="bucket means something only where ZeRO reduces gradients",
        where="strategy.bucket",
        fix="leave bucket out, or take ZeRO-1, 2 or 3",
        source="deepspeed/runtime/zero/config.py: reduce_bucket_size",
    ),
    _of_deepspeed(
        name="only-zero2-reduces-afterwards",
        broken=lambda f: not f.strategy.overlap_comm and f.strategy.stage != 2,
        reason="overlap_comm can be turned off under ZeRO-2 alone: no plan knows what the others do then",
        where="strategy.overlap_comm",
        fix="leave overlap_comm out, or take ZeRO-2",
        source="deepspeed/runtime/zero/stage_1_and_2.py: average_tensor, setup_buckets",
    ),
    Rule(
        name="tensor-parallel-is-deepspeed",
        broken=lambda f: f.strategy.tensor_parallel > 1 and not _engine(f).tensor_parallel,
        reason="tensor parallelism is DeepSpeed's AutoTP, or within the stages of a pipeline",
        where="strategy.tensor_parallel",
        fix="strategy.engine: deepspeed or pipeline, or tensor_parallel: 1",
        source="shardwise.engine",
    ),
    Rule(
        name="stages-need-the-pipeline-engine",
        broken=lambda f: (
            (f.strategy.pipeline > 1 or f.strategy.pipeline_schedule != "1f1b") and not _engine(f).pipeline
        ),
        reason="pipeline and pipeline_schedule mean something only to the pipeline engine",
        where="strategy.pipeline",
        fix="strategy.engine: pipeline, or leave both out",
        source="shardwise.engines.pipeline",
    ),
    _of_torch(
        name="pipeline-divides-the-processes",
        broken=lambda f: f.strategy.pipeline > 1 and f.world_size % _together(f.strategy) != 0,
        reason="pipeline times tensor_parallel has to divide the number of processes",
        where="strategy.pipeline",
        fix="a divisor of the number of processes",
        source="torch.distributed.device_mesh",
    ),
    _of_deepspeed(
        name="tensor-parallel-divides-the-processes",
        broken=lambda f: f.world_size % f.strategy.tensor_parallel != 0,
        reason="tensor_parallel has to divide the number of processes",
        where="strategy.tensor_parallel",
        fix=lambda f: f"tensor_parallel: {_divisors(f.world_size)}",
        source="torch.distributed.device_mesh",
    ),
    _of_torch(
        name="bf16-needs-ampere",
        broken=lambda f: _before_ampere(f, "bf16"),
        reason=lambda f: f"{_capability(f)} have no bf16 arithmetic",
        where="train.precision",
        fix=_bf16_fix,
        source="torch.cuda.is_bf16_supported(including_emulation=False): from compute capability 8.0",
    ),
    _of_torch(
        name="flash-attention-needs-ampere",
        broken=lambda f: _before_ampere(f, "fp16") and _flash_attention(f),
        reason=lambda f: f"{_capability(f)} have no flash attention, which this model attends with in fp16",
        where="train.precision",
        fix="train.precision: fp32, or a GPU of compute capability 8.0",
        source="torch, aten/.../flash_attn/flash_api.cpp: mha_varlen_fwd; shardwise.kernels.attention",
    ),
    _of_deepspeed(
        name="8-bit-moments-are-of-data-parallel-ranks",
        broken=lambda f: (
            f.strategy.optimizer == "adamw8bit" and (f.strategy.offloads or _together(f.strategy) > 1)
        ),
        reason="moments in 8 bits save nothing in host memory, and are not tested where a model is split",
        where="optimizer.name",
        fix="optimizer.name: adamw, or single, zero2, zero3 or fsdp2 without offloading",
        source="deepspeed/ops/adam: DeepSpeedCPUAdam keeps fp32 moments; shardwise.engines.runtime.adamw8bit",
    ),
    Rule(
        name="global-batch-divides",
        broken=lambda f: (
            f.strategy.global_batch != f.global_batch and (f.world_size == 1 or not _engine(f).plain)
        ),
        reason=_uneven_reason,
        where="train.global_batch",
        fix=_uneven_fix,
        source="arithmetic",
    ),
)

EVERY_RULE = (*RULES, *(rule for engine in ENGINES.values() for rule in engine.rules))
