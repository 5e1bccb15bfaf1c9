"""Adapters under ZeRO-0, 1 and 2, whose passes are recorded: engines/deepspeed/runtime/adapters.py."""

from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.recorded import enter_pool
from shardwise.simulate.step_trace import StepTrace


class RecordedAdapters(EngineMemory):
    """Gradients in sums that stay; after the passes `engine` gets a copy of each."""

    def __init__(self, engine: EngineMemory, trace: StepTrace) -> None:
        self._engine, self._trace = engine, trace
        self.step = engine.step  # type: ignore[method-assign]

    def build(self, memory: GpuMemory) -> None:
        self._engine.build(memory)
        for index in self._trace.trainable:
            memory.take(GRADIENTS, self._trace.parameters[index].size_bytes)

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        enter_pool(memory, self._trace)
        self._engine.begin(memory, micro_batch, last=last)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        memory.give(block)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        for index in self._trace.trainable:
            copy = memory.take(GRADIENTS, self._trace.parameters[index].size_bytes)
            self._engine.gradient(memory, index, copy)
        self._engine.end(memory, micro_batch, last=last)
