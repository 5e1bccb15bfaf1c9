"""The free and used blocks of one stream and size class, as the CUDA caching allocator keeps them.

Follows Block, BlockPool and ExpandableSegment of c10/cuda/CUDACachingAllocator.cpp, torch 2.13. Its functions
stand in parentheses. torch links the blocks of a segment to each other. Here a block is an address and a
size, and its neighbours are looked up by the addresses at which it begins and ends. That takes a third of the
time, and a plan replays millions of allocations.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

Free = tuple[int, int]
"""A free block: its size and its address."""

ADDRESSES = 1 << 62
"""Bytes of addresses in a segment. In torch 1.125 times the GPU's memory, and then another segment begins; a
replay goes on where the GPU would be full, to say by how much."""


class Block(NamedTuple):
    """An allocation."""

    pool: Pool
    address: int
    requested_bytes: int  # Before rounding; 0 for a tensor without elements, which has no memory
    account: int  # What the caller uses it for


class Pool:
    """The memory of one stream and one size class: one expandable segment. All numbers are bytes."""

    __slots__ = ("ends", "free", "live", "page_bytes", "starts", "unmapped")

    def __init__(self, *, page_bytes: int) -> None:
        self.page_bytes = page_bytes  # what the segment grows by
        self.free: list[Free] = []  # by size, then by address (BlockComparatorSizeCounterAddress)
        self.starts: dict[int, Free] = {}  # the free blocks by the addresses at which they begin
        self.ends: dict[int, Free] = {}  # and by those at which they end
        self.live: dict[int, int] = {}  # sizes of the blocks in use by their addresses
        self.unmapped: dict[int, int] = {0: ADDRESSES}  # sizes of ranges without memory by their addresses

    def take(self, size: int) -> int:
        """Use the smallest free block that fits (get_free_block, alloc_found_block).

        Returns its address, or -1 where no block fits. Half of all events of a replay end here, the other
        half in `put_back`.
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
        if rest:
            behind = address + size
            self.starts[behind] = self.ends[address + found] = block = (rest, behind)
            if index and free[index - 1] > block:
                del free[index]
                insort(free, block)
            else:
                free[index] = block
        else:
            del free[index], self.ends[address + found]
        self.live[address] = size
        return address

    def _not_at_the_end(self, index: int) -> int:
        """Index of the free block to use, given the index of the smallest that fits (get_free_block).

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

    def put_back(self, address: int, size: int) -> None:
        """Free a range, merged with the free blocks next to it (free_block, try_merge_blocks)."""
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

    def grow(self, size: int, reserve: Callable[[int], bool]) -> int:
        """Use a block after mapping the pages it lacks (try_allocate_expandable_block).

        `reserve` takes a number of bytes from the GPU, or returns False. Returns the address, or -1 where
        `reserve` fails; what was mapped by then stays in the pool, as in torch.
        """
        start = self._lowest_room(size)
        if start in self.unmapped and not self._map(start, min(self.unmapped[start], size), reserve):
            return -1
        while (mapped := self.starts[start][0]) < size:
            end = start + mapped
            if not self._map(end, min(size - mapped, self.unmapped[end]), reserve):
                return -1
        self._remove(start)
        if mapped > size:
            self.put_back(start + size, mapped - size)
        self.live[start] = size
        return start

    def _lowest_room(self, size: int) -> int:
        """Begin of the lowest run of free and unmapped addresses with room (find_expandable_block)."""
        starts, ends, unmapped = self.starts, self.ends, self.unmapped
        start = 0
        for address in sorted(unmapped):
            start = end = ends[address][1] if address in ends else address
            while end - start < size:
                more = starts[end][0] if end in starts else unmapped.get(end, 0)
                if not more:
                    break
                end += more
            else:
                break
        return start

    def _map(self, address: int, size: int, reserve: Callable[[int], bool]) -> bool:
        """Put memory behind the first `size` bytes of an unmapped range, in entire pages (map_block)."""
        mapped = -(-size // self.page_bytes) * self.page_bytes
        if not reserve(mapped):
            return False
        rest = self.unmapped.pop(address) - mapped
        if rest:
            self.unmapped[address + mapped] = rest
        self.put_back(address, mapped)
        return True

    def release(self) -> int:
        """Give back every page without a block in use (release_blocks, unmap_block); return their bytes."""
        released = 0
        page = self.page_bytes
        for size, start in list(self.starts.values()):
            end = start + size
            first, last = -(-start // page) * page, end // page * page
            if first < last:
                self._remove(start)
                if start < first:
                    self.put_back(start, first - start)
                if last < end:
                    self.put_back(last, end - last)
                self._unmap(first, last)
                released += last - first
        return released

    def _unmap(self, first: int, last: int) -> None:
        """Join a range with the unmapped ones next to it (try_merge_blocks)."""
        for address, size in list(self.unmapped.items()):
            if address + size == first or address == last:
                first, last = min(first, address), max(last, address + size)
                del self.unmapped[address]
        self.unmapped[first] = last - first

    def _remove(self, address: int) -> None:
        """Take a free block out."""
        block = self.starts.pop(address)
        del self.ends[address + block[0]]
        del self.free[bisect_left(self.free, block)]
