"""When ZeRO gathers, releases and reduces; and that memory and time agree on it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from shardwise.engines import descriptor
from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.config import NEVER_RELEASE, PERSIST, PREFETCH, RELEASE_AT
from shardwise.engines.deepspeed.memory.coordinator import Coordinator
from shardwise.engines.deepspeed.time import Zero3
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.step_trace import FORWARD, FORWARD_END, OP, Op, Parameter, StepTrace, Unit
from shardwise.simulate.time import collectives
from shardwise.simulate.time.streams import COMMUNICATE, COMPUTE, COMPUTE_WAITS
from shardwise.strategy import Strategy

ZERO3 = Strategy(engine="deepspeed", stage=3, data_parallel=4)


def _trace(*sizes: int) -> StepTrace:
    """One unit for each parameter, outside the blocks, each with a forward pass of one operator."""
    names = [f"p{index}" for index in range(len(sizes))]
    units = range(len(sizes))
    return StepTrace(
        parameters=tuple(
            Parameter(name=name, shape=(size,), item_bytes=2, trainable=True)
            for name, size in zip(names, sizes, strict=True)
        ),
        buffers=(),
        units=tuple(Unit(name=name, block=-1, parameters=(i,)) for i, name in enumerate(names)),
        events=tuple(event for unit in units for event in ((FORWARD, unit), (OP, 0), (FORWARD_END, unit))),
        ops=(Op(kind="matmul", flops=2.0, read_bytes=2, written_bytes=2, shape=(1, 1, 1, 1)),),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_memory_and_time_agree_on_what_persists(more: int) -> None:
    """mark_persistent_parameters: `ds_numel <= threshold` persists, and is never gathered."""
    trace = _trace(PERSIST + more, 10 * PERSIST)
    persistent = Coordinator(trace, ZERO3).persistent
    schedule = descriptor(ZERO3).schedule(trace, ZERO3, parse_hardware("4xH200"))
    assert isinstance(schedule, Zero3)
    assert persistent == ({0} if more <= 0 else set())
    assert schedule.parts == [[] if 0 in persistent else [0], [1]]


def test_of_a_unit_larger_than_what_is_gathered_ahead_the_rest_is_gathered_when_it_begins() -> None:
    sizes = [PREFETCH // 4, PREFETCH // 4, PREFETCH, PREFETCH // 2]
    trace = replace(
        _trace(*sizes),
        units=(
            Unit(name="first", block=-1, parameters=(0,)),
            Unit(name="second", block=-1, parameters=(1, 2, 3)),
        ),
        events=tuple(event for unit in (0, 1) for event in ((FORWARD, unit), (OP, 0), (FORWARD_END, unit))),
    )
    hardware = parse_hardware("4xH200")
    schedule = descriptor(ZERO3).schedule(trace, ZERO3, hardware)
    work = schedule._recorded(lambda: schedule.micro_batch(first=True, last=True))
    kinds = (COMPUTE, COMMUNICATE, COMPUTE_WAITS)
    seconds = [
        collectives.all_gather(2 * size, collectives.group(hardware, 4))
        for size in (sizes[0], sizes[1] + sizes[2], sizes[3])
    ]
    found = [item for item in work if item[0] in kinds][:8]
    assert [item[0] for item in found] == [
        *(COMMUNICATE, COMPUTE_WAITS, COMMUNICATE, COMPUTE),
        *(COMMUNICATE, COMPUTE_WAITS, COMPUTE_WAITS, COMPUTE),
    ]
    gathers = [item for item in found if item[0] == COMMUNICATE]
    assert [item[1] for item in gathers] == seconds
    assert [item[3] for item in gathers] == [False] * 3, "it waits for no computation"
    waits = [item[1] for item in found if item[0] == COMPUTE_WAITS]
    assert waits == [item[-1] for item in gathers], "one for each gather"
    assert len({*waits}) == 3


@pytest.mark.parametrize(
    ("live", "limit", "taken"),
    [
        (0, 10**15, 3),  # until as much as PREFETCH was asked for, the last one included
        (PREFETCH, 10**15, 3),
        (PREFETCH, int(1.4 * PREFETCH), 2),  # until as much is live as may be
        (PREFETCH, PREFETCH, 0),
    ],
)
def test_gathering_ahead_stops_when_enough_is_under_way(live: int, limit: int, taken: int) -> None:
    queue = deque([(0, 0), (1, 1), (2, 2), (3, 3)])
    sizes = {0: 0.3, 1: 0.3, 2: 0.4, 3: 0.4}

    def ahead() -> tuple[list[tuple[int, int]], list[int]]:
        return policy.look_ahead(
            queue, live=live, limit=limit, numel=lambda p: sizes[p] * PREFETCH, available=lambda _: False
        )

    uses, missing = ahead()
    assert missing == [use[0] for use in uses] == list(range(taken))
    assert len(queue) == 4 - taken


def test_gathering_ahead_passes_over_what_is_available_and_gathers_nothing_twice() -> None:
    queue = deque([(0, 0), (1, 1), (0, 2), (1, 3), (2, 4)])
    uses, missing = policy.look_ahead(
        queue, live=0, limit=10**15, numel=lambda _: PREFETCH / 2, available=lambda p: p == 1
    )
    assert missing == [0, 2]
    assert uses == [(0, 0), (1, 1), (0, 2), (1, 3), (2, 4)]


def test_what_is_used_again_within_the_limit_is_kept() -> None:
    later = [([1], 4), ([2], 4), ([3], 4)]
    assert policy.released([1, 2, 3, 4], later, limit=8) == {3, 4}, "3 comes after 8 elements"
    assert policy.released([1, 2, 3, 4], later, limit=9) == {4}
    assert policy.released([1], [], limit=8) == {1}


def test_without_resharding_nothing_is_released_that_is_used_again() -> None:
    assert policy.live_limit(ZERO3) == RELEASE_AT
    kept = Strategy(engine="deepspeed", stage=3, reshard=False)
    assert policy.live_limit(kept) == NEVER_RELEASE


@pytest.mark.parametrize(("stage", "reduced"), [(1, [False, True]), (2, [True, True]), (3, [True, True])])
def test_stage_1_reduces_after_the_last_micro_batch_only(stage: int, reduced: list[bool]) -> None:
    strategy = Strategy(engine="deepspeed", stage=stage)
    assert [policy.reduces(strategy, last=last) for last in (False, True)] == reduced


def test_a_bucket_is_flushed_before_the_gradient_that_it_has_no_room_for() -> None:
    bucket = policy.Bucket(_trace(6, 4, 9, 1), Strategy(engine="deepspeed", stage=2, bucket=10))
    assert not bucket.is_full_for(11), "an empty bucket takes any gradient"
    bucket.add([0], 6)
    assert not bucket.is_full_for(4)
    assert bucket.is_full_for(5)
    assert bucket.has_room_for(10)
    assert not bucket.has_room_for(11)
    bucket.add([1], 4)
    assert (bucket.parameters, bucket.used) == ([0, 1], 10)
    bucket.clear()
    assert (bucket.parameters, bucket.used) == ([], 0)


def test_a_bucket_is_no_larger_than_the_model() -> None:
    assert policy.Bucket(_trace(6, 4), Strategy(engine="deepspeed", stage=2)).size == 10
