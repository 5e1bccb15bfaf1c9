"""Which blocks a stage has, and the order of a rank's passes, which is torch's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from shardwise.engines.pipeline.stages import CHUNKS, Pass, cut, order


@pytest.mark.parametrize(
    ("costs", "head", "sizes"),
    [
        ([1.0] * 4, 0.0, [2, 2]),
        ([1.0] * 4, 0.9, [2, 2]),
        ([1.0] * 4, 1.1, [3, 1]),  # 3 and 2.1 cost less than 2 and 3.1
        ([1.0] * 3, 0.0, [1, 2]),  # as good as 2 and 1; the first stage keeps more activations
        ([1.0] * 3, 0.3, [2, 1]),
        ([1.0] * 6, 0.0, [1, 1, 2, 2]),
        ([1.0] * 6, 1.0, [1, 2, 2, 1]),
        ([1.0] * 16, 4.3, [2, 2, 2, 2, 2, 2, 3, 1]),  # the head decides; the others are even
        ([4.0, 1.0, 1.0, 1.0, 1.0], 0.0, [1, 4]),
        ([1.0] * 2, 100.0, [1, 1]),
        ([1.0] * 3, 0.0, [1, 1, 1]),
    ],
)
def test_the_most_expensive_stage_costs_as_little_as_possible(
    costs: list[float], head: float, sizes: list[int]
) -> None:
    found = cut(costs, head, len(sizes))
    assert [len(blocks) for blocks in found] == sizes
    assert [index for blocks in found for index in blocks] == list(range(len(costs)))


def test_no_cut_is_better() -> None:
    """Of all cuts of blocks of different costs into three stages."""
    costs, head = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0], 2.0

    def most(borders: tuple[int, int]) -> float:
        low, high = borders
        return max(sum(costs[:low]), sum(costs[low:high]), sum(costs[high:]) + head)

    first, second, _ = cut(costs, head, 3)
    best = min(most((low, high)) for low in range(1, 7) for high in range(low + 1, 8))
    assert most((first.stop, second.stop)) == best


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 blocks cannot be cut into 4 stages"):
        cut([1.0] * 3, 0.0, 4)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [4, 6, 8, 13])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_the_order_is_that_of_torch(schedule: Any, ranks: int, micro_batches: int) -> None:
    rounds = max(1, micro_batches // ranks)
    if schedule == "interleaved" and micro_batches % rounds:
        pytest.skip("torch takes equal rounds")
    for rank in range(ranks):
        found = _torch_order(schedule, rank, ranks, micro_batches)
        assert order(schedule, rank, ranks, micro_batches) == found


class Recorder:
    """A stage that notes its passes instead of computing them; nothing to send or to receive."""

    is_last = False

    def __init__(self, index: int, stages: int) -> None:
        self.stage_index, self.num_stages = index, stages
        self.passes: list[Pass] = []

    def forward_one_chunk(self, number: int, *_: Any, **__: Any) -> None:
        self.passes.append(Pass(False, self.stage_index, number))

    def backward_one_chunk(self, number: int, **_: Any) -> None:
        self.passes.append(Pass(True, self.stage_index, number))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []


def _torch_order(schedule: str, rank: int, ranks: int, micro_batches: int) -> list[Pass]:
    """What torch's schedule does on a rank, without processes.

    Of GPipe and 1F1B the loop that runs: Schedule1F1B's `pipeline_order` counts forward passes from 1 on the
    last rank (torch 2.13).
    """
    if schedule != "interleaved":
        kind = schedules.ScheduleGPipe if schedule == "gpipe" else schedules.Schedule1F1B
        stage = Recorder(rank, ranks)
        made = kind(stage, micro_batches)
        made._initialize_stage = lambda *_, **__: None
        made._step_microbatches()
        return stage.passes
    stages = [
        SimpleNamespace(
            num_stages=CHUNKS * ranks,
            group_size=ranks,
            group_rank=0,
            stage_index=chunk * ranks,
            submod=None,
            has_backward=True,
        )
        for chunk in range(CHUNKS)
    ]
    actions = schedules.ScheduleInterleaved1F1B(stages, micro_batches).pipeline_order[rank]
    kinds = (schedules.FORWARD, schedules.FULL_BACKWARD)
    return [
        Pass(action.computation_type != schedules.FORWARD, action.stage_index, action.microbatch_index)
        for action in actions
        if action is not None and action.computation_type in kinds
    ]
