"""`expandable_segments:True`: one segment a pool, which gets memory page by page as it grows.

Follows struct ExpandableSegment of c10/cuda/CUDACachingAllocator.cpp, torch 2.13, and those functions of that
file that stand in parentheses below.
"""

from __future__ import annotations

from collections.abc import Callable

from shardwise.simulate.memory.pool import Pool


def grow(pool: Pool, size: int, take: Callable[[int], bool]) -> int | None:
    """A block of `size` bytes or more after mapping pages, or None (try_allocate_expandable_block).

    Args:
        pool: the pool to grow.
        size: in bytes.
        take: takes so many bytes of the device's memory, or says that it cannot.

    Returns:
        The address of a free block. After None, what was mapped on the way stays in the pool, as in torch.
    """
    starts, unmapped = pool.starts, pool.unmapped
    start = _lowest_room(pool, size)
    if start in unmapped and not _map(pool, start, min(unmapped[start], size), take):
        return None
    while (mapped := starts[start][0]) < size:
        end = start + mapped
        if not _map(pool, end, min(size - mapped, unmapped[end]), take):
            return None
    return start


def _lowest_room(pool: Pool, size: int) -> int:
    """Where the lowest run of free and unmapped addresses with room begins (find_expandable_block)."""
    starts, ends, unmapped = pool.starts, pool.ends, pool.unmapped
    for address in sorted(unmapped):
        start = end = ends[address][1] if address in ends else address
        while end - start < size:
            more = starts[end][0] if end in starts else unmapped.get(end, 0)
            if not more:
                break
            end += more
        else:
            return start
    # torch would fail where a segment is too small; a replay goes on, to say by how much
    addresses = -(-max(pool.segment_bytes, size) // pool.page_bytes) * pool.page_bytes
    start = pool.new_segment(addresses)
    unmapped[start] = addresses
    return start


def _map(pool: Pool, address: int, size: int, take: Callable[[int], bool]) -> bool:
    """Put memory behind the first `size` bytes of an unmapped range, in whole pages (map_block).

    Pages are created one by one, but when one fails those of the same call are given back.
    """
    mapped = -(-size // pool.page_bytes) * pool.page_bytes
    if not take(mapped):
        return False
    rest = pool.unmapped.pop(address) - mapped
    if rest:
        pool.unmapped[address + mapped] = rest
    pool.put_back(address, mapped)
    return True


def release(pool: Pool) -> int:
    """Give back every page that no block in use touches (release_blocks).

    Returns:
        Bytes given back.
    """
    return sum(_unmap(pool, address, size) for size, address in list(pool.starts.values()))


def _unmap(pool: Pool, start: int, size: int) -> int:
    """Give back the whole pages of a free block; what they leave at its ends stays free (unmap_block)."""
    page, end = pool.page_bytes, start + size
    first, last = -(-start // page) * page, end // page * page
    if first >= last:
        return 0
    pool.remove(start)
    if start < first:
        pool.put_back(start, first - start)
    if last < end:
        pool.put_back(last, end - last)
    _add_unmapped(pool, first, last)
    return last - first


def _add_unmapped(pool: Pool, first: int, last: int) -> None:
    """Join a range with the unmapped ones beside it (try_merge_blocks)."""
    unmapped = pool.unmapped
    for address, size in list(unmapped.items()):
        if address + size == first or address == last:
            first, last = min(first, address), max(last, address + size)
            del unmapped[address]
    if pool.is_whole(first, last - first):
        del pool.segments[first]  # its addresses go back too (release_expandable_segment)
    else:
        unmapped[first] = last - first
