"""What a rank of a tensor-parallel group has of a model, and what it sums, by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from shardwise.job.schema import Model
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FORWARD, GRADIENT, OP, StepTrace
from shardwise.trace.trace import Tracer

HIDDEN, INNER, KV, VOCABULARY, BLOCKS = 256, 512, 128, 1000, 3
LLAMA = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": BLOCKS,
    "head_dim": 64,
}


def tracer(source: str = "llama-3.2-1b", **config: Any) -> Tracer:
    model = Model.model_validate({"source": source, "weights": "random", "config": {**LLAMA, **config}})
    return Tracer(model, precision="bf16", sequence_length=128, vocab_size=VOCABULARY)


def sums(trace: StepTrace) -> list[int]:
    """Bytes of each sum over the group, in order."""
    ops = (trace.ops[event[1]] for event in trace.events if event[0] == OP)
    return [op.written_bytes for op in ops if op.kind == "collective"]


@pytest.mark.parametrize("degree", [2, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_a_rank_has_its_part_of_linear_layers_and_the_whole_of_the_rest(degree: int, tied: bool) -> None:
    traced = tracer(tie_word_embeddings=tied, num_key_value_heads=4)
    trace = traced.trace(rows=2, checkpoint_every=0, tensor_parallel=degree)
    linear = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    outside = VOCABULARY * HIDDEN * (1 if tied else 2) + HIDDEN
    assert sum(p.numel for p in trace.parameters) == BLOCKS * (linear // degree + 2 * HIDDEN) + outside
    whole = traced.trace(rows=2, checkpoint_every=0)
    assert trace.tensor_parallel == degree
    assert [p.uncut_numel for p in trace.parameters] == [p.numel for p in whole.parameters]
    assert [p.name for p in trace.parameters] == [p.name for p in whole.parameters]
    names = {p.name.split(".")[-2] for p in trace.parameters if p.cut_from}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    gradients = {e[1]: e[2] for e in trace.events if e[0] == GRADIENT}
    sizes = {e[1]: e[2] for e in trace.events if e[0] == ALLOC}
    assert {i: sizes[t] for i, t in gradients.items()} == {
        i: p.size_bytes for i, p in enumerate(trace.parameters)
    }


@pytest.mark.parametrize(
    ("checkpoint_every", "again"), [(0, 0), (1, BLOCKS), (2, 2)], ids=["none", "all", "every second"]
)
def test_a_block_sums_twice_forward_and_once_for_each_of_five_column_cut_layers(
    checkpoint_every: int, again: int
) -> None:
    """A block that is computed again sums after attention once more; its last product is not done again."""
    trace = tracer().trace(rows=2, checkpoint_every=checkpoint_every, tensor_parallel=2)
    assert sums(trace) == [2 * 128 * HIDDEN * 2] * (BLOCKS * (2 + 5) + again)
    backward = next(i for i, event in enumerate(trace.events) if event[0] == BACKWARD)
    assert sums(replace(trace, events=trace.events[:backward])) == [2 * 128 * HIDDEN * 2] * BLOCKS * 2


def test_norms_of_heads_are_whole_and_their_gradients_summed() -> None:
    trace = tracer("Qwen/Qwen3-0.6B").trace(rows=1, checkpoint_every=0, tensor_parallel=2)
    assert Counter(sums(trace)) == {128 * HIDDEN * 2: BLOCKS * 7, 64 * 2: BLOCKS * 2}
    assert {p.shape for p in trace.parameters if "q_norm" in p.name} == {(64,)}


def test_biases_of_columns_are_cut_and_those_of_rows_are_added_to_the_sum() -> None:
    model = Model.model_validate(
        {"source": "pythia-70m", "weights": "random", "config": {"num_hidden_layers": 1}}
    )
    traced = Tracer(model, precision="bf16", sequence_length=128)
    trace = traced.trace(rows=1, checkpoint_every=0, tensor_parallel=2)
    shapes = {p.name.split("layers.0.")[-1]: p.shape for p in trace.parameters if "layers.0" in p.name}
    assert shapes["attention.query_key_value.weight"] == (3 * 512 // 2, 512)
    assert shapes["attention.query_key_value.bias"] == (3 * 512 // 2,)
    assert shapes["attention.dense.weight"] == (512, 512 // 2)
    assert shapes["attention.dense.bias"] == (512,)
    assert sums(trace) == [128 * 512 * 2] * 4


def test_the_first_rank_has_what_does_not_divide() -> None:
    trace = tracer(intermediate_size=514, num_key_value_heads=4).trace(
        rows=1, checkpoint_every=0, tensor_parallel=4
    )
    assert {p.shape for p in trace.parameters if "gate_proj" in p.name} == {(129, HIDDEN)}
    assert {p.shape for p in trace.parameters if "down_proj" in p.name} == {(HIDDEN, 129)}


def test_products_are_divided_and_what_a_block_keeps_of_full_width_is_not() -> None:
    traced = tracer()
    whole, half = (traced.trace(rows=2, checkpoint_every=0, tensor_parallel=n) for n in (1, 2))

    def flops(trace: StepTrace) -> float:
        ops = (trace.ops[event[1]] for event in trace.events if event[0] == OP)
        return sum(op.flops for op in ops if op.kind == "matmul")

    head = 6.0 * VOCABULARY * HIDDEN * 256
    assert flops(half) - head == (flops(whole) - head) / 2
    # of a block: input, both norms' outputs, attention's residual stay; queries, keys, values, the two
    # inputs of the gate and its product are halved, as is attention's output with its sums
    kept = {trace.tensor_parallel: _kept_by_the_second_block(trace) / 256 for trace in (whole, half)}
    narrow = 2 * (2 * HIDDEN + 2 * KV + 3 * INNER) + 4 * 4
    assert kept[1] - kept[2] == pytest.approx(narrow / 2, rel=0.01)


def _kept_by_the_second_block(trace: StepTrace) -> int:
    """Bytes that its forward pass leaves behind."""
    begins = [i for i, event in enumerate(trace.events) if event[0] == FORWARD and event[1] in (1, 2)]
    sizes: dict[int, int] = {}
    for event in trace.events[begins[0] : begins[1]]:
        if event[0] == ALLOC:
            sizes[event[1]] = event[2]
        elif event[0] == 1:
            sizes.pop(event[1], None)
    return sum(sizes.values())


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_the_folded_trace_is_the_whole_one(checkpoint_every: int) -> None:
    traced = tracer(num_hidden_layers=9)
    options = {"rows": 1, "checkpoint_every": checkpoint_every, "tensor_parallel": 2}
    folded, whole = traced.trace(**options), traced.trace(**options, folded=False)
    assert [event[0] for event in folded.events] == [event[0] for event in whole.events]
    assert sums(folded) == sums(whole)
    assert folded.parameters == whole.parameters


def test_the_model_itself_stays_whole() -> None:
    traced = tracer()
    before = traced.trace(rows=1, checkpoint_every=0)
    traced.trace(rows=1, checkpoint_every=0, tensor_parallel=2)
    assert traced.trace(rows=1, checkpoint_every=0) == before
    assert before.tensor_parallel == 1
    assert sums(before) == []
