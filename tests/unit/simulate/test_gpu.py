"""What memory is for, on top of the allocator."""

from __future__ import annotations

import pytest

from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import ACTIVATIONS, GRADIENTS, WEIGHTS, GpuMemory
from shardwise.simulate.memory.replay import PLENTY

MIB = 1024**2


@pytest.fixture
def memory() -> GpuMemory:
    return GpuMemory(CachingAllocator(capacity_bytes=1 << 40))


def test_the_accounts_are_those_of_the_fullest_moment(memory: GpuMemory) -> None:
    memory.take(WEIGHTS, 100)
    activation = memory.take(ACTIVATIONS, 3 * MIB)
    memory.give(activation)
    gradient = memory.move(memory.take(ACTIVATIONS, 2 * MIB), GRADIENTS)
    assert memory.fullest[:4] == [100, 0, 0, 3 * MIB]
    assert memory.accounts[:4] == [100, 2 * MIB, 0, 0]
    memory.give(gradient)
    assert memory.accounts == [100, 0, 0, 0, 0, 0]


def test_a_tensor_without_elements_has_no_memory(memory: GpuMemory) -> None:
    empty = memory.take(WEIGHTS, 0)
    memory.complete(memory.give_later(memory.take(WEIGHTS, 0)))
    memory.give(memory.move(empty, GRADIENTS))
    assert (memory.allocator.reserved_bytes, memory.accounts) == (0, [0] * 6)


def test_what_is_given_later_is_nobodys_until_then(memory: GpuMemory) -> None:
    block = memory.take(GRADIENTS, 20 * MIB)
    late = memory.give_later(block)
    assert memory.allocator.allocated_bytes == 0
    assert memory.accounts[GRADIENTS] == 20 * MIB
    memory.take(GRADIENTS, 20 * MIB)
    assert memory.allocator.reserved_bytes == 40 * MIB
    memory.complete(late)
    memory.take(ACTIVATIONS, 20 * MIB)
    assert memory.allocator.reserved_bytes == 40 * MIB
    assert memory.accounts[GRADIENTS] == 20 * MIB


def test_two_tensors_may_be_freed_later_in_the_same_place() -> None:
    """Memory that runs short completes the first, whose place the second gets (Llama-3.1-8B on 40 GB)."""
    memory = GpuMemory(CachingAllocator(capacity_bytes=80 * MIB))
    first = memory.take(GRADIENTS, 2 * MIB)
    memory.take(WEIGHTS, 18 * MIB)
    cached = memory.take(WEIGHTS, 20 * MIB)
    memory.take(WEIGHTS, 20 * MIB)
    memory.give(cached)
    lates = [memory.give_later(first)]
    memory.take(WEIGHTS, 40 * MIB)  # for which the cache has to be emptied
    second = memory.take(GRADIENTS, 2 * MIB)
    assert second == first
    lates.append(memory.give_later(second))
    for late in lates:
        memory.complete(late)
    assert (memory.allocator.allocated_bytes, memory.accounts[GRADIENTS]) == (78 * MIB, 0)
    assert memory.take(GRADIENTS, 2 * MIB) == first


def test_memory_is_given_back_once(memory: GpuMemory) -> None:
    block = memory.take(WEIGHTS, 512)
    memory.give(block)
    for give in (memory.give, memory.give_later):
        with pytest.raises(KeyError):
            give(block)


def test_a_tensor_larger_than_a_segments_addresses_still_has_a_size() -> None:
    """torch would fail; the replay says how much it would be."""
    memory = GpuMemory(CachingAllocator(capacity_bytes=PLENTY))
    size = 1 << 53
    memory.give(memory.take(ACTIVATIONS, size))
    assert memory.allocator.peak_allocated_bytes == size


def test_the_timeline_says_the_most_of_each_part_in_the_order_of_their_first_runs(memory: GpuMemory) -> None:
    memory.at("block 0 forward")
    block = memory.take(ACTIVATIONS, 2 * MIB)
    memory.at("norm backward")
    memory.at("optimizer")
    memory.give(block)
    memory.take(WEIGHTS, MIB)
    memory.at("block 0 forward")
    memory.take(ACTIVATIONS, 4 * MIB)
    assert [(m.where, m.allocated_bytes) for m in memory.timeline] == [
        ("block 0 forward", 5 * MIB),
        ("optimizer", MIB),
    ], "not those that allocate nothing: how much was held then nobody noted"
