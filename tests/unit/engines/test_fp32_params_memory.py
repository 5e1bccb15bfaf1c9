"""Mamba's fp32 parameters under engines that shard; sizes are multiples of 512 bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.job.schema import Model
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.engine import EngineMemory
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.step_trace import Parameter, StepTrace, Unit
from shardwise.strategy import Strategy
from shardwise.trace.trace import Tracer


def engine_memory(trace: StepTrace, strategy: Strategy) -> EngineMemory:
    return descriptor(strategy).memory(trace, strategy)


K = 1024
FEW, MANY = 2 * K, 64 * K
"""Elements of the fp32 parameter, and of the bf16 one beside it."""
STEP_COUNT = 512

SHARDED: list[dict[str, Any]] = [
    *({"engine": "deepspeed", "stage": stage} for stage in (0, 1, 2, 3)),
    {"engine": "deepspeed", "stage": 2, "offload_optimizer": "cpu"},
    {"engine": "deepspeed", "stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
    {"engine": "fsdp2"},
]


def _trace(*, few: int = FEW, trainable: bool = True) -> StepTrace:
    parameters = [
        Parameter(name="embedding", shape=(MANY,), item_bytes=2, trainable=True),
        Parameter(name="many", shape=(MANY,), item_bytes=2, trainable=True),
    ]
    if few:
        parameters.append(Parameter(name="few", shape=(few,), item_bytes=4, trainable=trainable))
    return StepTrace(
        parameters=tuple(parameters),
        buffers=(),
        units=(
            Unit(name="block", block=0, parameters=tuple(range(1, len(parameters)))),
            Unit(name="embedding", block=-1, parameters=(0,)),
        ),
        events=(),
        ops=(),
        rows=1,
        sequence_length=1,
        checkpoint_every=0,
        precision="bf16",
    )


def _allocated(trace: StepTrace, strategy: Strategy) -> list[int]:
    """Bytes after building, and with the fp32 parameter's gradient after two micro-batches."""
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine = descriptor(strategy).memory(trace, strategy)
    engine.build(memory)
    found = [memory.allocator.allocated_bytes]
    if len(trace.parameters) > 2 and trace.parameters[2].trainable:
        for _ in range(2):  # the second micro-batch's gradient is added to the first one's
            engine.gradient(memory, 2, memory.take(GRADIENTS, 4 * FEW))
    return [*found, memory.allocator.allocated_bytes]


@pytest.mark.parametrize("strategy", SHARDED, ids=str)
@pytest.mark.parametrize("gpus", [1, 4])
def test_fp32_parameters_are_whole_with_both_moments_on_every_rank(
    strategy: dict[str, Any], gpus: int
) -> None:
    chosen = Strategy(data_parallel=gpus, **strategy)
    without = _allocated(_trace(few=0), chosen)
    built, trained = _allocated(_trace(), chosen)
    assert built - without[0] == 3 * 4 * FEW + STEP_COUNT  # weight, two moments
    assert trained - built == 4 * FEW
    frozen = _allocated(_trace(trainable=False), chosen)
    assert frozen[0] - without[0] == 4 * FEW


def test_their_gradients_are_laid_end_to_end_and_gone_after_the_step() -> None:
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine = engine_memory(_trace(), Strategy(engine="fsdp2", data_parallel=2))
    engine.build(memory)
    built = memory.allocator.allocated_bytes
    engine.gradient(memory, 2, memory.take(GRADIENTS, 4 * FEW))
    memory.allocator.peak_allocated_bytes = memory.allocator.allocated_bytes
    engine.step(memory)
    assert memory.allocator.peak_allocated_bytes == built + 2 * 4 * FEW
    assert memory.allocator.allocated_bytes == built


def test_in_fp32_nothing_is_apart() -> None:
    trace = replace(_trace(), precision="fp32")
    wide = replace(trace, parameters=tuple(replace(p, item_bytes=4) for p in trace.parameters))
    engine = engine_memory(wide, Strategy(engine="deepspeed", stage=1, data_parallel=2, precision="fp32"))
    assert type(engine).__name__ == "Zero12Memory"


def test_each_gpu_has_126_mb_of_a_7b_mambas_fp32_parameters() -> None:
    """7.9 million of them (decision 0019), gradients included; a quarter each would be 95 MB less."""
    model = Model.model_validate({"source": "7b_mamba", "weights": "random"})
    trace = Tracer(model, precision="bf16", sequence_length=64).trace(rows=1, checkpoint_every=1)
    few = sum(p.numel for p in trace.parameters if p.item_bytes == 4)
    rest = sum(p.numel for p in trace.parameters) - few
    assert few == 45 * (9728 * 16 + 2 * 9728)
    assert 16 * few == pytest.approx(126e6, rel=0.01)
    strategy = Strategy(engine="deepspeed", stage=2, data_parallel=4)
    built = _allocated(trace, strategy)[0]
    assert built - (2 + 16 / 4) * rest == pytest.approx(16 * few, rel=0.01)
