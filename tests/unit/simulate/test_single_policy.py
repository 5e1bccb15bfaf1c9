"""Memory and time of a single process, by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardwise.engines import descriptor
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.gpu import GRADIENTS, GpuMemory
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy


@pytest.mark.parametrize(("accumulation", "item"), [(1, 2), (2, 4)])
def test_a_gradient_is_kept_in_bf16_or_summed_in_fp32(
    layers: Callable[..., StepTrace], accumulation: int, item: int
) -> None:
    trace, strategy = layers(blocks=2), Strategy(engine="single", accumulation=accumulation)
    engine = descriptor(strategy).memory(trace, strategy)
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 40))
    engine.build(memory)
    built, numel = memory.allocator.allocated_bytes, trace.parameters[0].numel
    engine.gradient(memory, 0, memory.take(GRADIENTS, 2 * numel))
    assert memory.allocator.allocated_bytes - built == item * numel
    engine.step(memory)
    assert memory.allocator.allocated_bytes == built
