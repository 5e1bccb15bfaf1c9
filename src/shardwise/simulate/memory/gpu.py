"""One GPU's memory while a step is replayed: the allocator, and what each allocation was for."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.simulate.memory.allocator import NO_BLOCK, CachingAllocator
from shardwise.simulate.memory.pool import Block, Pool
from shardwise.simulate.memory.run import Stretch
from shardwise.simulate.prediction import Moment

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BUFFERS = range(6)
"""Accounts, in the order of prediction.MemoryTerms."""


Late = tuple[int, int, int]
"""What `give_later` has freed: the allocator's handle, account, bytes. Not the block: memory that ran short
may have given its place to another tensor, freed later as well."""

_EMPTY: Block = Pool(page_bytes=1, segment_bytes=0, smallest_rest=0, split_below=0), 0, 0, WEIGHTS
"""A tensor without elements, which has no memory."""


@dataclass
class Machine:
    """Replays allocations; `fullest`: the accounts, in bytes, when most was allocated."""

    allocator: CachingAllocator
    accounts: list[int] = field(default_factory=lambda: [0] * 6)
    fullest: list[int] = field(default_factory=lambda: [0] * 6)
    host_bytes: int = 0
    """Of this process: what the engine keeps in host memory."""
    _most: int = 0
    _where: str = "model"
    _most_here: int = 0
    _largest: dict[str, int] = field(default_factory=dict)

    def take(self, account: int, size_bytes: int, stream: int = 0) -> Block:
        """Allocates; OutOfMemoryError where the GPU is full. A stream other than 0 has memory of its own."""
        if not size_bytes:
            return _EMPTY
        allocator = self.allocator
        block = allocator.take(size_bytes, stream, account)
        self.accounts[account] += size_bytes
        allocated = allocator.allocated_bytes
        if allocated > self._most_here:
            self._most_here = allocated
            if allocated > self._most:
                self._most = allocated
                self.fullest = self.accounts.copy()
        return block

    def give(self, block: Block) -> None:
        """Frees."""
        if block[2]:
            self.allocator.give(block)
        self.accounts[block[3]] -= block[2]

    def run(self, stretch: Stretch, places: dict[int, int]) -> None:
        """Allocates and frees what a stretch does; `places` are the addresses of the trace's tensors."""
        allocator, accounts = self.allocator, self.accounts
        most = allocator.allocated_bytes + stretch.most
        if most > self._most_here:
            self._most_here = most
            if most > self._most:
                self._most = most
                self.fullest = accounts.copy()
                for account, size_bytes in stretch.accounts_at_most:
                    self.fullest[account] += size_bytes
        allocator.run(stretch, places)
        for account, size_bytes in stretch.accounts:
            accounts[account] += size_bytes

    def handed_over(self, address: int, size_bytes: int, account: int) -> Block:
        """A tensor of a stretch, which its engine is to free."""
        return (self.allocator.pool(size_bytes), address, size_bytes, account) if size_bytes else _EMPTY

    def give_later(self, block: Block) -> Late:
        """Frees what another stream still uses; nobody gets its memory until `complete`."""
        handle = self.allocator.give_later(block) if block[2] else NO_BLOCK
        return handle, block[3], block[2]

    def complete(self, late: Late) -> None:
        """The other stream is done with it."""
        handle, account, size_bytes = late
        self.allocator.free(handle)
        self.accounts[account] -= size_bytes

    def scratch(self, account: int, *sizes: int) -> None:
        """Memory that exists for a moment: all of `sizes` at once."""
        for block in [self.take(account, size) for size in sizes]:
            self.give(block)

    def move(self, block: Block, account: int) -> Block:
        """The same memory on another account."""
        pool, address, size_bytes, before = block
        self.accounts[before] -= size_bytes
        self.accounts[account] += size_bytes
        return pool, address, size_bytes, account

    def at(self, where: str) -> None:
        """What runs from here on, for the timeline."""
        self._largest[self._where] = self._most_here
        self._where, self._most_here = where, self._largest.get(where, 0)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """The most that was allocated while each part ran, in the order of their first runs.

        Without those in which nothing was: a frozen norm's backward pass, an optimizer on the host. How much
        was held then nobody noted.
        """
        self._largest[self._where] = self._most_here
        return tuple(
            Moment(where=where, allocated_bytes=size) for where, size in self._largest.items() if size
        )
