"""What memory is for, on top of the allocator."""

from __future__ import annotations

import pytest

from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import ACTIVATIONS, GRADIENTS, WEIGHTS, Machine
from shardwise.simulate.memory.replay import PLENTY

MIB = 1024**2


@pytest.fixture
def machine() -> Machine:
    return Machine(CachingAllocator(capacity_bytes=1 << 40, expandable_segments=True))


def test_the_accounts_are_those_of_the_fullest_moment(machine: Machine) -> None:
    machine.take(WEIGHTS, 100)
    activation = machine.take(ACTIVATIONS, 3 * MIB)
    machine.give(activation)
    gradient = machine.move(machine.take(ACTIVATIONS, 2 * MIB), GRADIENTS)
    assert machine.fullest[:4] == [100, 0, 0, 3 * MIB]
    assert machine.accounts[:4] == [100, 2 * MIB, 0, 0]
    machine.give(gradient)
    assert machine.accounts == [100, 0, 0, 0, 0, 0]


def test_a_tensor_without_elements_has_no_memory(machine: Machine) -> None:
    empty = machine.take(WEIGHTS, 0)
    machine.complete(machine.give_later(machine.take(WEIGHTS, 0)))
    machine.give(machine.move(empty, GRADIENTS))
    assert (machine.allocator.reserved_bytes, machine.accounts) == (0, [0] * 6)


def test_what_is_given_later_is_nobodys_until_then(machine: Machine) -> None:
    block = machine.take(GRADIENTS, 20 * MIB)
    late = machine.give_later(block)
    assert machine.allocator.allocated_bytes == 0
    assert machine.accounts[GRADIENTS] == 20 * MIB
    machine.take(GRADIENTS, 20 * MIB)
    assert machine.allocator.reserved_bytes == 40 * MIB
    machine.complete(late)
    machine.take(ACTIVATIONS, 20 * MIB)
    assert machine.allocator.reserved_bytes == 40 * MIB
    assert machine.accounts[GRADIENTS] == 20 * MIB


def test_two_tensors_may_be_freed_later_in_the_same_place() -> None:
    """Memory that runs short completes the first, whose place the second gets (Llama-3.1-8B on 40 GB)."""
    machine = Machine(CachingAllocator(capacity_bytes=80 * MIB, expandable_segments=True))
    first = machine.take(GRADIENTS, 2 * MIB)
    machine.take(WEIGHTS, 18 * MIB)
    cached = machine.take(WEIGHTS, 20 * MIB)
    machine.take(WEIGHTS, 20 * MIB)
    machine.give(cached)
    lates = [machine.give_later(first)]
    machine.take(WEIGHTS, 40 * MIB)  # for which the cache has to be emptied
    second = machine.take(GRADIENTS, 2 * MIB)
    assert second == first
    lates.append(machine.give_later(second))
    for late in lates:
        machine.complete(late)
    assert (machine.allocator.allocated_bytes, machine.accounts[GRADIENTS]) == (78 * MIB, 0)
    assert machine.take(GRADIENTS, 2 * MIB) == first


def test_memory_is_given_back_once(machine: Machine) -> None:
    block = machine.take(WEIGHTS, 512)
    machine.give(block)
    for give in (machine.give, machine.give_later):
        with pytest.raises(KeyError):
            give(block)


def test_a_tensor_larger_than_a_segments_addresses_still_has_a_size() -> None:
    """torch would fail; the replay says how much it would be."""
    machine = Machine(CachingAllocator(capacity_bytes=PLENTY, expandable_segments=True))
    size = 1 << 53
    machine.give(machine.take(ACTIVATIONS, size))
    assert machine.allocator.peak_allocated_bytes == size


def test_the_timeline_says_the_most_of_each_part_in_the_order_of_their_first_runs(machine: Machine) -> None:
    machine.at("block 0 forward")
    block = machine.take(ACTIVATIONS, 2 * MIB)
    machine.at("norm backward")
    machine.at("optimizer")
    machine.give(block)
    machine.take(WEIGHTS, MIB)
    machine.at("block 0 forward")
    machine.take(ACTIVATIONS, 4 * MIB)
    assert [(m.where, m.allocated_bytes) for m in machine.timeline] == [
        ("block 0 forward", 5 * MIB),
        ("optimizer", MIB),
    ], "not those that allocate nothing: how much was held then nobody noted"
