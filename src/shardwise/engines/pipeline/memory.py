"""Memory of a pipeline's ranks: each replays the passes of its own stages, in the order of the schedule.

A forward pass keeps its activations until the backward pass of the same micro-batch, so the order decides how
many micro-batches are kept at a time. Follows runtime/zero1.py, and torch's PipelineStage, which has memory
to receive each micro-batch of a step in (stage.py: _setup_forward_recv_info, _create_grad_recv_info).
"""

from collections.abc import Sequence
from functools import partial

from shardwise.engines.pipeline.split import HALF, Stage, sent_bytes, stages_of
from shardwise.engines.pipeline.stages import order, stage_count
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.engine import SummedGradients, fill
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.replay import STEPS, Run, replay_steps, workspace_bytes
from shardwise.simulate.memory.spans import Step, steps
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy

ROUNDS = 3
"""Micro-batches that are replayed for each rank of a pipeline; further ones repeat them. GPipe keeps all."""


class RankMemory(SummedGradients):
    """Weights in the computation's format, sums of gradients in fp32, and a share of masters and moments."""

    def __init__(self, trace: StepTrace, strategy: Strategy, stages: Sequence[Stage]) -> None:
        super().__init__(trace, strategy)
        self._strategy, self._stages, self._ranks = strategy, stages, strategy.data_parallel
        self._parts = [part for stage in stages for part in stage.parts]

    def build(self, memory: GpuMemory) -> None:
        trace, total = self._trace, stage_count(self._strategy)
        for part in self._parts:
            weights = fill(memory, trace, part)
            for index in (index for index in part if trace.parameters[index].cut_from is not None):
                memory.take(WEIGHTS, trace.parameters[index].size_bytes)
                memory.give(weights[index])
        blocks = sum(unit.block >= 0 for unit in trace.units)
        memory.take(WEIGHTS, sum(trace.buffers) * sum(len(s.blocks) for s in self._stages) // blocks)
        shards = [FP32 * self._rows(index) for part in self._parts for index in self._trained(part)]
        if self._mixed or self._ranks > 1:
            for size in shards:
                memory.take(OPTIMIZER, size)
        for size in shards:
            memory.take_adamw_state(size // FP32, self._strategy.optimizer)
        for stage in self._stages:  # hidden states from the stage before, gradients from the one after
            for is_end in (stage.blocks[0] == 0, stage.blocks[-1] == blocks - 1):
                if total > 1 and not is_end:
                    for _ in range(self._strategy.accumulation):
                        memory.take(BUFFERS, sent_bytes(trace))

    def _trained(self, part: tuple[int, ...]) -> list[int]:
        return [index for index in part if self._trace.parameters[index].trainable]

    def _rows(self, index: int) -> int:
        """Elements of a rank's rows of a parameter, as torch.chunk splits it."""
        shape = self._trace.parameters[index].shape
        rows = shape[0] if shape else 1
        return -(-rows // self._ranks) * (self._trace.parameters[index].numel // max(rows, 1))

    def step(self, memory: GpuMemory) -> None:
        """Reduce part by part, step, and gather part by part."""
        reduced: list[Block] = []
        for part in self._parts if self._ranks > 1 else ():
            size = sum(self._rows(index) for index in self._trained(part))
            source = memory.take(BUFFERS, FP32 * size * self._ranks)
            memory.give(*(self._gradients.pop(index) for index in self._trained(part)))
            reduced.append(memory.take(GRADIENTS, FP32 * size))
            memory.give(source)
        memory.give(*reduced, *self._gradients.values())
        self._gradients.clear()
        for part in self._parts if self._ranks > 1 else ():
            indices = self._trained(part)
            item = self._trace.parameters[indices[0]].item_bytes if indices else 0
            size = item * sum(self._rows(index) for index in indices)
            memory.scratch(BUFFERS, size, size * self._ranks)


def runs(trace: StepTrace, strategy: Strategy, hardware: Hardware) -> list[Run]:
    """A replay for each rank of which one is the fullest."""
    stages = stages_of(trace, stage_count(strategy))
    ranks = fullest_ranks(strategy, [len(stage.blocks) for stage in stages])
    return [partial(_run, trace, strategy, hardware, stages, rank) for rank in ranks]


def fullest_ranks(strategy: Strategy, blocks: Sequence[int]) -> list[int]:
    """Ranks of which one is the fullest; `blocks`: of each stage.

    Of ranks with as many blocks the first one keeps the most activations, except for the last rank, which has
    the head.
    """
    ranks = strategy.pipeline
    own = [sum(blocks[rank::ranks]) for rank in range(ranks)]
    return sorted({0, ranks - 1, *(own.index(number, 1) for number in set(own[1:]))})


def _run(
    trace: StepTrace,
    strategy: Strategy,
    hardware: Hardware,
    stages: Sequence[Stage],
    rank: int,
    allocator_bytes: int,
) -> tuple[GpuMemory, int]:
    """As `simulate.memory.replay.Run`, of one rank."""
    ranks, count = strategy.pipeline, strategy.accumulation
    schedule = strategy.pipeline_schedule
    played = count if schedule == "gpipe" else min(count, ROUNDS * ranks)
    memory = GpuMemory(CachingAllocator(capacity_bytes=allocator_bytes))
    engine = RankMemory(trace, strategy, stages[rank::ranks])
    engine.build(memory)
    for _ in range(3 * count):  # token ids, labels and positions of a step's micro-batches
        memory.take(ACTIVATIONS, 8 * trace.tokens)
    workspaces = dict.fromkeys((False, True), workspace_bytes(hardware))
    flushes = 0
    for _ in range(STEPS):
        before = memory.allocator.alloc_retries
        addresses: dict[tuple[int, int], dict[int, int]] = {}
        for one in order(schedule, rank, ranks, played):
            stage = stages[one.stage].trace
            kept = addresses.setdefault((one.stage, one.micro_batch), {})
            part = _halves(stage)[one.backward]
            replay_steps(stage, part, memory, engine, workspaces.pop(one.backward, 0), kept)
        memory.at("optimizer")
        engine.step(memory)
        flushes = memory.allocator.alloc_retries - before
    return memory, flushes


def _halves(stage: StepTrace) -> tuple[Sequence[Step], Sequence[Step]]:
    """The steps of a stage's forward and of its backward pass."""

    def split() -> tuple[Sequence[Step], Sequence[Step]]:
        every = steps(stage)
        middle = next(place for place, (_, event) in enumerate(every) if event[0] == HALF) + 1
        return every[:middle], every[middle:]

    return stage.derived("halves", split)
