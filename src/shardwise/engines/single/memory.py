"""One process, nothing sharded: engines/single/runtime.py and engines/runtime/adamw.py."""

from shardwise.simulate.memory.engine import SummedGradients, fill
from shardwise.simulate.memory.gpu import OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy


class SingleMemory(SummedGradients):
    """Weights in the computation's format; masters, moments and gradients in fp32."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(trace, strategy)
        self._optimizer = strategy.optimizer

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
        for numel in numels:
            memory.take_adamw_state(numel, self._optimizer)

    def step(self, memory: GpuMemory) -> None:
        memory.scratch(OPTIMIZER, *[FP32] * len(self._gradients))  # the norm of each
        memory.give(*self._gradients.values())
        self._gradients.clear()
