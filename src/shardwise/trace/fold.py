"""Repeated blocks are traced only a few times, and the trace is unfolded to all of them.

Blocks repeat with a period p: 1 in most models, 2 where every second block is checkpointed, 6 in Gemma 3 with
its windows. After the first blocks, four groups of p blocks are traced. If the second and the third did the
same, with names relative to their neighbours, so would any number of groups between the third and the last:
their events are copied from the third. Otherwise the model is traced in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any

from shardwise.models.build import BuiltModel
from shardwise.simulate import step_trace
from shardwise.simulate.step_trace import Event
from shardwise.trace.layout import Layout

GROUPS = 4
_TENSOR_AT = {step_trace.ALLOC: 1, step_trace.FREE: 1, step_trace.GRADIENT: 2}
_UNIT_EVENTS = (step_trace.FORWARD, step_trace.FORWARD_END, step_trace.BACKWARD, step_trace.BACKWARD_END)


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Which blocks are traced: `head` blocks, then GROUPS groups of `period`; `copies` groups are not."""

    head: int
    period: int
    copies: int

    def kept(self, blocks: int) -> list[int]:
        """Indices of the blocks that are traced."""
        before_last = self.head + (GROUPS - 1) * self.period
        return [*range(before_last), *range(before_last + self.copies * self.period, blocks)]


