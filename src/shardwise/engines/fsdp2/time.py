"""Time of FSDP2 as `runtime.py` uses it: blocks gathered one ahead, gradients summed over ranks in fp32.

torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.11 to 2.13, whose functions stand in
parentheses. What is gathered and released when is in `memory.py`.

Under HSDP blocks are gathered and reduce-scattered within a group of ranks. In the last micro-batch of a step
each share is then summed over the groups, on a stream of its own (all_reduce_stream). Where a group is a
node, that uses other links, and nothing waits for it before the end of the backward pass; else the links are
shared.
"""

from shardwise.engines.fsdp2.memory import gathered_ahead, records, released
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.recorded import own_pool, sums_stay
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import (
    NORM_BYTES,
    TORCH_CPU_ADAMW_BYTES,
    Schedule,
    added,
    converted,
    copied,
    cpu_seconds,
)
from shardwise.simulate.time.segments import Segment
from shardwise.simulate.time.streams import event
from shardwise.strategy import Strategy


class Fsdp2Schedule(Schedule):
    """Each block is a group of parameters, and everything outside the blocks is the last one, the root."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay = records(strategy) and sums_stay(trace, strategy)
        if records(strategy) and own_pool(trace):
            self.record()
        self.offload = strategy.offload_parameters != "none"
        self.sharers, self.summed = strategy.sharers, ITEM_BYTES[strategy.reduced_in("fp32")]
        self.shards = communication.group(hardware, self.sharers)
        copies = strategy.data_parallel // self.sharers
        self.replicas = communication.group(hardware, copies, stride=self.sharers)
        groups, trainable = self.trace.parts, set(self.trace.trainable)
        self.root = len(groups) - 1
        # Parameters that are kept apart in fp32 have no elements here.
        self.parameters = [sum(1 for index in group if self.elements(index)) for group in groups]
        self.elements_of = [self.count(group) for group in groups]
        self.learned_of = [self.count(trainable.intersection(group)) for group in groups]

    def micro_batch(self, *, first: bool, last: bool) -> None:
        first = first and not self.stay
        self._need(self.root)
        for segment in self.segments:
            block = self._group(segment)
            if block != self.root:
                self._need(block)
                for other in gathered_ahead(block, self.root, backward=segment.backward):
                    self._gather(other)
            self.run(segment)
            if block != self.root:
                if segment.backward:
                    self._reduce(block, first=first, last=last)
                if released(self.strategy, backward=segment.backward, last=last):
                    self.gathered.discard(block)
        self._reduce(self.root, first=first, last=last)
        if released(self.strategy, backward=True, last=last):
            self.gathered.discard(self.root)
        self.streams.settle()
        if self.offload:
            self.streams.host_waits()  # gradients are added up on the host

    def _group(self, segment: Segment) -> int:
        block = -1 if segment.unit < 0 else self.trace.units[segment.unit].block
        return self.root if block < 0 else block

    def _need(self, block: int) -> None:
        """The computation waits for a group, and copies its parameters apart (all_gather_copy_out)."""
        if block in self.gathered:
            return
        if block not in self.arriving:
            self._gather(block)
        self.streams.compute_waits(self.arriving.pop(block))
        moved = copied(self.item) * self.elements_of[block]
        if self.sharers == 1 and self.mixed:  # a single process converts its own
            moved += converted(FP32, self.item) * self.learned_of[block]
        self.streams.move(moved, "foreach_copy")
        self.gathered.add(block)

    def _gather(self, block: int) -> None:
        """Cast this rank's shards into one buffer, and all-gather them (foreach_all_gather)."""
        if block in self.arriving or block in self.gathered:
            return
        streams, elements, learned = self.streams, self.elements_of[block], self.learned_of[block]
        shard = (learned * FP32 + (elements - learned) * self.item) / self.sharers
        self._visit(block, 2)
        arrived = event(block)
        if self.offload:
            streams.copy(shard, done=arrived)
            streams.communication_waits(arrived)
        moved = shard + self.item * elements / self.sharers if self.sharers > 1 else 0.0
        seconds = streams.moving(moved, "foreach_copy") if moved else 0.0
        seconds += communication.all_gather(self.item * elements, self.shards)
        moved += self.item * elements * (1 - 1 / self.sharers)
        self.arriving[block] = streams.communicate(seconds, moved, after_compute=False, done=arrived)

    def _visit(self, block: int, times: int) -> None:
        """The process goes through a group and its parameters: twice to gather and release it."""
        if self.recorded:
            return
        one = self.host.seconds("fsdp_unit")
        one += self.host.seconds("fsdp_parameter") * self.parameters[block]
        self.streams.issue(times * one)

    def _reduce(self, block: int, *, first: bool, last: bool) -> None:
        """Concatenate a group's gradients, reduce-scatter them and add them up in fp32 (foreach_reduce).

        `reduce_dtype` is what they are concatenated and summed in. Under HSDP micro-batches are, too.
        """
        streams, elements = self.streams, self.learned_of[block]
        if not elements:
            return
        part = elements / self.sharers
        self._visit(block, 1)
        item, total = self.summed, self.summed if self.strategy.shard_group else FP32
        moved = converted(self.item, item) * elements
        moved += 0.0 if first or self.offload else added(item, total) * part
        moved += converted(item, FP32) * part if item != FP32 and (last or total == FP32) else 0.0
        seconds = streams.moving(moved, "foreach_copy")
        seconds += communication.reduce_scatter(item * elements, self.shards)
        done = streams.communicate(seconds, moved + copied(item) * elements, after_compute=True)
        if last and self.replicas.size > 1:
            apart = self.shards.nodes == 1 and self.replicas.per_node == 1
            seconds = communication.all_reduce(item * part, self.replicas)
            streams.sum_over_replicas(seconds, copied(item) * part, apart=apart)
        if self.offload:
            streams.copy(FP32 * part, after=done)
            if not first:
                streams.host_waits()
                streams.issue(cpu_seconds(added(FP32, FP32) * part, self.neighbours, by="torch"))

    def update(self) -> None:
        streams, part = self.streams, self.trainable / self.sharers
        if self.offload:
            streams.host_waits()
            num_bytes = (NORM_BYTES + TORCH_CPU_ADAMW_BYTES) * part
            streams.issue(cpu_seconds(num_bytes, self.neighbours, by="torch"))
            return
        streams.move(NORM_BYTES * part, "foreach_norm")
        seconds = communication.all_reduce(2 * FP32, self.group)
        streams.compute_waits(streams.communicate(seconds, 0.0, after_compute=True))
        self.adamw(part, len(self.trace.trainable))
