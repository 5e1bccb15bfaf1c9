"""Which blocks each stage of a pipeline has, and in which order a GPU computes its passes.

Of p ranks each holds one stage, under the interleaved schedule CHUNKS of them: stage s is on rank s modulo p.
Both the simulator and the trainer read this file, so what is planned is what runs. Free of torch.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import NamedTuple

from shardwise.strategy import PipelineSchedule, Strategy

CHUNKS = 2  # Stages of a rank under the interleaved schedule


class Pass(NamedTuple):
    """A stage's forward or backward pass over one micro-batch."""

    backward: bool
    stage: int
    micro_batch: int


def chunks(strategy: Strategy) -> int:
    """Stages of each rank."""
    return CHUNKS if strategy.pipeline_schedule == "interleaved" else 1


def stage_count(strategy: Strategy) -> int:
    """Stages of all ranks."""
    return strategy.pipeline * chunks(strategy)


def cut(costs: Sequence[float], head: float, stages: int) -> tuple[range, ...]:
    """The blocks of each stage: the most expensive stage as cheap as possible, then all even.

    `costs` are those of the blocks, `head` is added to the last stage; any unit. Even: the least sum of
    squares; where several cuts are as good, the first stages, which keep the most activations, have fewer
    blocks. ValueError where there are fewer blocks than stages.
    """
    blocks = len(costs)
    if not 1 <= stages <= blocks:
        raise ValueError(f"{blocks} blocks cannot be cut into {stages} stages")
    sums = [0.0, *accumulate(costs)]

    def best(measure: Callable[[float, float], float]) -> list[dict[int, tuple[float, int]]]:
        """By stage, and the block it ends before: the measure of all stages so far, and where it begins."""
        found = [{0: (0.0, 0)}]
        for stage in range(stages):
            ends = range(stage + 1, blocks - (stages - stage - 1) + 1) if stage < stages - 1 else [blocks]
            extra = head if stage == stages - 1 else 0.0
            found.append(
                {
                    end: min(
                        (measure(so_far, sums[end] - sums[begin] + extra), begin)
                        for begin, (so_far, _) in found[-1].items()
                        if begin < end
                    )
                    for end in ends
                }
            )
        return found

    most = best(max)[stages][blocks][0] * (1 + 1e-9)
    table = best(lambda so_far, cost: so_far + cost**2 if cost <= most else inf)
    ends = [blocks]
    for stage in range(stages, 0, -1):
        ends.append(table[stage][ends[-1]][1])
    return tuple(range(begin, end) for begin, end in pairwise(reversed(ends)))


def order(schedule: PipelineSchedule, rank: int, ranks: int, micro_batches: int) -> list[Pass]:
    """A rank's passes of one step, in order, as torch.distributed.pipelining computes them.

    `_get_pipeline_order` of ScheduleGPipe and Schedule1F1B, `_get_1f1b_rank_ops` of ScheduleInterleaved1F1B
    (torch 2.13, schedules.py).
    """
    if schedule == "interleaved":
        return _interleaved(rank, ranks, micro_batches)
    ahead = micro_batches if schedule == "gpipe" else min(micro_batches, ranks - rank)
    passes = [Pass(False, rank, index) for index in range(ahead)]
    for index in range(micro_batches):
        passes.append(Pass(True, rank, index))
        if ahead + index < micro_batches:
            passes.append(Pass(False, rank, ahead + index))
    return passes


def rounds(ranks: int, micro_batches: int) -> int:
    """Of the interleaved schedule; they have to divide the micro-batches."""
    return max(1, micro_batches // ranks)


def _interleaved(rank: int, ranks: int, micro_batches: int) -> list[Pass]:
    each = micro_batches // rounds(ranks, micro_batches)  # micro-batches that a chunk takes in turn
    total = CHUNKS * micro_batches
    ahead = min((CHUNKS - 1) * each + 2 * (ranks - 1 - rank), total)

    def nth(number: int, *, backward: bool) -> Pass:
        turn, place = divmod(number, each)
        chunk = CHUNKS - 1 - turn % CHUNKS if backward else turn % CHUNKS
        return Pass(backward, chunk * ranks + rank, turn // CHUNKS * each + place)

    passes = [nth(number, backward=False) for number in range(ahead)]
    for number in range(total):
        if ahead + number < total:
            passes.append(nth(ahead + number, backward=False))
        passes.append(nth(number, backward=True))
    return passes
