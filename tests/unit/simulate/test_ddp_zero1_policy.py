"""Memory and time of replicas that share the optimizer's state, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.ddp_zero1 import memory as policy
from shardwise.engines.ddp_zero1 import time as schedules
from shardwise.engines.ddp_zero1.memory import buckets_of, part_of
from shardwise.errors import JobError
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.step_trace import StepTrace
from shardwise.simulate.time import collectives
from shardwise.simulate.time.streams import COMMUNICATE
from shardwise.strategy import Strategy

NODES = parse_hardware("4xH200")
ALL = collectives.group(NODES, 4)
WIDTH = 4096
BLOCK, EMBEDDING = WIDTH * WIDTH, 1024 * WIDTH
ELEMENTS = 2 * BLOCK + EMBEDDING


def strategy_of(**values: Any) -> Strategy:
    return Strategy(engine="ddp-zero1", data_parallel=4, **values)


def test_a_bucket_is_full_after_so_many_elements_and_has_one_format(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "BUCKET", 100)
    weights = {"a": (60, "bf16"), "b": (7, "fp32"), "c": (60, "bf16"), "d": (40, "bf16"), "e": (99, "bf16")}
    assert buckets_of(weights) == [["e", "d"], ["c", "a"], ["b"]]
    assert [part_of([numel], 4) for numel in (1, 256, 257)] == [64, 64, 128]
    assert part_of([1, 1, 1, 1, 1], 4) == 128  # each begins at a multiple of 64


@pytest.mark.parametrize(
    ("values", "sums", "copied", "part"),
    [
        ({}, 2, 0, 0),  # sent as they are
        ({"reduce_dtype": "fp32"}, 4, 0, 0),
        ({"accumulation": 2}, 4, 2, 2),  # micro-batches add up in fp32; of a copy each rank keeps its part
        ({"accumulation": 2, "reduce_dtype": "fp32"}, 4, 0, 0),
    ],
)
def test_a_rank_has_all_weights_and_gradients_and_a_part_of_the_rest(
    layers: Callable[..., StepTrace], values: dict[str, Any], sums: int, copied: int, part: int
) -> None:
    trace, strategy = layers(blocks=2), strategy_of(**values)
    engine = descriptor(strategy).memory(trace, strategy)
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine.build(memory)
    built = memory.allocator.allocated_bytes
    # master and moments of a quarter, which is a part of the last block: one step count
    assert built == (2 + sums + 12 // 4) * ELEMENTS + 512
    for _ in range(2):
        engine.gradient(memory, 0, memory.take(GRADIENTS, 2 * EMBEDDING))
    assert memory.allocator.allocated_bytes == built
    memory.allocator.peak_allocated_bytes = built
    engine.step(memory)
    assert memory.allocator.allocated_bytes == built
    parts, norms = part * ELEMENTS // 4, 512
    assert memory.allocator.peak_allocated_bytes == built + parts + max(copied * ELEMENTS, norms)


def sent(work: list[Any]) -> list[float]:
    return [item[1] for item in work if item[0] == COMMUNICATE]


def test_buckets_are_sent_in_the_backward_pass_of_a_single_micro_batch(
    layers: Callable[..., StepTrace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schedules, "BUCKET", BLOCK)
    strategy = strategy_of()
    schedule = descriptor(strategy).schedule(layers(blocks=2), strategy, NODES)
    each = [collectives.reduce_scatter(2 * size, ALL) for size in (BLOCK, BLOCK, EMBEDDING)]
    assert sent(schedule._micro_batch(first=True, last=True)) == each[:2]
    gathers = [collectives.all_gather(2 * ELEMENTS / 2, ALL)] * 2
    assert sent(schedule._update) == [each[2], collectives.all_reduce(8, ALL), *gathers]


def test_several_micro_batches_are_sent_at_once(layers: Callable[..., StepTrace]) -> None:
    strategy = strategy_of(accumulation=2)
    schedule = descriptor(strategy).schedule(layers(blocks=2), strategy, NODES)
    assert sent(schedule._micro_batch(first=False, last=True)) == []
    assert sent(schedule._update)[0] == collectives.reduce_scatter(2 * ELEMENTS, ALL)


@pytest.mark.parametrize("target", ["torchrun", "accelerate", "deepspeed"])
def test_no_other_script_runs_it(target: str) -> None:
    with pytest.raises(JobError, match="shardwise train"):
        descriptor(strategy_of()).check_launcher(target, strategy_of())
