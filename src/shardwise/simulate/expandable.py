"""`expandable_segments:True`: one segment a pool, which gets memory page by page as it grows.

Follows struct ExpandableSegment of c10/cuda/CUDACachingAllocator.cpp, torch 2.13, and those functions of that
file that stand in parentheses below.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from operator import attrgetter

from shardwise.simulate.blocks import FREE, IN_USE, UNMAPPED, Block, Pool

_address = attrgetter("address")


def best_fit(pool: Pool, index: int) -> int:
    """Where the block to use stands, given where the smallest that fits does (get_free_block).

    A block followed by addresses without memory counts as large as it could grow, so that the end of the
    segment is used last.
    """
    blocks = pool.blocks
    following = blocks[index].following
    if following is None or following.state != UNMAPPED:
        return index  # larger blocks do not reach less far
    while index + 1 < len(blocks) and _reach(blocks[index + 1]) < _reach(blocks[index]):
        index += 1
    return index


def _reach(block: Block) -> int:
    following = block.following
    return block.size + (following.size if following is not None and following.state == UNMAPPED else 0)


def grow(pool: Pool, size: int, take: Callable[[int], bool]) -> Block | None:
    """A block of `size` bytes or more after mapping pages, or None (try_allocate_expandable_block).

    Args:
        pool: the pool to grow.
        size: in bytes.
        take: takes so many bytes of the device's memory, or says that it cannot.

    Returns:
        A block that has left the pool. After None, what was mapped on the way stays in the pool, as in torch.
    """
    block: Block | None = _lowest_room(pool, size)
    if block is not None and block.state == UNMAPPED:
        block = _map(pool, block, min(block.size, size), take)
    while block is not None and block.size < size:
        assert block.following is not None, "_lowest_room found room"
        block = _map(pool, block.following, min(size - block.size, block.following.size), take)
    if block is not None:
        pool.remove(block)
    return block


def _lowest_room(pool: Pool, size: int) -> Block:
    """The first block of the lowest run of free and unmapped blocks with room (find_expandable_block)."""
    for unmapped in pool.unmapped:
        start = unmapped
        before = unmapped.preceding
        if before is not None and before.state == FREE:
            start = before
        room = 0
        block: Block | None = start
        while room < size and block is not None and block.state != IN_USE:
            room, block = room + block.size, block.following
        if room >= size:
            return start
    addresses = -(-pool.segment_bytes // pool.page_bytes) * pool.page_bytes
    segment = Block(pool, pool.end, addresses, None, None, UNMAPPED)
    pool.end += addresses
    pool.unmapped.append(segment)
    return segment


def _map(pool: Pool, unmapped: Block, size: int, take: Callable[[int], bool]) -> Block | None:
    """Put memory behind the first `size` bytes of an unmapped block, in whole pages (map_block).

    Pages are created one by one, but when one fails those of the same call are given back.

    Returns:
        The free block that these pages are now part of.
    """
    mapped = -(-size // pool.page_bytes) * pool.page_bytes
    if not take(mapped):
        return None
    block = unmapped
    if mapped == unmapped.size:
        pool.unmapped.remove(unmapped)
    else:
        block = Block(pool, unmapped.address, mapped, unmapped.preceding, unmapped, FREE)
        if unmapped.preceding is not None:
            unmapped.preceding.following = block
        unmapped.preceding = block
        unmapped.address += mapped
        unmapped.size -= mapped
    pool.put_back(block)
    return block


def release(pool: Pool) -> int:
    """Give back every page that no block in use touches (release_blocks).

    Returns:
        Bytes given back.
    """
    return sum(_unmap(pool, block) for block in list(pool.blocks))


def _unmap(pool: Pool, block: Block) -> int:
    """Give back the whole pages of a free block; what they leave at its ends stays free (unmap_block)."""
    page = pool.page_bytes
    start, end = block.address, block.address + block.size
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return 0
    pool.remove(block)
    if start < first:
        before = Block(pool, start, first - start, block.preceding, block, FREE)
        if block.preceding is not None:
            block.preceding.following = before
        block.preceding = before
        pool.insert(before)
    if last < end:
        after = Block(pool, last, end - last, block, block.following, FREE)
        if block.following is not None:
            block.following.preceding = after
        block.following = after
        pool.insert(after)
    block.address, block.size, block.state = first, last - first, UNMAPPED
    _merge_unmapped(pool, block)
    if not block.is_split:  # a whole segment: its addresses go back too (release_expandable_segment)
        pool.unmapped.remove(block)
    return last - first


def _merge_unmapped(pool: Pool, block: Block) -> None:
    """Join a block with the unmapped ones beside it (try_merge_blocks)."""
    before, after = block.preceding, block.following
    if before is not None and before.state == UNMAPPED:
        pool.unmapped.remove(before)
        block.address = before.address
        block.size += before.size
        block.preceding = before.preceding
        if block.preceding is not None:
            block.preceding.following = block
    if after is not None and after.state == UNMAPPED:
        pool.unmapped.remove(after)
        block.size += after.size
        block.following = after.following
        if block.following is not None:
            block.following.preceding = block
    insort(pool.unmapped, block, key=_address)
