"""Memory of ZeRO-3, DeepSpeed 0.19.8: stage3.py, partition_parameters.py; functions in parentheses."""

from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.config import NVME_BUFFER, sub_group, sums_in_fp32
from shardwise.engines.deepspeed.memory.coordinator import GATHER, Coordinator
from shardwise.simulate.memory.engine import EngineMemory, fill, pinned
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER, WEIGHTS, GpuMemory
from shardwise.simulate.memory.pool import Block
from shardwise.simulate.memory.recorded import enter_pool
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FP32, FP64, FREE, GRADIENT, ITEM_BYTES, StepTrace
from shardwise.strategy import Strategy

NORM = FP64  # Bytes of an element in the norm of an offloaded gradient (get_norm_dtype: fp64)
NORM_AT_ONCE = 250_000_000  # Elements (_constant_buffered_norm2)

REDUCTION = 3
"""The stream on which gradients are reduced, with memory of its own (reduce_and_partition_stream)."""

PARAMETER_BUFFERS, OPTIMIZER_BUFFERS = 5, 4  # Defaults of buffer_count (zero/offload_config.py)


class Zero3Memory(EngineMemory):
    """Everything is partitioned, parameter by parameter; a unit's parameters are gathered while it runs."""

    def __init__(self, trace: StepTrace, strategy: Strategy) -> None:
        self._trace, self._optimizer = trace, strategy.optimizer
        self._world = strategy.data_parallel
        self._item = FP32 if strategy.precision == "fp32" else 2
        self._places = (strategy.offload_optimizer, strategy.offload_parameters)
        self._sends_once = policy.sends_once(strategy)
        self._offload, self._offload_parameters = (place != "none" for place in self._places)
        self._reduced_item = ITEM_BYTES[strategy.reduced_in(strategy.precision)]
        self._sum_item = FP32 if sums_in_fp32(strategy) else self._item
        self._coordinator = Coordinator(trace, strategy)
        self.sums_stay = self._coordinator.recorded
        self._part = self._coordinator.part
        blocks = [(i, unit) for i, unit in enumerate(trace.units) if unit.block >= 0]
        self._unit_of = {parameter: i for i, unit in blocks for parameter in unit.parameters}
        self._output_gradient = _output_gradient_bytes(trace)
        self._groups = self._sub_groups(sub_group(strategy))
        self._bucket = policy.Bucket(trace, strategy)
        self._waiting: dict[int, dict[int, Block]] = {}
        self._oversized: list[Block] = []  # gradients larger than a bucket
        self._running: list[int] = []
        self._in_backward, self._last, self._states = False, True, False

    def _sub_groups(self, size: int) -> list[list[int]]:
        """Trainable parameters that are stepped together (_create_fp16_sub_groups)."""
        trainable = list(self._trace.trainable)
        if sum(self._part(index) for index in trainable) <= size:
            return [trainable]
        groups: list[list[int]] = [[]]
        numel = 0
        for index in trainable:
            groups[-1].append(index)
            numel += self._part(index)
            if numel >= size and index != trainable[-1]:
                groups.append([])
                numel = 0
        return groups

    def _numels(self) -> list[int]:
        return [sum(self._part(index) for index in group) for group in self._groups]

    def build(self, memory: GpuMemory) -> None:
        for size in self._trace.buffers:
            memory.take(WEIGHTS, size)
        partitions = self._shard(memory)
        memory.allocator.empty_cache()
        total = sum(self._numels())
        if self._offload_parameters:
            memory.host_bytes += self._parameter_host_bytes()
        else:  # moved into one buffer by way of the host (defragment)
            memory.give(*partitions)
            memory.allocator.empty_cache()
            memory.take(WEIGHTS, self._item * total)
        if self._offload:
            memory.host_bytes += self._optimizer_host_bytes()
        else:
            if self._item != FP32 or self._offload_parameters:
                self._make_masters(memory)
            memory.scratch(OPTIMIZER, FP32 * max(self._numels()))  # initialize_optimizer_states
        memory.take(BUFFERS, self._item * self._bucket.size)
        if not self._offload:
            memory.take(GRADIENTS, self._sum_item * total)  # grad_partitions_flat_buffer
        for index in self._trace.trainable:  # gathered and released (create_reduce_and_remove_grad_hooks)
            size = self._item * self._part(index)
            if self._world > 1:
                memory.scratch(WEIGHTS, self._world * size, *([size] if self._offload_parameters else []))
        self._coordinator.build(memory)
        if self._coordinator.recorded and self._optimizer == "adamw":  # runtime/recorded.py
            for numel in self._numels():
                memory.take_adamw_state(numel, self._optimizer)
            self._states = True

    def _make_masters(self, memory: GpuMemory) -> None:
        """Convert weights, then copy them (_create_fp32_partitions); the last conversion is freed late."""
        converted: Block | None = None
        for numel in self._numels():
            before, converted = converted, memory.take(OPTIMIZER, FP32 * numel)
            memory.give(before)
            memory.take(OPTIMIZER, FP32 * numel)
        memory.give(converted)

    def _shard(self, memory: GpuMemory) -> list[Block]:
        """Partition part by part (engines/deepspeed/runtime/engine.py: _shard); return the trained ones."""
        trainable = set(self._trace.trainable)
        partitions: list[Block] = []
        for part in self._trace.parts:
            weights = fill(memory, self._trace, part)
            for index in part:
                self._coordinator.copy_to_group(memory, index)
                if not self._offload_parameters:
                    size = self._trace.parameters[index].item_bytes * self._part(index)
                    block = memory.take(WEIGHTS, size)
                    if index in trainable:
                        partitions.append(block)
                memory.give(weights[index])
        return partitions

    def _parameter_host_bytes(self) -> int:
        """Single partitions (_partition_param), which torch keeps for reuse, and all trained ones together.

        NVMe: the buffers through which they pass (partitioned_param_swapper.py).
        """
        if self._places[1] == "nvme":
            largest = max(self._part(index) for index in range(len(self._trace.parameters)))
            return pinned(PARAMETER_BUFFERS * self._item * max(NVME_BUFFER, largest))
        sizes = [p.item_bytes * self._part(i) for i, p in enumerate(self._trace.parameters)]
        return sum(pinned(size) for size in sizes) + pinned(self._item * sum(self._numels()))

    def _optimizer_host_bytes(self) -> int:
        """Masters, page-locked gradients (initialize_optimizer_states), moments; the sum of gradients.

        NVMe: buffers for one sub-group instead of the first three (optimizer_utils.py: SwapBufferManager).
        """
        total = pinned(self._sum_item * sum(self._numels()))
        if self._places[0] == "nvme":
            return total + pinned(OPTIMIZER_BUFFERS * FP32 * max(self._numels()))
        masters = FP32 * sum(self._numels())
        gradients = sum(pinned(FP32 * numel) for numel in self._numels())
        return total + masters + gradients + 2 * masters

    def begin(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        self._in_backward, self._last = False, last
        if self._coordinator.recorded:
            enter_pool(memory, self._trace, (GATHER, REDUCTION))
        self._coordinator.begin(memory)

    def forward(self, memory: GpuMemory, unit: int) -> None:
        if not self._in_backward:  # no hooks run when a block is computed again
            self._coordinator.fetch(memory, unit)

    def forward_end(self, memory: GpuMemory, unit: int) -> None:
        if not self._in_backward:
            self._coordinator.release(memory, unit)

    def backward(self, memory: GpuMemory, unit: int) -> None:
        self._in_backward = True
        for running in list(self._running):
            self.backward_end(memory, running)
        self._coordinator.fetch(memory, unit)
        self._running.append(unit)

    def backward_end(self, memory: GpuMemory, unit: int) -> None:
        if unit not in self._running:
            return
        self._running.remove(unit)
        waiting = self._waiting.pop(unit, {})
        if waiting:
            # The hook that waited for them (torch/utils/hooks.py: BackwardHook) keeps the gradient of the
            # block's output, so that autograd cannot add to it in place.
            output = memory.take_in_pass(ACTIVATIONS, self._output_gradient)
            for parameter, block in sorted(waiting.items()):
                self._collect(memory, parameter, block)
            memory.give(output)
        self._coordinator.release(memory, unit)

    def gradient(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        unit = self._unit_of.get(parameter)
        if unit is None:
            self._collect(memory, parameter, block)
        else:  # a leaf module's gradients wait for its end (reduce_leaf_module_grads)
            self._waiting.setdefault(unit, {})[parameter] = memory.move(block, GRADIENTS)

    def _collect(self, memory: GpuMemory, parameter: int, block: Block) -> None:
        """A gradient goes into the bucket (__add_grad_to_ipg_bucket)."""
        numel = self._trace.parameters[parameter].numel
        if self._bucket.is_full_for(numel):
            self._reduce(memory)
        self._bucket.add([parameter], numel)
        if self._bucket.has_room_for(numel):
            self._coordinator.gradients.add(memory, block)
        else:
            self._oversized.append(block)

    def _reduce(self, memory: GpuMemory) -> None:
        """Reduces the bucket and adds it to this rank's part (__reduce_and_partition_ipg_grads)."""
        bucket = self._bucket.parameters
        if not bucket:
            return
        parts = [self._part(index) for index in bucket]
        flat: Block | None = None
        recast: Block | None = None  # In communication_data_type (__avg_scatter_grads)
        if self._reduced_item != self._item:
            numel = sum(self._trace.parameters[index].numel for index in bucket)
            recast = memory.take(BUFFERS, self._reduced_item * numel, REDUCTION)
        if len(parts) > 1 or parts[0] * self._world != self._trace.parameters[bucket[0]].numel:
            flat = memory.take(BUFFERS, self._reduced_item * self._world * sum(parts), REDUCTION)
        fp32_parts: list[Block] = []
        if self._sum_item != self._reduced_item:
            fp32_parts = [memory.take(BUFFERS, self._sum_item * numel, REDUCTION) for numel in parts]
            memory.give(flat)
            flat = None
        if self._offload:
            for numel in parts:
                self._to_host(memory, numel)
        memory.give(*fp32_parts, flat, recast)
        self._coordinator.gradients.add(memory, *self._oversized)
        self._oversized = []
        self._bucket.clear()

    def _to_host(self, memory: GpuMemory, numel: int) -> None:
        """A gradient, summed up, to the host (partition_grads, _offload_grad_partition_at_boundary).

        The only gradients of a step go there in fp32 (runtime/gradients.py: _to_host).
        """
        if self._sends_once:
            if self._sum_item != FP32:
                memory.scratch(BUFFERS, FP32 * numel, stream=REDUCTION)
            return
        gradient = memory.take(BUFFERS, self._sum_item * numel, REDUCTION)
        if self._last:
            memory.scratch(BUFFERS, NORM * min(numel, NORM_AT_ONCE), stream=REDUCTION)
            if self._sum_item != FP32:
                memory.scratch(BUFFERS, FP32 * numel, stream=REDUCTION)
        memory.give(gradient)

    def end(self, memory: GpuMemory, micro_batch: int, *, last: bool) -> None:
        for running in list(self._running):
            self.backward_end(memory, running)
        self._reduce(memory)
        self._coordinator.end(memory)

    def step(self, memory: GpuMemory) -> None:
        self._coordinator.release_all(memory)
        for group, numel in zip(self._groups, self._numels(), strict=True):
            if not self._offload:
                self._step_group(memory, len(group), numel)
        self._states = True
        self._coordinator.end_step(memory)

    def _step_group(self, memory: GpuMemory, count: int, numel: int) -> None:
        """Gradients in one piece, in fp32 (_prepare_fp32_grad_for_sub_group); moments at the first step."""
        gradient = memory.take(OPTIMIZER, self._sum_item * numel) if count > 1 else None
        if self._sum_item != FP32:
            converted = memory.take(OPTIMIZER, FP32 * numel)
            memory.give(gradient)
            gradient = converted
        if not self._states:
            memory.take_adamw_state(numel, self._optimizer)
        memory.give(gradient)


def _output_gradient_bytes(trace: StepTrace) -> int:
    """Bytes of the gradient of a block's output: the smallest tensor of the backward pass until then."""
    passing: dict[int, int] = {}
    turned = False
    for event in trace.events:
        kind = event[0]
        if kind == BACKWARD:
            if trace.units[event[1]].block >= 0:
                return min(passing.values(), default=0)
            turned = True
        elif kind == ALLOC and turned:
            passing[event[1]] = event[2]
        elif kind in (FREE, GRADIENT):
            passing.pop(event[1 if kind == FREE else 2], None)
    return 0
