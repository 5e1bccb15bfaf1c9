"""Long replays: what torch's own code recorded, and what must hold whatever happens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.simulate.memory.allocator import NO_BLOCK, CachingAllocator, OutOfMemoryError
from shardwise.simulate.memory.pool import Pool

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


def free_sizes(allocator: CachingAllocator) -> list[int]:
    return [size for pool in pools_of(allocator) for size, _ in pool.free]


def check(allocator: CachingAllocator, capacity_bytes: int) -> None:
    live = list(allocator._live.values())
    used = [size for pool in pools_of(allocator) for size in pool.live.values()]
    assert len(used) == len(live)
    assert allocator.allocated_bytes == sum(used)
    assert allocator.requested_bytes == sum(requested for _, _, requested, _ in live)
    assert all(pool.live[address] >= requested for pool, address, requested, _ in live)
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
    covered: dict[int, int] = {}
    for (address, size, kind), following in pairwise([*ranges, (1 << 60, 0, "")]):
        start = address if address in pool.segments else max(covered)
        assert start + covered.get(start, 0) == address, "they overlap, or leave a gap"
        covered[start] = covered.get(start, 0) + size
        if address + size == following[0] and kind != "live":
            assert kind != following[2], "they should have merged"
    assert covered == pool.segments


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
    assert (allocator.reserved_bytes, allocator.segments, free_sizes(allocator)) == (0, 0, [])
