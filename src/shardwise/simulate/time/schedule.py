"""What engines share of an optimizer step's schedule: a trace on one GPU's streams, and bytes of kernels."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.step_trace import FP32, StepTrace, fp32_parameters, without
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.roofline import Host, table
from shardwise.simulate.time.segments import Segment, segments, without_gradients
from shardwise.simulate.time.streams import Clocks, Streams, Work
from shardwise.strategy import Strategy


def copied(item: int) -> int:
    """Read and written once: a copy, or a value scaled in place. `item`: bytes of an element."""
    return 2 * item


def converted(source: int, target: int) -> int:
    """Read in one format and written in another."""
    return source + target


def added(item: int, total: int) -> int:
    """Read and added to a sum of `total` bytes, which is read and written."""
    return item + 2 * total


NORM_BYTES = FP32
"""A norm reads each fp32 gradient (torch._foreach_norm)."""

ADAMW_BYTES = 7 * FP32
"""AdamW reads weight, gradient and both moments in fp32, and writes all but the gradient (torch's
FusedAdamKernel.cu)."""

ADAMW_8BIT_BYTES = 4 * FP32 + copied(FP32)
"""bitsandbytes' reads fp32 weight and gradient, moments in bytes; all but the gradient are written."""

TORCH_CPU_ADAMW_BYTES = ADAMW_BYTES + FP32
"""In host memory, with the clipped gradient written back by torch as it goes."""

DEEPSPEED_CPU_ADAMW_BYTES = ADAMW_BYTES + copied(FP32)
"""In host memory, after DeepSpeed has clipped the gradient in place (unscale_and_clip_grads)."""

NVME_ADAMW_BYTES = 7 * FP32
"""On a drive: weight, moments and gradient are read, all but the gradient are written
(pipelined_optimizer_swapper.py)."""


