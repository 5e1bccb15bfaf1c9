"""Time of a pipeline's step: the passes of all ranks played in the order of the schedule.

A pass begins when its rank is free and what it needs has arrived. A message takes the link's latency and its
bytes over the link's rate. Under 1F1B a rank waits until what it has sent has arrived, as torch waits for
sends and receives together (schedules.py: Schedule1F1B); the other schedules send next to the computation.
After the passes each stage sums its gradients over its data-parallel ranks (runtime/zero1.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.engines.pipeline.split import Stage, sent_bytes, stages_of
from shardwise.engines.pipeline.stages import Pass, order, stage_count
from shardwise.hardware.hardware import Hardware, Link
from shardwise.simulate.energy import Draw
from shardwise.simulate.step_trace import FP32, StepTrace
from shardwise.simulate.time import collectives as communication
from shardwise.simulate.time.roofline import Host, Roofline
from shardwise.simulate.time.schedule import ADAMW_BYTES, NORM_BYTES, added, converted, copied
from shardwise.simulate.time.segments import segments
from shardwise.simulate.time.step import Played
from shardwise.simulate.time.streams import Totals
from shardwise.strategy import Strategy

MOST_ROUNDS = 16
"""Micro-batches a rank that are played one by one; each further one takes as long as those before it."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds of a stage's passes over one micro-batch, and of what it does after all of them."""

    forward: float
    backward: float
    host: float  # In which the process issues both passes
    kernels: float  # Of both passes, without the sums over the ranks that share a layer
    sums: float = 0.0  # Those sums
    joules: float = 0.0
    reduce: float = 0.0  # Collectives after the passes
    update: float = 0.0  # Kernels after the passes
    gather: float = 0.0  # Collectives after the optimizer


def play_pipeline(trace: StepTrace, strategy: Strategy, hardware: Hardware) -> Played:
    """A step's seconds, and totals of the average GPU."""
    ranks, count = strategy.pipeline, strategy.accumulation
    stages = stages_of(trace, stage_count(strategy))
    costs = [_costs(stage, strategy, hardware) for stage in stages]
    messages = [_seconds(link, sent_bytes(trace)) for link in _links(strategy, hardware)]

    def passes(messages: Sequence[float]) -> float:
        return finished(strategy, costs, messages)

    by_rank = [[costs[stage] for stage in range(rank, len(costs), ranks)] for rank in range(ranks)]
    tied = set(stages[0].trainable) & set(stages[-1].trainable)  # whose fp32 gradients the ends add up
    shared = sum(FP32 * stages[0].trace.parameters[i].numel for i in tied) / strategy.data_parallel
    ends = 2 * _seconds(_links(strategy, hardware)[-1], shared)
    reduce = max(sum(one.reduce for one in own) for own in by_rank) + ends
    update = max(sum(one.update for one in own) for own in by_rank)
    gather = max(sum(one.gather for one in own) for own in by_rank)
    free, seconds = passes([0.0] * len(messages)), passes(messages)
    host = Host(hardware.host_pace).seconds("step")
    busy = sum(count * (one.forward + one.backward) + one.update for one in costs) / ranks
    sums = sum(count * one.sums for one in costs) / ranks
    sent = sum(2 * count * message for message in messages[: len(costs) - 1]) / ranks
    totals = Totals(
        compute=sum(count * one.kernels + one.update for one in costs) / ranks,
        communication=sent + sums + reduce + gather,
        exposed=seconds - free + sums + reduce + gather,
        exposed_to_peers=sums,
        optimizer=update + gather,
        issue=sum(count * one.host for one in costs) / ranks + host,
        joules=sum(count * one.joules for one in costs) / ranks,
        bubble=free + update - busy,
    )
    return Played(seconds=seconds + reduce + update + gather + host, totals=totals)


def finished(strategy: Strategy, costs: Sequence[Costs], messages: Sequence[float]) -> float:
    """Seconds until the last rank has done its passes; `messages`: from each stage to the next, and back."""
    count, ranks = strategy.accumulation, strategy.pipeline
    most = MOST_ROUNDS * ranks
    if count <= most:
        return _play(strategy, count, costs, messages)
    half = most // 2
    many, few = (_play(strategy, number, costs, messages) for number in (most, half))
    return many + (count - most) / (most - half) * (many - few)


