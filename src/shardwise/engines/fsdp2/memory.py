"""Memory of PyTorch's FSDP2 as `runtime.py` sets it up, at the moments at which its hooks run.

What is gathered and released when is `policy.py`. The functions in parentheses are those of torch's
_fully_shard package.
"""

from __future__ import annotations

from shardwise.engines.fsdp2 import policy
from shardwise.engines.fsdp2.group import Group, shard_of, shard_part
from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.weights import fill, pinned
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.strategy import Strategy

GUARDS = 3
"""Scalars that stay on the GPU: the fields of engines/runtime/adamw.py's Guard."""

NORM_CHUNK = 65536
"""Elements that one block of a foreach kernel sums (kChunkSize in MultiTensorApply.cuh)."""


class Fsdp2Memory(EngineMemory):
    """Shards, in fp32 of trained parameters, in the computation's format of frozen ones."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._strategy = strategy
        self._offload = strategy.offload_parameters == "cpu"
        shards = [shard_of(i, p, strategy.data_parallel) for i, p in enumerate(trace.parameters)]
        groups = [
            Group([shards[i] for i in part], world_size=strategy.data_parallel, offload=self._offload)
            for part in trace.parts
        ]
        self._blocks, self._root = groups[:-1], groups[-1]
        self._trained = [shard for shard in shards if shard.trainable]
        self._gradients: dict[int, Block] = {}
        self._gathered: Block | None = None
        """The buffer of the last gathering in the forward pass (FSDPCommContext.all_gather_state)."""
        self._reducing: Block | None = None
        """The input of the last reduction (FSDPCommContext.reduce_scatter_states)."""
        self._in_backward = False
        self._last = True

    def build(self, memory: GpuMemory) -> None:
        for size in self._trace.buffers:
            memory.take(WEIGHTS, size)
        held: Block | None = None
        for part, group in zip(self._trace.parts, [*self._blocks, self._root], strict=True):
            weights = fill(memory, self._trace, part)
            if held is not None:
                memory.give(held)
            held = shard_part(memory, group.shards, weights, offload=self._offload)
        if held is not None:
            memory.give(held)
        if self._offload:
            memory.host_bytes += self._host_bytes()
        for shard in [] if self._offload else self._trained:
            memory.take_adamw_state(FP32 * shard.numel)
        for _ in range(GUARDS):
            memory.take(OPTIMIZER, FP32)

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        self._last = last
        self._in_backward = False
        self._await(memory, self._root)

    def forward(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block < 0 or self._in_backward:
            return
        self._await(memory, self._blocks[block])
        self._gather_ahead(memory, block, backward=False)

    def _gather_ahead(self, memory: GpuMemory, block: int, *, backward: bool) -> None:
        for other in policy.gathered_ahead(block, len(self._blocks), backward=backward):
            self._blocks[other].gather(memory)

    def _await(self, memory: GpuMemory, group: Group) -> None:
        """Before a group's forward pass: its buffer stays until the next group's has been copied out."""
        group.gather(memory)
        output = group.copy_out(memory)
        if output is not None:
            self._release(memory)
            self._gathered = output

    def _release(self, memory: GpuMemory) -> None:
        if self._gathered is not None:
            memory.give(self._gathered)
            self._gathered = None

    def forward_end(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block < 0 or self._in_backward:
            return
        if policy.released(self._strategy, backward=False, last=self._last):
            self._blocks[block].reshard(memory)

    def backward(self, memory: GpuMemory, unit: int) -> None:
        self._begin_backward(memory)
        self._reduce_blocks(memory)
        block = self._trace.units[unit].block
        if block < 0:
            return
        group = self._blocks[block]
        group.gather(memory)
        output = group.copy_out(memory)
        if output is not None:
            memory.give(output)
        group.awaited = True
        self._gather_ahead(memory, block, backward=True)

    def _begin_backward(self, memory: GpuMemory) -> None:
        """The root's forward pass ends, its backward pass begins."""
        if self._in_backward:
            return
        self._in_backward = True
        self._release(memory)
        self._root.awaited = True
        self._gather_ahead(memory, len(self._blocks), backward=True)

    def backward_end(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block >= 0 and self._blocks[block].awaited:
            self._reduce(memory, self._blocks[block])

    def _reduce_blocks(self, memory: GpuMemory) -> None:
        """A block is done when the gradient of its input is there, before the hooks of the block below."""
        for group in self._blocks:
            if group.awaited:
                self._reduce(memory, group)

    def _reduce(self, memory: GpuMemory, group: Group) -> None:
        """After a group's backward pass (post_backward)."""
        group.awaited = False
        if policy.released(self._strategy, backward=True, last=self._last):
            group.reshard(memory)
        if self._reducing is not None:
            memory.give(self._reducing)
        self._reducing = group.reduce(memory, self._gradients)
        for shard in group.shards:
            self._gradients.pop(shard.index, None)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        self._gradients[parameter] = block

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        """Complete what the backward pass has not (_root_post_backward_final_callback)."""
        for group in (self._root, *self._blocks):
            if group.awaited:
                self._reduce(memory, group)
            group.forget(memory)
        if self._reducing is not None:
            memory.give(self._reducing)
            self._reducing = None

    def step(self, memory: GpuMemory) -> None:
        if self._trained and not self._offload:
            longest = max(shard.numel for shard in self._trained)
            partial = FP32 * len(self._trained) * -(-longest // NORM_CHUNK)
            memory.scratch(OPTIMIZER, partial, *[FP32] * len(self._trained))  # the norm of each gradient
        for group in (*self._blocks, self._root):
            group.drop_gradients(memory)

    def _host_bytes(self) -> int:
        """Page-locked shards and gradients; moments and step counts in ordinary memory."""
        shards = [shard for group in (*self._blocks, self._root) for shard in group.shards]
        # A parameter without elements counts 2 bytes; to leave them out would change a prediction (Mamba).
        locked = sum(pinned(shard.shard_bytes) or 2 for shard in shards)
        locked += sum(pinned(FP32 * shard.numel) for shard in self._trained)
        return locked + sum(FP32 * (2 * shard.numel + 1) for shard in self._trained)
