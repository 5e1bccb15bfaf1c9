"""Expandable segments: pages instead of segments."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shardwise.simulate.memory.allocator import NO_BLOCK, CachingAllocator, OutOfMemoryError

MIB = 1024**2


def filled(sizes: Iterable[float], **options) -> tuple[CachingAllocator, list[int]]:
    """An allocator after allocations of so many MiB each, and their handles."""
    allocator = CachingAllocator(**options)
    return allocator, [allocator.malloc(int(size * MIB)) for size in sizes]


def free_sizes(allocator: CachingAllocator) -> list[float]:
    """Of the free blocks, in MiB, smallest first."""
    pools = [*allocator._small.values(), *allocator._large.values()]
    return sorted(size / MIB for pool in pools for size, _ in pool.free)


def test_expandable_segments_grow_by_whole_pages() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    reserved = []
    for size in (1, 2 * MIB, 2 * MIB, 15 * MIB, 10 * MIB, 51 * MIB):
        allocator.malloc(size)
        reserved.append(allocator.reserved_bytes // MIB)
    # 2 MiB for the first; of 20 MiB 2 + 2 + 15, then 1 + 9 of the next 20, 11 + 40 with two more
    assert reserved == [2, 22, 22, 22, 42, 82]
    assert (allocator.segments, allocator.inactive_split_bytes) == (0, 0)


def test_expandable_segments_split_off_512_bytes() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_free_pages_are_unmapped_and_mapped_again_at_the_lowest_address() -> None:
    allocator, handles = filled([30, 30, 20, 20], expandable_segments=True)
    allocator.free(handles[1])  # 30 to 60 MiB: of the page from 20 to 40 a half stays
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    assert free_sizes(allocator) == [10]
    allocator.malloc(25 * MIB)
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (100 * MIB, [5])
    allocator.malloc(25 * MIB)  # too large for the gap
    assert allocator.reserved_bytes == 140 * MIB


def test_the_end_of_an_expandable_segment_is_used_last() -> None:
    allocator, handles = filled([15, 15, 9], expandable_segments=True)  # 1 MiB is free at the end of 40
    allocator.free(handles[0])
    allocator.free(handles[2])  # now 10 MiB
    allocator.malloc(8 * MIB)
    assert free_sizes(allocator) == [7, 10]


def test_unused_expandable_segments_go_back_whole() -> None:
    allocator, handles = filled([30, 0.5], expandable_segments=True)
    for handle in handles:
        allocator.free(handle)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    allocator.malloc(10 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_another_expandable_segment_begins_where_addresses_end() -> None:
    """On a device of 80 MiB a segment has 90 MiB of addresses, that is five pages."""
    allocator, handles = filled([20, 20, 20, 20, 40], expandable_segments=True, device_bytes=80 * MIB)
    allocator.free(handles[3])
    allocator.free(handles[4])
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (120 * MIB, [20, 40])
    allocator.malloc(60 * MIB)
    assert allocator.reserved_bytes == 140 * MIB


def test_an_expandable_segment_without_pages_is_gone() -> None:
    allocator, handles = filled([20, 20, 20, 20, 30], expandable_segments=True, device_bytes=80 * MIB)
    for handle in handles[:4]:
        allocator.free(handle)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (40 * MIB, [10])
    allocator.malloc(25 * MIB)  # in the second segment, where 10 MiB are mapped already
    assert allocator.reserved_bytes == 60 * MIB


def test_a_limit_counts_segments_and_a_capacity_counts_pages() -> None:
    limited = CachingAllocator(expandable_segments=True, limit_bytes=30 * MIB)
    limited.malloc(21 * MIB)
    assert limited.reserved_bytes == 40 * MIB, "as a segment it would have been 22 MiB"
    with pytest.raises(OutOfMemoryError):
        limited.malloc(1)
    with pytest.raises(OutOfMemoryError):
        CachingAllocator(expandable_segments=True, capacity_bytes=30 * MIB).malloc(21 * MIB)
    with pytest.raises(OutOfMemoryError):
        CachingAllocator(expandable_segments=True, limit_bytes=19 * MIB).malloc(2 * MIB)


def test_sizes_that_grow_find_room_in_what_the_last_ones_left() -> None:
    expandable = CachingAllocator(expandable_segments=True)
    previous = NO_BLOCK
    for size in range(100, 200, 10):
        handle = expandable.malloc(size * MIB)
        expandable.free(previous)
        previous = handle
    assert expandable.peak_allocated_bytes == (180 + 190) * MIB
    # A buffer goes where those before the last one were, or to the end: 220, 340, 420, 520 MiB are mapped.
    assert expandable.reserved_bytes == 520 * MIB


def test_fragments_make_an_allocation_fail_that_pages_let_pass() -> None:
    def holes(**options) -> CachingAllocator:
        allocator, handles = filled([8] * 10, capacity_bytes=100 * MIB, **options)
        for handle in handles[5:]:
            allocator.free(handle)
        return allocator

    allocator = holes()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (40 * MIB, 100 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(50 * MIB)
    assert caught.value.reserved_bytes == 60 * MIB, "the two segments that were free were given back"
    expandable = holes(expandable_segments=True)
    expandable.malloc(50 * MIB)
    assert (expandable.allocated_bytes, expandable.reserved_bytes) == (90 * MIB, 100 * MIB)
