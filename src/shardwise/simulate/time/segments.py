"""A trace cut at the borders of its units: the GPU's computation and the host's time in each segment."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from shardwise.hardware.catalog import Gpu
from shardwise.simulate.energy import Draw
from shardwise.simulate.step_trace import BACKWARD, FORWARD, FORWARD_END, GRADIENT, OP, StepTrace
from shardwise.simulate.time.roofline import Host, Roofline


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The operators between the start of one unit's pass and that of the next unit's."""

    unit: int  # Index into the trace's units; -1 before the first and between forward and backward pass
    backward: bool
    seconds: float  # The GPU's kernels, at full clock
    grouped: float  # Those of them that multiply with experts
    joules: float  # Joules of the kernels, without the GPU's constant draw
    host_seconds: float  # Time in which the host issues them
    read_back: bool  # Whether the process waits at its beginning, to read a number that the segment computes
    passes: int  # Forward and backward passes in it: 2 where a backward pass computes the forward pass again
    gradients: tuple[int, ...] = ()  # Parameters whose gradient it completes
    learned: float = 0.0  # Their elements on this GPU
    sums: tuple[int, ...] = ()
    """Bytes of each sum over the tensor-parallel group in it; they are not in `seconds` and `joules`."""


READ_BACK = frozenset({"all", "any", "_local_scalar_dense", "nonzero"})
"""Operators whose result Python reads: transformers looks for packed samples in the position ids."""


def segments(trace: StepTrace, gpu: Gpu, host_pace: float) -> tuple[Segment, ...]:
    """The trace's segments in order, on this GPU and host; made once for each trace and both."""
    return trace.derived(("segments", gpu.name, host_pace), lambda: tuple(_cut(trace, gpu, host_pace)))


def clocked_seconds(trace: StepTrace, gpu: Gpu) -> float:
    """Seconds of a micro-batch's kernels that grow when the clock falls, at full clock."""

    def add_up() -> float:
        roofline = _roofline(trace, gpu)
        times = Counter(event[1] for event in trace.events if event[0] == OP)
        return sum(number * roofline.clocked(trace.ops[index]) for index, number in times.items())

    return trace.derived(("clocked", gpu.name), add_up)


def without_gradients(segment: Segment, trace: StepTrace, of: Collection[int]) -> Segment:
    """The segment without the gradients of some parameters of `trace`."""
    if not any(index in of for index in segment.gradients):
        return segment
    left = tuple(index for index in segment.gradients if index not in of)
    return replace(segment, gradients=left, learned=_elements(trace, left))


def _elements(trace: StepTrace, parameters: Iterable[int]) -> float:
    return float(sum(trace.parameters[index].numel for index in parameters))


def _roofline(trace: StepTrace, gpu: Gpu) -> Roofline:
    sizes = [size for parameter in trace.parameters for size in parameter.shape]
    return Roofline(gpu, trace.precision, rows=trace.tokens, sizes=sizes)


def _cut(trace: StepTrace, gpu: Gpu, host_pace: float) -> Iterator[Segment]:
    roofline = _roofline(trace, gpu)
    draw, host = Draw(gpu), Host(host_pace)
    summed = {index: op.read_bytes for index, op in enumerate(trace.ops) if op.kind == "collective"}
    seconds = [0.0 if index in summed else roofline.seconds(op) for index, op in enumerate(trace.ops)]
    joules = [0.0 if index in summed else draw.joules(op) for index, op in enumerate(trace.ops)]
    looked_at = {index for index, op in enumerate(trace.ops) if op.name in READ_BACK}
    calls = [(host.forward(op), host.backward(op)) for op in trace.ops]
    for index in summed:  # called from Python in both passes
        calls[index] = (calls[index][0], calls[index][0])
    forwards: dict[int, int] = {}
    unit, backward, ops, gradients = -1, False, list[int](), list[int]()

    def close() -> Segment:
        again = forwards.get(unit, 0) if backward and _recomputed(trace, unit) else 0
        issued = sum(calls[op][backward and index >= again] for index, op in enumerate(ops))
        issued += host.seconds("checkpoint") if again else 0.0
        if not backward:
            forwards[unit] = forwards.get(unit, 0) + len(ops)
        return Segment(
            unit=unit,
            backward=backward,
            seconds=sum(seconds[op] for op in ops),
            grouped=sum(seconds[op] for op in ops if trace.ops[op].name == "_grouped_mm"),
            joules=sum(joules[op] for op in ops),
            host_seconds=issued,
            read_back=any(op in looked_at for op in ops),
            passes=2 if again else 1,
            gradients=tuple(gradients),
            learned=_elements(trace, gradients),
            sums=tuple(summed[op] for op in ops if op in summed) if summed else (),
        )

    for event in trace.events:
        kind = event[0]
        if kind == OP:
            ops.append(event[1])
        elif kind == GRADIENT:
            gradients.append(event[1])
        elif kind in (FORWARD, FORWARD_END, BACKWARD):
            if ops or gradients:
                yield close()
            ops, gradients = [], []
            unit = -1 if kind == FORWARD_END else event[1]
            backward = backward or kind == BACKWARD
    yield close()


def _recomputed(trace: StepTrace, unit: int) -> bool:
    """Whether a unit's backward pass begins with its forward pass: that of blocks 0, n, 2 n, ..."""
    every = trace.checkpoint_every
    return every > 0 and unit >= 0 and trace.units[unit].block >= 0 and trace.units[unit].block % every == 0
