"""What passes have apart that are recorded as CUDA graphs: engines/runtime/recorded.py (decision 0088)."""

from collections.abc import Collection

from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GpuMemory
from shardwise.simulate.step_trace import FP64, StepTrace
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
    """Whether recorded passes add to gradients that are allocated once.

    With accumulation they have to be, and engines of several GPUs have those of adapters in what they reduce.
    Others are made in the passes' pool.
    """
    return strategy.accumulation > 1 or (adapters and strategy.engine != "single")


def keeps_format(strategy: Strategy) -> bool:
    """Whether gradients that are not allocated once stay in the format in which they are computed."""
    return strategy.accumulation == 1


def sums_stay(trace: StepTrace, strategy: Strategy) -> bool:
    """The same of a trace; False where no passes are recorded."""
    # Some are frozen; those that the engine does not see have no elements.
    adapters = any(not parameter.trainable and parameter.numel for parameter in trace.parameters)
    return own_pool(trace) and gradients_stay(strategy, adapters=adapters)


def enter_pool(memory: GpuMemory, trace: StepTrace, streams: Collection[int] = ()) -> None:
    """Before a pass; at first the cache is given back. `streams`: further ones of the passes."""
    if memory.allocator.passes:
        return
    memory.allocator.empty_cache()
    memory.allocator.passes = PASSES
    memory.allocator.private = {PASSES, *streams}
    memory.take(ACTIVATIONS, TOKENS * trace.tokens)  # what a graph reads
    memory.take(BUFFERS, SEED, OUTSIDE)
