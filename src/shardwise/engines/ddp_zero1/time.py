"""Time of replicas that share the optimizer's state: engines/ddp_zero1/runtime.py."""

from shardwise.engines.ddp_zero1.memory import BUCKET, formats, overlaps
from shardwise.engines.single.time import SingleSchedule
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import converted, copied
from shardwise.simulate.time.segments import Segment
from shardwise.strategy import Strategy


class DdpZero1Schedule(SingleSchedule):
    """A single process's passes, in which or after which gradients are reduce-scattered."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay, self.kept = not overlaps(strategy), False  # Added to sums that stay, or copied
        self.summed, self.sent = (ITEM_BYTES[one] for one in formats(self.item, strategy))
        self.waiting = 0.0  # Elements of the bucket that is being filled

    def completed(self, segment: Segment) -> None:
        self.waiting += segment.learned if overlaps(self.strategy) else 0.0
        if self.waiting >= BUCKET:
            self._reduce()

    def _reduce(self) -> None:
        elements, self.waiting = self.waiting, 0.0
        seconds = communication.reduce_scatter(self.sent * elements, self.group)
        self.streams.communicate(seconds, copied(self.sent) * elements, after_compute=True)

    def update(self) -> None:
        streams, elements = self.streams, self.trainable + sum(self.apart)
        part = elements / self.ranks
        if not overlaps(self.strategy):
            self.waiting = elements
            if self.sent != self.summed:
                streams.move(converted(self.summed, self.sent) * elements, "foreach_copy")
        self._reduce()
        streams.settle()
        if self.sent != self.summed:
            streams.move(copied(self.sent) * part, "foreach_copy")
        self.gradient_norm(part, gradient=self.sent)
        streams.communicate(communication.all_reduce(2 * FP32, self.group), 0.0, after_compute=True)
        streams.settle()  # the norm and the loss
        buckets = max(1, round(elements / BUCKET))
        gathered = self.item * elements / buckets
        seconds = communication.all_gather(gathered, self.group)
        for _ in range(buckets):
            tensors = len(self.trace.trainable) // buckets
            self.adamw(part / buckets, tensors, gradient=self.sent, rounded=self.rounded)
            streams.communicate(seconds, gathered, after_compute=True)
        streams.settle()
