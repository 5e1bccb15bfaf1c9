"""One process, nothing sharded: engines/single/runtime.py and engines/runtime/adamw.py."""

from shardwise.simulate.memory.engine import SummedGradients, fill
from shardwise.simulate.memory.gpu import GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.recorded import enter_pool, keeps_format, own_pool, sums_stay
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy


class SingleMemory(SummedGradients):
    """Weights in the computation's format; masters, moments and sums of gradients in fp32."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(trace, strategy)
        self._optimizer = strategy.optimizer
        self._own_pool, self._stay = own_pool(trace), sums_stay(trace, strategy)
        self._keeps = keeps_format(strategy)

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
        if self._own_pool:
            enter_pool(memory, self._trace)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if self._stay:
            memory.give(block)
        elif self._keeps:
            self._gradients[parameter] = memory.move(block, GRADIENTS)
        else:
            super().gradient(memory, parameter, block)

    def step(self, memory: GpuMemory) -> None:
        memory.scratch(OPTIMIZER, *[FP32] * len(self._trace.trainable))  # the norm of each
        for index, gradient in self._gradients.items():
            size = FP32 * self._trace.parameters[index].numel
            if self._optimizer == "adamw8bit" and gradient.requested_bytes < size:  # its kernel wants fp32
                memory.scratch(OPTIMIZER, size)
            memory.give(gradient)
        self._gradients.clear()
