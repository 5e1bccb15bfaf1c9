"""Recorded passes of adapters: a pool of their own, gradients that stay, and one call of the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.deepspeed import policy
from shardwise.engines.deepspeed.config import SUB_GROUP
from shardwise.engines.deepspeed.policy import records_passes
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.memory.allocator import MIN_BLOCK_BYTES, CachingAllocator
from shardwise.simulate.memory.recorded import SEED, TOKENS
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
from shardwise.simulate.time.roofline import Host, table
from shardwise.simulate.time.step import predict_time
from shardwise.strategy import Strategy

MIB = 1024**2
H100, TWO = parse_hardware("1xH100"), parse_hardware("2xH100")
SINGLE = Strategy(engine="single", precision="bf16")
FSDP2 = Strategy(engine="fsdp2", precision="bf16", data_parallel=2)
ZERO2 = replace(FSDP2, engine="deepspeed", stage=2)


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
    hardware = TWO if strategy.world_size > 1 else H100
    return descriptor(strategy).peak_memory(trace, strategy, hardware, capacity_bytes=1 << 50)


def time(trace: StepTrace, strategy: Strategy = SINGLE) -> Time:
    hardware = TWO if strategy.world_size > 1 else H100
    return predict_time(trace, strategy, hardware, descriptor(strategy).play(trace, strategy, hardware))


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


def test_gradients_that_add_up_stay_and_both_passes_share_a_workspace(adapters: StepTrace) -> None:
    first = adapters.events.index((FORWARD, 1)) + 1
    kept = ((ALLOC, 1000, MIB, ACTIVATION), (FREE, 1000))
    trace = replace(adapters, events=(*adapters.events[:first], *kept, *adapters.events[first:]))
    usual, recorded = (memory(replace(trace, one_shape=alike)) for alike in (False, True))
    several = memory(trace, replace(SINGLE, accumulation=2))
    forward = [
        next(moment.allocated_bytes for moment in found.timeline if moment.where == "block 0 forward")
        for found in (usual, recorded, several)
    ]
    workspace = 32 * MIB  # of the backward pass, from the first step on
    assert forward[1] - forward[0] == TOKENS * trace.tokens + MIN_BLOCK_BYTES - workspace
    sums = FP32 * sum(trace.parameters[index].numel for index in trace.trainable)
    assert forward[2] - forward[1] == sums + TOKENS * trace.tokens, "and a second micro-batch"
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
    allocator.passes, allocator.private = 1, {1, 4}
    allocator.give(allocator.take(60 * MIB, 1))
    allocator.give(allocator.take(40 * MIB))
    allocator.empty_cache()
    assert allocator.reserved_bytes == 60 * MIB


@pytest.mark.parametrize("strategy", [FSDP2, replace(FSDP2, accumulation=3)])
def test_fsdp2_issues_a_graph_for_each_micro_batch(adapters: StepTrace, strategy: Strategy) -> None:
    usual, recorded = time(replace(adapters, one_shape=False), strategy), time(adapters, strategy)
    graphs = strategy.accumulation * Host().seconds("graph")
    assert recorded.launch_seconds == pytest.approx(Host().seconds("step") + graphs)
    assert usual.launch_seconds > strategy.accumulation * 64 * Host().seconds("fsdp_unit")


@pytest.mark.parametrize(
    "change",
    [
        {"reshard": False, "accumulation": 2},
        {"shard_group": 2, "data_parallel": 4, "accumulation": 2},
        {"offload_parameters": "cpu", "offload_optimizer": "cpu"},
    ],
    ids=["gathered once a step", "summed over groups once a step", "offloaded"],
)
def test_fsdp2_records_no_micro_batches_that_differ(adapters: StepTrace, change: dict[str, Any]) -> None:
    strategy = replace(FSDP2, **change)
    usual = replace(adapters, one_shape=False)
    assert memory(adapters, strategy) == memory(usual, strategy)
    assert time(adapters, strategy) == time(usual, strategy)


def test_fsdp2_adds_micro_batches_to_gradients_that_are_allocated_once(layers) -> None:
    """And sums of a step with one micro-batch are made where its activations were."""
    trace = replace(with_gradients(layers(blocks=8, width=1024, tokens=256)), one_shape=True)
    shards = FP32 * sum(parameter.numel for parameter in trace.parameters) // 2
    first = [
        next(m.allocated_bytes for m in memory(trace, strategy).timeline if m.where == "block 0 forward")
        for strategy in (FSDP2, replace(FSDP2, accumulation=2))
    ]
    tokens = 3 * 8 * trace.tokens  # of one micro-batch more
    assert first[1] - first[0] == pytest.approx(shards + tokens, rel=0.01)


def test_parameters_that_are_kept_apart_in_fp32_are_no_frozen_ones(layers) -> None:
    trace = replace(with_gradients(layers(blocks=8, width=1024, tokens=256)), one_shape=True)
    first, *rest = trace.parameters
    trace = replace(trace, parameters=(replace(first, item_bytes=FP32), *rest))
    assert descriptor(FSDP2).memory(trace, FSDP2)._engine.sums_stay is False
    assert descriptor(FSDP2).memory(trace, replace(FSDP2, accumulation=2))._engine.sums_stay is True


def test_a_single_process_copies_its_shards_once(layers) -> None:
    trace = replace(layers(blocks=16, width=8192, tokens=256, trainable=False), one_shape=True)
    alone, single = replace(FSDP2, data_parallel=1, accumulation=2), replace(SINGLE, accumulation=2)
    more = time(trace, alone).compute_seconds - time(trace, single).compute_seconds
    once = 2 * sum(parameter.size_bytes for parameter in trace.parameters) / H100.gpu.memory_bytes_per_second
    assert more == pytest.approx(4 * once / table()["bandwidth"]["foreach_copy"], rel=0.01), "in all passes"


HOOKED = [replace(ZERO2, stage=stage) for stage in (1, 2, 3)]
ZERO0 = replace(ZERO2, stage=0)


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("frozen", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("strategy", [ZERO0, *HOOKED], ids=["zero0", "zero1", "zero2", "zero3"])
def test_passes_of_zero_cost_the_host_one_call(
    layers, strategy: Strategy, frozen: bool, accumulation: int
) -> None:
    trace = replace(with_gradients(layers(blocks=64, width=256, tokens=256)), one_shape=True)
    kept = [replace(p, trainable=index % 8 == 0 or not frozen) for index, p in enumerate(trace.parameters)]
    trace = replace(trace, parameters=tuple(kept))
    strategy = replace(strategy, accumulation=accumulation)
    usual, recorded = (time(replace(trace, one_shape=alike), strategy) for alike in (False, True))
    graphs = accumulation * Host().seconds("graph")
    assert recorded.launch_seconds == pytest.approx(Host().seconds("step") + graphs)
    hooks = len(trace.trainable) * Host().seconds("zero_hook") if strategy.stage else 0.0
    assert usual.launch_seconds > hooks + recorded.launch_seconds
    assert recorded.step_seconds < (0.5 if strategy.stage and not frozen else 1.0) * usual.step_seconds


@pytest.mark.parametrize("strategy", [ZERO0, HOOKED[0]], ids=["zero0", "zero1"])
def test_gradients_that_micro_batches_are_added_to_stay(layers, strategy: Strategy) -> None:
    """Those of ZeRO-1 are reduced in the last micro-batch alone."""
    trace = replace(with_gradients(layers(blocks=8, width=1024, tokens=256)), one_shape=True)
    once, several = (
        next(m.allocated_bytes for m in memory(trace, one).timeline if m.where == "block 0 forward")
        for one in (strategy, replace(strategy, accumulation=3))
    )
    gradients = sum(trace.parameters[index].size_bytes for index in trace.trainable)
    tokens = 2 * 8 * 3 * trace.tokens  # of two micro-batches more
    assert several - once == pytest.approx(gradients + tokens, abs=MIB)


def test_zero_0_has_fp32_copies_of_so_many_gradients_at_once(layers, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = with_gradients(layers(blocks=4, width=8192, tokens=64))
    numel = max(parameter.numel for parameter in trace.parameters)
    assert numel < SUB_GROUP < 2 * numel

    def needed() -> int:
        found = memory(trace, ZERO0).timeline
        return next(moment.allocated_bytes for moment in found if moment.where == "optimizer")

    in_parts = needed()
    monkeypatch.setattr(policy, "SUB_GROUP", 1 << 60)
    at_once = sum(parameter.numel for parameter in trace.parameters) - (needed() - in_parts) / FP32
    assert numel <= at_once <= SUB_GROUP


@pytest.mark.parametrize("strategy", HOOKED, ids=["zero1", "zero2", "zero3"])
def test_passes_with_hooks_have_the_memory_of_before_in_a_pool_of_their_own(
    layers, strategy: Strategy
) -> None:
    trace = with_gradients(layers(blocks=8, width=1024, tokens=256))
    usual, recorded = (memory(replace(trace, one_shape=alike), strategy) for alike in (False, True))
    block = 2 * 1024 * 1024
    more = recorded.peak_allocated_bytes - usual.peak_allocated_bytes
    assert -32 * MIB <= more <= block + TOKENS * trace.tokens + MIN_BLOCK_BYTES, "a block's gradients at most"


def test_the_moments_are_there_before_the_first_step(layers) -> None:
    """Not those of bitsandbytes, which makes them in its first step."""
    trace = replace(with_gradients(layers(blocks=8, width=1024, tokens=256)), one_shape=True)
    trained = sum(trace.parameters[index].numel for index in trace.trainable)

    def built(strategy: Strategy) -> int:
        found = memory(trace, strategy).timeline
        return next(moment.allocated_bytes for moment in found if moment.where == "block 0 forward")

    for strategy in HOOKED[1:]:
        apart = built(strategy) - built(replace(strategy, optimizer="adamw8bit"))
        assert apart == pytest.approx(2 * FP32 * trained / 2, rel=0.05)


def test_this_ranks_gradients_of_zero_2_are_fp32_and_stay(layers) -> None:
    """So do the moments, which are made in the first step otherwise."""
    trace = with_gradients(layers(blocks=8, width=1024, tokens=256))
    found = [memory(replace(trace, one_shape=alike), HOOKED[1]).timeline for alike in (False, True)]
    usual, recorded = (
        next(m.allocated_bytes for m in moments if m.where == "block 0 forward") for moments in found
    )
    trained = sum(trace.parameters[index].numel for index in trace.trainable)
    assert recorded - usual == pytest.approx(3 * FP32 * trained / 2 + TOKENS * trace.tokens, abs=MIB)


def test_only_packed_rows_are_recorded(layers) -> None:
    trace = replace(layers(trainable=False), one_shape=True)
    assert records_passes(trace, ZERO2)
    assert not records_passes(replace(trace, one_shape=False), ZERO2)
