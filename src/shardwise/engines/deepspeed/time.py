"""DeepSpeed's ZeRO as `runtime/engine.py` uses it, read from deepspeed 0.19.8 (runtime/zero)."""

from __future__ import annotations

from shardwise.engines.deepspeed.config import PERSIST, PREFETCH, RELEASE_AT
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import (
    ADAMW_BYTES,
    CPU_ADAMW_BYTES,
    FP32,
    NORM_BYTES,
    NVME_ADAMW_BYTES,
    Schedule,
    cpu_seconds,
    nvme_seconds,
    pageable_seconds,
)
from shardwise.simulate.time.segments import Segment
from shardwise.simulate.time.streams import NEVER, REDUCED, event
from shardwise.strategy import Strategy

FP64 = 8


class Zero0(Schedule):
    """DeepSpeed at stage 0: whole gradients in the computation's format, reduced when the last pass is over.

    deepspeed 0.19: engine.buffered_allreduce_fallback and runtime/fp16/fused_optimizer.py.
    """

    def micro_batch(self, *, first: bool, last: bool) -> None:
        for segment in self.segments:
            hooks = len(segment.gradients)
            self.run(segment)
            if hooks and not first:
                self.streams.move(3 * self.item * segment.learned, kernels=hooks)
        if last and self.ranks > 1:
            self._reduce()

    def _reduce(self) -> None:
        """Buckets are laid end to end, scaled, reduced and taken apart again, one after the other."""
        num_bytes = self.trainable * self.item
        self.streams.move(6 * num_bytes, "foreach_copy")
        seconds = communication.all_reduce(num_bytes, self.group)
        self.streams.compute_waits(self.streams.communicate(seconds, 2 * num_bytes, after_compute=True))

    def update(self) -> None:
        """A search for values that are not finite, fp32 copies laid end to end, norm, clipping, AdamW."""
        streams, elements = self.streams, self.trainable
        streams.host_waits()
        streams.issue(len(self.trace.trainable) * self.host.seconds("zero0_parameter"))
        if self.mixed:
            streams.move(self.item * elements, "foreach_norm")
            streams.move((self.item + FP32) * elements, "mixed")
            streams.move(2 * FP32 * elements, "foreach_copy")
        streams.move(NORM_BYTES * elements, "foreach_norm")
        streams.host_waits()
        streams.move(2 * FP32 * elements)
        streams.move(ADAMW_BYTES * elements, "fused_adamw")
        if self.mixed:
            streams.move((FP32 + self.item) * elements, "foreach_copy")


