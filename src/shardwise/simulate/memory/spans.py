"""A trace as a replay takes it: spans of allocations and frees, with their sums, between the engine's events.

A block in an expandable segment is as large as what was asked for, rounded up. So how much is allocated at
any moment of a span follows from the trace alone: it is counted once for all strategies that share the trace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.simulate.memory.allocator import MIN_BLOCK_BYTES, SMALL_BYTES
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, LOSS, OPTIMIZER, WEIGHTS
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FREE, GRADIENT, OP, Event, StepTrace

PRODUCT, END = -1, -2
"""Kinds of events that a trace does not have: the first matrix product of the forward or of the backward pass
is about to run; the micro-batch is over."""

NEVER = -(1 << 62)

_ACCOUNT_OF_TAG = (ACTIVATIONS, LOSS, GRADIENTS, BUFFERS)  # step_trace.TAGS


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Allocations and frees that follow each other while the engine does nothing; bytes."""

    moves: tuple[tuple[int, int, bool], ...]
    """A tensor; its rounded size if it is allocated, 0 if it is freed; whether it is in the small pool."""
    allocated: int  # What the span adds to the allocated bytes, in rounded sizes
    requested: int  # The same before rounding
    most: int  # The most that it adds at any moment of it; NEVER where nothing is allocated
    accounts: tuple[tuple[int, int], ...]
    """What it adds to each account, before rounding: pairs of account and bytes."""
    accounts_at_most: tuple[tuple[int, int], ...]  # The same up to the first moment of the most


Step = tuple[Span | None, Event]
"""What is allocated and freed first, then an event that is neither. A GRADIENT's own numbers are followed by
the tensor's bytes and account."""


def steps(trace: StepTrace) -> tuple[Step, ...]:
    """The trace's events, END last; made once for each trace."""
    return trace.derived("steps", lambda: tuple(_steps(trace)))


def _steps(trace: StepTrace) -> Iterator[Step]:
    tensors: dict[int, tuple[int, int]] = {}
    run: list[tuple[int, int, int]] = []
    for seen in (*_with_products(trace), (END,)):
        event, kind = seen, seen[0]
        if kind == ALLOC:
            tensors[event[1]] = event[2], _ACCOUNT_OF_TAG[event[3]]
            run.append((event[1], *tensors[event[1]]))
        elif kind == FREE:
            size, account = tensors.pop(event[1])
            run.append((event[1], -size, account))
        else:
            if kind == GRADIENT:
                event = (*event, *tensors.pop(event[2]))
            yield _span(run) if run else None, event
            run = []


def _with_products(trace: StepTrace) -> Iterator[Event]:
    """The events; of the operators only the first product of each pass, as PRODUCT."""
    products = {index for index, op in enumerate(trace.ops) if op.kind == "matmul"}
    due, in_backward = True, False
    for event in trace.events:
        if event[0] != OP:
            if event[0] == BACKWARD and not in_backward:
                due = in_backward = True
            yield event
        elif due and event[1] in products:
            due = False
            yield (PRODUCT,)


def _span(run: Sequence[tuple[int, int, int]]) -> Span:
    """Of tensors, their sizes, negative where they are freed, and their accounts."""
    moves: list[tuple[int, int, bool]] = []
    accounts = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BUFFERS), 0)
    allocated, most, at_most = 0, NEVER, accounts
    for tensor, size, account in run:
        if not size:
            continue  # a tensor without elements has no memory
        rounded = -(-abs(size) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        moves.append((tensor, rounded if size > 0 else 0, rounded <= SMALL_BYTES))
        allocated += rounded if size > 0 else -rounded
        accounts[account] += size
        if size > 0 and allocated > most:
            most, at_most = allocated, accounts.copy()
    return Span(
        moves=tuple(moves),
        allocated=allocated,
        requested=sum(accounts.values()),
        most=most,
        accounts=tuple((account, size) for account, size in accounts.items() if size),
        accounts_at_most=tuple((account, size) for account, size in at_most.items() if size),
    )
