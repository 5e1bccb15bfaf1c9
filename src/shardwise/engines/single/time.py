"""One optimizer step of a single process."""

from __future__ import annotations

from shardwise.simulate.time.schedule import ADAMW_BYTES, FP32, NORM_BYTES, Schedule


class SingleSchedule(Schedule):
    """`engines/single/runtime.py`: each gradient is added to its fp32 sum as soon as it is there."""

    sums_over_ranks = False

    def micro_batch(self, *, first: bool, last: bool) -> None:
        for segment in self.segments:
            self.run(segment)
            if not segment.gradients:
                continue
            elements = segment.learned
            moved = self.item + FP32 if first else self.item + 2 * FP32
            if self.mixed:
                hooks = len(segment.gradients)
                self.streams.move(
                    moved * elements, "mixed", kernels=hooks, issue=hooks * self.host.seconds("gradient_hook")
                )
            elif not first:
                self.streams.move(3 * FP32 * elements, kernels=len(segment.gradients))

    def update(self) -> None:
        streams, elements = self.streams, self.trainable
        streams.move(NORM_BYTES * elements, "foreach_norm")
        streams.move(ADAMW_BYTES * elements, "fused_adamw")
        if self.mixed:
            streams.move((FP32 + self.item) * elements, "foreach_copy")