class Schedule:
    """One optimizer step of one GPU under an engine, repeated as often as needed.

    What `micro_batch` puts on the streams may depend on `first`, `last`, `gathered` and `arriving` alone:
    where these are the same again, the recorded work is used again.
    """

    recorded = False  # Whether passes are CUDA graphs, which the host issues with one call
    adamw_kernel = "adamw"  # Ours, or torch's `fused_adamw`
    sums_over_ranks = True  # Whether gradients of fp32 parameters are concatenated and summed over the ranks

    def __init__(self, trace: StepTrace, strategy: Strategy, hardware: Hardware) -> None:
        apart = fp32_parameters(trace, strategy.precision)
        self.trace = without(trace, apart) if apart else trace  # As the engine sees it
        self.strategy = strategy
        self.streams = Streams(hardware, trace.precision)
        self.host = Host(hardware.host_pace)
        self.item: int = 2 if trace.precision in ("bf16", "fp16") else FP32
        self.mixed = self.item < FP32
        self.rounded = self.item if self.mixed else 0  # Bytes of a weight that follows the one AdamW steps
        self.group = communication.group(hardware, strategy.data_parallel, stride=strategy.tensor_parallel)
        self.peers = communication.group(hardware, strategy.tensor_parallel)
        self.ranks = strategy.data_parallel
        self.neighbours = min(hardware.gpus_per_node, strategy.world_size)
        assert trace.tensor_parallel == strategy.tensor_parallel, "a trace is that of one degree"
        cut = segments(trace, hardware.gpu, hardware.host_pace)
        self.segments = [without_gradients(segment, trace, of=apart) for segment in cut]
        self.apart = [float(trace.parameters[index].numel) for index in trace.trainable if index in apart]
        """Elements of the trained parameters that are kept in fp32, apart from the engine."""
        self.trainable = sum(self.elements(index) for index in trace.trainable)
        self.arriving: dict[int, int] = {}
        """Sharded weights on their way: whose, and the event of their arrival."""
        self.gathered: set[int] = set()  # Sharded weights that are gathered
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
        key = first, last, frozenset(self.gathered), tuple(self.arriving.items())
        if key not in self._known:
            work = self._recorded(lambda: self._passes(first=first, last=last))
            self._known[key] = work, self.arriving.copy(), self.gathered.copy()
        work, arriving, gathered = self._known[key]
        self.arriving, self.gathered = arriving.copy(), gathered.copy()
        return work

    def record(self) -> None:
        """Have the passes recorded, unless the host waits for the GPU in them."""
        self.recorded = not self.trace.host_waits
        if self.recorded:
            self.segments = [replace(one, host_seconds=0.0, read_back=False) for one in self.segments]

    def _passes(self, *, first: bool, last: bool) -> None:
        if self.recorded:
            self.streams.issue(self.host.seconds("graph"))
        self.micro_batch(first=first, last=last)
        if self.apart and not first:  # autograd adds to the gradients
            self.streams.move(added(FP32, FP32) * sum(self.apart), kernels=len(self.apart))

    @cached_property
    def _update(self) -> list[Work]:
        return self._recorded(self._update_both if self.apart else self.update)

    def _update_both(self) -> None:
        """The engine's update between those of fp32 parameters: sum over ranks, norm, AdamW."""
        streams, elements = self.streams, sum(self.apart)
        if self.sums_over_ranks:  # runtime/parameters.py: concatenated, summed, divided
            streams.move(copied(FP32) * elements, "foreach_copy")
            seconds = communication.all_reduce(FP32 * elements, self.group)
            if self.ranks > 1:
                moved = copied(FP32) * elements
                streams.compute_waits(streams.communicate(seconds, moved, after_compute=True))
            streams.move(copied(FP32) * elements)
        streams.move(NORM_BYTES * elements, "foreach_norm")
        self.update()
        streams.move(ADAMW_BYTES * elements, "adamw")

    @cached_property
    def _between(self) -> list[Work]:
        return self._recorded(lambda: self.streams.issue(self.host.seconds("step")))

    def _recorded(self, write: Callable[[], None]) -> list[Work]:
        """The work that `write` puts on the streams."""
        work: list[Work] = []
        self.streams.work = work
        write()
        return work

    def micro_batch(self, *, first: bool, last: bool) -> None:
        """Forward and backward pass."""
        raise NotImplementedError

    def update(self) -> None:
        """Gradient norm, clipping, optimizer."""
        raise NotImplementedError

    def elements(self, parameter: int) -> float:
        """Elements of a gathered parameter on this GPU."""
        return float(self.trace.parameters[parameter].numel)

    def count(self, parameters: Iterable[int]) -> float:
        """Elements of several gathered parameters."""
        return sum(self.elements(index) for index in parameters)

    def gradient_norm(self, elements: float, *, gradient: int = FP32) -> None:
        """The norm of gradients on the GPU, of `gradient` bytes each."""
        self.streams.move(gradient * elements, "foreach_norm" if gradient == FP32 else "norm_half")

    def adamw(self, elements: float, tensors: int, *, gradient: int = FP32, rounded: int = 0) -> None:
        """AdamW on the GPU: `adamw_kernel`, or one of bitsandbytes' for each tensor.

        `gradient`, `rounded`: bytes of a gradient as it comes, and of the weight that is written, too. Before
        bitsandbytes' kernels the host waits for the norm (engines/runtime/adamw8bit.py).
        """
        if self.strategy.optimizer == "adamw":
            self.streams.move((ADAMW_BYTES - FP32 + gradient + rounded) * elements, self.adamw_kernel)
            return
        if gradient < FP32:
            self.streams.move(converted(gradient, FP32) * elements, "mixed", kernels=tensors)
        self.streams.host_reads()
        issue = tensors * self.host.seconds("adamw8bit")
        self.streams.move(ADAMW_8BIT_BYTES * elements, "adamw8bit", kernels=tensors, issue=issue)
        if rounded:
            self.streams.move(converted(FP32, rounded) * elements, "foreach_copy")

    def run(self, segment: Segment, *, issue: float = 0.0) -> None:
        """A segment's kernels, and the sums over tensor-parallel ranks within it."""
        if segment.read_back:
            self.streams.host_reads()
        issue += segment.host_seconds
        self.streams.compute(segment.seconds, issue=issue, joules=segment.joules, grouped=segment.grouped)
        if segment.sums:
            seconds = sum(communication.all_reduce(num_bytes, self.peers) for num_bytes in segment.sums)
            self.streams.sum_over_peers(seconds, 2 * sum(segment.sums))


def cpu_seconds(num_bytes: float, processes: int, *, by: str) -> float:
    """Seconds in which the host reads and writes `num_bytes` for each of the `processes` of a node.

    Updating weights computes little: cores wait for memory, which all processes share, and of which one
    process alone does not use the full rate. `by`: whose code it is, `deepspeed` or `torch`.
    """
    rates = table()["cpu"][by]
    return num_bytes * processes / float(min(processes * rates["process"], rates["node"]))


def pageable_seconds(num_bytes: float) -> float:
    """Seconds of a copy to the GPU from host memory that is not page-locked."""
    return num_bytes / float(table()["cpu"]["pageable_bytes_per_second"])


def nvme_seconds(num_bytes: float, processes: int) -> float:
    """Seconds in which a node's drive reads or writes `num_bytes` for each of its `processes`."""
    return num_bytes * processes / float(table()["cpu"]["nvme_bytes_per_second"])
