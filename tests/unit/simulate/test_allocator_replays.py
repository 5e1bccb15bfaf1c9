"""Long replays: what torch's own code recorded, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.simulate.memory.allocator import CachingAllocator, OutOfMemoryError
from shardwise.simulate.memory.pool import ADDRESSES, Block, Pool

MIB, GIB = 1024**2, 1024**3


def pattern(seed: int, *, count: int, target_bytes: int) -> Iterator[tuple[str, int, int, int]]:
    """Random events (kind, identifier, bytes, stream) that keep about `target_bytes` alive."""
    rng = random.Random(seed)
    alive: list[tuple[int, int]] = []
    total = 0
    for identifier in range(count):
        while alive and total > target_bytes * rng.random():
            place = int(len(alive) * (1 - rng.random() ** 2))  # mostly what came last
            freed, size = alive.pop(place)
            total -= size
            yield ("free", freed, 0, 0)
        size = int(2 ** (4 + 24 * rng.random()))
        yield ("malloc", identifier, size, int(1.3 * rng.random()))
        alive.append((identifier, size))
        total += size
        if rng.random() < 0.002:
            yield ("empty_cache", 0, 0, 0)


# What torch reported: allocations that failed, alloc_retries, peaks of allocated and reserved bytes, means of
# both over all events. Recorded from torch 2.13.0's own libc10_cuda.so with expandable segments, linked to a
# CUDA runtime and driver that only count bytes: 2 GiB of a device of 80 GiB.
RECORDED = (0, 9, 1_850_756_096, 2_132_803_584, 1_047_042_026, 1_801_642_487)


def test_it_does_what_torch_does() -> None:
    allocator = CachingAllocator(capacity_bytes=2 * GIB)
    blocks: dict[int, Block] = {}
    failed = events = allocated = reserved = 0
    for kind, identifier, size, stream in pattern(1, count=3000, target_bytes=2 * GIB):
        if kind == "empty_cache":
            allocator.empty_cache()
        elif kind == "free":
            allocator.give(blocks.pop(identifier))
        else:
            try:
                blocks[identifier] = allocator.take(size, stream)
            except OutOfMemoryError:
                failed += 1
        events += 1
        allocated += allocator.allocated_bytes
        reserved += allocator.reserved_bytes
    assert (
        failed,
        allocator.alloc_retries,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocated // events,
        reserved // events,
    ) == RECORDED


def pools_of(allocator: CachingAllocator) -> list[Pool]:
    return [*allocator._small.values(), *allocator._large.values()]


def free_sizes(allocator: CachingAllocator) -> list[int]:
    return [size for pool in pools_of(allocator) for size, _ in pool.free]


def check(allocator: CachingAllocator, blocks: list[Block], capacity_bytes: int) -> None:
    used = [size for pool in pools_of(allocator) for size in pool.live.values()]
    assert len(used) == len(blocks)
    assert allocator.allocated_bytes == sum(used)
    assert allocator.requested_bytes == sum(block.requested_bytes for block in blocks)
    assert all(block.pool.live[block.address] >= block.requested_bytes for block in blocks)
    assert allocator.reserved_bytes == allocator.allocated_bytes + sum(free_sizes(allocator))
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= capacity_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
    for pool in pools_of(allocator):
        check_pool(pool)


def check_pool(pool: Pool) -> None:
    assert pool.free == sorted(pool.free)
    assert pool.starts == {address: (size, address) for size, address in pool.free}
    assert pool.ends == {address + size: (size, address) for size, address in pool.free}
    free = {address: size for size, address in pool.free}
    kinds = {"free": free, "live": pool.live, "unmapped": pool.unmapped}
    ranges = sorted((a, size, kind) for kind, found in kinds.items() for a, size in found.items())
    assert all(size % 512 == 0 for _, size, _ in ranges)
    for (address, size, kind), following in pairwise([*ranges, (ADDRESSES, 0, "")]):
        assert address + size == following[0], "they overlap, or leave a gap"
        assert kind == "live" or kind != following[2], "they should have merged"
    assert ranges[0][0] == 0


SIZES = st.one_of(
    st.integers(1, 3000),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 30 * MIB),
    st.sampled_from([MIB, 20 * MIB]),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(events=EVENTS, capacity=st.integers(40, 160))
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_bytes_add_up(events: list[tuple[str, int, int]], capacity: int) -> None:
    allocator = CachingAllocator(capacity_bytes=capacity * MIB)
    blocks: list[Block] = []
    for kind, number, stream in events:
        if kind == "malloc":
            try:
                blocks.append(allocator.take(number, stream))
            except OutOfMemoryError:
                assert allocator.reserved_bytes + number + 20 * MIB > capacity * MIB
        elif kind == "free" and blocks:
            allocator.give(blocks.pop(number % len(blocks)))
        elif kind == "empty_cache":
            allocator.empty_cache()
        check(allocator, blocks, capacity * MIB)
    for block in blocks:
        allocator.give(block)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (0, 0)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (0, [])
