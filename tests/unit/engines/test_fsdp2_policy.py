"""When FSDP2 gathers and releases."""

from __future__ import annotations

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
    kept, resharded = (Strategy(engine="fsdp2", reshard=flag) for flag in (False, True))
    assert memory.released(resharded, backward=False, last=last)
    assert memory.released(resharded, backward=True, last=last)
    assert not memory.released(kept, backward=False, last=last)
    assert memory.released(kept, backward=True, last=last) is last
