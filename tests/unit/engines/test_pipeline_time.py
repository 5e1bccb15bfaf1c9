"""Time of a pipeline's step: schedules of a few passes, counted by hand, and the formulas of the papers."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.pipeline.time import Costs, _links, finished
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.step_trace import (
    BACKWARD,
    FORWARD,
    FORWARD_END,
    GRADIENT,
    OP,
    Event,
    Op,
    Parameter,
    StepTrace,
    Unit,
)
from shardwise.simulate.time.step import Played, predict_time
from shardwise.strategy import Strategy


def strategy(**values: Any) -> Strategy:
    return Strategy(**{"engine": "pipeline", "pipeline": 2, "accumulation": 2, **values})


def stages(count: int, forward: float = 1.0, backward: float = 2.0) -> list[Costs]:
    return [Costs(forward=forward, backward=backward, host=0.0, kernels=0.0) for _ in range(count)]


@pytest.mark.parametrize("pipeline", [2, 4])
@pytest.mark.parametrize("micro_batches", [4, 8, 12])
def test_equal_stages_wait_as_long_as_the_papers_say(pipeline: int, micro_batches: int) -> None:
    """(m + p - 1) (F + B) under GPipe and 1F1B; the bubble is half of that with two stages a rank."""
    each: dict[str, Any] = {"pipeline": pipeline, "accumulation": micro_batches}
    for schedule in ("gpipe", "1f1b"):
        one = strategy(**each, pipeline_schedule=schedule)
        assert finished(one, stages(pipeline), [0.0] * pipeline) == 3.0 * (micro_batches + pipeline - 1)
    one = strategy(**each, pipeline_schedule="interleaved")
    found = finished(one, stages(2 * pipeline, 0.5, 1.0), [0.0] * 2 * pipeline)
    assert found == 3.0 * micro_batches + 1.5 * (pipeline - 1)


def test_1f1b_waits_for_what_it_sends() -> None:
    """Two micro-batches, two ranks, messages of 0.1.

    Rank 0: F0 0 to 1, sent at 1.1; F1 to 2.1, sent at 2.2. Rank 1: F0 1.1 to 2.1, B0 to 4.1, sent at 4.2; F1
    to 5.2, B1 to 7.2, sent at 7.3. Rank 0: B0 4.2 to 6.2, B1 7.3 to 9.3.
    """
    assert finished(strategy(), stages(2), [0.1, 0.1]) == pytest.approx(9.3)


def test_gpipe_sends_next_to_its_computation() -> None:
    """Rank 0: F0, F1 until 2. Rank 1: F0 1.1 to 2.1, F1, B0 to 5.1, B1 to 7.1. Rank 0: B0 5.2 to 7.2, B1."""
    one = strategy(pipeline_schedule="gpipe")
    assert finished(one, stages(2), [0.1, 0.1]) == pytest.approx(9.2)


def test_the_slowest_stage_decides() -> None:
    """The last rank, with a head, never waits from its first pass to its last."""
    uneven = [*stages(1), *stages(1, 2.0, 3.0)]
    assert finished(strategy(accumulation=8), uneven, [0.0, 0.0]) == 1.0 + 8 * 5.0 + 2.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_further_micro_batches_take_as_long_as_those_before(
    schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = [*stages(1), *stages(2, 1.5, 2.0), *stages(1, 2.0, 3.0)]
    ranks = 2 if schedule == "interleaved" else 4
    one = strategy(pipeline=ranks, accumulation=160, pipeline_schedule=schedule)
    short = finished(one, costs, [0.1] * 4)
    monkeypatch.setattr("shardwise.engines.pipeline.time.MOST_ROUNDS", 1000)
    assert short == pytest.approx(finished(one, costs, [0.1] * 4), rel=1e-9)


def test_stages_of_different_nodes_send_over_the_network() -> None:
    hardware = parse_hardware("2x8xH100")
    inter, intra = hardware.inter, hardware.intra
    assert inter is not None
    assert _links(strategy(pipeline=2, data_parallel=8), hardware) == [inter, inter]
    assert _links(strategy(pipeline=4, data_parallel=4), hardware) == [intra, inter, intra, inter]
    assert _links(strategy(pipeline=2, data_parallel=4), hardware) == [intra, intra]


def trace(width: int, *, tied: bool = False) -> StepTrace:
    """Four blocks of one square matrix, an embedding and a head, in bf16; tied ends share their weights."""
    shapes = [(width, width)] * 4 + [(1024, width)] * (1 if tied else 2)
    units = [Unit(name=f"{block}", block=block, parameters=(block,)) for block in range(4)]
    units += [
        Unit(name="embed", block=-1, parameters=(4,)),
        Unit(name="head", block=-1, parameters=(4 if tied else 5,)),
    ]
    events: list[Event] = []
    for unit in (4, 0, 1, 2, 3, 5):
        events += [(FORWARD, unit), (OP, 0), (FORWARD_END, unit)]
    for unit in (5, 3, 2, 1, 0, 4):
        events += [(BACKWARD, unit), (OP, 0), (OP, 0)]
        events += [(GRADIENT, units[unit].parameters[0], unit)] if unit != 5 or not tied else []
    product = Op(
        kind="matmul",
        flops=2.0 * width**3,
        read_bytes=4 * width**2,
        written_bytes=2 * width**2,
        item_bytes=2,
        shape=(1, width, width, width),
        name="mm",
    )
    return StepTrace(
        parameters=tuple(
            Parameter(name=f"{n}", shape=shape, item_bytes=2, trainable=True)
            for n, shape in enumerate(shapes)
        ),
        buffers=(),
        units=tuple(units),
        events=tuple(events),
        ops=(product,),
        rows=1,
        sequence_length=width,
        checkpoint_every=0,
        precision="bf16",
    )


def play(made: StepTrace, one: Strategy) -> Played:
    return descriptor(one).play(made, one, parse_hardware("2xH200"))


def test_tied_ends_send_the_embeddings_gradient_there_and_the_sum_back() -> None:
    """Once a step, in fp32; the stages train as many elements as with a head of its own."""
    tied, apart = (play(trace(4096, tied=both), strategy(accumulation=4)) for both in (True, False))
    link = parse_hardware("2xH200").intra
    sent = 2 * (link.latency_seconds + 4 * 1024 * 4096 / link.bytes_per_second)
    assert tied.seconds - apart.seconds == pytest.approx(sent)
    assert tied.totals.communication - apart.totals.communication == pytest.approx(sent)


def test_small_passes_last_as_long_as_the_process_issues_them() -> None:
    small = play(trace(64), strategy(accumulation=8))
    assert small.totals.compute < small.totals.issue / 10
    assert small.seconds > small.totals.issue
    large = play(trace(8192), strategy(accumulation=8))
    assert large.seconds > large.totals.compute > 10 * large.totals.issue


def test_a_stage_runs_its_share_of_what_follows_the_clock() -> None:
    """Two stages of a micro-batch: a GPU computes half of what one alone does."""
    hardware, made = parse_hardware("2xH200"), trace(4096)
    halves, alone = strategy(accumulation=4), Strategy(engine="single", accumulation=4)
    both = [predict_time(made, one, hardware, play(made, one)) for one in (halves, alone)]
    assert both[1].clocked_seconds > 0
    assert both[0].clocked_seconds == pytest.approx(both[1].clocked_seconds / 2)
