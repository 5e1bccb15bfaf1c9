"""The parameters that FSDP2 gathers and reduces together: class FSDPParamGroup of torch.distributed.fsdp.

Every parameter is split along its first dimension in equal shards, the last ones padded (torch.chunk). The
functions in parentheses are those of torch's _fully_shard package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.step_trace import FP32, Parameter

INT64 = 8

COPY_IN, REDUCE = 1, 2
"""Streams with memory of their own (FSDPCommContext): gathered buffers are allocated on the copy-in stream,
reduced gradients on the reduce-scatter stream; everything else on the default one, 0."""

CHUNK_CAT_BLOCK_BYTES = 16 * 128
CHUNK_CAT_VECTORS = 6
"""Bytes that one block of chunk_cat's kernel writes, and how many lists of numbers the kernel gets. The lists
have an int64 for each tensor, two of them one more, and another list has the tensor of each block
(_chunk_cat_out_cuda_contiguous in TensorShape.cu)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter, and what each process holds of it."""

    index: int
    """In the trace."""
    trainable: bool
    size_bytes: int
    """Of the gathered parameter in the computation's format."""
    item_bytes: int
    """Of the computation's format."""
    shard_item_bytes: int
    """fp32 of a trained parameter, the computation's format of a frozen one."""
    numel: int
    """Of a shard, padding included."""

    @property
    def cast(self) -> bool:
        return self.item_bytes != self.shard_item_bytes

    @property
    def shard_bytes(self) -> int:
        return self.shard_item_bytes * self.numel


def shard_of(index: int, parameter: Parameter, world_size: int) -> Shard:
    """Of `trace.parameters[index]`, as the first process has it."""
    rows = parameter.shape[0] if parameter.shape else 1
    return Shard(
        index=index,
        trainable=parameter.trainable,
        size_bytes=parameter.size_bytes,
        item_bytes=parameter.item_bytes,
        shard_item_bytes=FP32 if parameter.trainable else parameter.item_bytes,
        numel=-(-rows // world_size) * (parameter.numel // max(rows, 1)),
    )


class Group:
    """Memory of a block's parameters, or of those outside the blocks."""

    def __init__(self, shards: list[Shard], *, world_size: int, offload: bool) -> None:
        self.shards = shards
        self._world_size = world_size
        self._offload = offload
        self._copied_bytes = sum(s.item_bytes * s.numel for s in shards if s.cast)
        self._gathered_bytes = world_size * sum(s.item_bytes * s.numel for s in shards)
        self._output: Block | None = None
        self._gathered: list[Block] = []
        self._reduced: Block | None = None
        self.awaited = False
        """In the backward pass: its gradients are not reduced yet."""

    def gather(self, memory: GpuMemory) -> None:
        """Start to gather the parameters unless they are gathered or on their way (unshard)."""
        if self._gathered or self._output is not None or self._world_size == 1:
            return
        inputs = self._copy_in(memory)
        self._output = memory.take(BUFFERS, self._gathered_bytes, COPY_IN)
        for block in inputs:
            memory.give(block)

    def _copy_in(self, memory: GpuMemory) -> list[Block]:
        """This process's shards in the computation's format (_get_param_all_gather_inputs)."""
        if not self._offload:
            return [memory.take(BUFFERS, self._copied_bytes, COPY_IN)] if self._copied_bytes else []
        inputs = []
        for shard in self.shards:
            loaded = memory.take(BUFFERS, shard.shard_bytes, COPY_IN)
            if shard.cast:
                inputs.append(memory.take(BUFFERS, shard.item_bytes * shard.numel, COPY_IN))
                memory.give(loaded)
            else:
                inputs.append(loaded)
        return inputs

    def copy_out(self, memory: GpuMemory) -> Block | None:
        """Copy the parameters out of the buffer they were gathered in; return it (wait_for_unshard)."""
        if self._gathered:
            return None
        if self._world_size == 1:
            self._copy(memory)
            return None
        for shard in self.shards:
            size = self._world_size * shard.item_bytes * shard.numel
            self._gathered.append(memory.take(BUFFERS, size))
        output, self._output = self._output, None
        return output

    def _copy(self, memory: GpuMemory) -> None:
        """Copy the parameters of one process; a cast one is freed after the next has been cast."""
        cast: Block | None = None
        for shard in self.shards:
            previous, cast = cast, None
            if self._offload:
                loaded = memory.take(BUFFERS, shard.shard_bytes)
                cast = memory.take(BUFFERS, shard.size_bytes) if shard.cast else loaded
                if shard.cast:
                    memory.give(loaded)
            elif shard.cast:
                cast = memory.take(BUFFERS, shard.size_bytes)
            if previous is not None:
                memory.give(previous)
            self._gathered.append(memory.take(BUFFERS, shard.size_bytes))
        if cast is not None:
            memory.give(cast)

    def reshard(self, memory: GpuMemory) -> None:
        """Free all but the shards."""
        for block in self._gathered:
            memory.give(block)
        self._gathered.clear()

    def reduce(self, memory: GpuMemory, gradients: Mapping[int, Block]) -> Block | None:
        """Sum the gradients over the processes (foreach_reduce); each keeps its share, in fp32.

        Returns the reduction's input, which stays until the next group's reduction; None without gradients.
        """
        shards = [shard for shard in self.shards if shard.index in gradients]
        if not shards:
            return None
        numel = sum(shard.numel for shard in shards)
        source = memory.take(BUFFERS, FP32 * numel * self._world_size)
        memory.scratch(BUFFERS, _chunk_cat_bytes(shards))
        blocks = [gradients[shard.index] for shard in shards]
        held = blocks.pop() if self._world_size > 1 else None  # by a loop's variable
        for block in reversed(blocks):
            memory.give(block)
        reduced = memory.take(GRADIENTS, FP32 * numel, REDUCE)
        if held is not None:
            memory.give(held)
        else:
            memory.scratch(BUFFERS, FP32 * numel, stream=REDUCE)  # a divided copy
        if self._reduced is None and not self._offload:
            self._reduced = reduced
        else:
            memory.give(reduced)
        return source

    def forget(self, memory: GpuMemory) -> None:
        """Free a buffer whose parameters were not used (finalize_backward)."""
        if self._output is not None:
            memory.give(self._output)
            self._output = None

    def drop_gradients(self, memory: GpuMemory) -> None:
        if self._reduced is not None:
            memory.give(self._reduced)
            self._reduced = None


def shard_part(memory: GpuMemory, shards: list[Shard], weights: dict[int, Block], *, offload: bool) -> Block:
    """`fully_shard` of a part that has just been filled; returns its last unsharded weight.

    Trainable weights become fp32 first. Unsharded weights are freed after the last has been split, except for
    that last one: the engine's loop still refers to it.
    """
    for shard in shards:
        if shard.trainable and shard.cast:
            converted = memory.take(WEIGHTS, shard.size_bytes // shard.item_bytes * FP32)
            memory.give(weights[shard.index])
            weights[shard.index] = converted
    for shard in shards:
        split = memory.take(WEIGHTS, shard.shard_bytes)
        if offload:
            memory.give(split)
    for shard in shards[:-1]:
        memory.give(weights[shard.index])
    return weights[shards[-1].index]


def _chunk_cat_bytes(shards: list[Shard]) -> int:
    blocks = sum(-(-FP32 * shard.numel // CHUNK_CAT_BLOCK_BYTES) for shard in shards)
    return INT64 * (blocks + CHUNK_CAT_VECTORS * len(shards) + 2)
