"""The allocator's rules, worked out by hand, and the assertions of torch's own tests that need no GPU."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shardwise.simulate.memory.allocator import CachingAllocator, OutOfMemoryError
from shardwise.simulate.memory.pool import Block

MIB = 1024**2
PLENTY = 1 << 50


def filled(sizes: Iterable[float], capacity_bytes: int = PLENTY) -> tuple[CachingAllocator, list[Block]]:
    """An allocator after allocations of so many MiB each, and their blocks."""
    allocator = CachingAllocator(capacity_bytes=capacity_bytes)
    return allocator, [allocator.take(int(size * MIB)) for size in sizes]


def free_sizes(allocator: CachingAllocator) -> list[float]:
    """Of the free blocks, in MiB, smallest first."""
    pools = [*allocator._small.values(), *allocator._large.values()]
    return sorted(size / MIB for pool in pools for size, _ in pool.free)


# Rounding, pages and splitting


@pytest.mark.parametrize(
    ("requested", "block", "pages"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (20 * MIB, 20 * MIB, 20 * MIB),
        (20 * MIB + 1, 20 * MIB + 512, 40 * MIB),
    ],
)
def test_sizes_are_rounded_and_come_from_pages(requested: int, block: int, pages: int) -> None:
    allocator = CachingAllocator(capacity_bytes=PLENTY)
    allocator.take(requested)
    assert allocator.requested_bytes == requested
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (block, pages)
    assert free_sizes(allocator) == ([(pages - block) / MIB] if pages > block else [])


def test_segments_grow_by_entire_pages() -> None:
    allocator = CachingAllocator(capacity_bytes=PLENTY)
    reserved = []
    for size in (1, 2 * MIB, 2 * MIB, 15 * MIB, 10 * MIB, 51 * MIB):
        allocator.take(size)
        reserved.append(allocator.reserved_bytes // MIB)
    # 2 MiB for the first; of 20 MiB 2 + 2 + 15, then 1 + 9 of the next 20, 11 + 40 with two more
    assert reserved == [2, 22, 22, 22, 42, 82]


def test_blocks_are_split_down_to_512_bytes() -> None:
    allocator, _ = filled([1])
    allocator.take(MIB - 512)
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (2 * MIB, [512 / MIB])
    allocator.take(100)
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (2 * MIB, [])
    allocator.take(100)
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_blocks_do_not_share_pages() -> None:
    allocator, _ = filled([2, 1])
    assert allocator.reserved_bytes == 22 * MIB


# Reuse: best fit, age, merging, streams


def test_the_smallest_free_block_that_fits_is_used() -> None:
    allocator, blocks = filled([40, 2, 20, 2, 30, 6])  # those of 2 and 6 keep the others apart
    for block in blocks[::2]:
        allocator.give(block)
    allocator.take(18 * MIB)  # of the 20
    allocator.take(29 * MIB)  # of the 30
    allocator.take(31 * MIB)  # of the 40
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == ((10 + 18 + 29 + 31) * MIB, 100 * MIB)
    assert free_sizes(allocator) == [1, 2, 9]


def test_among_equal_blocks_that_of_the_lowest_address_is_used() -> None:
    allocator, (low, _, high, _) = filled([20, 20, 20, 20])
    allocator.give(high)
    allocator.give(low)
    assert allocator.take(20 * MIB).address == low.address


def test_the_end_of_the_segment_is_used_last() -> None:
    allocator, blocks = filled([15, 15, 9])  # 1 MiB is free at the end of 40
    allocator.give(blocks[0])
    allocator.give(blocks[2])  # now 10 MiB
    allocator.take(8 * MIB)
    assert free_sizes(allocator) == [7, 10]


def test_neighbours_merge_and_their_pages_can_be_given_back() -> None:
    allocator, (first, second, third) = filled([6, 6, 6])  # of one page of 20 MiB
    allocator.give(first)
    allocator.give(third)
    assert free_sizes(allocator) == [6, 8]
    allocator.empty_cache()
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (20 * MIB, [6, 8])
    allocator.give(second)
    assert free_sizes(allocator) == [20]
    allocator.empty_cache()
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (0, [])
    allocator.take(10 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


def test_free_pages_are_unmapped_and_mapped_again_at_the_lowest_address() -> None:
    allocator, blocks = filled([30, 30, 20, 20])
    allocator.give(blocks[1])  # 30 to 60 MiB: of the page from 20 to 40 a half stays
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    assert free_sizes(allocator) == [10]
    allocator.take(25 * MIB)
    assert (allocator.reserved_bytes, free_sizes(allocator)) == (100 * MIB, [5])
    allocator.take(25 * MIB)  # too large for the gap
    assert allocator.reserved_bytes == 140 * MIB


def test_unmapped_pages_join_those_on_both_sides() -> None:
    allocator, blocks = filled([20] * 5)
    for place in (1, 3, 2):
        allocator.give(blocks[place])
        allocator.empty_cache()
    assert allocator.take(60 * MIB).address == 20 * MIB
    assert allocator.reserved_bytes == 100 * MIB


def test_a_stream_does_not_use_what_another_freed() -> None:
    allocator = CachingAllocator(capacity_bytes=PLENTY)
    allocator.give(allocator.take(20 * MIB, stream=0))
    allocator.take(20 * MIB, stream=7)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.take(20 * MIB, stream=0)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_block_that_other_streams_use_stays_active() -> None:
    allocator, (block,) = filled([20])
    deferred = allocator.give_later(block)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 20 * MIB)
    again = allocator.take(20 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_active_bytes) == (20 * MIB, 40 * MIB)
    allocator.complete(deferred)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (20 * MIB, 20 * MIB)
    allocator.give(again)
    assert (allocator.active_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (0, 0, 40 * MIB)


def test_each_peak_is_noted_whether_the_other_rises_or_not() -> None:
    allocator, (first, second) = filled([40, 20])
    deferred = allocator.give_later(first)
    allocator.take(60 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_active_bytes) == (80 * MIB, 120 * MIB)
    allocator.complete(deferred)
    allocator.give(second)
    allocator.take(30 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_active_bytes) == (90 * MIB, 120 * MIB)


def test_short_of_memory_torch_waits_for_other_streams() -> None:
    allocator, (block,) = filled([20], capacity_bytes=20 * MIB)
    deferred = allocator.give_later(block)
    allocator.take(20 * MIB, stream=1)
    assert (allocator.active_bytes, allocator.alloc_retries) == (20 * MIB, 1)
    allocator.complete(deferred)  # its event, which passed meanwhile
    assert (allocator.active_bytes, allocator.requested_bytes) == (20 * MIB, 20 * MIB)


def test_a_block_is_freed_once() -> None:
    allocator, (block,) = filled([1])
    allocator.give(block)
    for give in (allocator.give, allocator.give_later):
        with pytest.raises(KeyError):
            give(block)


def test_peaks_are_the_highest_so_far() -> None:
    def peaks() -> tuple[int, ...]:
        return (allocator.peak_allocated_bytes, allocator.peak_active_bytes, allocator.peak_reserved_bytes)

    allocator, (first, _) = filled([40, 20])
    allocator.give(first)
    allocator.empty_cache()
    assert allocator.allocated_bytes == 20 * MIB
    assert peaks() == (60 * MIB,) * 3


# Fragmentation and running out of memory


def longer_and_longer(allocator: CachingAllocator) -> None:
    """Buffers that grow from batch to batch, each freed after the next one is there."""
    previous = allocator.take(100 * MIB)
    for size in range(110, 200, 10):
        block = allocator.take(size * MIB)
        allocator.give(previous)
        previous = block


def test_sizes_that_grow_find_room_in_what_the_last_ones_left() -> None:
    allocator, _ = filled([])
    longer_and_longer(allocator)
    assert allocator.peak_allocated_bytes == (180 + 190) * MIB
    # A buffer goes where those before the last one were, or to the end: 220, 340, 420, 520 MiB are mapped.
    assert (allocator.reserved_bytes, allocator.alloc_retries) == (520 * MIB, 0)


def test_cached_pages_are_given_back_before_an_allocation_fails() -> None:
    allocator, _ = filled([], capacity_bytes=400 * MIB)
    longer_and_longer(allocator)
    assert (allocator.alloc_retries, allocator.peak_reserved_bytes) == (5, 400 * MIB)


def test_the_cache_of_every_pool_and_stream_is_given_back() -> None:
    allocator, _ = filled([], capacity_bytes=40 * MIB)
    allocator.give(allocator.take(2 * MIB, stream=1))
    allocator.give(allocator.take(1, stream=2))
    allocator.take(40 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_out_of_memory_says_how_much_was_used() -> None:
    allocator, _ = filled([60, 30, 8], capacity_bytes=100 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.take(10 * MIB - 1)
    assert caught.value.requested_bytes == 10 * MIB - 1
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (98 * MIB, 100 * MIB)
    assert "10485759 B requested" in str(caught.value)


def test_out_of_memory_although_the_sum_would_fit() -> None:
    allocator, blocks = filled([8] * 10, capacity_bytes=80 * MIB)
    for block in blocks[::2]:
        allocator.give(block)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.take(9 * MIB)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (40 * MIB, 80 * MIB)
    allocator.take(8 * MIB)


def test_after_running_out_of_memory_it_goes_on() -> None:
    allocator, (first, second) = filled([60, 40], capacity_bytes=100 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.take(1)
    allocator.give(first)
    allocator.take(30 * MIB)
    allocator.give(second)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (30 * MIB, 100 * MIB)


def test_the_pages_of_a_failed_attempt_stay_mapped() -> None:
    """The segment has a gap of one page and then grows at its end, where the device has no more."""
    allocator, blocks = filled([20, 20, 20], capacity_bytes=60 * MIB)
    allocator.give(blocks[2])
    allocator.give(blocks[1])
    allocator.empty_cache()
    allocator.take(15 * MIB, stream=1)
    with pytest.raises(OutOfMemoryError):
        allocator.take(30 * MIB)
    assert allocator.reserved_bytes == 40 * MIB, "30 MiB are mapped as two pages at once: none of them stays"


def test_torch_1mb_allocation_uses_small_block() -> None:
    """Of torch's test/test_cuda.py."""
    allocator, (_, b) = filled([1, 1])
    for _ in range(5):
        clone = allocator.take(MIB)
        total = allocator.take(MIB)
        allocator.give(b)
        allocator.give(clone)
        b = total
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 4 * MIB)
