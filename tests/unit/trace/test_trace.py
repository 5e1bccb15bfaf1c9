"""A traced step against what is known of it by arithmetic, and its folded form against the whole."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from shardwise.job.schema import Job, Model
from shardwise.kernels.linear_cross_entropy import aligned_width
from shardwise.kernels.target import Target
from shardwise.models.flops import attention_flops_per_token, matmul_parameters
from shardwise.simulate.step_trace import (
    ALLOC,
    BACKWARD,
    FORWARD,
    FORWARD_END,
    FREE,
    GRADIENT,
    OP,
    TAGS,
    Event,
    StepTrace,
)
from shardwise.trace.job import JobTracer
from shardwise.trace.trace import Tracer

LLAMA = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def model(source: str, lora: int = 0, **config: Any) -> Model:
    values: dict[str, Any] = {"source": source, "weights": "random", "config": config}
    if lora:
        values["lora"] = {"rank": lora, "alpha": 2.0 * lora, "targets": "all-linear"}
    return Model.model_validate(values)


def tracer(source: str, lora: int = 0, **config: Any) -> Tracer:
    return Tracer(model(source, lora, **config), precision="bf16", sequence_length=256)


def peak_bytes(trace: StepTrace) -> int:
    """Most bytes alive at once, gradients given up as soon as they are complete."""
    live = peak = 0
    sizes: dict[int, int] = {}
    for event in trace.events:
        if event[0] == ALLOC:
            sizes[event[1]] = event[2]
            live += event[2]
            peak = max(peak, live)
        elif event[0] in (FREE, GRADIENT):
            live -= sizes.pop(event[1] if event[0] == FREE else event[2])
    assert live == 0, "everything is freed or handed over"
    return peak


def renumbered(trace: StepTrace) -> list[Any]:
    """The events with tensors numbered in the order in which they come to be, and operators spelled out."""
    names: dict[int, int] = {}

    def tensor(event: Event, at: int) -> int:
        return names.setdefault(event[at], len(names))

    result: list[Any] = []
    for event in trace.events:
        if event[0] in (ALLOC, FREE):
            result.append((event[0], tensor(event, 1), *event[2:]))
        elif event[0] == GRADIENT:
            result.append((*event[:2], tensor(event, 2)))
        else:
            result.append(trace.ops[event[1]] if event[0] == OP else event)
    return result


@pytest.mark.parametrize(
    ("source", "config", "checkpoint_every", "lora"),
    [
        ("llama-3.2-1b", {**LLAMA, "num_hidden_layers": 9}, 0, 0),
        ("llama-3.2-1b", {**LLAMA, "num_hidden_layers": 9}, 1, 8),
        ("llama-3.2-1b", {**LLAMA, "num_hidden_layers": 12}, 2, 0),
        ("gemma-3-1b", {"num_hidden_layers": 32}, 0, 0),  # five windows and one full attention, in turn
        ("gpt-neo-125m", {"num_layers": 12, "attention_types": [[["global", "local"], 6]]}, 1, 8),
        ("pythia-160m", {}, 0, 0),
        ("130m_mamba", {}, 0, 0),
        ("130m_mamba", {}, 1, 8),
    ],
)
def test_the_folded_trace_is_the_whole_one(
    source: str, config: dict[str, Any], checkpoint_every: int, lora: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced = tracer(source, lora, **config)
    whole = traced.trace(rows=2, checkpoint_every=checkpoint_every, folded=False)
    monkeypatch.setattr("shardwise.trace.layout.Layout.part", counted := Counted())
    folded = traced.trace(rows=2, checkpoint_every=checkpoint_every)
    assert len(counted.kept) == 1, "it folds, and needs no second try"
    assert len(counted.kept[0]) < len([unit for unit in whole.units if unit.block >= 0])
    assert renumbered(folded) == renumbered(whole)


class Counted:
    """Layout.part, which notes which blocks were asked for."""

    def __init__(self) -> None:
        from shardwise.trace.layout import Layout

        self.part = Layout.part
        self.kept: list[list[int]] = []

    def __get__(self, layout: Any, _: Any) -> Any:
        def part(kept: list[int]) -> Any:
            self.kept.append(kept)
            return self.part(layout, kept)

        return part


def test_products_take_the_flops_that_the_formula_has() -> None:
    traced = tracer("llama-3.2-1b", **LLAMA, num_hidden_layers=3, tie_word_embeddings=False)
    trace = traced.trace(rows=2, checkpoint_every=0)
    ops = [trace.ops[event[1]] for event in trace.events if event[0] == OP]
    assert {op.item_bytes for op in ops if op.kind == "matmul"} == {2}
    products = sum(op.flops for op in ops if op.kind == "matmul")
    skeleton = traced.built.skeleton
    assert products == 6.0 * matmul_parameters(skeleton) * trace.tokens
    attention = sum(op.flops for op in ops if op.kind == "attention")
    # 4 forward and 10 backward of the kernel, which computes the scores again, instead of 12
    assert attention == pytest.approx(
        attention_flops_per_token(skeleton.config, 256) * trace.tokens * 14 / 12, rel=1e-6
    )


def test_products_of_experts_take_the_flops_that_the_formula_has(tmp_path: Path) -> None:
    """Two of eight experts for each token: as in the formula, whichever they are."""
    config = CONFIG_MAPPING["mixtral"].from_dict(
        {**LLAMA, "num_hidden_layers": 2, "vocab_size": 512, "num_local_experts": 8, "num_experts_per_tok": 2}
    )
    config.save_pretrained(tmp_path)
    traced = tracer(str(tmp_path))
    trace = traced.trace(rows=2, checkpoint_every=0)
    ops = [trace.ops[event[1]] for event in trace.events if event[0] == OP]
    products = sum(op.flops for op in ops if op.kind == "matmul")
    assert products == pytest.approx(6.0 * matmul_parameters(traced.built.skeleton) * trace.tokens, rel=1e-6)


def test_a_plan_of_a_mixture_knows_that_its_experts_get_no_adapter(tmp_path: Path) -> None:
    values = {**LLAMA, "num_hidden_layers": 2, "vocab_size": 512, "num_local_experts": 8}
    CONFIG_MAPPING["mixtral"].from_dict(values).save_pretrained(tmp_path)
    job = {"name": "x", "data": {"train": "t.txt", "sequence_length": 64}, "train": {"steps": 1}}
    model = {"source": str(tmp_path), "weights": "random"}
    for lora, notes in (
        (None, []),
        ({"rank": 4}, ["the experts get no adapter: they are not linear modules"]),
    ):
        asked = Job.model_validate({**job, "model": {**model, "lora": lora}})
        traced = JobTracer(asked, vocab_size=512, capability=(9, 0))
        assert [note for note in traced.notes if "experts" in note] == notes


def test_checkpointing_computes_the_blocks_once_more() -> None:
    traced = tracer("llama-3.2-1b", **LLAMA, num_hidden_layers=6)

    def flops(every: int) -> float:
        trace = traced.trace(rows=1, checkpoint_every=every)
        ops = (trace.ops[event[1]] for event in trace.events if event[0] == OP)
        return sum(op.flops for op in ops if op.kind == "matmul")

    hidden, width, kv = 256, 512, 128
    block = 2.0 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * width) * 256
    # torch stops the second pass at the last tensor that backward needs: the last product is left out
    last = 2.0 * hidden * width * 256
    assert flops(1) - flops(0) == 6 * (block - last)
    assert flops(2) - flops(0) == 3 * (block - last)


def test_a_llama_block_saves_what_its_kernels_need() -> None:
    """Of two depths: what a further block adds to the peak is what its forward pass saves."""

    def peak(blocks: int) -> int:
        return peak_bytes(
            tracer("llama-3.2-1b", **LLAMA, num_hidden_layers=blocks).trace(rows=2, checkpoint_every=0)
        )

    tokens, hidden, width, kv, heads = 512, 256, 512, 128, 4
    vectors = 2 * hidden + 2 * hidden  # residuals and norms' outputs, twice each
    vectors += hidden + 2 * kv + hidden  # queries, keys, values; attention's output
    vectors += 3 * width  # gate, up, product
    statistics = 4 * tokens * (2 + heads)  # in fp32: both norms' scales, the softmax's log-sums
    assert peak(4) - peak(3) == pytest.approx(2 * vectors * tokens + statistics, abs=64)


def test_the_largest_logits_are_a_chunk_and_tagged_as_loss() -> None:
    trace = tracer("llama-3.2-1b", **LLAMA, num_hidden_layers=2).trace(rows=3, checkpoint_every=0)
    vocabulary = 128256
    logits = [e for e in trace.events if e[0] == ALLOC and e[2] == 2 * vocabulary * trace.tokens]
    assert [TAGS[event[3]] for event in logits] == ["loss"]


def test_every_trainable_parameter_gets_one_gradient_of_its_size() -> None:
    trace = tracer("llama-3.2-1b", lora=4, **LLAMA, num_hidden_layers=8).trace(rows=1, checkpoint_every=1)
    sizes = {event[1]: event[2] for event in trace.events if event[0] == ALLOC}
    gradients = {event[1]: sizes[event[2]] for event in trace.events if event[0] == GRADIENT}
    assert set(gradients) == set(trace.trainable)
    assert all(gradients[index] == trace.parameters[index].size_bytes for index in trace.trainable)
    assert all(".lora_" in trace.parameters[index].name for index in trace.trainable)


def test_units_begin_forward_in_order_and_backward_in_reverse() -> None:
    trace = tracer("pythia-160m", num_hidden_layers=8).trace(rows=1, checkpoint_every=0)
    blocks = [unit.block for unit in trace.units]
    forward = [blocks[event[1]] for event in trace.events if event[0] == FORWARD]
    backward = [blocks[event[1]] for event in trace.events if event[0] == BACKWARD]
    assert [block for block in forward if block >= 0] == list(range(8))
    assert [block for block in backward if block >= 0] == list(reversed(range(8)))
    assert {unit.name for unit in trace.units if unit.block < 0} == {
        "gpt_neox.embed_in",
        "gpt_neox.final_layer_norm",
        "lm_head",
    }


def kept_per_token(trace: StepTrace) -> list[float]:
    """Bytes a token that each block's forward pass leaves behind for the backward pass."""
    live: dict[int, int] = {}
    ends = []
    for event in trace.events:
        if event[0] == ALLOC:
            live[event[1]] = event[2]
        elif event[0] in (FREE, GRADIENT):
            live.pop(event[1] if event[0] == FREE else event[2])
        elif event[0] == FORWARD_END and trace.units[event[1]].block >= 0:
            ends.append(sum(live.values()) / trace.tokens)
    return [after - before for before, after in pairwise(ends)]


