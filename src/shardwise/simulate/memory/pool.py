"""Blocks of device memory and the ordered pools of free ones, as the CUDA caching allocator keeps them.

Follows struct Block and struct BlockPool of c10/cuda/CUDACachingAllocator.cpp, torch 2.13. torch links the
blocks of a segment to each other; here a block is an address and a size, and its neighbours are looked up by
the addresses at which it begins and ends: that takes a third of the time, and a plan replays millions of
allocations.
"""

from __future__ import annotations

from bisect import bisect_left, insort

Free = tuple[int, int]
"""A free block: its size and its address."""

Block = tuple["Pool", int, int, int]
"""What an allocation is known by: its pool, its address, the bytes asked for before rounding, and a number
that is the caller's own."""


class Pool:
    """The memory of one stream and one class of sizes; all numbers are bytes.

    Attributes:
        free: the free blocks, each its size and its address, in order: by size, then by the age of their
            segment, then by address (BlockComparatorSizeCounterAddress). Addresses grow from segment to
            segment, so the age is in them.
        starts, ends: the same by the addresses at which they begin, and by those at which they end.
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
        "ends",
        "free",
        "freed_at",
        "live",
        "page_bytes",
        "segment_bytes",
        "segments",
        "smallest_rest",
        "split_below",
        "starts",
        "unmapped",
    )

    def __init__(self, *, page_bytes: int, segment_bytes: int, smallest_rest: int, split_below: int) -> None:
        self.free: list[Free] = []
        self.starts: dict[int, Free] = {}
        self.ends: dict[int, Free] = {}
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
        return [(address, size) for size, address in self.free if self.is_whole(address, size)]

    def remove(self, address: int) -> int:
        """A free block leaves; returns its size."""
        block = self.starts.pop(address)
        del self.ends[address + block[0]]
        del self.free[bisect_left(self.free, block)]
        return block[0]

    def use(self, address: int, size: int) -> None:
        """The first `size` bytes of a free block come in use (alloc_found_block).

        All of it does where the rest would be too small.
        """
        found = self.remove(address)
        if found - size >= self.smallest_rest and size < self.split_below:
            self.put_back(address + size, found - size)
            found = size
        self.live[address] = found

    def take(self, size: int) -> int:
        """Uses the smallest free block that fits; returns its address, -1 where none does (get_free_block).

        It is `find` and `use` in one piece: half of all events of a replay end here, half in `put_back`.
        """
        free = self.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return -1
        found, address = free[index]
        if address + found in self.unmapped and index + 1 < len(free):
            index = self._not_at_the_end(index)
            found, address = free[index]
        rest = found - size
        del self.starts[address]
        if rest >= self.smallest_rest and size < self.split_below:
            behind = address + size
            self.starts[behind] = self.ends[address + found] = block = (rest, behind)
            if index and free[index - 1] > block:
                del free[index]
                insort(free, block)
            else:
                free[index] = block
            self.live[address] = size
        else:
            del free[index], self.ends[address + found]
            self.live[address] = found
        return address

    def find(self, size: int) -> Free | None:
        """The block that `take` would use."""
        index = bisect_left(self.free, (size,))
        return None if index == len(self.free) else self.free[self._not_at_the_end(index)]

    def _not_at_the_end(self, index: int) -> int:
        """Where the block to use stands, given where the smallest that fits does; in an expandable segment.

        A block followed by addresses without memory counts as large as it could grow, so that the end of the
        segment is used last.
        """
        free, reach = self.free, 0
        for place in range(index, len(free)):
            found, address = free[place]
            beyond = self.unmapped.get(address + found, 0)
            if place > index and found + beyond >= reach:
                return place - 1
            if not beyond:
                return place  # larger blocks do not reach less far
            reach = found + beyond
        return len(free) - 1

    def put_back(self, address: int, size: int) -> int:
        """A range becomes free and grows by the free blocks beside it (free_block, try_merge_blocks).

        Returns where the free block begins that it is now part of.
        """
        free, starts, ends = self.free, self.starts, self.ends
        end = address + size
        if address in ends:
            block = ends.pop(address)
            del free[bisect_left(free, block)]
            address = block[1]
        if end in starts:
            block = starts.pop(end)
            del free[bisect_left(free, block)]
            end += block[0]
        starts[address] = ends[end] = block = (end - address, address)
        insort(free, block)
        return address
