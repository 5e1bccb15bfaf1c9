"""Blocks of device memory and the ordered pools of free ones, as the CUDA caching allocator keeps them.

Follows struct Block and struct BlockPool of c10/cuda/CUDACachingAllocator.cpp, torch 2.13. torch links the
blocks of a segment to each other; here a block is an address and a size, and its neighbours are looked up by
the addresses at which it begins and ends: that takes a third of the time, and a plan replays millions of
allocations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

Block = tuple["Pool", int, int, int]
"""What an allocation is known by: its pool, its address, the bytes asked for before rounding, and a number
that is the caller's own."""


class Pool:
    """The memory of one stream and one class of sizes; all numbers are bytes.

    Attributes:
        sizes, addresses: of the free blocks, two parallel lists: ordered by size, then by the age of their
            segment, then by address (BlockComparatorSizeCounterAddress). Addresses grow from segment to
            segment, so the age is in them.
        starts: the sizes of the free blocks by the addresses at which they begin.
        ends: where the free blocks begin, by the addresses at which they end.
        live: the sizes of the blocks in use by their addresses.
        segments: the sizes of segments by their addresses, which are apart from each other.
        unmapped: the sizes of ranges of addresses without memory behind them; expandable segments only.
        freed_at: by the address of a free block, searches of the allocator when it was freed; kept only for
            garbage collection.
        page_bytes: what an expandable segment grows by.
        segment_bytes: how many addresses an expandable segment has.
        smallest_rest: bytes that must remain for a block to be split.
        split_below: requests of this many bytes take a whole block.
    """

    __slots__ = (
        "_end",
        "addresses",
        "ends",
        "freed_at",
        "live",
        "page_bytes",
        "segment_bytes",
        "segments",
        "sizes",
        "smallest_rest",
        "split_below",
        "starts",
        "unmapped",
    )

    def __init__(self, *, page_bytes: int, segment_bytes: int, smallest_rest: int, split_below: int) -> None:
        self.sizes: list[int] = []
        self.addresses: list[int] = []
        self.starts: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.live: dict[int, int] = {}
        self.segments: dict[int, int] = {}
        self.unmapped: dict[int, int] = {}
        self.freed_at: dict[int, int] = {}
        self.page_bytes = page_bytes
        self.segment_bytes = segment_bytes
        self.smallest_rest = smallest_rest
        self.split_below = split_below
        self._end = 0

    def new_segment(self, size: int) -> int:
        """Addresses that no segment has had; returns the first, a multiple of a page's size."""
        address = self._end
        self.segments[address] = size
        # a page between them, so that blocks of two segments are never beside each other
        self._end += (-(-size // self.page_bytes) + 1) * self.page_bytes
        return address

    def is_whole(self, address: int, size: int) -> bool:
        """Whether a block is all of its segment, which can then be given back."""
        return self.segments.get(address) == size

    @property
    def whole(self) -> list[tuple[int, int]]:
        """Address and size of the free blocks that are all of their segments, the smallest first."""
        free = zip(self.addresses, self.sizes, strict=True)
        return [block for block in free if self.is_whole(*block)]

    def place(self, address: int, size: int) -> int:
        """Where a free block stands in `sizes` and `addresses`, or would stand."""
        sizes = self.sizes
        index = bisect_left(sizes, size)
        if index < len(sizes) and sizes[index] == size and self.addresses[index] != address:
            return bisect_left(self.addresses, address, index, bisect_right(sizes, size, index))
        return index

    def insert(self, address: int, size: int) -> None:
        """A free block with nothing free beside it."""
        self.starts[address] = size
        self.ends[address + size] = address
        index = self.place(address, size)
        self.sizes.insert(index, size)
        self.addresses.insert(index, address)

    def remove(self, address: int, size: int) -> None:
        """A free block leaves."""
        del self.starts[address], self.ends[address + size]
        index = self.place(address, size)
        del self.sizes[index], self.addresses[index]

    def put_back(self, address: int, size: int) -> int:
        """A range becomes free and grows by the free blocks beside it (free_block, try_merge_blocks).

        Returns where the free block begins that it is now part of. Half of all events of a replay end here.
        """
        sizes, addresses, ends = self.sizes, self.addresses, self.ends
        end = address + size
        if address in ends:
            before = ends.pop(address)
            index = bisect_left(sizes, address - before)
            if addresses[index] != before:
                index = self.place(before, address - before)
            del sizes[index], addresses[index]
            address = before
        if end in self.starts:
            behind = self.starts.pop(end)
            index = bisect_left(sizes, behind)
            if addresses[index] != end:
                index = self.place(end, behind)
            del sizes[index], addresses[index]
            end += behind
        self.starts[address] = size = end - address
        ends[end] = address
        index = bisect_left(sizes, size)
        if index < len(sizes) and sizes[index] == size:
            index = self.place(address, size)
        sizes.insert(index, size)
        addresses.insert(index, address)
        return address
