"""Memory of ZeRO-0, 1 and 2, DeepSpeed 0.19.8; functions in parentheses.

Stage 0 in bf16 is fp16/unfused_optimizer.py, with `step_in_parts`; in fp32 torch's optimizer alone.
Stages 1 and 2 are runtime/zero/stage_1_and_2.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from shardwise.engines.deepspeed import policy
from shardwise.simulate.memory.allocator import DeferredFree
from shardwise.simulate.memory.engine import EngineMemory, cut, fill, pinned
from shardwise.simulate.memory.gpu import BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.recorded import PASSES, enter_pool, sums_stay
from shardwise.simulate.step_trace import FP32, FP64, ITEM_BYTES, StepTrace
from shardwise.strategy import Strategy

ALIGNMENT = 2  # Elements a partition's size is a multiple of (stage_1_and_2.py: nccl_start_alignment_factor)


@dataclass(frozen=True)
class Flat:
    """ZeRO-1 and 2's flat buffer: trainable parameters, padded so that `world` equal partitions result.

    Modelled is one parameter group. Weight decay makes two (engines/runtime/parameters.py), laid out alike.
    """

    trace: StepTrace
    world: int

    @cached_property
    def offsets(self) -> dict[int, int]:
        """First element of each trainable parameter."""
        offsets: dict[int, int] = {}
        end = 0
        for index in self.trace.trainable:
            offsets[index] = end
            end += self.trace.parameters[index].numel
        return offsets

    @cached_property
    def numel(self) -> int:
        """Elements of the flat buffer (flatten_dense_tensors_aligned)."""
        total = sum(self.trace.parameters[index].numel for index in self.trace.trainable)
        step = ALIGNMENT * self.world
        return -(-total // step) * step

    @property
    def partition(self) -> int:
        """Elements of a rank's part."""
        return self.numel // self.world

    def pieces(self, index: int) -> list[tuple[int, int]]:
        """(rank, elements) of the partitions that a parameter lies in (initialize_gradient_partition)."""
        start = self.offsets[index]
        end = start + self.trace.parameters[index].numel
        size = self.partition
        ranks = range(start // size, (end - 1) // size + 1)
        return [(rank, min(end, (rank + 1) * size) - max(start, rank * size)) for rank in ranks]

    def owned(self, rank: int) -> list[int]:
        """Parameters that are at least partly in a rank's partition (get_partition_info)."""
        return [index for index in self.offsets if any(owner == rank for owner, _ in self.pieces(index))]

    def slices(self, bucket: Iterable[int], *, joined: bool, rank: int) -> list[tuple[int, int]]:
        """(rank, elements) of a bucket's slices that are reduced for one rank (average_tensor), in order.

        `joined`: adjacent slices of `rank`, whose memory is modelled, are one, as other ranks' always are.
        """
        found: list[tuple[int, int]] = []
        for index in bucket:
            for owner, numel in self.pieces(index):
                if found and found[-1][0] == owner and (joined or owner != rank):
                    found[-1] = (owner, found[-1][1] + numel)
                else:
                    found.append((owner, numel))
        return found


REDUCED_AT_ONCE = 500_000_000
"""Elements from which gradients are reduced together (runtime/engine.py: buffered_allreduce_fallback)."""


class Zero0Memory(EngineMemory):
    """Weights, masters, moments and gradients, parameter by parameter; some gradients in fp32, too."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace = trace
        self._recorded = policy.records_passes(trace, strategy)
        self.sums_stay = self._recorded and sums_stay(trace, strategy)
        self._masters, self._optimizer = strategy.precision != "fp32", strategy.optimizer
        self._numel = [trace.parameters[index].numel for index in trace.trainable]
        self._gradients: dict[int, Block] = {}
        self._states = False

    def build(self, memory: GpuMemory) -> None:
        trace = self._trace
        for size in trace.buffers:
            memory.take(WEIGHTS, size)
        for part in trace.parts:
            fill(memory, trace, part)
        if not self._masters:
            return
        sizes = [trace.parameters[index].size_bytes for index in trace.trainable]
        for numel, size in zip(self._numel, sizes, strict=True):
            copy = memory.take(OPTIMIZER, size)
            memory.take(OPTIMIZER, FP32 * numel)
            memory.give(copy)
        # A step with zero gradients of both formats (initialize_optimizer_states).
        low = [memory.take(GRADIENTS, size) for size in sizes]
        high = [memory.take(GRADIENTS, FP32 * numel) for numel in self._numel]
        self._take_states(memory)
        memory.give(*low, *high)
        for size in sizes if self.sums_stay else ():
            memory.take(GRADIENTS, size)

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        if self._recorded:
            enter_pool(memory, self._trace)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        if self.sums_stay or parameter in self._gradients:
            memory.give(block)
        else:
            self._gradients[parameter] = memory.move(block, GRADIENTS)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        together: list[int] = []
        numel = 0
        for index in self._trace.trainable if last else ():
            parameter = self._trace.parameters[index]
            together.append(parameter.size_bytes)
            numel += parameter.numel
            if numel > REDUCED_AT_ONCE:
                _reduce(memory, together)
                together, numel = [], 0
        _reduce(memory, together)

    def step(self, memory: GpuMemory) -> None:
        for part in policy.stepped_together(self._numel) if self._masters else ():
            memory.give(*[memory.take(GRADIENTS, FP32 * numel) for numel in part])
        self._take_states(memory)
        memory.give(*self._gradients.values())
        self._gradients.clear()

    def _take_states(self, memory: GpuMemory) -> None:
        for numel in [] if self._states else self._numel:
            memory.take_adamw_state(numel, self._optimizer)
        self._states = True


def _reduce(memory: GpuMemory, sizes: list[int]) -> None:
    """Copy several gradients; a single one is reduced in its own memory (allreduce_bucket)."""
    if len(sizes) > 1:
        memory.scratch(BUFFERS, sum(sizes))


REDUCTION = 3
"""The stream on which gradients are reduced and copied, with memory of its own (reduction_stream)."""


class Zero12Memory(EngineMemory):
    """Weights in one flat buffer; masters, moments and reduced gradients of a rank's part of it."""

    def __init__(self, trace: StepTrace, strategy: Strategy, rank: int | None = None) -> None:
        """`rank`: whose memory is modelled; None: the last rank's.

        Its part of the gradients is reduced first, when most activations are still there. Where another rank
        needs more, it is less than 1 % (measured on two and four GPUs).
        """
        self._trace = trace
        self._flat = Flat(trace, strategy.data_parallel)
        self._rank = strategy.data_parallel - 1 if rank is None else rank
        self._owned = set(self._flat.owned(self._rank))
        self._numel = {index: trace.parameters[index].numel for index in trace.trainable}
        self._item = FP32 if strategy.precision == "fp32" else 2
        self._reduced_item = ITEM_BYTES[strategy.reduced_in(strategy.precision)]
        self._strategy = strategy
        self._offload = strategy.offload_optimizer != "none"
        self._fp32_sum = policy.keeps_sums(trace, strategy)
        self._last = True
        self._unreduced: dict[int, Block] = {}  # gradients that stage 1 adds up before it reduces them
        self._recorded = self.sums_stay = policy.records_passes(trace, strategy)
        self._adds = self._recorded and policy.adds_up(strategy)  # to what stays
        self._stream = REDUCTION if strategy.overlap_comm else PASSES if self._recorded else 0
        self._buffers: list[Block] = []
        self._bucket = policy.Bucket(trace, strategy)
        self._oversized: Block | None = None
        self._reduced: Block | None = None  # grads_in_partition
        self._sum: Block | None = None  # averaged_gradients, all_grad_tensors
        self._deferred: list[DeferredFree] = []
        self._states = False

    def build(self, memory: GpuMemory) -> None:
        trace, flat = self._trace, self._flat
        for size in trace.buffers:
            memory.take(WEIGHTS, size)
        weights: dict[int, Block] = {}
        for part in trace.parts:
            weights |= fill(memory, trace, part)
        weights = cut(memory, trace, weights)
        memory.allocator.empty_cache()
        memory.take(WEIGHTS, self._item * flat.numel)
        # views of the flat buffer from here on (_update_model_bit16_weights)
        memory.give(*[weights[index] for index in trace.trainable])
        copy = memory.take(OPTIMIZER, self._item * flat.partition)
        if self._offload:
            memory.give(copy)
            largest = self._item * max(self._numel.values())
            memory.take(BUFFERS, largest)  # temp_grad_buffer_for_gpu_offload
            memory.host_bytes += self._host_bytes(largest)
            return
        if self._item != FP32:
            memory.take(OPTIMIZER, FP32 * flat.partition)
            memory.give(copy)
        memory.scratch(OPTIMIZER, FP32 * flat.partition)  # initialize_optimizer_states
        if self._recorded:  # runtime/recorded.py
            if self._strategy.optimizer == "adamw":
                self._make_states(memory)
            for numel in self._numel.values() if self._adds else ():
                memory.take(GRADIENTS, self._item * numel)
            if self._fp32_sum:  # what graphs add to stays
                self._sum = memory.take(GRADIENTS, FP32 * flat.partition)

    def _make_states(self, memory: GpuMemory) -> None:
        if not self._states:
            self._states = True
            memory.take_adamw_state(self._flat.partition, self._strategy.optimizer)

    def _host_bytes(self, largest: int) -> int:
        """Page-locked masters, gradients, weights to be copied back, a buffer; moments (DeepSpeedCPUAdam)."""
        partition = self._flat.partition
        locked = 2 * pinned(FP32 * partition) + pinned(self._item * partition) + pinned(largest)
        if self._strategy.accumulation > 1 and not self._fp32_sum:  # async_accumulate_grad_in_cpu_via_gpu
            locked += sum(pinned(self._item * self._numel[index]) for index in self._owned)
        return locked + 2 * FP32 * partition

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        self._last = last
        if self._recorded:
            enter_pool(memory, self._trace, (REDUCTION,))

    def gradient(self, memory: GpuMemory, parameter: int, block: Block | None) -> None:
        if not self._buffers:  # with overlap two: one fills up while the other is reduced (setup_buckets)
            size, count = self._item * self._bucket.size, 1 + self._strategy.overlap_comm
            self._buffers = [memory.take_in_pass(BUFFERS, size) for _ in range(count)]
        before = self._unreduced.pop(parameter, None)
        if before is not None or self._adds:  # autograd adds to it
            memory.give(block)
            block = before
        if not policy.reduces(self._strategy, last=self._last):
            if block is not None:
                self._unreduced[parameter] = memory.move(block, GRADIENTS)
            return
        numel = self._numel[parameter]
        if self._bucket.is_full_for(numel):
            self._reduce(memory)
        self._bucket.add([parameter], numel)
        if self._bucket.has_room_for(numel):
            memory.give(block)
        else:
            self._oversized = block

    def _reduce(self, memory: GpuMemory) -> None:
        """Average the bucket's gradients, and copy those of this rank (reduce_ipg_grads)."""
        slices = self._flat.slices(self._bucket.parameters, joined=not self._fp32_sum, rank=self._rank)
        if self._fp32_sum and self._sum is None and any(rank == self._rank for rank, _ in slices):
            self._sum = memory.take(GRADIENTS, FP32 * self._flat.partition, self._stream)
        for together in self._at_once(slices):
            # Several are reduced in a copy, a single one in its own memory (allreduce_bucket).
            numel = sum(numel for _, numel in together)
            copy = memory.take(BUFFERS, self._item * numel, self._stream) if len(together) > 1 else None
            if self._reduced_item != self._item:  # communication_data_type
                memory.scratch(BUFFERS, self._reduced_item * numel, stream=self._stream)
            for rank, part in together:
                if self._fp32_sum and rank == self._rank:  # _add_to_grad_partition_buffer
                    memory.scratch(BUFFERS, FP32 * part, stream=self._stream)
            memory.give(copy)
        for parameter in self._bucket.parameters:
            if parameter in self._owned:
                self._keep(memory, parameter)
        if self._oversized is not None:
            self._deferred.append(memory.give_later(self._oversized))  # the reduction stream uses it
            self._oversized = None
        self._bucket.clear()

    def _at_once(self, slices: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        """Slices that are reduced by one call: until they exceed a bucket (allreduce_and_scatter)."""
        calls: list[list[tuple[int, int]]] = [[]]
        numel = 0
        for piece in slices:
            calls[-1].append(piece)
            numel += piece[1]
            if numel > self._bucket.size:
                calls.append([])
                numel = 0
        return calls

    def _keep(self, memory: GpuMemory, parameter: int) -> None:
        """Keep this rank's part of a reduced gradient (copy_grads_in_partition)."""
        if self._offload:
            if self._last:
                numel = next(n for rank, n in self._flat.pieces(parameter) if rank == self._rank)
                memory.scratch(BUFFERS, FP64 * numel, stream=self._stream)  # for its norm
                if self._item != FP32 and not self._fp32_sum:
                    memory.scratch(BUFFERS, FP32 * numel, stream=self._stream)
        elif self._reduced is None and not self._fp32_sum:
            size = self._item * sum(self._numel[index] for index in self._owned)
            self._reduced = memory.take(GRADIENTS, size, self._stream)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        if not policy.reduces(self._strategy, last=last):
            return
        self._reduce(memory)
        memory.complete(*self._deferred)
        self._deferred.clear()
        if self._sum is None:
            self._sum = self._reduced
        else:
            memory.give(self._reduced)
        self._reduced = None
        memory.give(*self._buffers)
        self._buffers.clear()

    def step(self, memory: GpuMemory) -> None:
        if self._offload:
            memory.give(self._sum)
            self._sum = None
            return
        size = FP32 * self._flat.partition
        gradient = self._gradient_of_partition(memory, size)
        self._make_states(memory)
        if gradient is not self._sum:
            memory.give(gradient)

    def _gradient_of_partition(self, memory: GpuMemory, size: int) -> Block:
        """The partition's gradient in fp32 and in one piece."""
        if self._fp32_sum:
            gradient, self._sum = self._sum, self._sum if self._recorded else None
            return gradient or memory.take(GRADIENTS, size)  # zeros, for a rank that has only padding
        flat = memory.take(OPTIMIZER, self._item * self._flat.partition) if len(self._owned) > 1 else None
        if flat is None or self._item != FP32:
            gradient = memory.take(GRADIENTS, size)
            memory.give(flat)
        else:
            gradient = flat
        memory.give(self._sum)
        self._sum = None
        return gradient
