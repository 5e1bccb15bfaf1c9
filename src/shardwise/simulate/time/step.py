"""Seconds of an optimizer step: a trace replayed on the streams of one GPU as the engine would issue it."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from statistics import NormalDist

from shardwise.hardware.hardware import Hardware
from shardwise.simulate.energy import Draw
from shardwise.simulate.prediction import Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time.collectives import Group, group
from shardwise.simulate.time.schedule import Schedule
from shardwise.simulate.time.segments import clocked_seconds
from shardwise.simulate.time.streams import Clocks, Totals
from shardwise.strategy import Strategy

STEPS = 3
"""Steps that are played; the last one counts. The first begins with an idle GPU."""

MOST_PLAYED = 64
"""Micro-batches that are played one by one. Each further one takes as long as those before it."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """One GPU's step in the steady state."""

    seconds: float  # At full clock
    totals: Totals


def play_steps(strategy: Strategy, schedule_of: Callable[[Strategy], Schedule]) -> Played:
    """Play steps until they are alike; `schedule_of`: the engine's schedule for a strategy."""
    count = strategy.accumulation
    if count <= MOST_PLAYED:
        return _play(schedule_of(strategy))
    half = MOST_PLAYED // 2
    many, few = (_play(schedule_of(replace(strategy, accumulation=n))) for n in (MOST_PLAYED, half))
    times = (count - MOST_PLAYED) / (MOST_PLAYED - half)

    def further(reached: float, before: float) -> float:
        return reached + times * (reached - before)

    names = [field.name for field in fields(Totals)]
    totals = {name: further(getattr(many.totals, name), getattr(few.totals, name)) for name in names}
    return Played(seconds=further(many.seconds, few.seconds), totals=Totals(**totals))


def _play(schedule: Schedule) -> Played:
    clocks = Clocks(events=max(len(schedule.trace.units), len(schedule.trace.parameters)) + 1)
    ends = [0.0]
    for _ in range(STEPS):
        clocks.totals = Totals()
        schedule.step(clocks)
        ends.append(max(clocks.compute, clocks.communication, *clocks.copies))
    return Played(seconds=ends[-1] - ends[-2], totals=clocks.totals)


def predict_time(trace: StepTrace, strategy: Strategy, hardware: Hardware, played: Played) -> Time:
    """The time of one optimizer step of `strategy` on `hardware`, whose micro-batches are each `trace`.

    `played`: one GPU's steps, as all GPUs do the same; the slowest of them decides. When its work would draw
    more than the power limit on average, the clock falls until it does not, and the work lasts as long as its
    joules need. What it does not draw while it waits for other ranks is not saved for later (0097).
    """
    totals = played.totals
    waited = totals.exposed - totals.exposed_to_peers
    working = max(played.seconds - waited, Draw(hardware.gpu).powered_seconds(totals.joules))
    link, link_to_peers = slowest_links(hardware, strategy)
    waiting = slowest(strategy.world_size, hardware.spread)
    return Time(
        step_seconds=waiting * (waited + working),
        compute_seconds=totals.compute,
        communication_seconds=totals.communication,
        exposed_communication_seconds=totals.exposed,
        exposed_to_peers_seconds=totals.exposed_to_peers,
        exposed_to_copies_seconds=totals.exposed_to_copies,
        contended_seconds=totals.contended,
        copy_seconds=totals.copy,
        optimizer_seconds=totals.optimizer,
        launch_seconds=totals.issue,
        bubble_seconds=totals.bubble,
        tokens_per_step=trace.tokens * strategy.accumulation * strategy.data_parallel,
        world_size=strategy.world_size,
        full_clock_seconds=waiting * played.seconds,
        clocked_seconds=strategy.accumulation * clocked_seconds(trace, hardware.gpu) / strategy.pipeline,
        link=link,
        link_to_peers=link_to_peers,
    )


def slowest_links(hardware: Hardware, strategy: Strategy) -> tuple[str, str]:
    """Of data-parallel ranks and stages, or of a single GPU to its host; and of tensor parallelism."""
    to_peers = _slowest(group(hardware, strategy.tensor_parallel))
    if size := strategy.shard_group:  # weights from the group, sums over the groups
        across = group(hardware, strategy.data_parallel // size, stride=size)
        both = dict.fromkeys((_slowest(group(hardware, size)), _slowest(across)))
        return " and ".join(both), to_peers
    # Stages and data-parallel ranks together: a pipeline waits for both, over the slowest link.
    ranks = strategy.pipeline * strategy.data_parallel
    others = group(hardware, ranks, stride=strategy.tensor_parallel)
    return hardware.host_link.name if ranks == 1 else _slowest(others), to_peers


def _slowest(ranks: Group) -> str:
    """The slowest, and a network that a ring crosses at less than twice the rate of the links of a node."""
    inter, slowest = ranks.inter, ranks.slowest
    if inter is None or inter == slowest:
        return slowest.name
    close = inter.bytes_per_second * ranks.per_node < 2 * slowest.bytes_per_second
    return f"{slowest.name} and {inter.name}" if close else slowest.name


def slowest(gpus: int, spread: float) -> float:
    """Expected time of the slowest of `gpus`, as a multiple of their mean.

    Their times are taken as independent and normal with the standard deviation `spread`, a share of the mean.
    The expected maximum of n standard normal values is about the quantile (n - 3/8) / (n + 1/4) (Blom 1958,
    Statistical Estimates and Transformed Beta-Variables): 0.59 for 2, where 0.56 is exact, 3.23 for 1,000
    (3.24).
    """
    return 1.0 + spread * NormalDist().inv_cdf((gpus - 0.375) / (gpus + 0.25))
