"""Memory and time of replicas by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.ddp import time as ddp_time
from shardwise.engines.ddp.memory import DdpMemory
from shardwise.engines.ddp.time import DdpSchedule, sent_by_powersgd
from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives
from shardwise.simulate.time.streams import COMMUNICATE
from shardwise.strategy import Strategy

NODES = parse_hardware("2x2xH200")
ALL = collectives.group(NODES, 4)
WIDTH = 4096
BLOCK, EMBEDDING = WIDTH * WIDTH, 1024 * WIDTH


def strategy_of(**values: Any) -> Strategy:
    return Strategy(engine="ddp", data_parallel=4, **values)


@pytest.mark.parametrize(("powersgd", "kept"), [(0, 2), (4, 4)])
def test_a_replica_has_all_states_and_buckets_for_all_gradients(
    layers: Callable[..., StepTrace], powersgd: int, kept: int
) -> None:
    trace = layers(blocks=2)
    elements = 2 * BLOCK + EMBEDDING
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine = DdpMemory(trace, strategy_of(powersgd=powersgd))
    engine.build(memory)
    # weights 2, master and moments 12; gradients, and what PowerSGD did not send, 2 each; 3 step counts
    built = memory.allocator.allocated_bytes
    assert built == (2 + 12 + kept) * elements + 3 * 512
    for _ in range(2):
        engine.gradient(memory, 0, memory.take(GRADIENTS, 2 * EMBEDDING))
    assert memory.allocator.allocated_bytes == built
    memory.allocator.peak_allocated_bytes = memory.allocator.allocated_bytes
    engine.step(memory)
    assert memory.allocator.allocated_bytes == built
    assert memory.allocator.peak_allocated_bytes == built + 4 * elements + 3 * 512  # in fp32, and norms


def schedule_of(trace: StepTrace, **values: Any) -> DdpSchedule:
    strategy = strategy_of(**values)
    found = descriptor(strategy).schedule(replace(trace, precision=strategy.precision), strategy, NODES)
    assert isinstance(found, DdpSchedule)
    found.streams.moving = lambda *_, **__: 0.0  # type: ignore[method-assign]
    return found


def sums(schedule: DdpSchedule, *, last: bool = True) -> list[float]:
    work = schedule._recorded(lambda: schedule.micro_batch(first=True, last=last))
    return [item[1] for item in work if item[0] == COMMUNICATE]


def test_buckets_are_summed_in_the_last_micro_batch(layers: Callable[..., StepTrace]) -> None:
    schedule = schedule_of(layers(blocks=2), accumulation=2)
    assert 2 * BLOCK > ddp_time.BUCKET_BYTES > 2 * EMBEDDING  # a block fills a bucket, the embedding does not
    assert sums(schedule, last=False) == []
    expected = [collectives.all_reduce(2 * size, ALL) for size in (BLOCK, BLOCK, EMBEDDING)]
    assert sums(schedule) == expected


def test_fewer_bits_and_factors_send_less(layers: Callable[..., StepTrace]) -> None:
    trace = layers(blocks=1)
    wide = schedule_of(trace, reduce_dtype="fp32")
    assert sums(wide) == [collectives.all_reduce(4 * size, ALL) for size in (BLOCK, EMBEDDING)]
    low = schedule_of(trace, powersgd=8)
    sent = [8 * (WIDTH + WIDTH), 8 * (1024 + WIDTH)]
    assert sums(low) == [collectives.all_reduce(2 * size, ALL) for size in sent]


@pytest.mark.parametrize(
    ("shape", "rank", "sent"),
    [
        ((64, 32), 4, 4 * (64 + 32)),
        ((64, 4, 8), 4, 4 * (64 + 32)),  # all but the first dimension are one
        ((64,), 4, 64),  # vectors are sent whole
        ((8, 8), 4, 64),  # factors of 64 elements are no smaller
        ((64, 2), 4, 64 * 2),
    ],
)
def test_powersgd_sends_two_factors_where_they_are_less_than_half(
    shape: tuple[int, ...], rank: int, sent: int
) -> None:
    """torch's own rule, which counts the same."""
    import torch
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _should_compress

    matrix = torch.empty(shape).view(shape[0], -1)
    compresses, *_ = _should_compress(*matrix.shape, min(rank, *matrix.shape), 2)
    assert sent_by_powersgd(shape, rank) == sent
    if len(shape) > 1:
        assert compresses is (sent < matrix.numel())


def test_deepspeeds_launcher_does_not_start_it() -> None:
    strategy = strategy_of(powersgd=4)
    with pytest.raises(JobError, match="no part of DeepSpeed"):
        descriptor(strategy).check_launcher("deepspeed", strategy)
    descriptor(strategy).check_launcher("torchrun", strategy)
    [note] = descriptor(strategy).script_notes(strategy, "torchrun", own_optimizer=True)
    assert "register_comm_hook" in note
    assert descriptor(strategy).script_notes(strategy_of(), "torchrun", own_optimizer=True) == []


@pytest.mark.parametrize(("reduce_dtype", "sent"), [("auto", 2), ("fp32", 0)])
def test_adapters_have_one_buffer_and_are_sent_at_once(
    layers: Callable[..., StepTrace], reduce_dtype: Any, sent: int
) -> None:
    trace = layers(blocks=2, trainable=False)
    elements = sum(trace.parameters[index].numel for index in trace.trainable)
    strategy = strategy_of(reduce_dtype=reduce_dtype)
    engine = descriptor(strategy).memory(trace, strategy)
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine.build(memory)
    built = memory.allocator.allocated_bytes
    single = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    alone = replace(strategy, engine="single", data_parallel=1)
    descriptor(alone).memory(replace(trace, one_shape=False), alone).build(single)
    assert built == single.allocator.allocated_bytes + 4 * elements
    for _ in range(2):
        engine.gradient(memory, trace.trainable[0], memory.take(GRADIENTS, 4 * EMBEDDING))
    memory.allocator.peak_allocated_bytes = built
    engine.step(memory)
    assert memory.allocator.allocated_bytes == built
    norms = 512 * len(trace.trainable)
    assert memory.allocator.peak_allocated_bytes == built + max(norms, sent * elements)


@pytest.mark.parametrize("alike", [True, False])
def test_passes_of_adapters_are_those_of_a_single_process(
    layers: Callable[..., StepTrace], alike: bool
) -> None:
    trace = replace(layers(blocks=8, width=256, tokens=256, trainable=False), one_shape=alike)
    strategy = strategy_of(accumulation=2)
    alone = replace(strategy, engine="single", data_parallel=1)
    both = [descriptor(one).schedule(trace, one, NODES) for one in (strategy, alone)]
    ours, single = (
        [schedule._micro_batch(first=False, last=last) for last in (False, True)] for schedule in both
    )
    assert ours == single
    update = both[0]._recorded(both[0].update)
    elements = sum(trace.parameters[index].numel for index in trace.trainable)
    expected = collectives.all_reduce(2 * elements, ALL) + collectives.all_reduce(8, ALL)
    assert [item[1] for item in update if item[0] == COMMUNICATE] == [expected]


def test_powersgd_keeps_buckets_for_adapters(layers: Callable[..., StepTrace]) -> None:
    trace, strategy = layers(blocks=2, trainable=False), strategy_of(powersgd=4)
    assert isinstance(descriptor(strategy).memory(trace, strategy), DdpMemory)
    assert isinstance(descriptor(strategy).schedule(trace, strategy, NODES), DdpSchedule)
