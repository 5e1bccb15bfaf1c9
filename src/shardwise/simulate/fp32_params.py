"""Parameters that stay in fp32 in a bf16 or fp16 model: every rank has all of them, apart from the engine.

Follows engines/runtime/fp32_params.py (decision 0019). The engine does not see these parameters.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import GRADIENTS, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Precision


def fp32_parameters(trace: StepTrace, precision: Precision) -> frozenset[int]:
    """Indices of the parameters that are kept in fp32; none where everything is computed in fp32."""
    if precision == "fp32":
        return frozenset()
    return frozenset(index for index, p in enumerate(trace.parameters) if p.item_bytes == FP32)


def without(trace: StepTrace, apart: frozenset[int]) -> StepTrace:
    """The trace of a module without those parameters, as its engine sees it; indices stay."""
    parameters = tuple(
        replace(p, shape=(0,), trainable=False) if index in apart else p
        for index, p in enumerate(trace.parameters)
    )
    units = tuple(
        replace(unit, parameters=tuple(index for index in unit.parameters if index not in apart))
        for unit in trace.units
    )
    return replace(trace, parameters=parameters, units=units)


class WithFp32Parameters(EngineMemory):
    """An engine and the parameters apart from it, with their moments and gradients in fp32."""

    def __init__(self, engine: EngineMemory, trace: StepTrace, apart: frozenset[int]) -> None:
        self._engine = engine
        self._apart = apart
        self._sizes = {index: FP32 * trace.parameters[index].numel for index in sorted(apart)}
        self._trained = [index for index in self._sizes if trace.parameters[index].trainable]
        self._gradients: dict[int, Block] = {}

    def build(self, memory: GpuMemory) -> None:
        for size in self._sizes.values():
            memory.take(WEIGHTS, size)
        self._engine.build(memory)
        for index in self._trained:
            memory.take_adamw_state(self._sizes[index])

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if parameter not in self._apart:
            self._engine.gradient(memory, parameter, block)
        elif parameter in self._gradients:  # autograd adds to it
            memory.give(block)
        else:
            self._gradients[parameter] = memory.move(block, GRADIENTS)

    def step(self, memory: GpuMemory) -> None:
        """Concatenate the gradients and sum them over the ranks; free them after AdamW's step."""
        total = memory.take(GRADIENTS, sum(self._sizes[index] for index in self._trained))
        for block in self._gradients.values():
            memory.give(block)
        self._gradients.clear()
        self._engine.step(memory)
        memory.give(total)

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        self._engine.begin(memory, micro_batch, last=last)

    def forward(self, memory: GpuMemory, unit: int) -> None:
        self._engine.forward(memory, unit)

    def forward_end(self, memory: GpuMemory, unit: int) -> None:
        self._engine.forward_end(memory, unit)

    def backward(self, memory: GpuMemory, unit: int) -> None:
        self._engine.backward(memory, unit)

    def backward_end(self, memory: GpuMemory, unit: int) -> None:
        self._engine.backward_end(memory, unit)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        self._engine.end(memory, micro_batch, last=last)
