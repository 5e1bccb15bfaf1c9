"""One optimizer step of a single process."""

from shardwise.simulate.step_trace import FP32
from shardwise.simulate.time.schedule import NORM_BYTES, Schedule, added, converted


class SingleSchedule(Schedule):
    """`engines/single/runtime.py`: each gradient is added to its fp32 sum as soon as it is complete."""

    sums_over_ranks = False

    def micro_batch(self, *, first: bool, last: bool) -> None:
        for segment in self.segments:
            self.run(segment)
            hooks = len(segment.gradients)
            if hooks and self.mixed:
                one = converted(self.item, FP32) if first else added(self.item, FP32)
                issue = hooks * self.host.seconds("gradient_hook")
                self.streams.move(one * segment.learned, "mixed", kernels=hooks, issue=issue)
            elif hooks and not first:
                self.streams.move(added(FP32, FP32) * segment.learned, kernels=hooks)

    def update(self) -> None:
        streams, elements = self.streams, self.trainable
        streams.move(NORM_BYTES * elements, "foreach_norm")
        self.adamw(elements, len(self.trace.trainable))
        if self.mixed:
            streams.move(converted(FP32, self.item) * elements, "foreach_copy")
