"""What PyTorch's FSDP2, as `runtime.py` sets it up, gathers and releases when, and what memory that takes.

The groups are `StepTrace.parts`: each block, and last the root, everything outside the blocks. A block's
parameters are asked for one block ahead; the root stays gathered for a micro-batch. Every parameter is split
along its first dimension in equal shards, the last ones padded (torch.chunk): over the ranks of one group
under HSDP, whose all-reduce over the groups works in place. The functions in parentheses are those of torch's
_fully_shard package.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.simulate.memory.engine import EngineMemory, fill, pinned
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.recorded import enter_pool, own_pool, sums_stay
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, Parameter, StepTrace
from shardwise.strategy import Strategy


def gathered_ahead(block: int, blocks: int, *, backward: bool) -> range:
    """The block, if any, that is asked for before `block` computes; of so many `blocks`."""
    return range(max(block - 1, 0), block) if backward else range(block + 1, min(block + 2, blocks))


def released(strategy: Strategy, *, backward: bool, last: bool) -> bool:
    """Whether a group is released after a pass of it (FSDPParamGroup: post_forward, post_backward).

    Without resharding it stays gathered until the backward pass of the last micro-batch; on one rank, which
    only converts its own, until that of each.
    """
    return strategy.reshard or (backward and (last or strategy.sharers == 1))


def records(strategy: Strategy) -> bool:
    """Whether all micro-batches of a step are alike on the GPU alone, so that one's passes serve for all."""
    each = released(strategy, backward=True, last=False) and not strategy.shard_group
    alike = strategy.accumulation == 1 or each
    return alike and strategy.offload_parameters == "none"


INT64 = 8

COPY_IN, REDUCE, REPLICAS = 3, 4, 5
"""Streams with memory of their own (FSDPCommContext): gathered buffers are allocated on the copy-in stream,
reduced gradients on the reduce-scatter stream, HSDP's in another format on the all-reduce stream; everything
else on that of the passes."""

