"""The moments of a replay at which an engine allocates and frees."""

from __future__ import annotations

from shardwise.simulate.memory.gpu import GpuMemory
from shardwise.simulate.memory.pool import Block


class EngineMemory:
    """An engine's allocations on the fullest GPU, in addition to the events of the trace; by default none."""

    def build(self, memory: GpuMemory) -> None:
        """Weights and optimizer, until the first step begins."""

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """Before the forward pass of one of a step's micro-batches."""

    def forward(self, memory: GpuMemory, unit: int) -> None:
        """A unit's forward pass begins."""

    def forward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def backward(self, memory: GpuMemory, unit: int) -> None:
        """A unit's backward pass begins."""

    def backward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        """A parameter's gradient, in the computation's format, is complete; the engine frees `block`."""

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """The backward pass of a micro-batch is over."""

    def step(self, memory: GpuMemory) -> None:
        """The optimizer's step, after which the gradients are freed."""
