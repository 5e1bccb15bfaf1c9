"""What the replay asks an engine to do at the moments at which the real one acts."""

from __future__ import annotations

from typing import Protocol

from shardwise.simulate.memory.gpu import GpuMemory
from shardwise.simulate.memory.pool import Block


class EngineMemory(Protocol):
    """An engine on the fullest GPU: what it allocates besides the events of the trace."""

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
        """A parameter's gradient, in the computation's format, is complete; `block` is the engine's now."""

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """The backward pass of a micro-batch is over."""

    def step(self, memory: GpuMemory) -> None:
        """The optimizer's step, after which gradients are gone."""


class NoHooks:
    """An engine that does nothing between modules."""

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None: ...

    def forward(self, memory: GpuMemory, unit: int) -> None: ...

    def forward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def backward(self, memory: GpuMemory, unit: int) -> None: ...

    def backward_end(self, memory: GpuMemory, unit: int) -> None: ...

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None: ...
