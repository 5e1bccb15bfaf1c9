"""Long replays: what torch's own code recorded, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.simulate.allocator import NO_BLOCK, CachingAllocator, OutOfMemoryError
from shardwise.simulate.blocks import IN_USE, Block, Pool

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


# Settings, then what torch reported: allocations that failed, alloc_retries, segments, inactive_split_bytes,
# peaks of allocated and reserved bytes, means of both over all events. Recorded from torch 2.13.0's own
# libc10_cuda.so, linked to a CUDA runtime and driver that only count bytes: 2 GiB of a device of 80 GiB.
RECORDED: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({}, (8, 25, 15, 399_740_928, 1_636_551_680, 2_141_192_192, 1_022_593_239, 1_880_457_689)),
    ({"expandable_segments": True}, (0, 9, 0, 0, 1_850_756_096, 2_132_803_584, 1_047_042_026, 1_801_642_487)),
    (
        {"max_split_size_bytes": 100 * MIB},
        (0, 18, 21, 269_580_288, 1_860_962_304, 2_147_483_648, 1_056_046_433, 1_893_459_327),
    ),
    (
        {"roundup_power2_divisions": 4},
        (7, 29, 15, 563_463_680, 1_756_781_568, 2_145_386_496, 1_110_423_641, 1_918_156_728),
    ),
    (
        {"garbage_collection_threshold": 0.6, "limit_bytes": 2 * GIB},
        (5, 5, 14, 439_544_320, 1_676_687_360, 2_136_997_888, 1_038_067_134, 1_639_652_828),
    ),
]


@pytest.mark.parametrize(("options", "recorded"), RECORDED, ids=["-".join(row[0]) or "-" for row in RECORDED])
def test_it_does_what_torch_does(options: dict[str, Any], recorded: tuple[int, ...]) -> None:
    allocator = CachingAllocator(capacity_bytes=2 * GIB, device_bytes=80 * GIB, **options)
    handles: dict[int, int] = {}
    failed = events = allocated = reserved = 0
    for kind, identifier, size, stream in pattern(1, count=3000, target_bytes=2 * GIB):
        if kind == "empty_cache":
            allocator.empty_cache()
        elif kind == "free":
            allocator.free(handles[identifier])
        else:
            try:
                handles[identifier] = allocator.malloc(size, stream)
            except OutOfMemoryError:
                handles[identifier] = NO_BLOCK
                failed += 1
        events += 1
        allocated += allocator.allocated_bytes
        reserved += allocator.reserved_bytes
    assert recorded == (
        failed,
        allocator.alloc_retries,
        allocator.segments,
        allocator.inactive_split_bytes,
        allocator.peak_allocated_bytes,
        allocator.peak_reserved_bytes,
        allocated // events,
        reserved // events,
    )


def pools_of(allocator: CachingAllocator) -> list[Pool]:
    return [*allocator._small.values(), *allocator._large.values()]


def free_blocks(allocator: CachingAllocator) -> list[Block]:
    return [block for pool in pools_of(allocator) for block in pool.blocks]


def check(allocator: CachingAllocator, capacity_bytes: int) -> None:
    live = list(allocator._live.values())
    assert allocator.allocated_bytes == sum(block.size for block in live)
    assert allocator.requested_bytes == sum(block.requested for block in live)
    free = free_blocks(allocator)
    assert allocator.reserved_bytes == allocator.allocated_bytes + sum(block.size for block in free)
    assert allocator.reserved_bytes <= allocator.peak_reserved_bytes <= capacity_bytes
    assert allocator.allocated_bytes <= allocator.peak_allocated_bytes
    for pool in pools_of(allocator):
        assert pool.keys == sorted(set(pool.keys))
        blocks = [block for block in live if block.pool is pool] + pool.blocks + pool.unmapped
        blocks.sort(key=lambda block: block.address)
        for block, following in pairwise(blocks):
            assert block.address + block.size <= following.address, "they overlap"
            assert block.following in (following, None)
            assert following.preceding in (block, None)
            if block.state != IN_USE and block.following is not None:
                assert following.state != block.state, "they should have merged"
        assert all(
            (block.size % 512 == 0 and block.state != IN_USE) or block.size >= block.requested
            for block in blocks
        )


SIZES = st.one_of(
    st.integers(0, 3000),
    st.integers(1, 2 * MIB),
    st.integers(MIB, 30 * MIB),
    st.sampled_from([MIB, 10 * MIB]),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.integers(0, 1)),
        st.tuples(st.just("free"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("empty_cache"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@given(events=EVENTS, expandable=st.booleans(), capacity=st.integers(40, 160))
@settings(max_examples=150, deadline=None)
def test_blocks_never_overlap_and_bytes_add_up(
    events: list[tuple[str, int, int]], expandable: bool, capacity: int
) -> None:
    allocator = CachingAllocator(expandable_segments=expandable, capacity_bytes=capacity * MIB)
    handles: list[int] = []
    for kind, number, stream in events:
        if kind == "malloc":
            try:
                handles.append(allocator.malloc(number, stream))
            except OutOfMemoryError:
                assert allocator.reserved_bytes + number + 20 * MIB > capacity * MIB
        elif kind == "free" and handles:
            allocator.free(handles.pop(number % len(handles)))
        elif kind == "empty_cache":
            allocator.empty_cache()
        check(allocator, capacity * MIB)
    for handle in handles:
        allocator.free(handle)
    assert (allocator.allocated_bytes, allocator.requested_bytes, allocator.inactive_split_bytes) == (0, 0, 0)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments, free_blocks(allocator)) == (0, 0, [])
