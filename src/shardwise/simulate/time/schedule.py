"""What an engine does around a trace, on the streams of one GPU: the part that all engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.fp32_params import fp32_parameters, without
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.host import Host
from shardwise.simulate.time.roofline import table
from shardwise.simulate.time.segments import Segment, segments, without_gradients
from shardwise.simulate.time.streams import Clocks, Streams, Work
from shardwise.strategy import Strategy

FP32 = 4

# Bytes that one element's update reads and writes, all in fp32: torch's fused AdamW reads weight, gradient
# and both moments and writes all but the gradient; a norm reads the gradient.
ADAMW_BYTES = 7 * FP32
NORM_BYTES = FP32


# The same in host memory, where the clipped gradient is written back: by torch's AdamW as it goes, by
# DeepSpeed before. On a drive, weight, moments and gradient are read, and all but the gradient written.
TORCH_CPU_ADAMW_BYTES = ADAMW_BYTES + FP32
CPU_ADAMW_BYTES = ADAMW_BYTES + 2 * FP32
NVME_ADAMW_BYTES = 7 * FP32


class Schedule:
    """One optimizer step of one GPU under an engine, as often as it is asked for.

    What `micro_batch` and `update` put on the streams is played once they are over. It may follow from
    nothing but `first`, `last`, `whole` and `arriving`: where these are the same again, so is the work.
    """

    sums_over_ranks = True
    """Whether gradients of fp32 parameters are laid end to end and summed over the ranks."""

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        whole = fp32_parameters(trace, strategy.precision)
        self.trace = without(trace, whole) if whole else trace
        """As the engine sees it."""
        self.strategy = strategy
        self.streams = Streams(hardware, trace.precision)
        self.host = Host()
        self.item: int = 2 if trace.precision in ("bf16", "fp16") else FP32
        self.mixed = self.item < FP32
        self.group = communication.group(hardware, strategy.data_parallel, stride=strategy.tensor_parallel)
        self.peers = communication.group(hardware, strategy.tensor_parallel)
        self.ranks = strategy.data_parallel
        self.neighbours = min(hardware.gpus_per_node, strategy.world_size)
        assert trace.tensor_parallel == strategy.tensor_parallel, "a trace is that of one degree"
        self.segments = [
            without_gradients(segment, trace, of=whole) for segment in segments(trace, hardware.gpu)
        ]
        self.beside = [float(trace.parameters[index].numel) for index in trace.trainable if index in whole]
        """Elements of what is trained in fp32 beside the engine."""
        self.trainable = sum(self.elements(index) for index in trace.trainable)
        self.arriving: dict[int, int] = {}
        """Sharded weights on the way: whose, and the event of their arrival."""
        self.whole: set[int] = set()
        """Sharded weights that are there."""
        self._known: dict[Any, tuple[list[Work], dict[int, int], set[int]]] = {}

    def step(self, clocks: Clocks) -> None:
        """All micro-batches and the update."""
        for micro_batch in range(self.strategy.accumulation):
            first, last = micro_batch == 0, micro_batch == self.strategy.accumulation - 1
            clocks.run(self._micro_batch(first=first, last=last))
        before = clocks.busy_until
        clocks.run(self._update)
        clocks.totals.optimizer += clocks.busy_until - before
        clocks.run(self._between)

    def _micro_batch(self, *, first: bool, last: bool) -> list[Work]:
        key = first, last, frozenset(self.whole), tuple(self.arriving.items())
        if key not in self._known:
            work = self._written(lambda: self._passes(first=first, last=last))
            self._known[key] = work, self.arriving.copy(), self.whole.copy()
        work, arriving, whole = self._known[key]
        self.arriving, self.whole = arriving.copy(), whole.copy()
        return work

    def _passes(self, *, first: bool, last: bool) -> None:
        self.micro_batch(first=first, last=last)
        if self.beside and not first:  # autograd adds to what is there
            self.streams.move(3 * FP32 * sum(self.beside), kernels=len(self.beside))

    @cached_property
    def _update(self) -> list[Work]:
        return self._written(self.update if not self.beside else self._update_both)

    def _update_both(self) -> None:
        """The engine's update between those of fp32 parameters: sum over ranks, norm, AdamW."""
        streams, elements = self.streams, sum(self.beside)
        if self.sums_over_ranks:
            streams.move(2 * FP32 * elements, "foreach_copy")
            seconds = communication.all_reduce(FP32 * elements, self.group)
            if self.ranks > 1:
                summed = streams.communicate(seconds, 2 * FP32 * elements, after_compute=True)
                streams.compute_waits(summed)
            streams.move(2 * FP32 * elements)
        streams.move(NORM_BYTES * elements, "foreach_norm")
        self.update()
        streams.move(ADAMW_BYTES * elements, "fused_adamw")

    @cached_property
    def _between(self) -> list[Work]:
        return self._written(lambda: self.streams.issue(self.host.seconds("step")))

    def _written(self, ask: Callable[[], None]) -> list[Work]:
        work: list[Work] = []
        self.streams.work = work
        ask()
        return work

    def micro_batch(self, *, first: bool, last: bool) -> None:
        """Forward and backward pass."""
        raise NotImplementedError

    def update(self) -> None:
        """Gradient norm, clipping, optimizer."""
        raise NotImplementedError

    def elements(self, parameter: int) -> float:
        """Of a parameter, on this GPU when it is whole there."""
        return float(self.trace.parameters[parameter].numel)

    def count(self, parameters: Iterable[int]) -> float:
        """Elements of several."""
        return sum(self.elements(index) for index in parameters)

    def run(self, segment: Segment, *, issue: float = 0.0) -> None:
        """A segment's kernels, and the sums over tensor-parallel ranks within it."""
        if segment.read_back:
            self.streams.host_reads()
        self.streams.compute(segment.seconds, issue=segment.host_seconds + issue, joules=segment.joules)
        if segment.sums:
            seconds = sum(communication.all_reduce(num_bytes, self.peers) for num_bytes in segment.sums)
            self.streams.sum_over_peers(seconds, 2 * sum(segment.sums))


def cpu_seconds(num_bytes: float, processes: int, *, by: str) -> float:
    """How long the host needs to read and write `num_bytes` for each of the `processes` of a node.

    Updating weights computes little: cores wait for memory, which all processes share. `by`: whose code it
    is, `deepspeed` or `torch`, of which one process alone may not use all that the memory gives.
    """
    rates = table()["cpu"]
    rate: float = min(processes * rates[f"{by}_bytes_per_second"], rates["bytes_per_second"])
    return num_bytes * processes / rate


def pageable_seconds(num_bytes: float) -> float:
    """How long a copy to the GPU lasts from host memory that is not page-locked."""
    rate: float = table()["cpu"]["pageable_bytes_per_second"]
    return num_bytes / rate


def nvme_seconds(num_bytes: float, processes: int) -> float:
    """How long a node's drive needs to read or write `num_bytes` for each of its `processes`."""
    rate: float = table()["cpu"]["nvme_bytes_per_second"]
    return num_bytes * processes / rate
