"""One optimizer step of a single process."""

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.recorded import own_pool, sums_stay
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.simulate.time.schedule import NORM_BYTES, Schedule, added, converted
from shardwise.simulate.time.segments import Segment
from shardwise.strategy import Strategy


class SingleSchedule(Schedule):
    """`engines/single/runtime.py`: each gradient is added to its fp32 sum as soon as it is complete.

    Recorded passes are issued with one call, and may add to sums that stay.
    """

    sums_over_ranks = False

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay = sums_stay(trace, strategy)
        self.summed = FP32  # Bytes in which gradients are added up
        if own_pool(trace):
            self.record()

    def micro_batch(self, *, first: bool, last: bool) -> None:
        first = first and not self.stay
        for segment in self.segments:
            self.run(segment)
            hooks = len(segment.gradients)
            if hooks and self.mixed:
                one = (converted if first else added)(self.item, self.summed)
                issue = 0.0 if self.recorded else hooks * self.host.seconds("gradient_hook")
                self.streams.move(one * segment.learned, "mixed", kernels=hooks, issue=issue)
            elif hooks and not first:
                self.streams.move(added(FP32, FP32) * segment.learned, kernels=hooks)
            if hooks:
                self.completed(segment)

    def completed(self, segment: Segment) -> None:
        """The gradients of a segment are added up."""

    def update(self) -> None:
        streams, elements = self.streams, self.trainable
        streams.move(NORM_BYTES * elements, "foreach_norm")
        self.adamw(elements, len(self.trace.trainable))
        if self.mixed:
            streams.move(converted(FP32, self.item) * elements, "foreach_copy")
