"""Time where groups of ranks share copies: what goes over the network, and what overlaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.deepspeed import policy
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives
from shardwise.simulate.time.schedule import Schedule
from shardwise.simulate.time.streams import COMMUNICATE, HOST_READS, Clocks, Streams
from shardwise.strategy import Strategy

NODES = parse_hardware("2x2xH200")
NODE, ALL = collectives.group(NODES, 2), collectives.group(NODES, 4)
WIDTH = 4096
BLOCK = WIDTH * WIDTH


def zero3(trace: StepTrace, group: int) -> Schedule:
    strategy = Strategy(engine="deepspeed", stage=3, data_parallel=4, shard_group=group, accumulation=2)
    return descriptor(strategy).schedule(trace, strategy, NODES)


def gathers(schedule: Schedule, *, first: bool) -> list[float]:
    """Seconds of each gather of a block, without the kernels around it; reductions take longer."""
    schedule.streams.moving = lambda *_, **__: 0.0  # type: ignore[method-assign]
    work = schedule._recorded(lambda: schedule.micro_batch(first=first, last=not first))
    far, near = (collectives.all_gather(2 * BLOCK, group) for group in (ALL, NODE))
    return [item[1] for item in work if item[0] == COMMUNICATE and item[1] in (far, near)]


def test_hpz_gathers_over_all_ranks_once_a_step_and_then_within_a_node(
    layers: Callable[..., StepTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "RELEASE_AT", 1)
    monkeypatch.setattr(policy, "PREFETCH", 1)
    far, near = (collectives.all_gather(2 * BLOCK, group) for group in (ALL, NODE))
    assert near < far / 3
    trace = layers(blocks=3)
    grouped, plain = zero3(trace, 2), zero3(trace, 0)
    # Three blocks forward; the last is still there when the backward pass begins with it.
    assert gathers(grouped, first=True) == [far] * 3 + [near] * 2
    assert gathers(grouped, first=False) == [near] * 5
    assert gathers(plain, first=True) == gathers(plain, first=False) == [far] * 5


def test_hpz_waits_for_each_copy_once_a_step(
    layers: Callable[..., StepTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "RELEASE_AT", 1)
    schedule = zero3(layers(blocks=3), 2)
    for first, copies in ((True, 3 + 1), (False, 0)):
        work = schedule._recorded(lambda first=first: schedule.micro_batch(first=first, last=not first))
        waits = [place for place, item in enumerate(work) if item[0] == HOST_READS]
        assert len(waits) == copies
        # half of a block on this rank: cleared, read and written, 2 bytes each
        one = schedule.streams.draw.moving(3 * 2 * BLOCK / 2)
        assert [work[place - 1][3] for place in waits].count(one) == (3 if first else 0)


def test_qwz_gathers_one_byte_an_element(layers: Callable[..., StepTrace]) -> None:
    strategy = Strategy(engine="deepspeed", stage=3, data_parallel=4, quantized_weights=True)
    schedule = descriptor(strategy).schedule(layers(blocks=1), strategy, NODES)
    one = schedule.streams.draw.linking(1)
    schedule.streams.moving = lambda *_, **__: 0.0  # type: ignore[method-assign]
    work = schedule._recorded(lambda: schedule.micro_batch(first=True, last=True))
    [gather] = [
        item for item in work if item[0] == COMMUNICATE and item[1] == collectives.all_gather(BLOCK, ALL)
    ]
    # A quarter is concatenated, goes to fp16 and int8; all come back by fp16, are copied out; the collective.
    moved = (4 + 4 + 3) / 4 + (3 + 4) + 4 + 1
    assert gather[2] / one / BLOCK == pytest.approx(moved)


def test_qgz_sends_half_a_byte_within_a_node_and_its_share_of_that_between(
    layers: Callable[..., StepTrace],
) -> None:
    values = {"engine": "deepspeed", "stage": 3, "precision": "fp16", "quantized_gradients": True}
    strategy = Strategy(data_parallel=4, **values)  # type: ignore[arg-type]
    schedule = descriptor(strategy).schedule(layers(blocks=1), strategy, NODES)
    across = collectives.group(NODES, 2, stride=2)
    expected = collectives.reduce_scatter(BLOCK / 2, NODE) + collectives.reduce_scatter(BLOCK / 4, across)
    assert schedule._scatter(BLOCK) == expected
    alone = descriptor(strategy).schedule(layers(blocks=1), strategy, parse_hardware("4xH200"))
    inside = collectives.group(parse_hardware("4xH200"), 4)
    assert alone._scatter(BLOCK) == collectives.reduce_scatter(2 * BLOCK, inside), "DeepSpeed does as before"


def test_sums_over_replicas_run_beside_collectives_and_are_waited_for_at_the_end() -> None:
    streams = Streams(NODES, "bf16")
    for _ in range(2):
        streams.communicate(1.0, 0.0, after_compute=False)
        streams.sum_over_replicas(3.0, 0.0, apart=True)
    streams.settle()
    clocks = Clocks()
    clocks.run(streams.work)
    # Collectives end at 1 and 2. Sums: 1 to 4, and after that to 7.
    assert clocks.compute == pytest.approx(7.0, abs=1e-4)
    assert clocks.totals.communication == 8.0
    assert clocks.totals.exposed == pytest.approx(7.0, abs=1e-4)


def test_sums_over_the_same_links_wait_for_the_collectives() -> None:
    streams = Streams(NODES, "bf16")
    for _ in range(2):
        streams.communicate(1.0, 0.0, after_compute=False)
        streams.sum_over_replicas(3.0, 0.0, apart=False)
    streams.settle()
    clocks = Clocks()
    clocks.run(streams.work)
    assert clocks.compute == pytest.approx(8.0, abs=1e-4)


@pytest.mark.parametrize(("network", "times"), [("eth25", 4), ("ib400", 1)])
def test_a_step_on_two_nodes_waits_less_where_each_has_all_weights(
    layers: Callable[..., StepTrace], network: str, times: int
) -> None:
    hardware, trace = parse_hardware(f"2x8xH100+{network}"), layers(blocks=8)

    def exposed(**values: Any) -> float:
        strategy = Strategy(data_parallel=16, accumulation=4, **values)
        return descriptor(strategy).play(trace, strategy, hardware).totals.exposed

    all_ranks, by_node = exposed(engine="fsdp2"), exposed(engine="fsdp2", shard_group=8)
    assert by_node < all_ranks / times
    assert exposed(engine="deepspeed", stage=3, shard_group=8) < exposed(engine="deepspeed", stage=3)
