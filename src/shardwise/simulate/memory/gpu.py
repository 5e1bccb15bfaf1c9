"""One GPU's memory while a step is replayed: the allocator, and what each allocation was for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.job.schema import OptimizerName
from shardwise.simulate.memory.allocator import CachingAllocator, DeferredFree
from shardwise.simulate.memory.pool import Block, Pool
from shardwise.simulate.prediction import Moment
from shardwise.simulate.step_trace import FP32

if TYPE_CHECKING:
    from shardwise.simulate.memory.spans import Span

WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS, LOSS, BUFFERS = range(6)
"""Accounts, in the order of prediction.MemoryTerms."""

EIGHT_BIT_BLOCK, LEAST_EIGHT_BIT = 256, 4096
"""Values that share a scale, and elements of the smallest tensor with moments in 8 bits (bitsandbytes 0.50,
optim/optimizer.py: Optimizer2State)."""

_EMPTY = Block(Pool(page_bytes=1), 0, 0, WEIGHTS)  # A tensor without elements, which has no memory


@dataclass
class GpuMemory:
    """Replays allocations; `fullest`: the accounts, in bytes, when most was allocated."""

    allocator: CachingAllocator
    accounts: list[int] = field(default_factory=lambda: [0] * 6)
    fullest: list[int] = field(default_factory=lambda: [0] * 6)
    host_bytes: int = 0  # Of this process: what the engine keeps in host memory
    _most: int = 0
    _where: str = "model"
    _most_here: int = 0
    _largest: dict[str, int] = field(default_factory=dict)

    def take(self, account: int, size_bytes: int, stream: int = 0) -> Block:
        """Allocate; a stream other than 0 has memory of its own. OutOfMemoryError: the GPU is full."""
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

    def take_in_pass(self, account: int, size_bytes: int) -> Block:
        """Allocate where the passes do: in their own pool, if they have one."""
        return self.take(account, size_bytes, self.allocator.passes)

    def give(self, *blocks: Block | None) -> None:
        """Free blocks one after the other; None is nothing to free."""
        for block in blocks:
            if block is not None and block.requested_bytes:
                self.allocator.give(block)
                self.accounts[block.account] -= block.requested_bytes

    def run(self, span: Span, addresses: dict[int, int]) -> None:
        """Allocate and free what a span does; `addresses` are those of the trace's tensors."""
        allocator, accounts = self.allocator, self.accounts
        most = allocator.allocated_bytes + span.most
        if most > self._most_here:
            self._most_here = most
            if most > self._most:
                self._most = most
                self.fullest = accounts.copy()
                for account, size_bytes in span.accounts_at_most:
                    self.fullest[account] += size_bytes
        allocator.run(span, addresses)
        for account, size_bytes in span.accounts:
            accounts[account] += size_bytes

    def handed_over(self, address: int, size_bytes: int, account: int) -> Block:
        """A tensor that a span allocated and the engine frees."""
        pool = self.allocator.pool(size_bytes, self.allocator.passes)
        return Block(pool, address, size_bytes, account) if size_bytes else _EMPTY

    def give_later(self, block: Block) -> DeferredFree:
        """Free what another stream still uses; no allocation gets its memory until `complete`."""
        return self.allocator.give_later(block) if block.requested_bytes else DeferredFree(block, 0)

    def complete(self, *frees: DeferredFree) -> None:
        """The other stream no longer uses them."""
        for deferred in frees:
            self.allocator.complete(deferred)
            self.accounts[deferred.block.account] -= deferred.block.requested_bytes

    def take_adamw_state(self, numel: int, optimizer: OptimizerName) -> None:
        """Allocate what AdamW keeps of one tensor.

        torch's: its step count and two fp32 moments. bitsandbytes' (engines/runtime/adamw8bit.py): two
        moments in bytes, and an fp32 scale for each block of both; fp32 moments of small tensors.
        """
        sizes = [FP32, FP32 * numel, FP32 * numel]
        if optimizer == "adamw8bit":
            scales = FP32 * -(-numel // EIGHT_BIT_BLOCK)
            sizes = sizes[1:] if numel < LEAST_EIGHT_BIT else [numel, numel, scales, scales]
        for size in sizes:
            self.take(OPTIMIZER, size)

    def scratch(self, account: int, *sizes: int, stream: int = 0) -> None:
        """Allocate all of `sizes` at once, and free them."""
        self.give(*[self.take(account, size, stream) for size in sizes])

    def move(self, block: Block, account: int) -> Block:
        """Count the same memory on another account."""
        self.accounts[block.account] -= block.requested_bytes
        self.accounts[account] += block.requested_bytes
        return block._replace(account=account)

    def at(self, where: str) -> None:
        """Name what runs from here on, for the timeline."""
        self._largest[self._where] = self._most_here
        self._where, self._most_here = where, self._largest.get(where, 0)

    @property
    def timeline(self) -> tuple[Moment, ...]:
        """The most that was allocated while each part ran, in the order of their first runs.

        Without parts that allocated nothing: what was held then was not noted.
        """
        self._largest[self._where] = self._most_here
        return tuple(Moment(where=at, allocated_bytes=size) for at, size in self._largest.items() if size)
