"""Memory of replicas: engines/ddp/runtime.py."""

from dataclasses import replace

from shardwise.engines.single.memory import SingleMemory
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.strategy import Strategy


def sums_once(trace: StepTrace, strategy: Strategy) -> bool:
    """Whether gradients are summed after a step's passes: those of adapters, which are small."""
    return len(trace.trainable) < len(trace.parameters) and not strategy.powersgd


class AdapterMemory(SingleMemory):
    """A single process's states, and one fp32 buffer for all gradients."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(trace, strategy)
        self._stay, self._sent_bytes = True, ITEM_BYTES[strategy.reduced_in(strategy.precision)]

    def _that_stay(self, numels: list[int]) -> list[int]:
        self._numel = sum(numels)
        return [self._numel]

    def step(self, memory: GpuMemory) -> None:
        if self._sent_bytes < FP32:
            memory.scratch(GRADIENTS, self._sent_bytes * self._numel)
        super().step(memory)


class DdpMemory(SingleMemory):
    """A single process's states, and buckets that hold all gradients as long as the engine lives.

    PowerSGD also keeps what it did not send, as large as the gradients (error_dict). Not counted are its
    factors and the copies of one bucket.
    """

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        super().__init__(replace(trace, one_shape=False), strategy)  # it records no passes
        self._trained = [trace.parameters[index] for index in trace.trainable]
        self._keeps_errors = strategy.powersgd > 0

    def build(self, memory: GpuMemory) -> None:
        super().build(memory)
        for account in (GRADIENTS, BUFFERS) if self._keeps_errors else (GRADIENTS,):
            memory.take(account, sum(parameter.size_bytes for parameter in self._trained))

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        memory.give(block)  # added to its place in a bucket (gradient_as_bucket_view)

    def step(self, memory: GpuMemory) -> None:
        low = [parameter for parameter in self._trained if parameter.item_bytes != FP32]
        sums = [memory.take(GRADIENTS, FP32 * parameter.numel) for parameter in low]
        memory.scratch(OPTIMIZER, *[FP32] * len(self._trained))  # the norm of each
        memory.give(*sums)
