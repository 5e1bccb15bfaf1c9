"""When FSDP2 gathers and releases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.engines.fsdp2 import memory
from shardwise.strategy import Strategy


@pytest.mark.parametrize(
    ("block", "backward", "ahead"),
    [
        *((0, False, [1]), (1, False, [2]), (2, False, [])),
        *((3, True, [2]), (2, True, [1]), (1, True, [0]), (0, True, [])),
    ],
)
def test_the_next_block_in_this_direction_is_gathered(block: int, backward: bool, ahead: list[int]) -> None:
    assert list(memory.gathered_ahead(block, 3, backward=backward)) == ahead


@pytest.mark.parametrize("last", [False, True])
def test_without_resharding_groups_stay_until_the_last_backward_pass(last: bool) -> None:
    kept, resharded = (Strategy(engine="fsdp2", reshard=flag, data_parallel=2) for flag in (False, True))
    assert memory.released(resharded, backward=False, last=last)
    assert memory.released(resharded, backward=True, last=last)
    assert not memory.released(kept, backward=False, last=last)
    assert memory.released(kept, backward=True, last=last) is last


def test_on_one_rank_there_is_nothing_to_gather_again() -> None:
    """So that each micro-batch of a step can be the same graph."""
    kept = Strategy(engine="fsdp2", reshard=False, accumulation=2)
    assert memory.released(kept, backward=True, last=False)
    assert not memory.released(kept, backward=False, last=False)
    assert memory.records(kept)
    assert not memory.records(replace(kept, data_parallel=2))
