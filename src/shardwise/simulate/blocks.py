"""Blocks of device memory and the ordered pools of free ones, as the CUDA caching allocator keeps them.

Follows struct Block and struct BlockPool of c10/cuda/CUDACachingAllocator.cpp, torch 2.13.
"""

from __future__ import annotations

from bisect import bisect_left

# States of a block. torch says the same with `allocated`, `event_count` and `mapped`.
IN_USE, FREE, UNMAPPED = range(3)

# Free blocks are ordered by size, then by the age of their segment, then by address
# (BlockComparatorSizeCounterAddress). Addresses here grow from segment to segment, so the age is in them.
# 56 bits are enough for segments that fill a GPU of 80 GiB 800,000 times.
ADDRESS_BITS = 56


class Block:
    """A range of one segment: a tensor's memory, or a gap that a tensor can have.

    Attributes:
        size: in bytes, a multiple of 512.
        requested: what was asked for, in bytes, before rounding.
        address: of its first byte, in an address space of its pool's own.
        preceding, following: the blocks beside it in its segment.
        cached_at: searches of the allocator when it was freed; kept only for garbage collection.
    """

    __slots__ = ("address", "cached_at", "following", "pool", "preceding", "requested", "size", "state")

    cached_at: int
    requested: int

    def __init__(
        self,
        pool: Pool,
        address: int,
        size: int,
        preceding: Block | None,
        following: Block | None,
        state: int,
    ) -> None:
        """Stands between `preceding` and `following`, which the caller makes point here."""
        self.pool = pool
        self.address = address
        self.size = size
        self.preceding = preceding
        self.following = following
        self.state = state

    @property
    def is_split(self) -> bool:
        """Part of a segment, so that the segment cannot be given back with this block alone."""
        return self.preceding is not None or self.following is not None


class Pool:
    """The free blocks of one stream and one class of sizes, smallest first.

    Attributes:
        keys, blocks: two parallel lists; a key is a size and an address, see ADDRESS_BITS.
        unmapped: ranges of addresses without memory behind them, by address; expandable segments only.
        page_bytes: what an expandable segment grows by.
        smallest_rest: bytes that must remain for a block to be split.
        split_below: requests of this many bytes take a whole block.
        end: the first address no segment has had.
    """

    __slots__ = (
        "blocks",
        "end",
        "keys",
        "page_bytes",
        "segment_bytes",
        "smallest_rest",
        "split_below",
        "unmapped",
    )

    def __init__(self, *, page_bytes: int, segment_bytes: int, smallest_rest: int, split_below: int) -> None:
        self.keys: list[int] = []
        self.blocks: list[Block] = []
        self.unmapped: list[Block] = []
        self.page_bytes = page_bytes
        self.segment_bytes = segment_bytes
        self.smallest_rest = smallest_rest
        self.split_below = split_below
        self.end = 0

    def insert(self, block: Block) -> None:
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(self.keys, key)
        self.keys.insert(index, key)
        self.blocks.insert(index, block)

    def remove(self, block: Block) -> None:
        index = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[index], self.blocks[index]

    def put_back(self, block: Block) -> None:
        """Free a block: it grows by the free blocks beside it (free_block, try_merge_blocks).

        Written out instead of calling `insert` and `remove`: half of all events of a replay end here.
        """
        keys, blocks = self.keys, self.blocks
        block.state = FREE
        beside = block.preceding
        if beside is not None and beside.state == FREE:
            index = bisect_left(keys, beside.size << ADDRESS_BITS | beside.address)
            del keys[index], blocks[index]
            block.address = beside.address
            block.size += beside.size
            block.preceding = before = beside.preceding
            if before is not None:
                before.following = block
        beside = block.following
        if beside is not None and beside.state == FREE:
            index = bisect_left(keys, beside.size << ADDRESS_BITS | beside.address)
            del keys[index], blocks[index]
            block.size += beside.size
            block.following = after = beside.following
            if after is not None:
                after.preceding = block
        key = block.size << ADDRESS_BITS | block.address
        index = bisect_left(keys, key)
        keys.insert(index, key)
        blocks.insert(index, block)
