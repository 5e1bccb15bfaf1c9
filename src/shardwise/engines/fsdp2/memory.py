"""PyTorch FSDP2 as `runtime.py` sets it up: what it allocates, at the moments at which its hooks run.

Each block is a group of parameters, and so is what is outside the blocks, the root. A block asks for the next
one's parameters before it computes, in the backward pass for those of the block before it. The functions in
parentheses are those of torch's _fully_shard package.
"""

from __future__ import annotations

from shardwise.engines.fsdp2.group import FP32, Group, shard_of, shard_part
from shardwise.simulate.memory.gpu import OPTIMIZER, WEIGHTS, Machine
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.weights import fill, parts
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy

GUARDS = 3
"""Scalars that stay on the GPU: the fields of engines/runtime/adamw.py's Guard."""

NORM_CHUNK = 65536
"""Elements that one block of a foreach kernel sums (kChunkSize in MultiTensorApply.cuh)."""


class Fsdp2Memory:
    """fp32 shards of what is trained, in the computation's format of what is frozen; gathered when needed."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._reshards = strategy.reshard
        self._offload = strategy.offload_parameters == "cpu"
        shards = [shard_of(i, p, strategy.data_parallel) for i, p in enumerate(trace.parameters)]
        groups = [
            Group([shards[i] for i in part], world_size=strategy.data_parallel, offload=self._offload)
            for part in parts(trace)
        ]
        self._blocks, self._root = groups[:-1], groups[-1]
        self._trained = [shard for shard in shards if shard.trainable]
        self._gradients: dict[int, Block] = {}
        self._gathered: Block | None = None
        """The buffer of the last gathering in the forward pass (FSDPCommContext.all_gather_state)."""
        self._reducing: Block | None = None
        """The input of the last reduction (FSDPCommContext.reduce_scatter_states)."""
        self._turned = False
        self._last = True

    def build(self, machine: Machine) -> None:
        for size in self._trace.buffers:
            machine.take(WEIGHTS, size)
        held: Block | None = None
        for part, group in zip(parts(self._trace), [*self._blocks, self._root], strict=True):
            weights = fill(machine, self._trace, part)
            if held is not None:
                machine.give(held)
            held = shard_part(machine, group.shards, weights, offload=self._offload)
        if held is not None:
            machine.give(held)
        if self._offload:
            machine.host_bytes += self._host_bytes()
        for shard in [] if self._offload else self._trained:
            machine.take(OPTIMIZER, FP32)  # its step count
            machine.take(OPTIMIZER, FP32 * shard.numel)
            machine.take(OPTIMIZER, FP32 * shard.numel)
        for _ in range(GUARDS):
            machine.take(OPTIMIZER, FP32)

    def begin(
        self,
        machine: Machine,
        micro_batch: int,
        *,
        last: bool,
    ) -> None:
        self._last = last
        self._turned = False
        self._await(machine, self._root)

    def forward(self, machine: Machine, unit: int) -> None:
        block = self._trace.units[unit].block
        if block < 0 or self._turned:
            return
        self._await(machine, self._blocks[block])
        for following in self._blocks[block + 1 : block + 2]:
            following.gather(machine)

    def _await(self, machine: Machine, group: Group) -> None:
        """Before a group's forward pass: its buffer stays until the next group's has been copied out."""
        group.gather(machine)
        output = group.copy_out(machine)
        if output is not None:
            self._release(machine)
            self._gathered = output

    def _release(self, machine: Machine) -> None:
        if self._gathered is not None:
            machine.give(self._gathered)
            self._gathered = None

    def forward_end(self, machine: Machine, unit: int) -> None:
        block = self._trace.units[unit].block
        if block >= 0 and self._reshards and not self._turned:
            self._blocks[block].reshard(machine)

    def backward(self, machine: Machine, unit: int) -> None:
        self._turn(machine)
        self._reduce_blocks(machine)
        block = self._trace.units[unit].block
        if block < 0:
            return
        group = self._blocks[block]
        group.gather(machine)
        output = group.copy_out(machine)
        if output is not None:
            machine.give(output)
        group.awaited = True
        if block > 0:
            self._blocks[block - 1].gather(machine)

    def _turn(self, machine: Machine) -> None:
        """The root's forward pass ends, its backward pass begins."""
        if self._turned:
            return
        self._turned = True
        self._release(machine)
        self._root.awaited = True
        for last in self._blocks[-1:]:
            last.gather(machine)

    def backward_end(self, machine: Machine, unit: int) -> None:
        block = self._trace.units[unit].block
        if block >= 0 and self._blocks[block].awaited:
            self._reduce(machine, self._blocks[block])

    def _reduce_blocks(self, machine: Machine) -> None:
        """A block is done when the gradient of its input is there, before the hooks of the block below."""
        for group in self._blocks:
            if group.awaited:
                self._reduce(machine, group)

    def _reduce(self, machine: Machine, group: Group) -> None:
        """After a group's backward pass (post_backward)."""
        group.awaited = False
        if self._reshards or self._last:
            group.reshard(machine)
        if self._reducing is not None:
            machine.give(self._reducing)
        self._reducing = group.reduce(machine, self._gradients)
        for shard in group.shards:
            self._gradients.pop(shard.index, None)

    def gradient(
        self,
        machine: Machine,
        parameter: int,
        block: Block,
    ) -> None:
        self._gradients[parameter] = block

    def end(
        self,
        machine: Machine,
        micro_batch: int,
        *,
        last: bool,
    ) -> None:
        """What the backward pass has not completed (_root_post_backward_final_callback)."""
        for group in (self._root, *self._blocks):
            if group.awaited:
                self._reduce(machine, group)
            group.forget(machine)
        if self._reducing is not None:
            machine.give(self._reducing)
            self._reducing = None

    def step(self, machine: Machine) -> None:
        if self._trained and not self._offload:
            longest = max(shard.numel for shard in self._trained)
            partial = FP32 * len(self._trained) * -(-longest // NORM_CHUNK)
            machine.scratch(OPTIMIZER, partial, *[FP32] * len(self._trained))  # the norm of each gradient
        for group in (*self._blocks, self._root):
            group.drop_gradients(machine)

    def _host_bytes(self) -> int:
        """Shards and gradients lie in page-locked memory, moments and step counts in ordinary memory.

        Page-locked blocks are as large as the next power of two (CachingHostAllocator.h).
        """
        shards = [shard for group in (*self._blocks, self._root) for shard in group.shards]
        pinned = sum(_power_of_two(shard.shard_bytes) for shard in shards)
        pinned += sum(_power_of_two(FP32 * shard.numel) for shard in self._trained)
        return pinned + sum(FP32 * (2 * shard.numel + 1) for shard in self._trained)


def _power_of_two(size_bytes: int) -> int:
    return 1 << (size_bytes - 1).bit_length()
