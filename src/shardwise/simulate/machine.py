"""One GPU's memory while a step is replayed: the allocator, and what each allocation was for."""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.simulate.allocator import CachingAllocator
from shardwise.simulate.prediction import Moment

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BUFFERS = range(6)
"""Accounts, in the order of prediction.MemoryTerms."""


@dataclass(slots=True)  # not frozen: millions are made, and that would take three times as long
class Block:
    """An allocation that is somebody's; never changed."""

    handle: int
    account: int
    size_bytes: int


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
        allocator = self.allocator
        handle = allocator.malloc(size_bytes, stream)
        self.accounts[account] += size_bytes
        allocated = allocator.allocated_bytes
        if allocated > self._most_here:
            self._most_here = allocated
            if allocated > self._most:
                self._most = allocated
                self.fullest = self.accounts.copy()
        return Block(handle, account, size_bytes)

    def give(self, block: Block) -> None:
        self.allocator.free(block.handle)
        self.accounts[block.account] -= block.size_bytes

    def scratch(self, account: int, *sizes: int) -> None:
        """Memory that exists for a moment: all of `sizes` at once."""
        for block in [self.take(account, size) for size in sizes]:
            self.give(block)

    def move(self, block: Block, account: int) -> Block:
        """The same memory on another account."""
        self.accounts[block.account] -= block.size_bytes
        self.accounts[account] += block.size_bytes
        return Block(block.handle, account, block.size_bytes)

    def at(self, where: str) -> None:
        """What runs from here on, for the timeline."""
        self._largest[self._where] = self._most_here
        self._where, self._most_here = where, self._largest.get(where, 0)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """The most that was allocated while each part ran, in the order of their first runs."""
        self._largest[self._where] = self._most_here
        return tuple(Moment(where=where, allocated_bytes=size) for where, size in self._largest.items())