class _Buckets(Schedule):
    """Gradients are copied into a bucket; a full one is reduced beside the rest of the backward pass."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        # its size is set before tensor parallelism cuts the model
        learned = (self.trace.parameters[index].whole_numel for index in self.trace.trainable)
        self.bucket = min(strategy.bucket, float(sum(learned)))
        self.offload = strategy.offload_optimizer != "none"
        self.filled = 0.0  # at the end of a pass nothing is left
        self.part = self.trainable / self.ranks

    def collect(self, segment: Segment, *, first: bool, last: bool) -> None:
        """What the hooks on a segment's gradients do."""
        if self.filled + segment.learned <= self.bucket:
            if segment.gradients:
                self.streams.move(
                    2 * self.item * segment.learned, "foreach_copy", kernels=len(segment.gradients)
                )
            self.filled += segment.learned
            return
        for index in segment.gradients:
            elements = self.elements(index)
            if self.filled and self.filled + elements > self.bucket:
                self.flush(first=first, last=last)
            if elements <= self.bucket:
                self.streams.move(2 * self.item * elements, "foreach_copy")
            self.filled += elements

    def flush(self, *, first: bool, last: bool) -> None:
        """Reduces the bucket; one reduction at a time."""
        raise NotImplementedError

    def end_pass(self, *, first: bool, last: bool) -> None:
        """The epilogue of a backward pass: the last bucket, then the process waits for the GPU."""
        self.flush(first=first, last=last)
        self.streams.compute_waits(REDUCED)
        self.streams.host_waits()

    def step_part(self) -> None:
        """This rank's part: gradients in fp32, clipping, AdamW, weights in the computation's format."""
        streams, part = self.streams, self.part
        if self.mixed:
            streams.move(2 * self.item * part, "foreach_copy")
            streams.move((self.item + FP32) * part, "mixed")
        streams.move(2 * FP32 * part)
        streams.move(ADAMW_BYTES * part, "fused_adamw")
        if self.mixed:
            streams.move((FP32 + self.item) * part, "foreach_copy")

    def norm(self) -> None:
        """The gradient's norm over all ranks; the process waits for it, to decide whether to step at all."""
        streams = self.streams
        if self.peers.size > 1:
            self._norm_of_each()
        else:
            streams.move(self.item * self.part, "foreach_norm")
        streams.compute_waits(
            streams.communicate(communication.all_reduce(FP32, self.group), 0.0, after_compute=True)
        )
        streams.host_waits()

    def _norm_of_each(self) -> None:
        """DeepSpeed's own, under tensor parallelism: `has_overflow`, then `get_grad_norm_direct`.

        It looks for the largest and the smallest value of each gradient, waits, and copies each to fp64. The
        host is taken to need as long for a gradient as stage 0 does for nearly the same.
        """
        streams, parameters = self.streams, -(-len(self.trace.trainable) // self.ranks)
        issue = parameters * self.host.seconds("zero0_parameter")
        streams.move(2 * self.item * self.part, "foreach_norm", kernels=2 * parameters, issue=issue)
        streams.sum_over_peers(2 * communication.all_reduce(FP32, self.peers), 0.0)
        streams.host_waits()
        streams.move((self.item + FP64) * self.part, "mixed", kernels=parameters)
        streams.move(FP64 * self.part, "foreach_norm", kernels=parameters)

    def step_on_host(self) -> None:
        """Clipping, DeepSpeedCPUAdam and the cast over the part in host memory; the GPU has nothing to do."""
        self.streams.host_waits()
        one = CPU_ADAMW_BYTES + FP32 + self.item
        self.streams.issue(cpu_seconds(one * self.part, self.neighbours, by="deepspeed"))
        if self.strategy.offload_optimizer == "nvme":
            self.streams.issue(nvme_seconds(NVME_ADAMW_BYTES * self.part, self.neighbours))


class Zero12(_Buckets):
    """Stages 1 and 2: whole weights. Stage 1 reduces after the last micro-batch only."""

    def micro_batch(self, *, first: bool, last: bool) -> None:
        reduces = last or self.strategy.stage == 2
        for segment in self.segments:
            hooks = len(segment.gradients)
            self.run(segment, issue=hooks * self.host.seconds("zero_hook"))
            if self.strategy.stage == 1 and hooks and not first:
                self.streams.move(3 * self.item * segment.learned, kernels=hooks)
            if reduces:
                self.collect(segment, first=first, last=last)
        if reduces:
            self.end_pass(first=first, last=last)

    def flush(self, *, first: bool, last: bool) -> None:
        """All-reduces a bucket, of which each rank keeps its part: `allreduce_and_scatter`."""
        streams, elements = self.streams, self.filled
        self.filled = 0.0
        if not elements:
            return
        streams.compute_waits(REDUCED)
        own = elements / self.ranks
        moved = 2 * self.item * elements + (6 * self.item if self.ranks > 1 else 2 * self.item) * own
        if self.strategy.accumulation > 1 and self.strategy.stage == 2:
            moved += (self.item + 2 * FP32) * own
        seconds = streams.moving(moved, "foreach_copy")
        seconds += communication.all_reduce(self.item * elements, self.group)
        moved += 2 * self.item * elements if self.ranks > 1 else 0.0
        streams.communicate(seconds, moved, after_compute=True, done=REDUCED)
        if self.offload:
            self._to_host(own, first=first)

    def _to_host(self, own: float, *, first: bool) -> None:
        """The part's gradients in fp32; with accumulation they come back to be added to."""
        if not first:
            self.streams.copy(self.item * own, after=REDUCED)
        self.streams.copy(FP32 * own, after=REDUCED, done=REDUCED)

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
    """Stage 3: a block's weights are gathered as a whole, those ahead beside the computation."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.on_host = strategy.offload_parameters != "none"
        self.sizes = [
            sum(n for n in map(self.elements, unit.parameters) if n >= PERSIST) for unit in self.trace.units
        ]
        self.uses = [
            (segment.unit, number) for number, segment in enumerate(self.segments) if segment.unit >= 0
        ]
        self.kept = self._kept()
        self.ahead = 0

    def _kept(self) -> set[int]:
        """Segments after which a unit's weights stay, as they are needed again within the reuse distance."""
        if not self.strategy.reshard:
            return {number for unit, number in self.uses if not self.segments[number].backward}
        kept, units = set(), [unit for unit, _ in self.uses]
        for place, (unit, number) in enumerate(self.uses):
            distance = 0.0
            for other in units[place + 1 :]:
                if distance >= RELEASE_AT:
                    break
                if other == unit:
                    kept.add(number)
                    break
                distance += self.sizes[other]
        return kept

    def micro_batch(self, *, first: bool, last: bool) -> None:
        self.ahead = 0
        place = 0
        for number, segment in enumerate(self.segments):
            if segment.unit >= 0:
                place += 1
                self._fetch(segment.unit, place, segment.passes)
            self.run(segment, issue=len(segment.gradients) * self.host.seconds("zero3_hook"))
            if segment.unit >= 0 and number not in self.kept:
                self.whole.discard(segment.unit)
            self.collect(segment, first=first, last=last)
        self.end_pass(first=first, last=last)
        self.whole.clear()

    def _fetch(self, unit: int, place: int, passes: int) -> None:
        """Waits for a unit's weights, then asks for those of the next ones (`fetch_sub_module`)."""
        visits = 2 * passes * (len(self.trace.units[unit].parameters) + 2)
        self.streams.issue(visits * self.host.seconds("zero3_visit"))
        if unit not in self.whole:
            if unit not in self.arriving:
                self._gather(unit)
            self.streams.compute_waits(self.arriving.pop(unit))
            self.whole.add(unit)
        self.ahead = max(self.ahead, place)
        live = sum(self.sizes[other] for other in (*self.whole, *self.arriving))
        wanted = min(PREFETCH, RELEASE_AT - live) if self.strategy.reshard else PREFETCH
        asked = 0.0
        while self.ahead < len(self.uses) and asked < wanted:
            other = self.uses[self.ahead][0]
            self.ahead += 1
            if other not in self.whole and other not in self.arriving:
                self._gather(other)
                asked += self.sizes[other]

    def _gather(self, unit: int) -> None:
        """Parts into one buffer, all-gather, and every parameter's parts laid end to end."""
        streams, elements = self.streams, self.sizes[unit]
        self.arriving[unit] = NEVER
        if self.on_host:
            num_bytes = self.item * elements / self.ranks
            nvme = self.strategy.offload_parameters == "nvme"
            read = nvme_seconds(num_bytes, self.neighbours) if nvme else 0.0
            self.arriving[unit] = streams.copy(num_bytes, read_seconds=read, done=event(unit))
        if self.ranks == 1 or not elements:
            return
        streams.communication_waits(self.arriving[unit])
        moved = 2 * self.item * elements * (1 + 1 / self.ranks)
        seconds = streams.moving(moved, "foreach_copy")
        seconds += communication.all_gather(self.item * elements, self.group)
        moved += self.item * elements
        self.arriving[unit] = streams.communicate(seconds, moved, after_compute=False, done=event(unit))

    def flush(self, *, first: bool, last: bool) -> None:
        """Reduce-scatters a bucket: laid end to end by rank, scaled, summed, added to this rank's part."""
        streams, elements = self.streams, self.filled
        self.filled = 0.0
        if not elements:
            return
        own = elements / self.ranks
        moved = 4 * self.item * elements + 2 * self.item * own + (0.0 if first else 3 * FP32 * own)
        seconds = streams.moving(moved, "foreach_copy")
        seconds += communication.reduce_scatter(self.item * elements, self.group)
        moved += 2 * self.item * elements if self.ranks > 1 else 0.0
        streams.communicate(seconds, moved, after_compute=True, done=REDUCED)
        if self.offload:
            self._to_host(own, last=last)

    def _to_host(self, own: float, *, last: bool) -> None:
        """Gradients to their sums on the host and back again, at the end for their norm (partition_grads)."""
        item = FP32 if self.strategy.accumulation > 1 and self.mixed else self.item
        num_bytes = 2 * item * own + (FP32 * own if last else 0.0)
        self.streams.copy(num_bytes, after=REDUCED, done=REDUCED)

    def update(self) -> None:
        if self.offload:
            self.step_on_host()
            if not self.on_host:  # converted on the host, into memory that is not page-locked
                self.streams.issue(pageable_seconds(self.item * self.part))
            return
        self.norm()
        self.step_part()