CHUNK_CAT_BLOCK_BYTES = 16 * 128
CHUNK_CAT_VECTORS = 6
"""Bytes that one block of chunk_cat's kernel writes, and how many lists of numbers the kernel gets. The lists
have an int64 for each tensor, two of them one more, and another list has the tensor of each block
(_chunk_cat_out_cuda_contiguous in TensorShape.cu)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One parameter, and what each process holds of it."""

    index: int  # In the trace
    trainable: bool
    size_bytes: int  # Of the gathered parameter in the computation's format
    item_bytes: int  # Of the computation's format
    shard_item_bytes: int  # fp32 of a trained parameter, the computation's format of a frozen one
    numel: int  # Of a shard, padding included

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

    def __init__(self, shards: list[Shard], strategy: Strategy, *, stay: bool) -> None:
        """`stay`: gradients are added to sums that are allocated once."""
        self.shards, self._stay = shards, stay
        self._world_size, self._grouped = strategy.sharers, strategy.shard_group > 0
        self._item = ITEM_BYTES[strategy.reduced_in("fp32")]  # Of gradients as they are summed over ranks
        self._in_flight: Block | None = None  # What was summed in that format (AllReduceState)
        self._offload = strategy.offload_parameters == "cpu"
        world_size = self._world_size
        self._copied_bytes = sum(s.item_bytes * s.numel for s in shards if s.cast)
        self._gathered_bytes = world_size * sum(s.item_bytes * s.numel for s in shards)
        self._output: Block | None = None
        self._gathered: list[Block] = []
        self._reduced: Block | None = None
        self.awaited = False  # In the backward pass: its gradients are not reduced yet

    def gather(self, memory: GpuMemory) -> None:
        """Start to gather the parameters unless they are gathered or on their way (unshard)."""
        if self._gathered or self._output is not None or self._world_size == 1:
            return
        inputs = self._copy_in(memory)
        self._output = memory.take(BUFFERS, self._gathered_bytes, COPY_IN)
        memory.give(*inputs)

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
        sizes = [self._world_size * shard.item_bytes * shard.numel for shard in self.shards]
        self._gathered = [memory.take_in_pass(BUFFERS, size) for size in sizes]
        output, self._output = self._output, None
        return output

    def _copy(self, memory: GpuMemory) -> None:
        """Copy the parameters of one process; a cast one is freed after the next has been cast."""
        cast: Block | None = None
        for shard in self.shards:
            previous, cast = cast, None
            if self._offload:
                loaded = memory.take_in_pass(BUFFERS, shard.shard_bytes)
                cast = memory.take_in_pass(BUFFERS, shard.size_bytes) if shard.cast else loaded
                if shard.cast:
                    memory.give(loaded)
            elif shard.cast:
                cast = memory.take_in_pass(BUFFERS, shard.size_bytes)
            memory.give(previous)
            self._gathered.append(memory.take_in_pass(BUFFERS, shard.size_bytes))
        memory.give(cast)

    def reshard(self, memory: GpuMemory) -> None:
        """Free all but the shards."""
        memory.give(*self._gathered)
        self._gathered.clear()

    def reduce(self, memory: GpuMemory, gradients: Mapping[int, Block], *, last: bool) -> Block | None:
        """Sum the gradients over the processes (foreach_reduce); each keeps its share, in the end in fp32.

        Micro-batches are added to the first one's share. Under HSDP the last one's is what is summed over the
        groups: the others are added to it, and freed (partial_reduce_output).
        Returns the reduction's input, which stays until the next group's reduction; None without gradients.
        """
        shards = [shard for shard in self.shards if shard.index in gradients]
        if not shards:
            return None
        numel = sum(shard.numel for shard in shards)
        source = memory.take_in_pass(BUFFERS, self._item * numel * self._world_size)
        memory.give(memory.take_in_pass(BUFFERS, _chunk_cat_bytes(shards, self._item)))
        blocks = [gradients[shard.index] for shard in shards]
        held = blocks.pop() if self._world_size > 1 else None  # by a loop's variable
        memory.give(*reversed(blocks))
        reduced = memory.take(GRADIENTS, self._item * numel, REDUCE)
        memory.give(held)
        if held is None:
            memory.scratch(BUFFERS, self._item * numel, stream=REDUCE)  # a divided copy
        if self._grouped:
            self._keep_of_group(memory, reduced, numel, last=last)
            return source
        if self._item != FP32:
            summed, reduced = reduced, memory.take(GRADIENTS, FP32 * numel, REDUCE)
            memory.give(summed)
        if self._reduced is None and not self._offload and not self._stay:
            self._reduced = reduced
        else:
            memory.give(reduced)
        return source

    def _keep_of_group(self, memory: GpuMemory, reduced: Block, numel: int, *, last: bool) -> None:
        if self._reduced is None or last:
            memory.give(self._reduced)
            self._reduced = reduced
        else:
            memory.give(reduced)
        if last and self._item != FP32:
            self._in_flight, self._reduced = reduced, memory.take(GRADIENTS, FP32 * numel, REPLICAS)

    def forget(self, memory: GpuMemory) -> None:
        """Free a buffer whose parameters were not used, and what was in flight (finalize_backward)."""
        memory.give(self._output, self._in_flight)
        self._output = self._in_flight = None

    def drop_gradients(self, memory: GpuMemory) -> None:
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
    memory.give(*[weights[shard.index] for shard in shards[:-1]])
    return weights[shards[-1].index]


