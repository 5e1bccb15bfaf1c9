"""Memory of a pipeline's stages: bytes counted by hand, of a model whose sizes are multiples of 512."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.engines import descriptor
from shardwise.engines.pipeline.memory import fullest_ranks
from shardwise.engines.pipeline.split import sent_bytes, stages_of
from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.prediction import Memory
from shardwise.simulate.step_trace import (
    ALLOC,
    BACKWARD,
    BACKWARD_END,
    FORWARD,
    FORWARD_END,
    FREE,
    GRADIENT,
    Event,
    Parameter,
    StepTrace,
    Unit,
)
from shardwise.strategy import Strategy

KIB = 1024
WIDTH, TOKENS, VOCABULARY, BLOCKS = 256, 512, 64, 4
HIDDEN, SAVED = 256 * KIB, 1024 * KIB  # Hidden states, and what a block saves, of a micro-batch
MATRIX, EMBEDDING = 128 * KIB, 32 * KIB  # Weights in bf16
EMBED, HEAD = BLOCKS, BLOCKS + 1  # Units


def trace(*, tied: bool = False) -> StepTrace:
    """Four blocks of one matrix each, an embedding and a head."""
    embedding = Parameter(name="embed", shape=(VOCABULARY, WIDTH), item_bytes=2, trainable=True)
    matrices = [
        Parameter(name=f"{block}", shape=(WIDTH, WIDTH), item_bytes=2, trainable=True)
        for block in range(BLOCKS)
    ]
    head = () if tied else (Parameter(name="head", shape=(VOCABULARY, WIDTH), item_bytes=2, trainable=True),)
    units = [Unit(name=f"{block}", block=block, parameters=(1 + block,)) for block in range(BLOCKS)]
    units += [Unit(name="embed", block=-1, parameters=(0,))]
    units += [Unit(name="head", block=-1, parameters=(0 if tied else 1 + BLOCKS,))]
    hidden, saved, back, gradient = (range(n, n + 10) for n in (0, 10, 20, 30))
    events: list[Event] = [(FORWARD, EMBED), (ALLOC, hidden[0], HIDDEN, 0), (FORWARD_END, EMBED)]
    for block in range(BLOCKS):
        events += [(FORWARD, block), (ALLOC, saved[block], SAVED, 0), (ALLOC, hidden[block + 1], HIDDEN, 0)]
        events += [(FORWARD_END, block)]
    events += [(FORWARD, HEAD), (ALLOC, 40, 128 * KIB, 1), (FORWARD_END, HEAD), (BACKWARD, HEAD)]
    events += [(ALLOC, gradient[5], EMBEDDING, 2)]
    events += [] if tied else [(GRADIENT, 1 + BLOCKS, gradient[5])]
    events += [(ALLOC, back[BLOCKS], HIDDEN, 0), (FREE, 40), (FREE, hidden[BLOCKS]), (BACKWARD_END, HEAD)]
    for block in reversed(range(BLOCKS)):
        events += [
            (BACKWARD, block),
            (ALLOC, gradient[block], MATRIX, 2),
            (GRADIENT, 1 + block, gradient[block]),
        ]
        events += [(ALLOC, back[block], HIDDEN, 0), (FREE, saved[block]), (FREE, back[block + 1])]
        events += [(FREE, hidden[block]), (BACKWARD_END, block)]
    events += [(BACKWARD, EMBED), (ALLOC, gradient[4], EMBEDDING, 2)]
    events += [(FREE, gradient[4])] if tied else []  # added to the head's
    events += [(GRADIENT, 0, gradient[5 if tied else 4]), (FREE, back[0]), (BACKWARD_END, EMBED)]
    return StepTrace(
        parameters=(embedding, *matrices, *head),
        buffers=(),
        units=tuple(units),
        events=tuple(events),
        ops=(),
        rows=1,
        sequence_length=TOKENS,
        checkpoint_every=0,
        precision="bf16",
    )


def memory(made: StepTrace, **values: Any) -> Memory:
    strategy = Strategy(**{"engine": "pipeline", "pipeline": 2, "accumulation": 4, **values})
    hardware = parse_hardware("8xH100")
    return descriptor(strategy).peak_memory(made, strategy, hardware, capacity_bytes=1 << 40)


STATES = 288 + 576 + 2 * 576 + 1.5  # KiB of rank 0: weights, masters, moments, and step counts of 512 bytes
BATCHES = 48  # Token ids, labels, positions of four micro-batches
KEPT = 3 * 256 + 2 * 1024  # Of a micro-batch: input, output and what lies between, of two blocks


@pytest.mark.parametrize(
    ("schedule", "kib"),
    [
        # two micro-batches at a time; then the gradient of a block's input, next to all sums of gradients
        ("1f1b", 2 * KEPT + 576 + 256),
        # all four; when the first backward pass ends a block, there is only that block's sum
        ("gpipe", 4 * KEPT + 256 + 256),
    ],
)
def test_the_first_rank_keeps_what_the_schedule_says(schedule: str, kib: float) -> None:
    received = 4 * 256  # a gradient from the next stage for each micro-batch
    found = memory(trace(), pipeline_schedule=schedule).peak_allocated_bytes
    assert found == (STATES + BATCHES + received + kib) * KIB


def test_data_parallel_ranks_share_masters_and_moments() -> None:
    alone = memory(trace())
    shared = memory(trace(), data_parallel=2)
    assert alone.peak_allocated_bytes - shared.peak_allocated_bytes == 3 * 576 / 2 * KIB
    assert alone.terms.optimizer_bytes - shared.terms.optimizer_bytes == 3 * 576 / 2 * KIB


def test_more_micro_batches_take_memory_to_be_received_in_only() -> None:
    few, many = memory(trace()), memory(trace(), accumulation=8)
    assert many.peak_allocated_bytes - few.peak_allocated_bytes == 4 * (256 + 12) * KIB


def test_every_tensor_of_a_stage_is_freed() -> None:
    for stages in (1, 2, 4):
        for stage in stages_of(trace(), stages):
            sizes: dict[int, int] = {}
            for event in stage.trace.events:
                if event[0] == ALLOC:
                    assert event[1] not in sizes
                    sizes[event[1]] = event[2]
                elif event[0] in (FREE, GRADIENT):
                    del sizes[event[-1]]
            assert sizes == {}


def test_both_ends_have_the_gradient_of_tied_embeddings() -> None:
    first, last = stages_of(trace(tied=True), 2)
    for stage in (first, last):
        assert [event[1] for event in stage.trace.events if event[0] == GRADIENT].count(0) == 1
    assert 0 in first.parts[-1]
    assert 0 in last.parts[-1]


def test_hidden_states_are_sent() -> None:
    assert sent_bytes(trace()) == HIDDEN


def test_the_stages_have_all_passes_of_the_model_once() -> None:
    found = stages_of(trace(), 4)
    assert [list(stage.blocks) for stage in found] == [[0], [1], [2], [3]]
    units = [event for stage in found for event in stage.trace.events if event[0] == BACKWARD]
    assert sorted(unit for _, unit in units) == list(range(BLOCKS + 2))


@pytest.mark.parametrize(
    ("pipeline", "blocks", "ranks"),
    [
        (2, [2, 2], [0, 1]),
        (4, [2, 2, 2, 2], [0, 1, 3]),
        (4, [1, 2, 2, 1], [0, 1, 3]),
        (4, [2, 2, 3, 2], [0, 1, 2, 3]),
    ],
)
def test_ranks_that_cannot_be_the_fullest_are_left_out(
    pipeline: int, blocks: list[int], ranks: list[int]
) -> None:
    assert fullest_ranks(Strategy(engine="pipeline", pipeline=pipeline), blocks) == ranks
