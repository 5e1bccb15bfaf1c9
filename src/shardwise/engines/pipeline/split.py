"""A trace cut into the stages of a pipeline: what a stage's two passes over a micro-batch do to its GPU.

The runtime (`runtime/model.py`) runs the model's own code in each stage. So a stage has the events of its
blocks; what stands before the blocks belongs to the first stage, what follows them to the last. Masks and
rotary angles are made in each stage.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwise.engines.pipeline.stages import cut
from shardwise.simulate.step_trace import (
    ACTIVATION,
    ALLOC,
    BACKWARD,
    FORWARD,
    FORWARD_END,
    FP32,
    FREE,
    GRADIENT,
    GRADIENT_TAG,
    Event,
    StepTrace,
)

HALF = -3  # Kind of the event between a stage's forward and its backward pass


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of a trace."""

    blocks: range
    trace: StepTrace  # Events of both passes, HALF between them; parameters and units are those of the model
    parts: tuple[tuple[int, ...], ...]  # Its parameters: of each block, then those outside the blocks

    @property
    def trainable(self) -> list[int]:
        return [i for part in self.parts for i in part if self.trace.parameters[i].trainable]


def stages_of(trace: StepTrace, count: int) -> tuple[Stage, ...]:
    """The stages of a trace, from the first to the last; made once for each number of stages."""
    return trace.derived(("stages", count), lambda: tuple(_Cutter(trace, count).stages()))


def sent_bytes(trace: StepTrace) -> int:
    """Bytes of a micro-batch's hidden states: what a stage sends on, and gets back as a gradient."""
    before = (trace.parameters[i] for unit in _outside(trace)[0] for i in trace.units[unit].parameters)
    width = max(before, key=lambda parameter: parameter.numel).shape[-1]
    return trace.tokens * width * (FP32 if trace.precision == "fp32" else 2)


def _outside(trace: StepTrace) -> tuple[list[int], list[int]]:
    """Units before the blocks and after them."""
    order = list(dict.fromkeys(event[1] for event in trace.events if event[0] == FORWARD))
    first = next(place for place, unit in enumerate(order) if trace.units[unit].block >= 0)
    return order[:first], [unit for unit in order[first:] if trace.units[unit].block < 0]


class _Cutter:
    """Cuts one trace. A place is a block's number, -1 before the blocks, their number after them."""

    def __init__(self, trace: StepTrace, count: int) -> None:
        self._trace, self._last = trace, count - 1
        self._blocks = sum(unit.block >= 0 for unit in trace.units)
        self._before, self._after = _outside(trace)
        units = trace.units
        self._tied = {i for unit in self._before for i in units[unit].parameters}
        self._tied &= {i for unit in self._after for i in units[unit].parameters}
        self._ranges = cut(
            [self._multiplied(unit) for unit in range(self._blocks)],
            sum(self._multiplied(unit) for unit in self._after),
            count,
        )
        self._events = list(self._placed())
        self._freed_in_forward = {e[1] for e, backward, _ in self._events if e[0] == FREE and not backward}
        self._new = 1 + max((event[1] for event in trace.events if event[0] == ALLOC), default=0)

    def _multiplied(self, unit: int) -> float:
        """Elements of a unit's matrices before tensor parallelism, as `runtime/model.py` counts them."""
        own = [self._trace.parameters[i] for i in self._trace.units[unit].parameters]
        return float(sum(p.made_of or p.uncut_numel for p in own if p.made_of or len(p.shape) > 1))

    def _placed(self) -> Iterator[tuple[Event, bool, int]]:
        """Each event, whether it is part of the backward pass, and its place."""
        place, backward = -1, False
        for event in self._trace.events:
            kind = event[0]
            if kind == BACKWARD or (kind == FORWARD and not backward):  # later: a block that is recomputed
                block = self._trace.units[event[1]].block
                if kind == BACKWARD and not backward:
                    backward, place = True, self._blocks
                if block >= 0:
                    place = block
                elif kind == FORWARD and place >= 0:
                    place = self._blocks
                elif kind == BACKWARD and place < self._blocks:
                    place = -1
            yield event, backward, place

    def stages(self) -> Iterator[Stage]:
        units = self._trace.units
        for number, blocks in enumerate(self._ranges):
            ends = [*(self._before if number == 0 else []), *(self._after if number == self._last else [])]
            outside = dict.fromkeys(i for unit in ends for i in units[unit].parameters)
            yield Stage(
                blocks=blocks,
                trace=replace(self._trace, events=tuple(self._of_stage(number, blocks))),
                parts=(*(units[block].parameters for block in blocks), tuple(outside)),
            )

    def _own(self, number: int, blocks: range) -> Iterator[tuple[Event, bool, int]]:
        """What the stage does, and what each stage does before the blocks, outside the embeddings."""
        low = -1 if number == 0 else blocks[0]
        high = self._blocks if number == self._last else blocks[-1]
        in_unit = False
        for event, backward, place in self._events:
            marks = event[0] in (FORWARD, FORWARD_END)
            if place == -1 and marks:
                in_unit = event[0] == FORWARD
            shared = place == -1 and not (backward or in_unit or marks)
            if low <= place <= high or shared:
                yield event, backward, place

    def _of_stage(self, number: int, blocks: range) -> list[Event]:
        live: dict[int, int] = {}  # Tensors of this stage, and the place that has allocated them
        halves: tuple[list[Event], list[Event]] = ([], [])
        zeros = number > 0  # in place of the embeddings, until the first block has run
        if zeros:
            halves[0].append((ALLOC, self._new, sent_bytes(self._trace), ACTIVATION))
        for event, backward, place in self._own(number, blocks):
            kind, events = event[0], halves[backward]
            if zeros and (place > blocks[0] or backward):
                zeros = False
                halves[0].append((FREE, self._new))
            if kind == ALLOC:
                live[event[1]] = place
            elif kind == FREE and live.pop(event[1], None) is None:
                continue
            elif kind == GRADIENT and live.pop(event[2], None) is None:
                events.append((ALLOC, event[2], self._trace.parameters[event[1]].size_bytes, GRADIENT_TAG))
            events.append(event)
        for tensor in [t for t, at in live.items() if at == -1 and t in self._freed_in_forward]:
            halves[0].append((FREE, tensor))
            del live[tensor]
        if number == self._last:
            halves[1].extend(self._gradients_of_tied(live))
        return [*halves[0], (HALF,), *halves[1], *((FREE, tensor) for tensor in live)]

    def _gradients_of_tied(self, live: dict[int, int]) -> Iterator[Event]:
        """The head's gradients of embeddings that the last stage has, too."""
        sizes = {event[1]: event[2] for event in self._trace.events if event[0] == ALLOC}
        for index in sorted(self._tied):
            parameter = self._trace.parameters[index]
            if parameter.trainable:
                found = [t for t in live if sizes[t] == parameter.size_bytes and live[t] == self._blocks]
                tensor = found[-1] if found else self._new + 1 + index
                if not found:
                    yield ALLOC, tensor, parameter.size_bytes, GRADIENT_TAG
                live.pop(tensor, None)
                yield GRADIENT, index, tensor
