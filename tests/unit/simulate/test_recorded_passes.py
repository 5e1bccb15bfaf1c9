"""Recorded passes of adapters: a pool of their own, gradients that stay, and one call of the host."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.engines import descriptor
from shardwise.engines.single.memory import SEED, TOKENS
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.memory.allocator import MIN_BLOCK_BYTES, CachingAllocator
from shardwise.simulate.prediction import Memory, Time
from shardwise.simulate.step_trace import (
    ACTIVATION,
    ALLOC,
    FORWARD,
    FP32,
    FREE,
    GRADIENT,
    GRADIENT_TAG,
    Event,
    StepTrace,
)
from shardwise.simulate.time.roofline import Host
from shardwise.simulate.time.step import predict_time
from shardwise.strategy import Strategy

MIB = 1024**2
H100 = parse_hardware("1xH100")
SINGLE = Strategy(engine="single", precision="bf16")


@pytest.fixture
def adapters(layers) -> StepTrace:
    """Frozen blocks of tiny products, which the GPU computes faster than a host issues them."""
    return replace(with_gradients(layers(blocks=64, width=256, tokens=256, trainable=False)), one_shape=True)


def with_gradients(trace: StepTrace) -> StepTrace:
    """With the memory of the gradients, which the fixture leaves out."""
    events: list[Event] = []
    for event in trace.events:
        if event[0] == GRADIENT:
            _, parameter, _ = event
            events.append((ALLOC, parameter, trace.parameters[parameter].size_bytes, GRADIENT_TAG))
            events.append((GRADIENT, parameter, parameter))
        else:
            events.append(event)
    return replace(trace, events=tuple(events))


def memory(trace: StepTrace, strategy: Strategy = SINGLE) -> Memory:
    return descriptor(strategy).peak_memory(trace, strategy, H100, capacity_bytes=1 << 50)


def time(trace: StepTrace, strategy: Strategy = SINGLE) -> Time:
    return predict_time(trace, strategy, H100, descriptor(strategy).play(trace, strategy, H100))


def test_the_host_issues_one_call_a_micro_batch(adapters: StepTrace) -> None:
    usual, recorded = time(replace(adapters, one_shape=False)), time(adapters)
    per_step = Host().seconds("step")
    assert recorded.launch_seconds == pytest.approx(per_step + Host().seconds("graph"))
    assert usual.launch_seconds > per_step + 64 * Host().seconds("forward")
    assert recorded.compute_seconds == pytest.approx(usual.compute_seconds, rel=0.02)
    four = replace(SINGLE, accumulation=4)
    assert time(adapters, four).launch_seconds == pytest.approx(per_step + 4 * Host().seconds("graph"))


def test_passes_that_wait_for_the_gpu_are_issued_as_usual(adapters: StepTrace) -> None:
    usual = time(replace(adapters, one_shape=False))
    assert time(replace(adapters, host_waits=True)).launch_seconds == pytest.approx(usual.launch_seconds)


def test_gradients_stay_and_both_passes_share_a_workspace(adapters: StepTrace) -> None:
    first = adapters.events.index((FORWARD, 1)) + 1
    kept = ((ALLOC, 1000, MIB, ACTIVATION), (FREE, 1000))
    trace = replace(adapters, events=(*adapters.events[:first], *kept, *adapters.events[first:]))
    usual, recorded = (memory(replace(trace, one_shape=alike)) for alike in (False, True))
    forward = [
        next(moment.allocated_bytes for moment in found.timeline if moment.where == "block 0 forward")
        for found in (usual, recorded)
    ]
    trained = sum(trace.parameters[index].numel for index in trace.trainable)
    workspace = 32 * MIB  # of the backward pass, from the first step on
    more = FP32 * trained + TOKENS * trace.tokens + MIN_BLOCK_BYTES
    assert forward[1] - forward[0] == more - workspace
    assert usual.terms.engine_buffers_bytes == 2 * workspace
    assert recorded.terms.engine_buffers_bytes == workspace + SEED


@pytest.mark.parametrize(
    ("changes", "engine"),
    [({"precision": "fp32"}, "single"), ({"one_shape": False}, "single")],
)
def test_others_keep_one_pool_for_all(adapters: StepTrace, changes: dict[str, object], engine: str) -> None:
    trace, strategy = replace(adapters, **changes), replace(SINGLE, engine=engine)
    strategy = replace(strategy, precision=trace.precision)
    assert memory(trace, strategy) == memory(replace(trace, one_shape=False), strategy)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_recorded_passes_of_all_weights_need_no_more_memory(layers, accumulation: int) -> None:
    trace = with_gradients(layers(blocks=8, width=1024, tokens=256))
    strategy = replace(SINGLE, accumulation=accumulation)
    usual, recorded = (memory(replace(trace, one_shape=alike), strategy) for alike in (False, True))
    gradients = FP32 * sum(parameter.numel for parameter in trace.parameters)
    assert gradients > 32 * MIB
    assert (
        recorded.peak_allocated_bytes <= usual.peak_allocated_bytes + TOKENS * trace.tokens + MIN_BLOCK_BYTES
    )


def test_passes_of_all_weights_are_issued_with_one_call(layers) -> None:
    trace = replace(with_gradients(layers(blocks=64, width=256, tokens=256)), one_shape=True)
    assert time(trace).launch_seconds < 0.5 * time(replace(trace, one_shape=False)).launch_seconds


def test_pages_of_the_passes_stay_and_those_of_the_construction_do_not() -> None:
    allocator = CachingAllocator(capacity_bytes=1 << 40)
    allocator.give(allocator.take(100 * MIB))
    assert allocator.reserved_bytes == 100 * MIB
    allocator.empty_cache()
    allocator.passes = 1
    allocator.give(allocator.take(60 * MIB, 1))
    allocator.give(allocator.take(40 * MIB))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB
