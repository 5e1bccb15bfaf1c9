"""Time of DeepSpeed's ZeRO as `runtime/engine.py` uses it, read from deepspeed 0.19.8 (runtime/zero).

What is gathered, released and reduced when is `policy.py`. `moved` adds up the GPU memory traffic of the
kernels around a collective, whose functions stand in parentheses: `elements` are those of a bucket or gather,
`own` this rank's share.
"""

from collections import deque

from shardwise.engines.deepspeed import policy
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.recorded import sums_stay
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import (
    DEEPSPEED_CPU_ADAMW_BYTES,
    NVME_ADAMW_BYTES,
    Schedule,
    added,
    converted,
    copied,
    cpu_seconds,
    nvme_seconds,
    pageable_seconds,
)
from shardwise.simulate.time.segments import Segment
from shardwise.simulate.time.streams import NEVER, REDUCED, event
from shardwise.strategy import Strategy

INT4, INT8, FP16 = 0.5, 1, 2
"""Bytes of an element that ZeRO++ sends or converts; not counted are scales, 4 bytes for 4000 elements."""


def collective(item: int, elements: float, *, ranks: int) -> float:
    """A collective reads and writes its buffer; on one rank there is none."""
    return copied(item) * elements if ranks > 1 else 0.0


class _Zero(Schedule):
    adamw_kernel = "fused_adamw"

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.own_pool = policy.records_passes(trace, strategy)
        self.on_gpu = policy.decides_on_gpu(strategy) and (strategy.stage < 3 or self.own_pool)
        if self.own_pool:
            self.record()


class Zero0(_Zero):
    """Stage 0: full gradients in the computation's format, reduced when the last pass is over.

    engine.buffered_allreduce_fallback and runtime/fp16/unfused_optimizer.py.
    """

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay = self.own_pool and sums_stay(trace, strategy)

    def micro_batch(self, *, first: bool, last: bool) -> None:
        first = first and not self.stay
        for segment in self.segments:
            hooks = len(segment.gradients)
            self.run(segment)
            if hooks and not first:
                self.streams.move(added(self.item, self.item) * segment.learned, kernels=hooks)
        if last:
            num_bytes = self.trainable * self.item
            # concatenated, scaled and copied back (runtime/engine.py: allreduce_and_copy)
            self.streams.move(3 * copied(1) * num_bytes, "foreach_copy")
            seconds = communication.all_reduce(num_bytes, self.group)
            moved = collective(1, num_bytes, ranks=self.ranks)
            self.streams.compute_waits(self.streams.communicate(seconds, moved, after_compute=True))

    def update(self) -> None:
        """Norm, clipping, AdamW; in bf16 as `step_in_parts`. In fp32 the host waits for the norm."""
        streams, elements = self.streams, self.trainable
        if not self.mixed:
            streams.host_waits()
            streams.issue(len(self.trace.trainable) * self.host.seconds("zero0_parameter"))
        streams.move(self.item * elements, "foreach_norm")
        if self.mixed:
            streams.move(converted(self.item, FP32) * elements, "mixed")
        if not self.on_gpu:  # else AdamW's kernel clips
            streams.host_waits()
            streams.move(copied(FP32) * elements)
        self.adamw(elements, len(self.trace.trainable))
        if self.mixed:
            streams.move(converted(FP32, self.item) * elements, "foreach_copy")


class _Buckets(_Zero):
    """Gradients are copied into a bucket; a full one is reduced while the backward pass continues."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.bucket = policy.Bucket(self.trace, strategy)  # empty at the end of a pass
        self.offload = strategy.offload_optimizer != "none"
        self.sums = policy.keeps_sums(trace, strategy)
        self.part = self.trainable / self.ranks
        self.summed = ITEM_BYTES[strategy.reduced_in(strategy.precision)]
        """Bytes of an element of gradients as they are reduced (communication_data_type)."""

    def _hook_seconds(self, segment: Segment, name: str) -> float:
        """Of the host, in DeepSpeed's hooks of a segment's gradients; a graph calls none."""
        return 0.0 if self.recorded else len(segment.gradients) * self.host.seconds(name)

    def recast(self, elements: float) -> float:
        """Bytes moved to convert gradients to that format."""
        return converted(self.item, self.summed) * elements if self.summed != self.item else 0.0

    def collect(self, segment: Segment, *, first: bool, last: bool) -> None:
        """Copy a segment's gradients into the bucket, as their hooks do.

        Where all of them fit, they are one piece of work: a plan plays thousands of micro-batches.
        """
        bucket, gradients = self.bucket, segment.gradients
        one = copied(self.item)
        if bucket.used + segment.learned <= bucket.size:
            if gradients:
                self.streams.move(one * segment.learned, "foreach_copy", kernels=len(gradients))
            bucket.add(gradients, segment.learned)
            return
        for index in gradients:
            elements = self.elements(index)
            if bucket.is_full_for(elements):
                self.flush(first=first, last=last)
            if bucket.has_room_for(elements):
                self.streams.move(one * elements, "foreach_copy")
            bucket.add([index], elements)

    def flush(self, *, first: bool, last: bool) -> None:
        """Reduce the bucket, if there is anything in it."""
        elements = self.bucket.used
        self.bucket.clear()
        if elements:
            self.reduce(elements, first=first, last=last)

    def reduce(self, elements: float, *, first: bool, last: bool) -> None:
        raise NotImplementedError

    def end_pass(self, *, first: bool, last: bool) -> None:
        """Reduce the last bucket at the end of a backward pass (`patches.order_streams`)."""
        self.flush(first=first, last=last)
        self.streams.compute_waits(REDUCED)
        if not (self.recorded or (last and self.on_gpu)):
            self.streams.host_waits()

    def step_part(self) -> None:
        """This rank's part: gradients in fp32, clipping, AdamW, weights in the computation's format."""
        streams, part = self.streams, self.part
        if self.mixed and not self.sums:  # which are fp32, and in one piece
            streams.move(copied(self.item) * part, "foreach_copy")
            streams.move(converted(self.item, FP32) * part, "mixed")
        if not self.on_gpu:  # else AdamW's kernel clips
            streams.move(copied(FP32) * part)
        self.adamw(part, 1)
        if self.mixed:
            streams.move(converted(FP32, self.item) * part, "foreach_copy")

    def norm(self) -> None:
        """The gradient's norm over all ranks.

        Where the process decides whether to step, it waits for the norm. Else, with overlap, it waits for the
        reduction: its memory is taken by the step, unless passes have memory of their own (`_before_step`).
        """
        streams = self.streams
        streams.move((FP32 if self.sums else self.item) * self.part, "foreach_norm")
        if self.peers.size > 1:
            streams.sum_over_peers(communication.all_reduce(FP32, self.peers), 0.0)
        seconds = communication.all_reduce(FP32, self.group)
        streams.compute_waits(streams.communicate(seconds, 0.0, after_compute=True))
        if not self.on_gpu:
            streams.host_waits()
        elif self.strategy.overlap_comm and not self.own_pool:
            streams.host_reads(REDUCED)

    def step_on_host(self) -> None:
        """Clipping, DeepSpeedCPUAdam and the cast over the part in host memory, while the GPU waits."""
        self.streams.host_waits()
        one = DEEPSPEED_CPU_ADAMW_BYTES + converted(FP32, self.item)
        self.streams.issue(cpu_seconds(one * self.part, self.neighbours, by="deepspeed"))
        if self.strategy.offload_optimizer == "nvme":
            self.streams.issue(nvme_seconds(NVME_ADAMW_BYTES * self.part, self.neighbours))


class Zero12(_Buckets):
    """Stages 1 and 2: every rank has all weights."""

    def micro_batch(self, *, first: bool, last: bool) -> None:
        reduces = policy.reduces(self.strategy, last=last)
        for segment in self.segments:
            hooks = len(segment.gradients)
            self.run(segment, issue=self._hook_seconds(segment, "zero_hook"))
            if policy.adds_up(self.strategy) and hooks and (not first or self.own_pool):
                self.streams.move(added(self.item, self.item) * segment.learned, kernels=hooks)
            if reduces:
                self.collect(segment, first=first, last=last)
        if reduces:
            self.end_pass(first=first, last=last)

    def reduce(self, elements: float, *, first: bool, last: bool) -> None:
        """All-reduce a bucket, of which each rank keeps its part, after the one before it (average_tensor).

        Under fp16 the sum over micro-batches is counted in fp32, too. DeepSpeed adds it in fp16 then
        (`config.sums_in_fp32`). To tell the formats apart here would change predictions.
        """
        streams, own = self.streams, elements / self.ranks
        streams.compute_waits(REDUCED)
        # All of it is scaled (allreduce_bucket). This rank's share is concatenated, copied back
        # (allreduce_and_copy_with_multiple_ranks) and copied to its partition (copy_grads_in_partition), or
        # added there; on one rank only this. Concatenating the other ranks' shares, one more copy, is not
        # counted.
        copies = (3 if self.ranks > 1 else 1) - self.sums
        moved = copied(self.item) * elements + copies * copied(self.item) * own
        moved += 2 * self.recast(elements)  # and back (allreduce_bucket)
        in_fp32 = 0.0
        if self.sums or (self.strategy.accumulation > 1 and self.strategy.stage == 2):
            # converted, then added (_add_to_grad_partition_buffer)
            in_fp32 = converted(self.item, FP32) * own if self.mixed else 0.0
            moved += added(FP32, FP32) * own
        seconds = streams.moving(moved, "foreach_copy")
        seconds += streams.moving(in_fp32, "mixed") if in_fp32 else 0.0
        moved += in_fp32
        seconds += communication.all_reduce(self.summed * elements, self.group)
        moved += collective(self.summed, elements, ranks=self.ranks)
        if self.ranks == 1:  # on another stream these kernels would only share the memory's bandwidth
            streams.compute(seconds, joules=streams.draw.moving(moved))
            seconds = moved = 0.0
        streams.communicate(seconds, moved, after_compute=True, done=REDUCED)
        if not self.strategy.overlap_comm:  # on the computation's stream (average_tensor)
            streams.compute_waits(REDUCED)
        if self.offload:  # with accumulation, earlier gradients come back to be added to
            if not first:
                streams.copy(self.item * own, after=REDUCED)
            streams.copy(FP32 * own, after=REDUCED, done=REDUCED)

    def update(self) -> None:
        streams = self.streams
        if self.offload:
            self.step_on_host()
            streams.compute_waits(streams.copy(self.item * self.part))
        else:
            self.norm()
            self.step_part()
        num_bytes = self.item * self.trainable
        gathered = communication.all_gather(num_bytes, self.group)
        streams.compute_waits(streams.communicate(gathered, num_bytes, after_compute=True))


class Zero3(_Buckets):
    """Stage 3: a unit's parameters are gathered, those of the next units during the computation."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.on_host = strategy.offload_parameters != "none"
        self.limit = policy.live_limit(strategy)
        order = policy.gather_order(trace).__getitem__
        cut = {p for p in range(len(trace.parameters)) if not policy.persists(self.elements(p))}
        self.parts = [sorted(cut.intersection(unit.parameters), key=order) for unit in self.trace.units]
        """Parameters of each unit that are gathered."""
        self.calls = [(segment.unit, n) for n, segment in enumerate(self.segments) if segment.unit >= 0]
        self.uses = [(parameter, n) for unit, n in self.calls for parameter in self.parts[unit]]
        self.queue: deque[tuple[int, int]] = deque()
        self.live = 0.0  # Elements that are gathered or on their way
        self.hardware = hardware
        self.near = communication.group(hardware, strategy.sharers)
        self.copied: set[int] = set()
        """Under hpZ, parameters of which this rank's group of `shard_group` holds a copy: until the step.
        Those of frozen weights stay in fact, so that LoRA is a little faster than this."""
        self.released: dict[int, frozenset[int]] = {}  # By segment, parameters that are released after it
        sizes = [self.count(part) for part in self.parts]
        for place, (unit, number) in enumerate(self.calls):
            later = ((self.parts[other], sizes[other]) for other, _ in self.calls[place + 1 :])
            self.released[number] = policy.released(self.parts[unit], later, limit=self.limit)

    def micro_batch(self, *, first: bool, last: bool) -> None:
        self.queue = deque(self.uses)
        self.live = self.count(self.gathered) + self.count(self.arriving)
        held = self.strategy.shard_group and not first
        self.copied = {parameter for part in self.parts for parameter in part} if held else set()
        for number, segment in enumerate(self.segments):
            if segment.unit >= 0:
                self._fetch(segment.unit, number, segment.passes)
            self.run(segment, issue=self._hook_seconds(segment, "zero3_hook"))
            self._release(self.released.get(number, frozenset()))
            self.collect(segment, first=first, last=last)
        self.end_pass(first=first, last=last)

    def _fetch(self, unit: int, number: int, passes: int) -> None:
        """Wait for a unit's weights, then ask for those of the next ones (`fetch_sub_module`)."""
        visits = 2 * passes * (len(self.trace.units[unit].parameters) + 2)
        if not self.recorded:
            self.streams.issue(visits * self.host.seconds("zero3_visit"))
        wanted = self.parts[unit]
        self._gather([one for one in wanted if not self._available(one)])
        for arrived in sorted({self.arriving.pop(one) for one in wanted if one in self.arriving}):
            self.streams.compute_waits(arrived)
        self.gathered.update(wanted)
        while self.queue and self.queue[0][1] <= number:
            self.queue.popleft()
        _, missing = policy.look_ahead(
            self.queue,
            live=self.live,
            limit=self.limit,
            numel=self.elements,
            available=self._available,
        )
        self._gather(missing)

    def _available(self, parameter: int) -> bool:
        return parameter in self.gathered or parameter in self.arriving

    def _gather(self, parameters: list[int]) -> None:
        """By one call what a group has copies of, and by another one what no group has."""
        for near in (True, False):
            if chosen := [one for one in parameters if (one in self.copied) is near]:
                self.live += self.count(chosen)
                self.arriving |= dict.fromkeys(chosen, self._all_gather(chosen, near=near))

    def _all_gather(self, parameters: list[int], *, near: bool) -> int:
        """The event of their arrival; where a gather is joined, shares are concatenated and copied out."""
        streams, elements, done = self.streams, self.count(parameters), event(parameters[0])
        arrived = NEVER
        if self.on_host:
            num_bytes = self.item * elements / self.ranks
            nvme = self.strategy.offload_parameters == "nvme"
            read = nvme_seconds(num_bytes, self.neighbours) if nvme else 0.0
            arrived = streams.copy(num_bytes, read_seconds=read, done=done)
        if self.ranks == 1:
            return arrived
        streams.communication_waits(arrived)
        group, ranks = (self.near, self.strategy.shard_group) if near else (self.group, self.ranks)
        item = INT8 if self.strategy.quantized_weights else self.item
        seconds, moved = communication.all_gather(item * elements, group), item * elements
        if policy.joins(self.strategy):  # _all_gather_dtype, AllGatherCoalescedHandle.wait
            copies = copied(self.item) * elements * (1 + 1 / ranks)
            if item == INT8:  # shares to fp16 and int8, and all of them back (CUDAQuantizer)
                copies += (converted(self.item, FP16) + converted(FP16, INT8)) * elements / ranks
                copies += (converted(INT8, FP16) + converted(FP16, self.item)) * elements
            seconds += streams.moving(copies, "foreach_copy")
            moved += copies
        return streams.communicate(seconds, moved, after_compute=False, done=done)

    def _scatter(self, elements: float) -> float:
        """Seconds to sum gradients; by qgZ within and then over nodes, in int4 (all_to_all_quant_reduce)."""
        if not self.strategy.quantized_gradients or self.group.nodes == 1:
            return communication.reduce_scatter(self.summed * elements, self.group)
        node = self.group.per_node
        within = communication.reduce_scatter(INT4 * elements, communication.group(self.hardware, node))
        across = communication.group(self.hardware, self.group.nodes, stride=node)
        return within + communication.reduce_scatter(INT4 * elements / node, across)

    def _release(self, parameters: frozenset[int]) -> None:
        """Under hpZ a group's copy is cleared, written and waited for (_partition_param_sec)."""
        self.live -= self.count(parameters & self.gathered)
        self.gathered -= parameters
        new = parameters - self.copied
        if self.strategy.shard_group and new:
            self.copied |= new
            own = self.count(new) / self.strategy.shard_group
            self.streams.move((self.item + copied(self.item)) * own, "foreach_copy")
            self.streams.host_reads()

    def reduce(self, elements: float, *, first: bool, last: bool) -> None:
        """Reduce-scatter a bucket and add it to this rank's part (__reduce_and_partition_ipg_grads)."""
        streams, own = self.streams, elements / self.ranks
        # laid out by rank, scaled (reduce_scatter_coalesced); the share copied, then added (partition_grads)
        moved = 2 * copied(self.item) * elements + copied(self.item) * own
        moved += 0.0 if first else added(FP32, FP32) * own
        moved += self.recast(elements)  # __avg_scatter_grads
        seconds = streams.moving(moved, "foreach_copy")
        seconds += self._scatter(elements)
        moved += collective(self.summed, elements, ranks=self.ranks)
        streams.communicate(seconds, moved, after_compute=True, done=REDUCED)
        if self.offload:
            # Under fp16 counted in fp32, as in `Zero12.reduce`.
            item = FP32 if self.strategy.accumulation > 1 and self.mixed else self.item
            # to their sums and back, in the end once more (partition_grads,
            # _offload_grad_partition_at_boundary), or once
            num_bytes = 0.0 if policy.sends_once(self.strategy) else 2 * item * own
            num_bytes += FP32 * own if last else 0.0
            streams.copy(num_bytes, after=REDUCED, done=REDUCED)

    def update(self) -> None:
        if self.offload:
            self.step_on_host()
            if not self.on_host:  # converted on the host, into memory that is not page-locked
                self.streams.issue(pageable_seconds(self.item * self.part))
            return
        self.norm()
        self.step_part()
