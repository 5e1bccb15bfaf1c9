"""PyTorch's CUDA caching allocator as arithmetic: what allocations reserve on a GPU, and when one fails.

Follows class DeviceCachingAllocator of c10/cuda/CUDACachingAllocator.cpp, torch 2.13, whose functions stand
in parentheses where a rule comes from. Releases differ in which of several free blocks of one size they take:
since 2.13 that of the oldest segment (pytorch/pytorch#183591), in 2.12 the oldest block (#178362), up to 2.11
that of the lowest address, which cudaMalloc chooses.

Not modelled: private pools and CUDA graphs, and memory shared between processes.
"""

from __future__ import annotations

from bisect import bisect_left

from shardwise.simulate.memory.expandable import grow, release
from shardwise.simulate.memory.pool import Block, Pool
from shardwise.simulate.memory.run import Stretch
from shardwise.units import GIB

MIB = 1024**2

# c10/core/AllocatorConfig.h
MIN_BLOCK_BYTES = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_BYTES = MIB  # kSmallSize: up to here a request is served from the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: what the small pool grows by
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size: what the large pool grows by, up to the next
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: from here a request gets a segment of its own size
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge: that size is a multiple of it
OVERSIZE_SLACK_BYTES = 20 * MIB  # max_non_split_rounding_size

NO_BLOCK = 0  # the handle of an empty tensor, which has no memory
UNLIMITED = 1 << 100


class OutOfMemoryError(Exception):
    """An allocation fails although all cached memory was given back.

    Attributes:
        requested_bytes: what was asked for.
        allocated_bytes: in tensors at that moment.
        reserved_bytes: in segments at that moment; what exceeds `allocated_bytes` is lost to fragmentation.
    """

    def __init__(self, *, requested_bytes: int, allocated_bytes: int, reserved_bytes: int) -> None:
        super().__init__(
            f"{requested_bytes} B asked for with {allocated_bytes} B allocated, {reserved_bytes} B reserved"
        )
        self.requested_bytes = requested_bytes
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes


