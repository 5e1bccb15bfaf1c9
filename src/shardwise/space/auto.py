"""From the job's strategy section to a complete strategy.

`auto` follows a rule of thumb on model states alone; it does not know activations. With P parameters, T of
them trained, N GPUs, and w bytes a weight (2 in bf16 and fp16, 4 in fp32, fewer quantised), a GPU holds
(ZeRO, Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, with fp32 gradients):

    single           w P + 16 T            gradient 4 (2: one micro-batch), master weight 4, two moments 8
    zero2            w P + 16 T / N
    zero3            (w P + 16 T) / N      and the blocks that are being computed
    zero2-offload    w P
    zero3-offload    the blocks that are being computed

The first of the list that takes at most 60 % of a GPU is chosen; the rest is for activations, logits and
buffers. On CPUs: `single` for one process, `zero2` for several.
"""

from dataclasses import dataclass

from shardwise.engines import ENGINES, parts_of, spec_problems
from shardwise.engines.facts import Architecture, Devices, Facts
from shardwise.errors import JobError
from shardwise.job.schema import Job, StrategySpec, Train
from shardwise.job.strategies import NAMED, Parts, ranks_a_row
from shardwise.space.rules import violations
from shardwise.strategy import Strategy
from shardwise.units import count, gib

SHARE_FOR_STATES = 0.6

QUANTIZED_BYTES = {"int8": 1.0, "nf4": 0.516}
"""Bytes per weight of a quantised base with its scales (QLoRA, Dettmers et al. 2023: 4.127 bits)."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """The machine and the model that a strategy is for."""

    world_size: int
    devices: Devices
    device_memory_bytes: int | None
    trainable_parameters: int
    total_parameters: int
    bytes_per_weight: float


def resolve(
    job: Job,
    *,
    world_size: int,
    devices: Devices,
    trainable_parameters: int = 0,
    total_parameters: int = 0,
    device_memory_bytes: int | None = None,
    architecture: Architecture | None = None,
    capability: tuple[int, int] | None = None,
    resuming: bool = False,
) -> tuple[Strategy, list[str]]:
    """The strategy and the reasons for it. Raises JobError with everything that is wrong.

    Sizes matter only to `auto` on GPUs. Rules that need an unknown architecture or compute capability are not
    checked.
    """
    spec, train = job.strategy, job.train
    unquantised = 4 if train.precision == "fp32" else 2
    situation = Situation(
        world_size=world_size,
        devices=devices,
        device_memory_bytes=device_memory_bytes,
        trainable_parameters=trainable_parameters,
        total_parameters=total_parameters,
        bytes_per_weight=QUANTIZED_BYTES.get(job.model.quantization, unquantised),
    )
    why: list[str] = []
    parts = _parts(spec, situation, why)
    data_parallel = max(1, world_size // ranks_a_row(parts))
    micro_batch, accumulation = _batch(train, data_parallel, int(parts.get("pipeline", 1)), situation, why)
    strategy = Strategy(
        **parts,
        data_parallel=data_parallel,
        micro_batch=micro_batch,
        accumulation=accumulation,
        precision=train.precision,
        checkpoint_every=_checkpoint_every(train, parts, situation, why),
        clip_norm=job.optimizer.clip_norm,
        optimizer=job.optimizer.name,
    )
    problems = spec_problems(spec) + violations(
        Facts(
            strategy=strategy,
            devices=devices,
            world_size=world_size,
            global_batch=train.global_batch,
            lora=job.model.lora is not None,
            micro_batch=train.micro_batch,
            architecture=architecture,
            capability=capability,
            resuming=resuming,
        )
    )
    if problems:
        raise JobError("the strategy does not work", problems=problems)
    return strategy, why


def _parts(spec: str | StrategySpec, situation: Situation, why: list[str]) -> Parts:
    """Engine, stage and places."""
    if spec == "auto":
        return parts_of(_choose(situation, why))
    named = f"{spec} is" if isinstance(spec, str) else "the strategy's parts are"
    why.append(f"{named} named in the job")
    return parts_of(spec)


def _choose(situation: Situation, why: list[str]) -> str:
    alone = situation.world_size == 1
    if situation.devices == "cpu" or situation.device_memory_bytes is None:
        name = "single" if alone else "zero2"
        them = "one process" if alone else f"{situation.world_size} processes"
        why.append(f"{name}: auto's choice for {them} on CPUs")
        return name
    room = SHARE_FOR_STATES * situation.device_memory_bytes
    names = ("single", "zero2-offload", "zero3-offload") if alone else ("zero2", "zero3", "zero3-offload")
    for name in names[:-1]:
        needed = states_bytes(NAMED[name], situation)
        fits = needed <= room
        why.append(
            f"{name}: {gib(needed)} of weights, gradients and optimizer states a GPU for "
            f"{count(situation.total_parameters)} parameters, {count(situation.trainable_parameters)} "
            f"of them trained; {'within' if fits else 'more than'} {SHARE_FOR_STATES:.0%} of "
            f"{gib(situation.device_memory_bytes)}"
        )
        if fits:
            return name
    why.append(f"{names[-1]}: the last resort")
    return names[-1]


def states_bytes(parts: Parts, situation: Situation) -> float:
    """Bytes of model states on each GPU under a strategy's parts, by the table at the top."""
    parallel = ranks_a_row(parts)
    sharers = situation.world_size // parallel
    engine, group = ENGINES[parts["engine"]], parts.get("shard_group", 0)
    shards = engine.shards(parts.get("stage", 0))
    weights = situation.bytes_per_weight * situation.total_parameters / parallel
    trained = situation.trainable_parameters / parallel
    if parts.get("offload_parameters", "none") != "none":
        weights = 0.0
    if parts.get("offload_optimizer", "none") != "none":
        trained = 0.0  # gradients follow the optimizer
    copies = weights / group if group and engine.copies_weights else 0.0
    if group and not engine.copies_weights:
        sharers = group
    return copies + sum(
        size / (sharers if sharded else 1)
        for size, sharded in zip((12 * trained, 4 * trained, weights), shards, strict=True)
    )