def find_folding(kinds: Sequence[Any]) -> Folding | None:
    """Find how blocks of these kinds repeat; None where folding saves nothing."""
    for period in range(1, len(kinds) // (GROUPS + 1) + 1):
        for start in range(period + 1):
            tail = kinds[start:]
            if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
                head = start + (len(kinds) - start) % period
                copies = (len(kinds) - head) // period - GROUPS
                return Folding(head=head, period=period, copies=copies) if copies > 0 else None
    return None


def block_kinds(built: BuiltModel, checkpoint_every: int) -> list[Any]:
    """What distinguishes blocks: class, shapes, the config's values for each layer, checkpointing."""
    config = built.config.get_text_config()
    values = [*config.to_dict().values(), getattr(config, "attention_layers", None)]  # GPT-Neo's is computed
    per_layer = [value for value in values if isinstance(value, list) and len(value) == len(built.blocks)]
    return [
        (
            type(block),
            tuple((p.shape, p.dtype, p.requires_grad) for p in block.parameters()),
            tuple(str(values[index]) for values in per_layer),
            checkpoint_every > 0 and index % checkpoint_every == 0,
            # the embeddings are not in fp32 yet
            index == 0 and getattr(config, "residual_in_fp32", False),
        )
        for index, block in enumerate(built.blocks)
    ]


def unfold(events: list[Event], folding: Folding, blocks: int, places: Layout) -> list[Event] | None:
    """Return the events of all blocks; None where the groups differ.

    `events` name units and parameters by their index in the full model of `blocks` blocks.
    """
    parts = _split(events, folding, blocks)
    move = _Move(blocks, folding, places)
    return _assemble(parts, folding, move) if _alike(parts, folding.period, move) else None


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The events by group: `forward[g]` and `backward[g]` for group g; 3 is the last."""

    before: list[Event]
    forward: list[list[Event]]
    middle: list[Event]
    """The last group's forward pass, the loss, and the backward pass up to the last group."""
    backward: list[list[Event]]
    after: list[Event]


def _split(events: list[Event], folding: Folding, blocks: int) -> _Parts:
    p = folding.period
    first = [folding.head + g * p for g in range(GROUPS - 1)] + [blocks - p]
    starts = {e[1]: i for i, e in enumerate(events) if e[0] == step_trace.FORWARD and e[1] < blocks}
    turns = {e[1]: i for i, e in enumerate(events) if e[0] == step_trace.BACKWARD and e[1] < blocks}
    begin = [starts[block] for block in first]
    # the backward pass starts with the last block of a group
    turn = [turns[block + p - 1] for block in first]
    return _Parts(
        before=events[: begin[0]],
        forward=[events[a:b] for a, b in pairwise(begin)],
        middle=events[begin[3] : turn[3]],
        backward=[[], *(events[turn[g] : turn[g - 1]] for g in (1, 2, 3))],
        after=events[turn[0] :],
    )


def _made(events: list[Event]) -> dict[int, int]:
    """Index of each tensor among those that these events allocate."""
    return {event[1]: index for index, event in enumerate(e for e in events if e[0] == step_trace.ALLOC)}


def _alike(parts: _Parts, period: int, move: _Move) -> bool:
    """Whether the second and the third group did the same, relative to each one's place."""
    seen = []
    for g in (1, 2):
        neighbours = parts.forward[g - 1], parts.forward[g], parts.backward[g + 1], parts.backward[g]
        labels: dict[int, Any] = {}
        for label, events in enumerate(neighbours):
            labels |= {tensor: (label, index) for tensor, index in _made(events).items()}
        both = [*parts.forward[g], *parts.backward[g]]
        seen.append([_renamed(move(event, -g * period), labels) for event in both])
    return seen[0] == seen[1]


class _Move:
    """Moves events of the second and third group by some blocks, as if the last group came next."""

    def __init__(self, blocks: int, folding: Folding, places: Layout) -> None:
        self._blocks, self._places = blocks, places
        self._last, self._gap = blocks - folding.period, folding.copies * folding.period

    def __call__(self, event: Event, shift: int) -> Event:
        """Return the event `shift` blocks later; tensors keep their numbers."""
        kind = event[0]
        if kind == step_trace.GRADIENT:
            near = self._nearer(shift, self._places.block(event[1]))
            return (kind, self._places.further(event[1], near), event[2])
        if kind in _UNIT_EVENTS and event[1] < self._blocks:
            return (kind, event[1] + self._nearer(shift, event[1]))
        return event

    def _nearer(self, shift: int, block: int) -> int:
        return shift - self._gap if block >= self._last else shift


def _assemble(parts: _Parts, folding: Folding, move: _Move) -> list[Event]:
    """Join all groups in order, with copies of the third between the third and the last."""
    everything = [*parts.before, *(e for f in parts.forward for e in f), *parts.middle]
    everything += [*(e for b in parts.backward for e in b), *parts.after]
    numbers = count(1 + max(e[1] for e in everything if e[0] == step_trace.ALLOC))
    copies, p = folding.copies, folding.period
    # tensors by group and index; the third group is 2, its copies are 3 to 2 + copies
    forward = {g: list(_made(parts.forward[g])) for g in (1, 2)}
    backward = {2: list(_made(parts.backward[2])), 3 + copies: list(_made(parts.backward[3]))}
    for g in range(3, 3 + copies):
        forward[g] = [next(numbers) for _ in forward[2]]
        backward[g] = [next(numbers) for _ in backward[2]]

    def copy(events: list[Event], g: int) -> list[Event]:
        """The third group's events as group g's, with g's names of its tensors and its neighbours'."""
        pairs = [(forward[1], forward[g - 1]), (forward[2], forward[g]), (backward[2], backward[g])]
        # the last group may have allocated more, which no other group refers to
        pairs.append((backward[3 + copies], backward[g + 1]))
        names = {old: new for olds, news in pairs for old, new in zip(olds, news, strict=False)}
        return [_renamed(move(e, (g - 2) * p), names) for e in events]

    seen_from_the_last = dict(zip(forward[2], forward[2 + copies], strict=True))
    result = [*parts.before, *parts.forward[0], *parts.forward[1], *parts.forward[2]]
    for g in range(3, 3 + copies):
        result += copy(parts.forward[2], g)
    result += [_renamed(e, seen_from_the_last) for e in (*parts.middle, *parts.backward[3])]
    for g in range(2 + copies, 1, -1):
        result += copy(parts.backward[2], g)
    return [*result, *parts.backward[1], *parts.after]


def _renamed(event: Event, names: Mapping[int, Any]) -> Event:
    at = _TENSOR_AT.get(event[0])
    if at is None or event[at] not in names:
        return event
    return (*event[:at], names[event[at]], *event[at + 1 :])
