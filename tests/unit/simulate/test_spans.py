"""A trace in spans does to a GPU's memory what its events do one by one."""

from __future__ import annotations

import pickle
from dataclasses import replace

from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import ACTIVATIONS, BUFFERS, GRADIENTS, LOSS, Block, GpuMemory
from shardwise.simulate.memory.spans import END, PRODUCT, steps
from shardwise.simulate.step_trace import (
    ALLOC,
    BACKWARD,
    FORWARD,
    FREE,
    GRADIENT,
    OP,
    WORKSPACE,
    Event,
    Op,
    StepTrace,
)

MIB = 1024**2
ACCOUNTS = (ACTIVATIONS, LOSS, GRADIENTS, BUFFERS)


def new_memory() -> GpuMemory:
    return GpuMemory(CachingAllocator(capacity_bytes=1 << 50))


def step(*events: Event) -> StepTrace:
    """A trace of these events whose operators 0 and 1 are a norm and a product."""
    norm = Op(kind="normalization", flops=1.0, read_bytes=1, written_bytes=1)
    return StepTrace(
        parameters=(),
        buffers=(),
        units=(),
        events=events,
        ops=(norm, replace(norm, kind="matmul")),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


def in_spans(trace: StepTrace, on: GpuMemory) -> list[Block]:
    """Replays it; returns what is left to the engine."""
    addresses: dict[int, int] = {}
    handed_over = []
    for span, event in steps(trace):
        if span is not None:
            on.run(span, addresses)
        if event[0] == GRADIENT:
            handed_over.append(on.handed_over(addresses.get(event[2], 0), *event[3:]))
        elif event[0] == FORWARD:
            on.at(f"unit {event[1]}")
    return handed_over


def one_by_one(trace: StepTrace, on: GpuMemory) -> list[Block]:
    blocks: dict[int, Block] = {}
    handed_over = []
    for event in trace.events:
        if event[0] == ALLOC:
            blocks[event[1]] = on.take(ACCOUNTS[event[3]], event[2])
        elif event[0] == FREE:
            on.give(blocks.pop(event[1]))
        elif event[0] == GRADIENT:
            handed_over.append(blocks.pop(event[2]))
        elif event[0] == FORWARD:
            on.at(f"unit {event[1]}")
    return handed_over


SIZES = st.one_of(st.integers(0, 3000), st.sampled_from([512, 513, 514, 515]), st.integers(MIB, 30 * MIB))


@given(
    kinds=st.lists(
        st.tuples(st.sampled_from([ALLOC, ALLOC, ALLOC, FREE, FREE, GRADIENT, FORWARD]), SIZES), max_size=60
    )
)
@example(kinds=[(ALLOC, 513), (FREE, 0), (ALLOC, 514)])  # as full again, with another account
@settings(max_examples=150, deadline=None)
def test_spans_do_what_their_events_do(kinds: list[tuple[int, int]]) -> None:
    events: list[Event] = []
    alive: list[int] = []
    for number, (kind, size) in enumerate(kinds):
        if kind == ALLOC:
            events.append((ALLOC, number, size, size % 4))
            alive.append(number)
        elif kind == FORWARD:
            events.append((FORWARD, size % 3))
        elif alive:
            tensor = alive.pop(size % len(alive))
            events.append((FREE, tensor) if kind == FREE else (GRADIENT, 0, tensor))
    trace = step(*events, *((FREE, tensor) for tensor in alive))
    fast, slow = new_memory(), new_memory()
    for on in (fast, slow):
        on.take(BUFFERS, 3 * MIB)
    for _ in range(2):  # the second finds what the first has left
        left = in_spans(trace, fast), one_by_one(trace, slow)
        assert [block[1:] for block in left[0]] == [block[1:] for block in left[1]]
        for on, blocks in zip((fast, slow), left, strict=True):
            for block in blocks[::2]:
                on.give(block)
    assert (fast.fullest, fast.accounts, fast.timeline) == (slow.fullest, slow.accounts, slow.timeline)
    measured = ("allocated", "requested", "reserved", "peak_allocated", "peak_active", "peak_reserved")
    for name in measured:
        assert getattr(fast.allocator, f"{name}_bytes") == getattr(slow.allocator, f"{name}_bytes"), name


def test_a_product_is_announced_once_for_each_pass() -> None:
    product, norm = (OP, 1), (OP, 0)
    scratch = [(ALLOC, 7, 512, WORKSPACE), (FREE, 7)]
    trace = step(norm, product, *scratch, product, (BACKWARD, 0), norm, *scratch, product, product)
    kinds = [(event[0], span is not None) for span, event in steps(trace)]
    assert kinds == [(PRODUCT, False), (BACKWARD, True), (PRODUCT, True), (END, False)]


def test_they_are_kept_with_their_trace_and_not_sent_with_it() -> None:
    trace = step((FORWARD, 0))
    size = len(pickle.dumps(trace))
    assert steps(trace) is steps(trace)
    assert steps(step((FORWARD, 1))) is not steps(trace)
    assert len(pickle.dumps(trace)) == size
    assert pickle.loads(pickle.dumps(trace)) == trace
