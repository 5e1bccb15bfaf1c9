"""Bars say by length what the numbers say."""

from __future__ import annotations

import pytest

from shardwise.planner.table import BEYOND, LIMIT, memory_bar, plain_bar, room
from shardwise.simulate.prediction import Memory, MemoryTerms


def memory(
    weights: int, optimizer: int = 0, activations: int = 0, outside: int = 0, capacity: int = 100
) -> Memory:
    terms = MemoryTerms(
        weights_bytes=weights,
        gradients_bytes=0,
        optimizer_bytes=optimizer,
        activations_bytes=activations,
        loss_bytes=0,
        engine_buffers_bytes=0,
        fragmentation_bytes=0,
    )
    return Memory(
        peak_reserved_bytes=terms.total_bytes,
        peak_allocated_bytes=terms.total_bytes,
        outside_allocator_bytes=outside,
        capacity_bytes=capacity,
        terms=terms,
        host_bytes=0,
    )


def test_each_part_has_its_share_of_the_room() -> None:
    before = room(27, all_fit=False)
    assert before == 20
    bar = memory_bar(memory(25, optimizer=30, activations=20, outside=5), 27, before).plain
    assert bar == "█████▓▓▓▓▓▓▒▒▒▒░····│      "


@pytest.mark.parametrize("width", [12, 13, 20, 27, 40])
@pytest.mark.parametrize("weights", [1, 50, 99, 100, 101, 120, 133, 500, 10**12])
def test_the_limit_is_passed_only_by_what_does_not_fit(width: int, weights: int) -> None:
    before = room(width, all_fit=False)
    bar = memory_bar(memory(weights), width, before).plain
    assert len(bar) == width
    assert bar.index(LIMIT) == before
    beyond = bar.partition(LIMIT)[2].strip()
    assert bool(beyond) == (weights > 100)
    assert (weights >= 500) <= (BEYOND in bar) <= (weights > 100)


def test_a_bar_longer_than_the_line_ends_in_an_arrow() -> None:
    assert memory_bar(memory(300), 13, 9).plain == "█████████│██»"
    assert memory_bar(memory(101), 13, 9).plain == "█████████│█  "


def test_where_all_fits_the_limit_is_the_end() -> None:
    before = room(11, all_fit=True)
    assert memory_bar(memory(100), 11, before).plain == "██████████│"


def test_a_plain_bar() -> None:
    assert plain_bar(0.5, 8).plain == "████····"
    assert plain_bar(1.7, 4).plain == "████"
