"""The strategies that a job allows, and those that a rule refuses."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.engines import ENGINES, parts_of, spec_problems
from shardwise.engines.facts import Architecture, Devices, Facts
from shardwise.errors import JobError
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.job.strategies import NAMED, Parts, ranks_a_row
from shardwise.space.rules import broken_rules
from shardwise.strategy import Strategy

FOR_ADAPTERS, FOR_ALL_WEIGHTS = (
    tuple(parts for parts in NAMED.values() if ENGINES[parts["engine"]].only_for == trained)
    for trained in ("adapters", "all weights")
)
"""Replicas: decisions 0091 and 0102. Of each, why it is left out where the other is trained:"""
ALL_WEIGHTS = "all weights are trained: ddp-zero1 holds less than ddp does, and sends as much"
ADAPTERS = "adapters are trained: their states are too small to be shared, and ddp sends less"

REPLICAS = (*FOR_ADAPTERS, *FOR_ALL_WEIGHTS)
SHAPES = tuple(parts for parts in NAMED.values() if parts not in REPLICAS)
"""What `auto` considers without tensor parallelism, from the fastest to the leanest."""

TENSOR_PARALLEL = (2, 4, 8)
TENSOR_PARALLEL_STAGES = (1, 2)

PIPELINES = (2, 4, 8)
"""Within a node the sharding engines are faster, and leaner: `auto` cuts a model between nodes only."""

CHECKPOINT_EVERY = (0, 4, 2, 1)  # From no recomputation to full recomputation

PARALLEL_CHECKPOINT_EVERY = (0, 1)
PARALLEL_STEP, PARALLEL_MOST_ROWS = 4, 16
"""How `auto` limits tensor parallelism, because each degree needs traces of its own, which take seconds.
So it does with pipelines, whose simulation takes the longest.

Checkpointing of no block or all; each micro-batch at least PARALLEL_STEP times the one before, up to
PARALLEL_MOST_ROWS. A job that names tensor parallelism gets all variants."""

GATHERED_STYLES = frozenset({"colwise_rep", "colwise_gather_output"})
"""Ways to cut a layer after which AutoTP gathers outputs; no supported plan has one (transformers 5.23)."""

MOST_ROWS = 128  # Largest micro-batch considered: matrices are large enough long before
MOST_MICRO_BATCHES = 8


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A strategy and a rule that it breaks."""

    strategy: Strategy
    rule: str
    reason: str
    where: str  # The job's keys that say so
    fix: str


def candidates(
    job: Job,
    *,
    world_size: int,
    gpus_per_node: int,
    devices: Devices = "cuda",
    capability: tuple[int, int] | None = None,
    architecture: Architecture | None = None,
) -> tuple[list[Strategy], list[Refused]]:
    """All strategies that the job leaves open: those to predict, and the refused ones.

    `strategy: auto` means all of SHAPES, and DeepSpeed's AutoTP within a node; anything else is kept, as are
    a named micro-batch and checkpointing. Order: by shape, then checkpointing (none to all), then micro-batch
    (ascending).

    A refused strategy stands for all its micro-batches, once per broken rule. Raises JobError where the
    job's own parts contradict each other.
    """
    spec, train = job.strategy, job.train
    problems = spec_problems(spec)
    if problems:
        raise JobError("the strategy does not work", problems=problems)
    adapters = job.model.lora is not None
    shapes = _shapes(world_size, gpus_per_node, adapters=adapters) if spec == "auto" else [parts_of(spec)]
    accepted: list[Strategy] = []
    refused: list[Refused] = []
    for parts in shapes:
        thin = spec == "auto" and ranks_a_row(parts) > 1
        variants = list(_variants(parts, job, world_size, architecture, thin=thin))
        facts = Facts(
            strategy=variants[0],  # the smallest micro-batch
            devices=devices,
            world_size=world_size,
            global_batch=train.global_batch,
            lora=adapters,
            micro_batch=train.micro_batch,
            architecture=architecture,
            capability=capability,
        )
        broken = broken_rules(facts)
        refused += [
            Refused(strategy=variants[0], rule=rule.name, reason=found.what, where=found.where, fix=found.fix)
            for rule, found in broken
        ]
        if not broken:  # larger micro-batches may be too few for a pipeline
            accepted += [one for one in variants if not broken_rules(replace(facts, strategy=one))]
    return accepted, refused