def test_a_mamba_block_of_the_7b_shape_keeps_74_kb_a_token() -> None:
    """mamba_ssm's fused function and what is around it keep 98.6 kB there: it keeps the scan's output too."""
    built = Tracer(model("7b_mamba"), precision="bf16", sequence_length=4096)
    kept = kept_per_token(built.trace(rows=1, checkpoint_every=0))
    width, hidden, rank, states, length, chunk = 9728, 4864, 304, 16, 4096, 128
    expected = (
        2 * 2 * width  # xz
        + 2 * (rank + 2 * states)  # dt, B and C before dt's projection
        + 4 * states * width / chunk  # a state for each chunk, fp32
        + 2 * 4 * states * width / length  # A and exp(A_log), fp32
        + 4 * hidden  # the residual, fp32
        + 2 * hidden  # the input projection's input
        + 4  # the norm's factor
        + 4 * hidden / length  # its weight in fp32
    )
    assert set(kept[1:]) == {expected}
    assert expected == 73_944.75
    upstream = 6.14 * width + 8 * hidden
    assert upstream == pytest.approx(98.6e3, rel=1e-3)
    assert expected < 0.76 * upstream


def test_a_checkpointed_mamba_block_keeps_its_input() -> None:
    built = Tracer(model("7b_mamba"), precision="bf16", sequence_length=4096)
    kept = kept_per_token(built.trace(rows=1, checkpoint_every=1))
    assert set(kept[1:]) == {4 * 4864}