def _play(strategy: Strategy, count: int, costs: Sequence[Costs], messages: Sequence[float]) -> float:
    ranks, last = strategy.pipeline, len(costs) - 1
    left = [order(strategy.pipeline_schedule, rank, ranks, count) for rank in range(ranks)]
    at, free, arrived = [0] * ranks, [0.0] * ranks, dict[Pass, float]()
    waits = strategy.pipeline_schedule == "1f1b"
    moved = True
    while moved:
        moved = False
        for rank, passes in enumerate(left):
            while at[rank] < len(passes):
                one = passes[at[rank]]
                backward, stage, micro_batch = one
                if backward:
                    needed = Pass(stage < last, min(stage + 1, last), micro_batch)
                else:
                    needed = Pass(False, stage - 1, micro_batch)
                if needed.stage >= 0 and needed not in arrived:
                    break
                begin = max(free[rank], arrived.get(needed, 0.0))
                end = begin + (costs[stage].backward if backward else costs[stage].forward)
                to = stage - 1 if backward else stage + 1
                sent = 0.0 if to in (-1, last + 1) else messages[min(stage, to)]
                arrived[one] = end + sent
                free[rank] = end + sent if waits else end
                at[rank] += 1
                moved = True
    assert all(at[rank] == len(passes) for rank, passes in enumerate(left)), "the schedule waits for itself"
    return max(free)


def _costs(stage: Stage, strategy: Strategy, hardware: Hardware) -> Costs:
    trace, count = stage.trace, strategy.accumulation
    item = FP32 if trace.precision == "fp32" else 2
    roofline, draw = Roofline(hardware.gpu, trace.precision), Draw(hardware.gpu)
    host = Host(hardware.host_pace)
    peers = communication.group(hardware, strategy.tensor_parallel)
    seconds, issued, sums, joules = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], 0.0
    for segment in segments(trace, hardware.gpu, hardware.host_pace):
        half = int(segment.backward)
        seconds[half] += segment.seconds
        sums[half] += sum(communication.all_reduce(size, peers) for size in segment.sums)
        joules += segment.joules
        issued[half] += segment.host_seconds
        hooks = len(segment.gradients)
        if hooks:  # the first micro-batch's gradients begin a sum, the others are added to it
            begin = converted(item, FP32) if item < FP32 else 0
            size = segment.learned * (begin + (count - 1) * added(item, FP32)) / count
            seconds[1] += hooks * roofline.moving(size / hooks, "mixed" if item < FP32 else "elementwise")
            issued[1] += hooks * host.seconds("gradient_hook") if item < FP32 else 0.0
            joules += draw.moving(size)
    elements = float(sum(trace.parameters[index].numel for index in stage.trainable))
    rows = communication.group(hardware, strategy.data_parallel, stride=strategy.tensor_parallel)
    own = elements / strategy.data_parallel
    moved = (NORM_BYTES + ADAMW_BYTES) * own
    moved += converted(FP32, item) * own if item < FP32 or rows.size > 1 else 0.0
    moved += (copied(FP32) + copied(item)) * elements if rows.size > 1 else 0.0
    # The process issues a pass while the GPU runs the one before: only both together wait for it.
    waits = max(1.0, sum(issued) / (sum(seconds) + sum(sums)))
    return Costs(
        forward=waits * (seconds[0] + sums[0]),
        backward=waits * (seconds[1] + sums[1]),
        host=sum(issued),
        kernels=sum(seconds),
        sums=sum(sums),
        joules=joules + draw.moving(moved) / count,
        reduce=communication.reduce_scatter(FP32 * elements, rows) if elements else 0.0,
        update=roofline.moving(moved, "foreach_copy"),
        gather=communication.all_gather(item * elements, rows) if elements else 0.0,
    )


def _links(strategy: Strategy, hardware: Hardware) -> list[Link]:
    """The link from each stage to the next; last, that from the last stage to the first."""
    each = strategy.data_parallel * strategy.tensor_parallel

    def link(stage: int) -> Link:
        here, there = (rank % strategy.pipeline * each for rank in (stage, stage + 1))
        node = hardware.gpus_per_node
        crosses = any((here + k) // node != (there + k) // node for k in range(each))
        return (hardware.inter or hardware.intra) if crosses else hardware.intra

    return [link(stage) for stage in range(stage_count(strategy))]


def _seconds(link: Link, num_bytes: float) -> float:
    return link.latency_seconds + num_bytes / link.bytes_per_second if num_bytes else 0.0
