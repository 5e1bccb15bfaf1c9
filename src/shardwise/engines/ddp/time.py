"""Time of replicas: engines/ddp/runtime.py, torch/nn/parallel/distributed.py, 2.11 to 2.13."""

from math import prod

from shardwise.engines.single.time import SingleSchedule
from shardwise.hardware.hardware import Hardware
from shardwise.simulate.step_trace import FP32, ITEM_BYTES, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.schedule import NORM_BYTES, Schedule, added, converted, copied
from shardwise.strategy import Strategy

BUCKET_BYTES = 25 * 1024**2  # bucket_cap_mb's default

PASSES = 8
"""How often PowerSGD goes through a gradient: it adds what was left over and copies the sum, multiplies it by
either factor, multiplies these, subtracts that; read, and often written (powerSGD_hook)."""


def sent_by_powersgd(shape: tuple[int, ...], rank: int) -> int:
    """Elements of a gradient's two factors; all of them where that is not half as many (_should_compress)."""
    numel = prod(shape)
    rows, columns = (shape[0], numel // max(shape[0], 1)) if len(shape) > 1 else (1, numel)
    rank = min(rows, columns, rank)
    factors = (rows + columns) * rank
    return factors if len(shape) > 1 and 2 * factors < numel else numel


class AdapterSchedule(SingleSchedule):
    """A single process's passes, recorded where those are; then one all-reduce of all gradients."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.stay, self.kept, self.summed = True, False, FP32

    def update(self) -> None:
        elements = self.trainable + sum(self.apart)
        sent = ITEM_BYTES[self.strategy.reduced_in(self.strategy.precision)]
        if sent < FP32:
            self.streams.move((2 * converted(FP32, sent) + copied(sent)) * elements, "foreach_copy")
            self.streams.move(copied(FP32) * elements, "foreach_copy")
        seconds = communication.all_reduce(sent * elements, self.group)
        seconds += communication.all_reduce(2 * FP32, self.group)  # the norm and the loss
        moved = copied(sent) * elements
        self.streams.compute_waits(self.streams.communicate(seconds, moved, after_compute=True))
        super().update()


class DdpSchedule(Schedule):
    """Gradients are added in buckets, which are all-reduced during the last backward pass of a step."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        super().__init__(trace, strategy, hardware)
        self.summed, self.rank = ITEM_BYTES[strategy.reduced_in(strategy.precision)], strategy.powersgd
        self.waiting: list[int] = []

    def micro_batch(self, *, first: bool, last: bool) -> None:
        for segment in self.segments:
            hooks = len(segment.gradients)
            self.run(segment)
            if hooks:
                self.streams.move(added(self.item, self.item) * segment.learned, kernels=hooks)
            for index in segment.gradients if last else ():
                self.waiting.append(index)
                if self.item * self.count(self.waiting) >= BUCKET_BYTES:
                    self._reduce()
        if last:
            self._reduce()
            self.streams.settle()

    def _reduce(self) -> None:
        """A bucket is divided by the number of ranks, or compressed, and summed."""
        elements = sent = self.count(self.waiting)
        moved = copied(self.item) * elements
        if self.rank:
            shapes = [self.trace.parameters[index].shape for index in self.waiting]
            sent = sum(sent_by_powersgd(shape, self.rank) for shape in shapes)
            moved = PASSES * self.item * elements
        elif self.summed != self.item:
            moved += 2 * converted(self.item, self.summed) * elements  # and back
        self.waiting = []
        seconds = self.streams.moving(moved, "foreach_copy")
        seconds += communication.all_reduce(self.summed * sent, self.group)
        self.streams.communicate(seconds, moved + copied(self.summed) * sent, after_compute=True)

    def update(self) -> None:
        streams, elements = self.streams, self.trainable
        streams.move((converted(self.item, FP32) + self.item) * elements, "mixed")  # in fp32; cleared
        streams.move(NORM_BYTES * elements, "foreach_norm")
        seconds = communication.all_reduce(2 * FP32, self.group)
        streams.compute_waits(streams.communicate(seconds, 0.0, after_compute=True))
        self.adamw(elements, len(self.trace.trainable), rounded=self.rounded)