def test_products_of_a_mamba_take_the_flops_that_the_formula_has() -> None:
    traced = tracer("130m_mamba", num_hidden_layers=3)
    trace = traced.trace(rows=2, checkpoint_every=0)
    ops = [trace.ops[event[1]] for event in trace.events if event[0] == OP]
    products = sum(op.flops for op in ops if op.kind == "matmul")
    width, rank = 1536, 48
    # in the backward pass u x_proj^T is not done again, but dt's projection is; the convolution is no product
    again = 2.0 * width * rank * 3
    head = traced.built.skeleton.get_input_embeddings().weight
    again += 6.0 * (aligned_width(len(head), 2) - len(head)) * head.shape[1]
    counted = 6.0 * (matmul_parameters(traced.built.skeleton) - 3 * 4 * width) + again
    assert products == counted * trace.tokens
    scans = [op for op in ops if op.kind == "scan"]
    assert {op.name: op.shape for op in scans} == dict.fromkeys(
        ("selective_scan", "selective_scan_replay", "selective_scan_backward"), (512, width, 16)
    )


GEMMA = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 1024,
}


@pytest.mark.parametrize(("capability", "more"), [((8, 0), 0), ((9, 0), 1)])
def test_a_batch_of_whole_and_packed_rows_keeps_what_its_kernels_give_and_what_it_is_joined_to(
    capability: tuple[int, int], more: int
) -> None:
    """Measured for Llama-2-7B, two rows of 2048 on each of four H200: 32 MiB a block (docs/examples)."""
    gpu = Target(capability=capability, multiprocessors=132)
    shape = model("llama-3.2-1b", **LLAMA, num_hidden_layers=9)
    made = Tracer(shape, precision="bf16", sequence_length=4096, target=gpu)

    def peak(single_segment_rows: int) -> int:
        return peak_bytes(made.trace(rows=2, checkpoint_every=0, single_segment_rows=single_segment_rows))

    joined = 2 * 4096 * 256 * 2  # rows, tokens, hidden size, bf16
    assert peak(1) - peak(2) == pytest.approx(9 * joined * more, abs=1000)  # and a few numbers a block


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("source", ["llama-3.2-1b", "gemma-3-1b"])
def test_in_fp32_every_row_of_every_layer_is_attended_to_by_itself(
    source: str, capability: tuple[int, int]
) -> None:
    """Hopper takes rows of one segment together where no layer has a window."""
    shape = GEMMA | ({"sliding_window": 512} if source == "gemma-3-1b" else {})
    gpu = Target(capability=capability, multiprocessors=132)
    fp32 = Tracer(model(source, **shape), precision="fp32", sequence_length=1024, target=gpu)
    trace = fp32.trace(rows=3, checkpoint_every=0)
    calls = [trace.ops[e[1]] for e in trace.events if e[0] == OP and trace.ops[e[1]].kind == "attention"]
    together = source == "llama-3.2-1b" and capability == (9, 0)
    assert len(calls) == 2 * 6 * (1 if together else 3)
    assert {op.shape for op in calls} == {(3 if together else 1, 4, 4, 1024, 1024, 64)}
    assert all("efficient_attention" in op.name for op in calls)


def test_in_fp32_a_window_keeps_a_mask_for_the_backward_pass() -> None:
    """Of one row and layer 1024 x 1024 numbers; a window as long as the row needs none."""

    def peak(window: int) -> int:
        shape = GEMMA | {"sliding_window": window}
        made = Tracer(model("gemma-3-1b", **shape), precision="fp32", sequence_length=1024)
        return peak_bytes(made.trace(rows=2, checkpoint_every=0))

    layers = 5  # the sixth sees everything
    assert peak(512) - peak(1024) == pytest.approx(2 * layers * 4 * 1024**2, rel=0.1)


def test_a_trace_takes_no_time_for_values_of_causal_masks() -> None:
    tracer = Tracer(Model(source="gpt-neo-125m", weights="random"), precision="bf16", sequence_length=64)
    masks = [one for name, one in tracer.built.model.named_buffers() if name.endswith("attention.bias")]
    assert [mask.is_meta for mask in masks] == [True] * 12
