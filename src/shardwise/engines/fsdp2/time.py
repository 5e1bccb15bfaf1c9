"""FSDP2 as `runtime.py` uses it: blocks gathered one ahead, gradients summed over ranks in fp32.

torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.11 to 2.13: a gather casts this rank's fp32
shards into one buffer, and copies the gathered one apart; a reduction first copies the gradients into one
fp32 buffer.
"""

from __future__ import annotations

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import (
    ADAMW_BYTES,
    FP32,
    NORM_BYTES,
    TORCH_CPU_ADAMW_BYTES,
    Schedule,
    cpu_seconds,
)
from shardwise.simulate.time.segments import Segment
from shardwise.simulate.time.streams import event
from shardwise.strategy import Strategy

ROOT = -1
"""What is outside the blocks: gathered for the whole of a micro-batch."""


class Fsdp2Schedule(Schedule):
    """Each block is a group of parameters, the rest another one."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.offload = strategy.offload_parameters != "none"
        self.parameters: dict[int, list[int]] = {}
        seen: set[int] = set()
        for unit in sorted(self.trace.units, key=lambda unit: unit.block < 0):
            new = [index for index in unit.parameters if index not in seen]
            self.parameters.setdefault(unit.block, []).extend(new)
            seen.update(new)
        self.elements_of = {block: self.count(indices) for block, indices in self.parameters.items()}
        trainable = set(self.trace.trainable)
        self.learned_of = {
            block: self.count(trainable.intersection(indices)) for block, indices in self.parameters.items()
        }
        self.blocks = sorted(block for block in self.parameters if block != ROOT)

    def micro_batch(self, *, first: bool, last: bool) -> None:
        release = self.strategy.reshard or last
        self._need(ROOT)
        for segment in self.segments:
            block = self._block(segment)
            if block != ROOT:
                self._need(block)
                self._gather_next(block, segment)
            self.run(segment)
            if block == ROOT:
                continue
            if segment.backward:
                self._reduce(block, first=first)
            if release if segment.backward else self.strategy.reshard:
                self.whole.discard(block)
        self._reduce(ROOT, first=first)
        if release:
            self.whole.discard(ROOT)
        self.streams.settle()
        if self.offload:
            self.streams.host_waits()  # gradients are added up on the host

    def _block(self, segment: Segment) -> int:
        return ROOT if segment.unit < 0 else self.trace.units[segment.unit].block

    def _gather_next(self, block: int, segment: Segment) -> None:
        """The next block in this direction, before this one is computed."""
        place = self.blocks.index(block) + (-1 if segment.backward else 1)
        if 0 <= place < len(self.blocks) and self.blocks[place] not in self.whole:
            self._gather(self.blocks[place])

    def _need(self, block: int) -> None:
        """The computation waits until a group is there, and copies it apart."""
        if block in self.whole:
            return
        if block not in self.arriving:
            self._gather(block)
        self.streams.compute_waits(self.arriving.pop(block))
        self.streams.move(2 * self.item * self.elements_of[block], "foreach_copy")
        self.whole.add(block)

    def _gather(self, block: int) -> None:
        if block in self.arriving:
            return
        streams, elements, learned = self.streams, self.elements_of[block], self.learned_of[block]
        shard = (learned * FP32 + (elements - learned) * self.item) / self.ranks
        self._visit(block, 2)
        arrived = event(block + 1)
        if self.offload:
            streams.copy(shard, done=arrived)
            streams.communication_waits(arrived)
        seconds = streams.moving(shard + self.item * elements / self.ranks, "foreach_copy")
        seconds += communication.all_gather(self.item * elements, self.group)
        moved = shard + self.item * elements
        self.arriving[block] = streams.communicate(seconds, moved, after_compute=False, done=arrived)

    def _visit(self, block: int, times: int) -> None:
        """The process goes through a group and its parameters so often; a gathered one is released again."""
        one = self.host.seconds("fsdp_unit")
        one += self.host.seconds("fsdp_parameter") * len(self.parameters[block])
        self.streams.issue(times * one)

    def _reduce(self, block: int, *, first: bool) -> None:
        """Sums a group's gradients over the ranks, each keeping its part."""
        streams, elements = self.streams, self.learned_of[block]
        if not elements:
            return
        part = elements / self.ranks
        self._visit(block, 1)
        moved = (self.item + FP32) * elements + (0.0 if first or self.offload else 3 * FP32 * part)
        seconds = streams.moving(moved, "foreach_copy")
        seconds += communication.reduce_scatter(FP32 * elements, self.group)
        done = streams.communicate(seconds, moved + 2 * FP32 * elements, after_compute=True)
        if self.offload:
            streams.copy(FP32 * part, after=done)
            if not first:
                streams.host_waits()
                streams.issue(cpu_seconds(3 * FP32 * part, self.neighbours, by="torch"))

    def update(self) -> None:
        streams, part = self.streams, self.trainable / self.ranks
        if self.offload:
            streams.host_waits()
            num_bytes = (NORM_BYTES + TORCH_CPU_ADAMW_BYTES) * part
            streams.issue(cpu_seconds(num_bytes, self.neighbours, by="torch"))
            return
        streams.move(NORM_BYTES * part, "foreach_norm")
        streams.compute_waits(
            streams.communicate(communication.all_reduce(2 * FP32, self.group), 0.0, after_compute=True)
        )
        streams.move(ADAMW_BYTES * part, "fused_adamw")