class CachingAllocator:
    """Replays allocations and frees of one device, in the order the program makes them.

    The attributes are those of torch.cuda.memory_stats(): `allocated_bytes` is `allocated_bytes.all.current`,
    `segments` is `segment.all.current` (0 with expandable segments), `alloc_retries` is `num_alloc_retries`.

    Attributes:
        allocated_bytes: in tensors, each rounded up to the size of its block.
        requested_bytes: what was asked for, before rounding, of the blocks in `active_bytes`.
        reserved_bytes: in segments or mapped pages: what the device has given away.
        segments: calls of cudaMalloc that were not undone.
        alloc_retries: how often the whole cache had to be given back for an allocation.
        peak_allocated_bytes, peak_active_bytes, peak_reserved_bytes: highest since `reset_peaks`.
    """

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        limit_bytes: int | None = None,
        device_bytes: int = 4096 * GIB,
        expandable_segments: bool = False,
        max_split_size_bytes: int | None = None,
        roundup_power2_divisions: int = 0,
        garbage_collection_threshold: float = 0.0,
    ) -> None:
        """The defaults are torch's.

        Args:
            capacity_bytes: what the device can give to the allocator: its memory without CUDA contexts,
                libraries and other processes. None: any amount.
            limit_bytes: what torch.cuda.set_per_process_memory_fraction allows: int(fraction * total).
                With expandable segments it is not a capacity: torch compares it with the size that a segment
                would have, and may then map more or less than that (alloc_block). None: any amount.
            device_bytes: the device's whole memory. An expandable segment has 1.125 times as many addresses;
                when they run out, another begins. The default is beyond any device.
            expandable_segments: as in PYTORCH_ALLOC_CONF.
            max_split_size_bytes: max_split_size_mb of PYTORCH_ALLOC_CONF, in bytes.
            roundup_power2_divisions: as in PYTORCH_ALLOC_CONF, one power of two for all sizes.
            garbage_collection_threshold: as in PYTORCH_ALLOC_CONF, a share of `limit_bytes`; without a
                limit, torch ignores it.
        """
        self._capacity = UNLIMITED if capacity_bytes is None else capacity_bytes
        self._limit = UNLIMITED if limit_bytes is None else limit_bytes
        self._expandable = expandable_segments
        self._segment_bytes = device_bytes + device_bytes // 8
        self._max_split = UNLIMITED if max_split_size_bytes is None else max_split_size_bytes
        self._divisions = roundup_power2_divisions
        self._gc_threshold = 0.0 if limit_bytes is None else garbage_collection_threshold
        self._choosy = bool(max_split_size_bytes or self._gc_threshold)
        self._searches = 0  # for large blocks: the clock of garbage collection
        self._small: dict[int, Pool] = {}
        self._large: dict[int, Pool] = {}
        self._live: dict[int, Block] = {}
        self._deferred: dict[int, Block | None] = {}  # the last number is the block's size
        self._deferred_bytes = 0
        self._last_handle = NO_BLOCK
        self.allocated_bytes = self.peak_allocated_bytes = self.peak_active_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.requested_bytes = 0
        self.segments = 0
        self.alloc_retries = 0

    @property
    def active_bytes(self) -> int:
        """Allocated, or freed while another stream still uses it."""
        return self.allocated_bytes + self._deferred_bytes

    @property
    def inactive_split_bytes(self) -> int:
        """Free, but in segments partly in use; with expandable segments 0 by definition (free_block)."""
        if self._expandable:
            return 0
        pools = [*self._small.values(), *self._large.values()]
        return sum(size for pool in pools for size, address in pool.free if not pool.is_whole(address, size))

    def reset_peaks(self) -> None:
        """As torch.cuda.reset_peak_memory_stats."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes
        self.peak_reserved_bytes = self.reserved_bytes

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        """Allocate for use on a stream.

        Returns:
            A handle for `free`, never given twice. `NO_BLOCK` for 0 bytes.

        Raises:
            OutOfMemoryError: neither the cache nor the device has room. The cache has then been given back.
        """
        if size_bytes <= 0:
            assert size_bytes == 0
            return NO_BLOCK
        self._last_handle = handle = self._last_handle + 1
        self._live[handle] = self.take(size_bytes, stream)
        return handle

    def free(self, handle: int) -> None:
        """Free an allocation, or complete one that was freed with `free_later`.

        Raises:
            KeyError: the handle was freed already or never given.
        """
        if handle in self._live:
            self.give(self._live.pop(handle))
        elif handle != NO_BLOCK:
            self._complete(self._deferred.pop(handle))

    def free_later(self, handle: int) -> None:
        """Free an allocation that other streams still use (recordStream, insert_events).

        Its block counts as active, and nobody gets it, until `free(handle)` says that those streams have
        passed the point of this call, or until memory is short and torch waits (synchronize_and_free_events).

        Raises:
            KeyError: the handle was freed already or never given.
        """
        if handle != NO_BLOCK:
            self._defer(handle, self._live.pop(handle))

    def take(self, size_bytes: int, stream: int = 0, owner: int = 0) -> Block:
        """`malloc` of more than 0 bytes, for callers that keep the block itself (malloc, alloc_found_block).

        `owner` comes back in the block.
        """
        size = (size_bytes + 511) & -512 if self._divisions < 2 else self._rounded(size_bytes)
        try:
            pool = (self._small if size <= SMALL_BYTES else self._large)[stream]
        except KeyError:
            pool = self.pool(size, stream)
        address = self._take_chosen(pool, size) if self._choosy else pool.take(size)
        if address < 0:
            address = self._obtain(pool, size, size_bytes)
            pool.use(address, size)
        self.requested_bytes += size_bytes
        self.allocated_bytes = allocated = self.allocated_bytes + pool.live[address]
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        if allocated + self._deferred_bytes > self.peak_active_bytes:
            self.peak_active_bytes = allocated + self._deferred_bytes
        return pool, address, size_bytes, owner

    def run(self, stretch: Stretch, places: dict[int, int]) -> None:
        """Allocates and frees, on stream 0, what a stretch does; `places` are its tensors' addresses.

        Only with expandable segments and sizes rounded as by default, and where memory is never short.
        """
        small, large = self.pool(0), self.pool(SMALL_BYTES + 1)
        for tensor, size, is_small in stretch.moves:
            pool = small if is_small else large
            if size:
                address = pool.take(size)
                if address < 0:
                    address = self._obtain(pool, size, size)
                    pool.use(address, size)
                places[tensor] = address
            else:
                address = places[tensor]
                pool.put_back(address, pool.live.pop(address))
        most = self.allocated_bytes + stretch.most
        if most > self.peak_allocated_bytes:
            self.peak_allocated_bytes = most
        if most + self._deferred_bytes > self.peak_active_bytes:
            self.peak_active_bytes = most + self._deferred_bytes
        self.allocated_bytes += stretch.allocated
        self.requested_bytes += stretch.requested

    def give(self, block: Block) -> None:
        """`free` of a block that `take` gave (free, free_block).

        Raises:
            KeyError: nothing is in use at its address.
        """
        pool, address, requested, _ = block
        size = pool.live.pop(address)
        self.allocated_bytes -= size
        self.requested_bytes -= requested
        address = pool.put_back(address, size)
        if self._gc_threshold:
            pool.freed_at[address] = self._searches

    def give_later(self, block: Block) -> int:
        """`free_later` of a block that `take` gave; returns a handle for the `free` that completes it."""
        self._last_handle = handle = self._last_handle + 1
        self._defer(handle, block)
        return handle

    def _defer(self, handle: int, block: Block) -> None:
        pool, address, requested, _ = block
        size = pool.live.pop(address)
        self._deferred[handle] = pool, address, requested, size
        self._deferred_bytes += size
        self.allocated_bytes -= size

    def _complete(self, deferred: Block | None) -> None:
        if deferred is None:  # completed before, when memory was short
            return
        pool, address, requested, size = deferred
        self._deferred_bytes -= size
        self.requested_bytes -= requested
        address = pool.put_back(address, size)
        if self._gc_threshold:
            pool.freed_at[address] = self._searches

    def empty_cache(self) -> None:
        """Give back every segment, or page, without a block in use (emptyCache, release_cached_blocks)."""
        for handle, block in self._deferred.items():
            self._complete(block)
            self._deferred[handle] = None
        for pool in (*self._large.values(), *self._small.values()):
            if self._expandable:
                self.reserved_bytes -= release(pool)
            else:
                for address, size in pool.whole:
                    self._release(pool, address, size)

    def _rounded(self, size_bytes: int) -> int:
        """Up to the next of `divisions` equal steps between two powers of two (round_size)."""
        if size_bytes <= MIN_BLOCK_BYTES * self._divisions:
            return (size_bytes + 511) & -512
        step = (1 << size_bytes.bit_length() - 1) // self._divisions
        return -(-size_bytes // step) * step

    def pool(self, size: int, stream: int = 0) -> Pool:
        """Where memory for so many bytes comes from (get_pool)."""
        try:
            return (self._small if size <= SMALL_BYTES else self._large)[stream]
        except KeyError:
            return self._new_pool(stream, small=size <= SMALL_BYTES)

    def _new_pool(self, stream: int, *, small: bool) -> Pool:
        """With the rules by which its blocks are split (should_split)."""
        always_split = small or self._expandable
        pool = Pool(
            page_bytes=SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES,
            segment_bytes=self._segment_bytes,
            smallest_rest=MIN_BLOCK_BYTES if always_split else SMALL_BYTES + 1,
            split_below=UNLIMITED if always_split else self._max_split,
        )
        (self._small if small else self._large)[stream] = pool
        return pool

    def _take_chosen(self, pool: Pool, size: int) -> int:
        """`pool.take` by the rules of max_split_size, counted for garbage collection (get_free_block)."""
        if size > SMALL_BYTES:
            self._searches += 1
        found, address = pool.find(size) or (UNLIMITED, -1)
        if found >= (self._max_split if size < self._max_split else size + OVERSIZE_SLACK_BYTES):
            return -1
        pool.use(address, size)
        return address

    def _obtain(self, pool: Pool, size: int, size_bytes: int) -> int:
        """Gets a free block from the device, for which more and more of the cache is given back (malloc).

        Returns its address.
        """
        if self._gc_threshold:
            self._collect_garbage()
        address = self._from_device(pool, size)
        if address is None and self._release_oversize(pool, size):
            address = self._from_device(pool, size)
        if address is None:
            self.empty_cache()
            self.alloc_retries += 1
            address = self._from_device(pool, size)
        if address is None:
            raise OutOfMemoryError(
                requested_bytes=size_bytes,
                allocated_bytes=self.allocated_bytes,
                reserved_bytes=self.reserved_bytes,
            )
        return address

    def _from_device(self, pool: Pool, size: int) -> int | None:
        """The address of a free block: of a new segment, or of one that grew (alloc_block)."""
        if size <= SMALL_BYTES:
            segment = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            segment = LARGE_SEGMENT_BYTES
        else:
            segment = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        if self.reserved_bytes + segment > self._limit:
            return None
        if self._expandable:
            return grow(pool, size, self._reserve)
        if not self._reserve(segment):
            return None
        self.segments += 1
        address = pool.new_segment(segment)
        return pool.put_back(address, segment)

    def _reserve(self, size: int) -> bool:
        if self.reserved_bytes + size > self._capacity:
            return False
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _release(self, pool: Pool, address: int, size: int) -> None:
        """Give back a segment that is one free block (release_block)."""
        pool.remove(address)
        del pool.segments[address]
        self.reserved_bytes -= size
        self.segments -= 1

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back blocks too large to be split, just enough of them (release_available_cached_blocks)."""
        if self._max_split == UNLIMITED or self._expandable:
            return False
        needed = max(size, self._max_split)
        free = pool.free
        index = bisect_left(free, (needed,))
        if index < len(free):
            found, address = free[index]
            self._release(pool, address, found)
            return True
        released = 0
        while released < needed and free and free[-1][0] >= self._max_split:
            found, address = free[-1]
            released += found
            self._release(pool, address, found)
        return released >= needed

    def _collect_garbage(self) -> None:
        """Give back the segments that waited longest (garbage_collect_cached_blocks)."""
        surplus = self.reserved_bytes - int(self._gc_threshold * self._limit)
        whole = [(pool, *block) for pool in self._large.values() for block in pool.whole]
        while surplus > 0 and whole:
            waited = [self._searches - pool.freed_at[address] for pool, address, _ in whole]
            average = sum(waited) / len(waited)
            oldest = [block for block, time in zip(whole, waited, strict=True) if time >= average]
            for block in oldest:
                surplus -= block[2]
                whole.remove(block)
                self._release(*block)