def predictable(
    job: Job, hardware: Hardware, architecture: Architecture | None
) -> tuple[list[Strategy], list[Refused]]:
    """The `candidates` on all GPUs of a hardware that can be simulated, and the other ones.

    The trace of a split model cannot have layers whose outputs are gathered.
    """
    accepted, refused = candidates(
        job,
        world_size=hardware.world_size,
        gpus_per_node=hardware.gpus_per_node,
        capability=hardware.gpu.capability,
        architecture=architecture,
    )
    if architecture is None or not architecture.plan_styles & GATHERED_STYLES:
        return accepted, refused
    parallel = {one.name: one for one in reversed(accepted) if one.tensor_parallel > 1}
    left_out = [
        Refused(
            strategy=strategy,
            rule="gathered-layers-are-not-simulated",
            reason="its plan gathers the outputs of cut layers, which is not simulated: it trains, unplanned",
            where="strategy.tensor_parallel",
            fix="train with it as the job names it, or tensor_parallel: 1 for a plan",
        )
        for strategy in reversed(parallel.values())
    ]
    return [one for one in accepted if one.tensor_parallel == 1], refused + left_out


def micro_batches(rows: int) -> list[int]:
    """Micro-batches to consider for a GPU with `rows` per step; ascending divisors of `rows`.

    All up to MOST_ROWS; where these are more than MOST_MICRO_BATCHES, each at least twice the one before.
    """
    divisors = [n for n in range(1, min(rows, MOST_ROWS) + 1) if rows % n == 0]
    return divisors if len(divisors) <= MOST_MICRO_BATCHES else _sparse(divisors, 2)


def _sparse(sizes: list[int], step: int) -> list[int]:
    """Ascending sizes, thinned so that each is at least `step` times the one before."""
    sparse = sizes[:1]
    for n in sizes[1:]:
        if n >= step * sparse[-1]:
            sparse.append(n)
    return sparse


def _shapes(world_size: int, gpus_per_node: int, *, adapters: bool) -> list[Parts]:
    """What `auto` considers. Tensor parallelism stays within a node: every layer waits for it.

    Where one group has all GPUs, nothing is sharded and both stages are the same. On several nodes FSDP2 may
    share weights within each (HSDP). ZeRO-3's hpZ has to be named: no run has shown yet that it is faster.
    Pipelines are cut between nodes, over which a stage sends less than an engine that shards.
    """
    parallel = [
        {"engine": "deepspeed", "stage": stage, "tensor_parallel": degree}
        for degree in TENSOR_PARALLEL
        if gpus_per_node % degree == 0
        for stage in TENSOR_PARALLEL_STAGES
        if stage == TENSOR_PARALLEL_STAGES[0] or degree != world_size
    ]
    by_node = {**NAMED["fsdp2"], "shard_group": gpus_per_node}
    groups = [by_node, {**by_node, "reshard": False}] if 1 < gpus_per_node < world_size else []
    nodes = world_size // gpus_per_node
    pipelines = [{"engine": "pipeline", "pipeline": p} for p in PIPELINES if nodes % p == 0]
    replicas = () if world_size == 1 else FOR_ADAPTERS if adapters else FOR_ALL_WEIGHTS
    return [*replicas, *SHAPES, *groups, *parallel, *pipelines]


def _variants(
    parts: Parts, job: Job, world_size: int, architecture: Architecture | None, *, thin: bool
) -> Iterator[Strategy]:
    """A shape with every checkpointing and micro-batch that the job leaves open; `thin`: with some."""
    train = job.train
    data_parallel = max(1, world_size // ranks_a_row(parts))
    rows = train.global_batch // data_parallel
    sizes = [train.micro_batch] if train.micro_batch else micro_batches(rows) or [1]
    checkpointing = _checkpointing(train.checkpointing, architecture)
    if thin:
        few = [n for n in sizes if n <= PARALLEL_MOST_ROWS]
        sizes = _sparse(few or sizes, PARALLEL_STEP)
        if train.checkpointing == "auto":
            checkpointing = [every for every in checkpointing if every in PARALLEL_CHECKPOINT_EVERY]
    for checkpoint_every in checkpointing:
        for micro_batch in sizes:
            yield Strategy(
                **parts,
                data_parallel=data_parallel,
                micro_batch=micro_batch,
                accumulation=max(1, rows // micro_batch),
                precision=train.precision,
                checkpoint_every=checkpoint_every,
                clip_norm=job.optimizer.clip_norm,
                optimizer=job.optimizer.name,
            )


def _checkpointing(asked: str | int, architecture: Architecture | None) -> list[int]:
    """The values of `checkpoint_every` to consider, without equivalent ones."""
    if asked == "auto":
        blocks = architecture.blocks if architecture else max(CHECKPOINT_EVERY) + 1
        return [every for every in CHECKPOINT_EVERY if every < blocks or every <= 1]
    return [{"none": 0, "full": 1}[asked] if isinstance(asked, str) else asked]