def _chunk_cat_bytes(shards: list[Shard], item: int) -> int:
    blocks = sum(-(-item * shard.numel // CHUNK_CAT_BLOCK_BYTES) for shard in shards)
    return INT64 * (blocks + CHUNK_CAT_VECTORS * len(shards) + 2)


GUARDS = 3  # Scalars that stay on the GPU: the guard's state in engines/runtime/adamw.py

NORM_CHUNK = 65536  # Elements that one block of a foreach kernel sums (kChunkSize in MultiTensorApply.cuh)


class Fsdp2Memory(EngineMemory):
    """Shards, in fp32 of trained parameters, in the computation's format of frozen ones."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._strategy = strategy
        self._offload = strategy.offload_parameters == "cpu"
        shards = [shard_of(i, p, strategy.sharers) for i, p in enumerate(trace.parameters)]
        self._own_pool = own_pool(trace) and records(strategy)
        self.sums_stay = records(strategy) and sums_stay(trace, strategy)
        groups = [Group([shards[i] for i in part], strategy, stay=self.sums_stay) for part in trace.parts]
        self._blocks, self._root = groups[:-1], groups[-1]
        self._trained = [shard for shard in shards if shard.trainable]
        self._gradients: dict[int, Block] = {}
        self._gathered: Block | None = None
        """The buffer of the last gathering in the forward pass (FSDPCommContext.all_gather_state)."""
        self._reducing: Block | None = None
        """The input of the last reduction (FSDPCommContext.reduce_scatter_states)."""
        self._in_backward, self._last = False, True

    def build(self, memory: GpuMemory) -> None:
        for size in self._trace.buffers:
            memory.take(WEIGHTS, size)
        held: Block | None = None
        for part, group in zip(self._trace.parts, [*self._blocks, self._root], strict=True):
            weights = fill(memory, self._trace, part)
            memory.give(held)
            held = shard_part(memory, group.shards, weights, offload=self._offload)
        memory.give(held)
        if self._offload:
            memory.host_bytes += self._host_bytes()
        for shard in self._trained if self.sums_stay else ():
            memory.take(GRADIENTS, FP32 * shard.numel)
        for shard in [] if self._offload else self._trained:
            memory.take_adamw_state(shard.numel, self._strategy.optimizer)
        for _ in range(GUARDS):
            memory.take(OPTIMIZER, FP32)

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        if self._own_pool:
            enter_pool(memory, self._trace, (COPY_IN, REDUCE, REPLICAS))
        self._in_backward, self._last = False, last
        self._await(memory, self._root)

    def forward(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block >= 0 and not self._in_backward:
            self._await(memory, self._blocks[block])
            self._gather_ahead(memory, block, backward=False)

    def _gather_ahead(self, memory: GpuMemory, block: int, *, backward: bool) -> None:
        for other in gathered_ahead(block, len(self._blocks), backward=backward):
            self._blocks[other].gather(memory)

    def _await(self, memory: GpuMemory, group: Group) -> None:
        """Before a group's forward pass: its buffer stays until the next group's has been copied out."""
        group.gather(memory)
        output = group.copy_out(memory)
        if output is not None:
            self._release(memory)
            self._gathered = output

    def _release(self, memory: GpuMemory) -> None:
        memory.give(self._gathered)
        self._gathered = None

    def forward_end(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block < 0 or self._in_backward:
            return
        if released(self._strategy, backward=False, last=self._last):
            self._blocks[block].reshard(memory)

    def backward(self, memory: GpuMemory, unit: int) -> None:
        if not self._in_backward:  # the root's forward pass ends, its backward pass begins
            self._in_backward = True
            self._release(memory)
            self._root.awaited = True
            self._gather_ahead(memory, len(self._blocks), backward=True)
        # A block is done when the gradient of its input is there, before the hooks of the block below.
        for group in self._blocks:
            if group.awaited:
                self._reduce(memory, group)
        block = self._trace.units[unit].block
        if block < 0:
            return
        group = self._blocks[block]
        group.gather(memory)
        memory.give(group.copy_out(memory))
        group.awaited = True
        self._gather_ahead(memory, block, backward=True)

    def backward_end(self, memory: GpuMemory, unit: int) -> None:
        block = self._trace.units[unit].block
        if block >= 0 and self._blocks[block].awaited:
            self._reduce(memory, self._blocks[block])

    def _reduce(self, memory: GpuMemory, group: Group) -> None:
        """After a group's backward pass (post_backward)."""
        group.awaited = False
        if released(self._strategy, backward=True, last=self._last):
            group.reshard(memory)
        memory.give(self._reducing)
        self._reducing = group.reduce(memory, self._gradients, last=self._last)
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