def _batch(
    train: Train, data_parallel: int, stages: int, situation: Situation, why: list[str]
) -> tuple[int, int]:
    """Rows a GPU takes at a time, and how often in a step.

    Unset, the largest divisor of a GPU's rows that is at most 4 on CPUs, 2 on GPUs from 80 GB, else 1; and
    that leaves a micro-batch for each stage of a pipeline.
    """
    rows = train.global_batch // data_parallel
    micro_batch = train.micro_batch
    if micro_batch is None:
        most = 2 if (situation.device_memory_bytes or 0) >= 79e9 else 1
        most = min(4 if situation.devices == "cpu" else most, max(1, rows // stages))
        micro_batch = max(n for n in range(1, most + 1) if max(rows, 1) % n == 0)
        why.append(f"micro_batch {micro_batch}: of {rows} rows a process and step")
    return micro_batch, max(1, rows // micro_batch)


def _checkpoint_every(train: Train, parts: Parts, situation: Situation, why: list[str]) -> int:
    """Recompute every n-th block; `auto`: none on CPUs and on large GPUs with room, else all.

    Large means 40 GB or more, room that the model states take at most a third.
    """
    if train.checkpointing != "auto":
        named = {"none": 0, "full": 1}
        return named[train.checkpointing] if isinstance(train.checkpointing, str) else train.checkpointing
    memory = situation.device_memory_bytes
    if situation.devices == "cpu" or memory is None:
        return 0
    if memory >= 39e9 and states_bytes(parts, situation) <= memory / 3:
        why.append("checkpointing none: the model states take at most a third of the GPU")
        return 0
    why.append("checkpointing full: it saves memory; train.checkpointing: none is faster where it fits")
    return 1
