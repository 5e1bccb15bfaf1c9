"""The allocator's rules, worked out by hand, and the assertions of torch's own tests that need no GPU."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from shardwise.simulate.memory.allocator import NO_BLOCK, CachingAllocator, OutOfMemoryError

MIB, GIB = 1024**2, 1024**3


def filled(sizes: Iterable[float], **options) -> tuple[CachingAllocator, list[int]]:
    """An allocator after allocations of so many MiB each, and their handles."""
    allocator = CachingAllocator(**options)
    return allocator, [allocator.malloc(int(size * MIB)) for size in sizes]


def free_sizes(allocator: CachingAllocator) -> list[float]:
    """Of the free blocks, in MiB, smallest first."""
    pools = [*allocator._small.values(), *allocator._large.values()]
    return sorted(size / MIB for pool in pools for size, _ in pool.free)


# Rounding, segments and splitting


@pytest.mark.parametrize(
    ("asked", "block", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB, 10 * MIB),  # the rounded size decides
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # 1 MiB would remain: too little to split off
        (32 * MIB + 1, 34 * MIB - (2 * MIB - 512), 34 * MIB),
    ],
)
def test_sizes_are_rounded_and_come_from_segments(asked: int, block: int, segment: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(asked)
    assert allocator.requested_bytes == asked
    assert (allocator.allocated_bytes, allocator.reserved_bytes, allocator.segments) == (block, segment, 1)
    assert allocator.inactive_split_bytes == segment - block


def test_small_blocks_share_a_segment_down_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert (allocator.reserved_bytes, allocator.inactive_split_bytes) == (2 * MIB, 512)
    allocator.malloc(100)
    assert (allocator.reserved_bytes, allocator.inactive_split_bytes) == (2 * MIB, 0)
    allocator.malloc(100)
    assert (allocator.reserved_bytes, allocator.segments) == (4 * MIB, 2)


def test_small_and_large_blocks_do_not_share_segments() -> None:
    allocator, _ = filled([2, 1])
    assert allocator.reserved_bytes == 22 * MIB


def test_an_empty_tensor_has_no_block() -> None:
    allocator = CachingAllocator(capacity_bytes=0)
    assert allocator.malloc(0) == NO_BLOCK
    allocator.free(NO_BLOCK)
    allocator.free_later(NO_BLOCK)
    assert allocator.reserved_bytes == 0


# Reuse: best fit, age, merging, streams


def test_the_smallest_free_block_that_fits_is_used() -> None:
    allocator, handles = filled([40, 20, 30])
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(18 * MIB)  # of the 20
    allocator.malloc(29 * MIB)  # of the 30, whole: 1 MiB is not split off
    allocator.malloc(31 * MIB)  # of the 40
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == ((18 + 30 + 31) * MIB, 90 * MIB)
    assert allocator.inactive_split_bytes == (2 + 9) * MIB


def test_among_equal_blocks_that_of_the_oldest_segment_is_used() -> None:
    allocator, (old, _, new) = filled([20, 20, 20])
    allocator.free(new)
    allocator.free(old)
    allocator.malloc(18 * MIB)
    assert [address for _, address in allocator._large[0].free] == [
        18 * MIB,
        80 * MIB,
    ]  # segments are a page of 20 MiB apart


def test_neighbours_merge_and_a_whole_segment_can_be_given_back() -> None:
    allocator, (first, second, third) = filled([6, 6, 6])  # of one segment of 20 MiB
    allocator.free(first)
    allocator.free(third)
    assert free_sizes(allocator) == [6, 8]
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.inactive_split_bytes) == (20 * MIB, 14 * MIB)
    allocator.free(second)
    assert free_sizes(allocator) == [20]
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.segments) == (0, 0)


def test_blocks_never_cross_segments() -> None:
    allocator, (first, second) = filled([10, 10])
    allocator.free(first)
    allocator.free(second)
    allocator.malloc(20 * MIB)
    assert (allocator.reserved_bytes, allocator.segments) == (40 * MIB, 3)


def test_a_stream_does_not_use_what_another_freed() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, stream=0))
    allocator.malloc(20 * MIB, stream=7)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(20 * MIB, stream=0)
    assert allocator.reserved_bytes == 40 * MIB


def test_a_block_that_other_streams_use_stays_active() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(20 * MIB)
    allocator.free_later(handle)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 20 * MIB)
    again = allocator.malloc(20 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_active_bytes) == (20 * MIB, 40 * MIB)
    allocator.free(handle)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (20 * MIB, 20 * MIB)
    allocator.free(again)
    assert (allocator.active_bytes, allocator.requested_bytes, allocator.reserved_bytes) == (0, 0, 40 * MIB)


def test_short_of_memory_torch_waits_for_other_streams() -> None:
    allocator = CachingAllocator(capacity_bytes=20 * MIB)
    handle = allocator.malloc(20 * MIB)
    allocator.free_later(handle)
    allocator.malloc(20 * MIB, stream=1)
    assert (allocator.active_bytes, allocator.alloc_retries) == (20 * MIB, 1)
    allocator.free(handle)  # its event, which passed meanwhile
    assert allocator.active_bytes == 20 * MIB


def test_a_handle_is_freed_once() -> None:
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(KeyError):
        allocator.free(handle)
    with pytest.raises(KeyError):
        allocator.free_later(handle)


def test_peaks_can_be_reset() -> None:
    allocator, (first, _) = filled([30, 20])
    allocator.free(first)
    allocator.empty_cache()
    peaks = (allocator.peak_allocated_bytes, allocator.peak_active_bytes, allocator.peak_reserved_bytes)
    assert peaks == (50 * MIB,) * 3
    allocator.reset_peaks()
    peaks = (allocator.peak_allocated_bytes, allocator.peak_active_bytes, allocator.peak_reserved_bytes)
    assert peaks == (20 * MIB,) * 3


# Fragmentation and running out of memory


def longer_and_longer(allocator: CachingAllocator) -> None:
    """Buffers that grow from batch to batch, each freed after the next one is there."""
    previous = NO_BLOCK
    for size in range(100, 200, 10):
        handle = allocator.malloc(size * MIB)
        allocator.free(previous)
        previous = handle


def test_sizes_that_grow_reserve_far_more_than_was_ever_allocated() -> None:
    allocator = CachingAllocator()
    longer_and_longer(allocator)
    assert allocator.peak_allocated_bytes == (180 + 190) * MIB
    assert allocator.reserved_bytes == sum(range(100, 200, 10)) * MIB


def test_cached_segments_are_given_back_before_an_allocation_fails() -> None:
    allocator = CachingAllocator(capacity_bytes=400 * MIB)
    longer_and_longer(allocator)
    # 130 MiB do not fit beside 100 + 110 + 120, then 150 beside 120 + 130 + 140, then every one
    assert (allocator.alloc_retries, allocator.reserved_bytes) == (6, (180 + 190) * MIB)
    assert allocator.peak_reserved_bytes == (120 + 130 + 140) * MIB


def test_the_cache_of_every_pool_and_stream_is_given_back() -> None:
    allocator = CachingAllocator(capacity_bytes=24 * MIB)
    allocator.free(allocator.malloc(2 * MIB, stream=1))
    allocator.free(allocator.malloc(1, stream=2))
    allocator.malloc(24 * MIB)
    assert (allocator.reserved_bytes, allocator.segments) == (24 * MIB, 1)


def test_out_of_memory_says_what_was_there() -> None:
    allocator, _ = filled([60, 30], capacity_bytes=100 * MIB)
    allocator.malloc(10 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(10 * MIB - 1)
    assert caught.value.requested_bytes == 10 * MIB - 1
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (100 * MIB, 100 * MIB)
    assert "10485759 B asked for" in str(caught.value)


def test_out_of_memory_although_the_sum_would_fit() -> None:
    allocator, handles = filled([8] * 10, capacity_bytes=110 * MIB)  # two in each of five segments of 20 MiB
    for handle in handles[::2]:
        allocator.free(handle)
    assert (allocator.allocated_bytes, allocator.inactive_split_bytes) == (40 * MIB, 60 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.malloc(12 * MIB)
    assert (caught.value.allocated_bytes, caught.value.reserved_bytes) == (40 * MIB, 100 * MIB)
    allocator.malloc(10 * MIB)  # what the device has left


def test_after_running_out_of_memory_it_goes_on() -> None:
    allocator, (first, second) = filled([50, 50], capacity_bytes=100 * MIB)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(1)
    allocator.free(first)
    allocator.malloc(30 * MIB)
    allocator.free(second)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (30 * MIB, 100 * MIB)


# Settings of PYTORCH_ALLOC_CONF that are off by default


def test_blocks_above_max_split_size_are_kept_whole() -> None:
    allocator, (large,) = filled([100], max_split_size_bytes=50 * MIB)
    allocator.free(large)
    allocator.malloc(40 * MIB)  # not of the 100
    assert allocator.reserved_bytes == 140 * MIB
    allocator.malloc(79 * MIB)  # 21 MiB smaller: too wasteful
    assert allocator.reserved_bytes == 220 * MIB
    allocator.malloc(81 * MIB)  # the 100, whole
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == ((40 + 80 + 100) * MIB, 220 * MIB)


def test_oversize_blocks_are_given_back_first_and_no_more_than_needed() -> None:
    allocator, handles = filled([60, 70, 80, 20], max_split_size_bytes=50 * MIB, capacity_bytes=230 * MIB)
    for handle in handles:
        allocator.free(handle)
    allocator.malloc(75 * MIB)  # fits the 80; 20 MiB of slack
    allocator.malloc(100 * MIB)  # no one block is as large: 70 and 60 go
    assert (allocator.reserved_bytes, allocator.alloc_retries) == ((80 + 20 + 100) * MIB, 0)


def test_garbage_collection_gives_back_what_waited_longest() -> None:
    allocator, handles = filled([40, 30, 20], limit_bytes=440 * MIB, garbage_collection_threshold=0.25)
    allocator.free(handles[0])
    allocator.free(handles[1])
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(50 * MIB)
    assert allocator.reserved_bytes == 140 * MIB, "90 MiB before it were below the threshold of 110"
    allocator.malloc(60 * MIB)
    assert (allocator.reserved_bytes, allocator.alloc_retries) == ((140 - 30 + 60) * MIB, 0)
    assert free_sizes(allocator) == [40]


def test_garbage_is_not_collected_without_a_limit() -> None:
    allocator, handles = filled([200], garbage_collection_threshold=0.1)
    allocator.free(handles[0])
    allocator.malloc(1)
    assert allocator.reserved_bytes == 202 * MIB


# Assertions of torch's test/test_cuda.py


def test_torch_out_of_memory_retry() -> None:
    total = 80 * GIB
    allocator = CachingAllocator(capacity_bytes=total - 500 * MIB)
    first = allocator.malloc(total // 2)
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(total // 2)
    allocator.free(first)
    allocator.malloc(total // 2)


def test_torch_set_per_process_memory_fraction() -> None:
    total = 85_024_112_640
    allocator = CachingAllocator(limit_bytes=int(0.5 * total))
    allocator.malloc(4096)
    application = int(total * 0.499) - allocator.peak_reserved_bytes
    allocator.free(allocator.malloc(application))
    allocator.empty_cache()
    with pytest.raises(OutOfMemoryError):
        allocator.malloc(int(total * 0.5))


@pytest.mark.parametrize(("elements", "divisions", "block"), [(21, 4, 96), (100, 8, 416)])
def test_torch_allocator_settings(elements: int, divisions: int, block: int) -> None:
    """`elements` Mi of four bytes each, and the size in MiB that its power2_div gives."""
    allocator = CachingAllocator(roundup_power2_divisions=divisions)
    allocator.malloc(4 * elements * MIB)
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (block * MIB, 4 * elements * MIB)
    allocator.malloc(divisions * 512)
    assert allocator.allocated_bytes == block * MIB + divisions * 512, "as small as that it is left alone"


@pytest.mark.parametrize("expandable", [False, True])
def test_torch_1mb_allocation_uses_small_block(expandable: bool) -> None:
    allocator, (_, b) = filled([1, 1], expandable_segments=expandable)
    for _ in range(5):
        clone = allocator.malloc(MIB)
        total = allocator.malloc(MIB)
        allocator.free(b)
        allocator.free(clone)
        b = total
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (2 * MIB, 4 * MIB)
