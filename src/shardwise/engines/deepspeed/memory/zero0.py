"""Memory of ZeRO-0, DeepSpeed 0.19.8: every rank holds all states.

In bf16 and fp16 that is fp16/unfused_optimizer.py: FP16_UnfusedOptimizer; in fp32 torch's optimizer alone.
"""

from __future__ import annotations

from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.weights import fill
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy

REDUCED_AT_ONCE = 500_000_000
"""Elements from which gradients are reduced together (runtime/engine.py: buffered_allreduce_fallback)."""


class Zero0Memory(EngineMemory):
    """Weights, masters, moments and both formats of the gradients, parameter by parameter."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._masters = strategy.precision != "fp32"
        self._numel = [trace.parameters[index].numel for index in trace.trainable]
        self._gradients: dict[int, Block] = {}
        self._states = False

    def build(self, memory: GpuMemory) -> None:
        trace = self._trace
        for size in trace.buffers:
            memory.take(WEIGHTS, size)
        for part in trace.parts:
            fill(memory, trace, part)
        if not self._masters:
            return
        sizes = [trace.parameters[index].size_bytes for index in trace.trainable]
        for numel, size in zip(self._numel, sizes, strict=True):
            copy = memory.take(OPTIMIZER, size)
            memory.take(OPTIMIZER, FP32 * numel)
            memory.give(copy)
        # A step with zero gradients of both formats (initialize_optimizer_states).
        low = [memory.take(GRADIENTS, size) for size in sizes]
        high = [memory.take(GRADIENTS, FP32 * numel) for numel in self._numel]
        self._take_states(memory)
        for block in low + high:
            memory.give(block)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if parameter in self._gradients:
            memory.give(block)
        else:
            self._gradients[parameter] = memory.move(block, GRADIENTS)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        if not last:
            return
        together: list[int] = []
        numel = 0
        for index in self._trace.trainable:
            parameter = self._trace.parameters[index]
            together.append(parameter.size_bytes)
            numel += parameter.numel
            if numel > REDUCED_AT_ONCE:
                _reduce(memory, together)
                together, numel = [], 0
        _reduce(memory, together)

    def step(self, memory: GpuMemory) -> None:
        high: list[Block] = []
        if self._masters:
            for numel in self._numel:  # each gradient in fp32, for its norm (utils.py: get_weight_norm)
                memory.scratch(OPTIMIZER, FP32 * numel)
            high = [memory.take(GRADIENTS, FP32 * numel) for numel in self._numel]
        self._take_states(memory)
        for block in high:
            memory.give(block)
        for block in self._gradients.values():
            memory.give(block)
        self._gradients.clear()

    def _take_states(self, memory: GpuMemory) -> None:
        if self._states:
            return
        self._states = True
        for numel in self._numel:
            memory.take_adamw_state(FP32 * numel)


def _reduce(memory: GpuMemory, sizes: list[int]) -> None:
    """Copy several gradients; a single one is reduced in its own memory (allreduce_bucket)."""
    if len(sizes) > 1:
        memory.scratch(BUFFERS, sum(sizes))
