"""One process, nothing sharded: engines/single/runtime.py and engines/runtime/adamw.py."""

from shardwise.simulate.memory.engine import EngineMemory, fill
from shardwise.simulate.memory.gpu import GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy


class SingleMemory(EngineMemory):
    """Weights in the computation's format; masters, moments and gradients in fp32."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace, self._masters = trace, strategy.precision != "fp32"
        self._optimizer = strategy.optimizer
        self._gradients: dict[int, Block] = {}

    def build(self, memory: GpuMemory) -> None:
        trace = self._trace
        for part in trace.parts:
            fill(memory, trace, part)
        for size in trace.buffers:
            memory.take(WEIGHTS, size)
        numels = [trace.parameters[index].numel for index in trace.trainable]
        if self._masters:
            for numel in numels:
                memory.take(OPTIMIZER, FP32 * numel)
        for numel in numels:
            memory.take_adamw_state(numel, self._optimizer)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        first = parameter not in self._gradients
        if not self._masters and first:
            self._gradients[parameter] = memory.move(block, GRADIENTS)
            return
        if first:
            size = FP32 * self._trace.parameters[parameter].numel
            self._gradients[parameter] = memory.take(GRADIENTS, size)
        memory.give(block)

    def step(self, memory: GpuMemory) -> None:
        memory.scratch(OPTIMIZER, *[FP32] * len(self._gradients))  # the norm of each
        memory.give(*self._gradients.values())
        self._gradients.clear()
