"""One process, nothing sharded: engines/single/runtime.py, recorded.py and engines/runtime/adamw.py."""

from shardwise.simulate.memory.engine import SummedGradients, fill
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, FP64, StepTrace
from shardwise.strategy import Strategy

TOKENS = 3 * FP64
"""Bytes of a token: its id, its label and its position."""

PASSES, OUTSIDE = 1, 2
"""The pools of recorded passes, and of what their stream has outside them."""

SEED = 2 * FP64  # Of a graph's random numbers, and their offset


def own_pool(trace: StepTrace) -> bool:
    """Whether the passes have a pool of their own, to be recorded if they can: those of packed rows."""
    return trace.one_shape and trace.precision != "fp32"


def gradients_stay(strategy: Strategy, *, adapters: bool) -> bool:
    """Whether recorded passes add to gradients that are allocated once (decision 0088).

    With accumulation they have to be, and those of adapters are small. Others are made in the passes' pool.
    """
    return adapters or strategy.accumulation > 1


def sums_stay(trace: StepTrace, strategy: Strategy) -> bool:
    """The same of a trace; False where no passes are recorded."""
    adapters = len(trace.trainable) < len(trace.parameters)
    return own_pool(trace) and gradients_stay(strategy, adapters=adapters)


class SingleMemory(SummedGradients):
    """Weights in the computation's format; masters, moments and gradients in fp32."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(trace, strategy)
        self._optimizer = strategy.optimizer
        self._own_pool, self._stay = own_pool(trace), sums_stay(trace, strategy)

    def build(self, memory: GpuMemory) -> None:
        trace = self._trace
        for part in trace.parts:
            fill(memory, trace, part)
        for size in trace.buffers:
            memory.take(WEIGHTS, size)
        numels = [trace.parameters[index].numel for index in trace.trainable]
        if self._mixed:
            for numel in numels:
                memory.take(OPTIMIZER, FP32 * numel)
        for numel in self._that_stay(numels):
            memory.take(GRADIENTS, FP32 * numel)
        for numel in numels:
            memory.take_adamw_state(numel, self._optimizer)

    def _that_stay(self, numels: list[int]) -> list[int]:
        """Elements of the gradients that are allocated once."""
        return numels if self._stay else []

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        if self._own_pool and not memory.allocator.passes:
            memory.allocator.empty_cache()
            memory.allocator.passes = PASSES
            memory.take(ACTIVATIONS, TOKENS * self._trace.tokens)  # what a graph reads
            memory.take(BUFFERS, SEED, OUTSIDE)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if self._stay:
            memory.give(block)
        else:
            super().gradient(memory, parameter, block)

    def step(self, memory: GpuMemory) -> None:
        memory.scratch(OPTIMIZER, *[FP32] * len(self._trace.trainable))  # the norm of each
        memory.give(*self._gradients.values())
        self._gradients.clear()
