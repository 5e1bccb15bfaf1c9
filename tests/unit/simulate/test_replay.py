"""What a GPU has room for: with its allocator's cache, only without, not at all."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.engines import descriptor
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.prediction import Memory
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FREE, OP, StepTrace
from shardwise.strategy import Strategy

MIB = 1024**2
SINGLE = Strategy(engine="single")


@pytest.fixture
def fragments(layers) -> StepTrace:
    """A pass that frees 200 of 400 MiB and then wants 300: 500 are allocated at most, 700 reserved."""
    events = (
        (ALLOC, 0, 200 * MIB, 3),
        (ALLOC, 1, 200 * MIB, 3),
        (FREE, 0),
        (ALLOC, 2, 300 * MIB, 3),
        (FREE, 1),
        (FREE, 2),
    )
    return replace(layers(blocks=0), events=events)


def memory(trace: StepTrace, mib: int) -> Memory:
    """Of a GPU with so much for torch's allocator, beside `around`: what is there before the pass."""
    hardware = parse_hardware("1xH200")
    around = descriptor(SINGLE).peak_memory(
        replace(trace, events=()), SINGLE, hardware, capacity_bytes=1 << 50
    )
    outside = descriptor(SINGLE).outside_allocator_bytes(SINGLE)
    return descriptor(SINGLE).peak_memory(
        trace, SINGLE, hardware, capacity_bytes=around.peak_reserved_bytes + outside + mib * MIB
    )


def test_a_cache_that_the_gpu_has_room_for_is_kept(fragments: StepTrace) -> None:
    found = memory(fragments, 720)
    assert found.fits
    assert found.cache_flushes == 0


def test_a_cache_too_large_is_given_back_every_step(fragments: StepTrace) -> None:
    whole, found = memory(fragments, 720), memory(fragments, 580)
    assert found.fits
    assert found.cache_flushes == 1
    pages = 2 * 20 * MIB  # memory is taken and given by these; the freed range begins and ends within one
    assert 200 * MIB - pages <= whole.peak_reserved_bytes - found.peak_reserved_bytes <= 200 * MIB
    assert found.peak_allocated_bytes == whole.peak_allocated_bytes


def test_tensors_too_large_do_not_fit_and_say_what_they_would_need(fragments: StepTrace) -> None:
    whole, found = memory(fragments, 720), memory(fragments, 480)
    assert not found.fits
    assert (found.cache_flushes, found.peak_reserved_bytes) == (0, whole.peak_reserved_bytes)


@pytest.mark.parametrize(("gpu", "workspace"), [("1xH200", 32 * MIB), ("1xRTX4090", 8 * MIB + 128 * 1024)])
def test_a_step_has_its_tokens_and_a_workspace_for_each_pass(layers, gpu: str, workspace: int) -> None:
    """Token ids, labels and positions of all micro-batches as int64; workspaces of the first one stay."""
    trace = replace(layers(blocks=0), events=((OP, 0), (BACKWARD, 0), (OP, 0)))
    for accumulation in (1, 3):
        strategy = replace(SINGLE, accumulation=accumulation)
        found = descriptor(strategy).peak_memory(trace, strategy, parse_hardware(gpu), capacity_bytes=1 << 50)
        assert found.terms.activations_bytes == 3 * 8 * trace.tokens * accumulation
        assert found.terms.engine_buffers_bytes == 2 * workspace
