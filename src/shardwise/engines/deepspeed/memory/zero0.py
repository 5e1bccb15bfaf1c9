"""ZeRO-0 of DeepSpeed 0.19.8: every rank holds everything.

In bf16 and fp16 that is fp16/unfused_optimizer.py: FP16_UnfusedOptimizer; in fp32 torch's optimizer alone.
"""

from __future__ import annotations

from shardwise.simulate.memory.engine import Passive
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, Machine
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.weights import fill, parts
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy

FP32 = 4

REDUCED_AT_ONCE = 500_000_000
"""Elements from which gradients are reduced together (runtime/engine.py: buffered_allreduce_fallback)."""


class Zero0Memory(Passive):
    """Weights, masters, moments and both formats of the gradients, parameter by parameter."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._masters = strategy.precision != "fp32"
        self._numel = [trace.parameters[index].numel for index in trace.trainable]
        self._gradients: dict[int, Block] = {}
        self._states = False

    def build(self, machine: Machine) -> None:
        trace = self._trace
        for size in trace.buffers:
            machine.take(WEIGHTS, size)
        for part in parts(trace):
            fill(machine, trace, part)
        if not self._masters:
            return
        sizes = [trace.parameters[index].size_bytes for index in trace.trainable]
        for numel, size in zip(self._numel, sizes, strict=True):
            copy = machine.take(OPTIMIZER, size)
            machine.take(OPTIMIZER, FP32 * numel)
            machine.give(copy)
        # A step with zero gradients of both formats (initialize_optimizer_states).
        low = [machine.take(GRADIENTS, size) for size in sizes]
        high = [machine.take(GRADIENTS, FP32 * numel) for numel in self._numel]
        self._take_states(machine)
        for block in low + high:
            machine.give(block)

    def gradient(self, machine: Machine, parameter: int, block: Block) -> None:
        if parameter in self._gradients:
            machine.give(block)
        else:
            self._gradients[parameter] = machine.move(block, GRADIENTS)

    def end(self, machine: Machine, micro_batch: int, *, last: bool) -> None:
        if not last:
            return
        together: list[int] = []
        numel = 0
        for index in self._trace.trainable:
            parameter = self._trace.parameters[index]
            together.append(parameter.size_bytes)
            numel += parameter.numel
            if numel > REDUCED_AT_ONCE:
                _reduce(machine, together)
                together, numel = [], 0
        _reduce(machine, together)

    def step(self, machine: Machine) -> None:
        high: list[Block] = []
        if self._masters:
            for (
                numel
            ) in self._numel:  # each gradient in fp32, for its norm (runtime/utils.py: get_weight_norm)
                machine.scratch(OPTIMIZER, FP32 * numel)
            high = [machine.take(GRADIENTS, FP32 * numel) for numel in self._numel]
        self._take_states(machine)
        for block in high:
            machine.give(block)
        for block in self._gradients.values():
            machine.give(block)
        self._gradients.clear()

    def _take_states(self, machine: Machine) -> None:
        if self._states:
            return
        self._states = True
        for numel in self._numel:
            machine.take(OPTIMIZER, FP32)  # its step count
            machine.take(OPTIMIZER, FP32 * numel)
            machine.take(OPTIMIZER, FP32 * numel)


def _reduce(machine: Machine, sizes: list[int]) -> None:
    """A copy of several gradients; one alone is reduced where it lies (allreduce_bucket)."""
    if len(sizes) > 1:
        machine.scratch(BUFFERS, sum(sizes))
