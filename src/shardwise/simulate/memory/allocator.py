"""PyTorch's CUDA caching allocator as arithmetic: what allocations reserve on a GPU, and when one fails.

Follows class DeviceCachingAllocator of c10/cuda/CUDACachingAllocator.cpp, torch 2.13, under
`PYTORCH_ALLOC_CONF=expandable_segments:True` (decision 0030); its functions stand in parentheses.

Not modelled: other settings of the allocator, and memory shared between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.simulate.memory.pool import Block, Pool

if TYPE_CHECKING:
    from shardwise.simulate.memory.spans import Span

MIB = 1024**2

# c10/core/AllocatorConfig.h
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_BYTES = MIB  # kSmallSize: up to here a request is served from the small pool
SMALL_PAGE_BYTES = 2 * MIB  # kSmallBuffer: what the small pool grows by
LARGE_PAGE_BYTES = 20 * MIB  # large_segment_size: what the large pool grows by


class OutOfMemoryError(Exception):
    """An allocation fails although all cached memory was given back."""

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} B requested with {allocated_bytes} B allocated, {reserved_bytes} B reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


@dataclass(eq=False, slots=True)
class DeferredFree:
    """A block that was freed while another stream uses it, and its bytes.

    Its place alone would not identify it: when memory runs short, another tensor may get that place.
    """

    block: Block
    size: int


class CachingAllocator:
    """Replays allocations and frees of one device, in the order in which the program makes them.

    The attributes are those of torch.cuda.memory_stats(): `allocated_bytes` is `allocated_bytes.all.current`,
    `alloc_retries` is `num_alloc_retries`.

    Attributes:
        allocated_bytes: in tensors, each rounded up to the size of its block.
        requested_bytes: before rounding, of the blocks in `active_bytes`.
        reserved_bytes: in mapped pages, taken from the device.
        alloc_retries: how often the entire cache was given back for an allocation.
        peak_allocated_bytes, peak_active_bytes, peak_reserved_bytes: highest so far.
    """

    def __init__(self, *, capacity_bytes: int) -> None:
        """`capacity_bytes`: the device's memory without CUDA contexts, libraries and other processes."""
        self.passes = 0
        """Stream whose pools serve the model's passes; other than 0 where they have a private pool."""
        self.private: set[int] = set()  # Streams of a private pool
        self._capacity = capacity_bytes
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._deferred: dict[DeferredFree, None] = {}
        self._deferred_bytes = 0
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_active_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.requested_bytes = 0
        self.alloc_retries = 0

    @property
    def active_bytes(self) -> int:
        """Allocated, or freed while another stream still uses it."""
        return self.allocated_bytes + self._deferred_bytes

    def take(self, size_bytes: int, stream: int = 0, account: int = 0) -> Block:
        """Allocate more than 0 bytes for use on a stream (malloc, alloc_found_block).

        `account` comes back in the block. OutOfMemoryError: neither the cache nor the device has room.
        """
        size = (size_bytes + MIN_BLOCK_BYTES - 1) & -MIN_BLOCK_BYTES
        pool = (self._small if size <= SMALL_BYTES else self._large).get(stream) or self.pool(size, stream)
        address = pool.take(size)
        if address < 0:
            address = self._obtain(pool, size, size_bytes)
        self.requested_bytes += size_bytes
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes or allocated + self._deferred_bytes > self.peak_active_bytes:
            self._note_peaks(allocated)
        return Block(pool, address, size_bytes, account)

    def run(self, span: Span, addresses: dict[int, int]) -> None:
        """Allocate and free in the passes' pools what a span does; `addresses` are those of its tensors."""
        small, large = self.pool(0, self.passes), self.pool(SMALL_BYTES + 1, self.passes)
        for tensor, size, is_small in span.moves:
            pool = small if is_small else large
            if size:
                address = pool.take(size)
                if address < 0:
                    address = self._obtain(pool, size, size)
                addresses[tensor] = address
            else:
                address = addresses[tensor]
                pool.put_back(address, pool.live.pop(address))
        self._note_peaks(self.allocated_bytes + span.most)
        self.allocated_bytes += span.allocated
        self.requested_bytes += span.requested

    def _note_peaks(self, allocated: int) -> None:
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, allocated)
        self.peak_active_bytes = max(self.peak_active_bytes, allocated + self._deferred_bytes)

    def give(self, block: Block) -> None:
        """Free a block (free, free_block). KeyError: it was freed already."""
        pool, address, requested, _ = block
        size = pool.live.pop(address)
        self.allocated_bytes -= size
        self.requested_bytes -= requested
        pool.put_back(address, size)

    def give_later(self, block: Block) -> DeferredFree:
        """Free a block that other streams still use (recordStream, insert_events).

        It counts as active until `complete` says that those streams have passed the point of this call, or
        until memory is short and torch waits for them (synchronize_and_free_events).
        """
        size = block.pool.live.pop(block.address)
        deferred = DeferredFree(block, size)
        self._deferred[deferred] = None
        self._deferred_bytes += size
        self.allocated_bytes -= size
        return deferred

    def complete(self, deferred: DeferredFree) -> None:
        """Finish a deferred free, unless it was finished when memory was short."""
        if deferred in self._deferred:
            del self._deferred[deferred]
            pool, address, requested, _ = deferred.block
            self._deferred_bytes -= deferred.size
            self.requested_bytes -= requested
            pool.put_back(address, deferred.size)

    def empty_cache(self) -> None:
        """Give back every page without a block in use, a private pool's apart (release_cached_blocks)."""
        for deferred in list(self._deferred):
            self.complete(deferred)
        for pools in (self._large, self._small):
            for stream, pool in pools.items():
                if stream not in self.private:
                    self.reserved_bytes -= pool.release()

    def pool(self, size: int, stream: int = 0) -> Pool:
        """The pool that serves requests of so many bytes (get_pool)."""
        small = size <= SMALL_BYTES
        pools = self._small if small else self._large
        if stream not in pools:
            pools[stream] = Pool(page_bytes=SMALL_PAGE_BYTES if small else LARGE_PAGE_BYTES)
        return pools[stream]

    def _obtain(self, pool: Pool, size: int, size_bytes: int) -> int:
        """Use a block after growing the pool, maybe after giving the cache back (malloc, alloc_block)."""
        address = pool.grow(size, self._reserve)
        if address < 0:
            self.empty_cache()
            self.alloc_retries += 1
            address = pool.grow(size, self._reserve)
        if address < 0:
            raise OutOfMemoryError(
                requested_bytes=size_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        return address

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self._capacity:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True
