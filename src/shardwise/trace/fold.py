"""Repeated blocks are traced a few times only, and the trace is unfolded to all of them.

Blocks repeat with a period p: 1 in most models, 2 where every second block is checkpointed, 6 in Gemma 3 with
its windows. After the first few, four groups of p blocks are traced. The second and the third have done the
same when each is named relative to its neighbours; then so would any number of groups between the third and
the last, whose events are copied from the third. Where they have not, the model is traced in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Protocol

from shardwise.models.build import BuiltModel
from shardwise.simulate.step_trace import (
    ALLOC,
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    FORWARD_END,
    FREE,
    GRADIENT,
    Event,
)

GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Folding:
    """Which blocks are left: `head` ones, then GROUPS groups of `period`; `copies` groups are left out."""

    head: int
    period: int
    copies: int

    def kept(self, blocks: int) -> list[int]:
        """Indices of the blocks that are traced."""
        before_last = self.head + (GROUPS - 1) * self.period
        return [*range(before_last), *range(before_last + self.copies * self.period, blocks)]


def find_folding(kinds: Sequence[Any]) -> Folding | None:
    """How blocks of these kinds repeat; None where that saves nothing."""
    for period in range(1, len(kinds) // (GROUPS + 1) + 1):
        for start in range(period + 1):
            tail = kinds[start:]
            if all(a == b for a, b in zip(tail, tail[period:], strict=False)):
                head = start + (len(kinds) - start) % period
                copies = (len(kinds) - head) // period - GROUPS
                return Folding(head=head, period=period, copies=copies) if copies > 0 else None
    return None


def block_kinds(built: BuiltModel, checkpoint_every: int) -> list[Any]:
    """What tells one block from another: class, shapes, what its config says of it, checkpointing."""
    config = built.config.get_text_config()
    per_layer = [
        value
        for key, value in config.to_dict().items()
        if isinstance(value, list) and len(value) == len(built.blocks)
    ]
    attention = getattr(config, "attention_layers", None)  # GPT-Neo's is computed
    if attention is not None and len(attention) == len(built.blocks):
        per_layer.append(attention)
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


class Places(Protocol):
    """Where the parameters of the whole model are."""

    def block(self, parameter: int) -> int:
        """Its block; -1 where it is in none."""

    def further(self, parameter: int, shift: int) -> int:
        """The same parameter `shift` blocks further on; itself where it is in no block."""


def unfold(events: list[Event], folding: Folding, blocks: int, places: Places) -> list[Event] | None:
    """The events of all blocks; None where the groups were not alike.

    `events` name units and parameters by their place in the whole model of `blocks` blocks.
    """
    parts = _split(events, folding, blocks)
    move = _Move(blocks, folding, places)
    return _assemble(parts, folding, move) if _alike(parts, folding.period, move) else None


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """The events by group. `forward[g]` and `backward[g]` are those of group g; 3 is the last one."""

    before: list[Event]
    forward: list[list[Event]]
    middle: list[Event]
    """The last group's forward pass, the loss, and the backward pass up to the last group."""
    backward: list[list[Event]]
    after: list[Event]


def _split(events: list[Event], folding: Folding, blocks: int) -> _Parts:
    p = folding.period
    first = [folding.head + g * p for g in range(GROUPS - 1)] + [blocks - p]
    starts = {e[1]: i for i, e in enumerate(events) if e[0] == FORWARD and e[1] < blocks}
    turns = {e[1]: i for i, e in enumerate(events) if e[0] == BACKWARD and e[1] < blocks}
    begin = [starts[block] for block in first]
    # backward comes to the last block of a group first
    turn = [turns[block + p - 1] for block in first]
    return _Parts(
        before=events[: begin[0]],
        forward=[events[a:b] for a, b in pairwise(begin)],
        middle=events[begin[3] : turn[3]],
        backward=[[], *(events[turn[g] : turn[g - 1]] for g in (1, 2, 3))],
        after=events[turn[0] :],
    )


def _made(events: list[Event]) -> dict[int, int]:
    """Place of each tensor among those that these events allocate."""
    return {event[1]: index for index, event in enumerate(e for e in events if e[0] == ALLOC)}


def _alike(parts: _Parts, period: int, move: _Move) -> bool:
    """Whether the second and the third group have done the same, seen from where each stands."""
    seen = []
    for g in (1, 2):
        labels: dict[int, Any] = {}
        neighbours = {
            "previous": parts.forward[g - 1],
            "forward": parts.forward[g],
            "next": parts.backward[g + 1],
            "backward": parts.backward[g],
        }
        for label, events in neighbours.items():
            labels |= {tensor: (label, index) for tensor, index in _made(events).items()}

        both = [*parts.forward[g], *parts.backward[g]]
        seen.append([_renamed(move(event, -g * period), labels) for event in both])
    return seen[0] == seen[1]


_TENSOR_AT = {ALLOC: 1, FREE: 1, GRADIENT: 2}


class _Move:
    """Moves events of the second and third group by some blocks, as if the last group came right behind."""

    def __init__(self, blocks: int, folding: Folding, places: Places) -> None:
        self._blocks, self._places = blocks, places
        self._last, self._gap = blocks - folding.period, folding.copies * folding.period

    def __call__(self, event: Event, shift: int) -> Event:
        """The event `shift` blocks further on; tensors keep their numbers."""
        kind = event[0]
        if kind == GRADIENT:
            near = self._nearer(shift, self._places.block(event[1]))
            return (kind, self._places.further(event[1], near), event[2])
        if kind in _UNIT_EVENTS and event[1] < self._blocks:
            return (kind, event[1] + self._nearer(shift, event[1]))
        return event

    def _nearer(self, shift: int, block: int) -> int:
        return shift - self._gap if block >= self._last else shift


_UNIT_EVENTS = (FORWARD, FORWARD_END, BACKWARD, BACKWARD_END)


def _assemble(parts: _Parts, folding: Folding, move: _Move) -> list[Event]:
    """All groups in order: those traced, and between the third and the last the copies of the third."""
    everything = [*parts.before, *(e for f in parts.forward for e in f), *parts.middle]
    everything += [*(e for b in parts.backward for e in b), *parts.after]
    numbers = count(1 + max(e[1] for e in everything if e[0] == ALLOC))
    copies, p = folding.copies, folding.period
    made_forward, made_backward = _made(parts.forward[2]), _made(parts.backward[2])
    last = _made(parts.backward[3])
    # by group, the third being 2, its copies 3 to 2 + copies: tensors by place
    forward = {1: list(_made(parts.forward[1])), 2: list(made_forward)}
    backward = {2: list(made_backward), 3 + copies: list(last)}
    for g in range(3, 3 + copies):
        forward[g] = [next(numbers) for _ in made_forward]
        backward[g] = [next(numbers) for _ in made_backward]

    def renaming(g: int) -> dict[int, int]:
        """What the third group's tensors, and its neighbours', are called in group g."""
        pairs = [
            (forward[1], forward[g - 1]),
            (forward[2], forward[g]),
            (backward[2], backward[g]),
            # the last group may have made more, which no other can refer to
            (backward[3 + copies], backward[g + 1]),
        ]
        return {old: new for olds, news in pairs for old, new in zip(olds, news, strict=False)}

    def copy(events: list[Event], g: int) -> list[Event]:
        names = renaming(g)
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
