"""A trace as a replay takes it: stretches in which no engine acts, each with what it comes to in the end.

A block in an expandable segment is as large as what was asked for, rounded up. So how much is allocated at
any moment of a stretch follows from the trace alone: it is counted once for all strategies that share it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from shardwise.simulate.memory.allocator import MIN_BLOCK_BYTES, SMALL_BYTES
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, LOSS, OPTIMIZER, WEIGHTS
from shardwise.simulate.memory.run import NEVER, Stretch
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FREE, GRADIENT, OP, Event, StepTrace

PRODUCT, END = -1, -2
"""Kinds of events beside those of a trace: the first matrix product of the forward or the backward pass is
about to run; the micro-batch is over."""

_ACCOUNT_OF_TAG = (ACTIVATIONS, LOSS, GRADIENTS, BUFFERS)  # step_trace.TAGS


Step = tuple[Stretch | None, Event]
"""What is allocated and freed first, then an event that is neither. Behind its own numbers GRADIENT has the
tensor's bytes and account."""

_KEPT: dict[int, tuple[weakref.ref[StepTrace], tuple[Step, ...]]] = {}


def steps(trace: StepTrace) -> tuple[Step, ...]:
    """The trace's events, END last; kept for as long as the trace is."""
    key = id(trace)
    found = _KEPT.get(key)
    if found is not None and found[0]() is trace:
        return found[1]
    made = tuple(_steps(trace))
    _KEPT[key] = weakref.ref(trace, lambda _: _KEPT.pop(key, None)), made
    return made


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
            yield _stretch(run) if run else None, event
            run = []


def _with_products(trace: StepTrace) -> Iterator[Event]:
    """The events, of what is computed only the two products that PRODUCT stands for."""
    products = {index for index, op in enumerate(trace.ops) if op.kind == "matmul"}
    due, turned = True, False
    for event in trace.events:
        if event[0] != OP:
            if event[0] == BACKWARD and not turned:
                due = turned = True
            yield event
        elif due and event[1] in products:
            due = False
            yield (PRODUCT,)


def _stretch(run: Sequence[tuple[int, int, int]]) -> Stretch:
    """Of tensors, their sizes, negative where they are freed, and their accounts."""
    moves: list[tuple[int, int, bool]] = []
    accounts = dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BUFFERS), 0)
    allocated, most, at_most = 0, NEVER, accounts
    for tensor, size, account in run:
        if not size:
            continue  # a tensor without elements has no memory
        rounded = -(-abs(size) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES
        moves.append((tensor, max(0, size) and rounded, rounded <= SMALL_BYTES))
        allocated += rounded if size > 0 else -rounded
        accounts[account] += size
        if size > 0 and allocated > most:
            most, at_most = allocated, accounts.copy()
    return Stretch(
        moves=tuple(moves),
        allocated=allocated,
        requested=sum(accounts.values()),
        most=most,
        accounts=_changed(accounts),
        accounts_at_most=_changed(at_most),
    )


def _changed(accounts: dict[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple((account, size) for account, size in accounts.items() if size)
