"""One optimizer step of a single process."""

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.memory.recorded import keeps_format, own_pool, sums_stay
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.simulate.time.schedule import Schedule, added, converted
from shardwise.simulate.time.segments import Segment
from shardwise.strategy import Strategy


class SingleSchedule(Schedule):
    """`engines/single/runtime.py`: gradients of several micro-batches are added to fp32 sums as they come.

    Recorded passes are issued with one call, and may add to sums that stay.
    """

    sums_over_ranks = False

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay = sums_stay(trace, strategy)
        self.kept = keeps_format(strategy) and not self.stay  # Gradients stay as they come
        self.summed = self.item if self.kept else FP32  # Bytes in which gradients are added up
        if own_pool(trace):
            self.record()

    def micro_batch(self, *, first: bool, last: bool) -> None:
        first = first and not self.stay
        for segment in self.segments:
            self.run(segment)
            hooks = len(segment.gradients)
            if hooks and self.mixed:
                issue = 0.0 if self.recorded else hooks * self.host.seconds("gradient_hook")
                one = 0 if self.kept else (converted if first else added)(self.item, self.summed)
                kernels = 0 if self.kept else hooks
                self.streams.move(one * segment.learned, "mixed", kernels=kernels, issue=issue)
            elif hooks and not first:
                self.streams.move(added(FP32, FP32) * segment.learned, kernels=hooks)
            if hooks:
                self.completed(segment)

    def completed(self, segment: Segment) -> None:
        """The gradients of a segment are added up."""

    def update(self) -> None:
        elements = self.trainable
        self.gradient_norm(elements, gradient=self.summed)
        self.adamw(elements, len(self.trace.trainable), gradient=self.summed, rounded=self.rounded)
