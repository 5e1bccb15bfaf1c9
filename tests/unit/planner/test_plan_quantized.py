"""A quantised base in a plan: what its weights take, what is kept, what is unpacked for a moment."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Lora, Model
from shardwise.planner.plan import Plan
from shardwise.planner.planning import make_plan, nearest_change
from shardwise.planner.sketch import sketch
from shardwise.simulate.memory.allocator import CachingAllocator
from shardwise.simulate.memory.engine import fill
from shardwise.simulate.memory.gpu import GpuMemory
from shardwise.simulate.step_trace import ALLOC, BACKWARD, FREE, OP, StepTrace
from shardwise.trace.trace import Tracer


@cache
def traced(quantization: str, checkpoint_every: int = 0) -> StepTrace:
    model = Model(source="llama-2-7b", weights="random", lora=Lora(rank=16), quantization=quantization)
    return Tracer(model, precision="bf16", sequence_length=2048).trace(
        rows=1, checkpoint_every=checkpoint_every
    )


LINEARS = 6_476_005_376
"""Values of Llama-2-7B's linear layers but the head: 32 x (4 x 4096^2 + 3 x 4096 x 11008)."""
OUTSIDE = 2 * 32000 * 4096 + 65 * 4096
ADAPTERS = 39_976_960
ROWS = 32 * (5 * 4096 + 2 * 11008 + 4096)
"""Rows of them."""


@pytest.mark.parametrize(
    ("quantization", "weights", "scales"),
    [
        ("none", 2 * LINEARS, 0),
        ("int8", LINEARS, 4 * (ROWS - 32 * 4096)),
        # 0.5 + 1/64 + 4/(64 * 256) bytes a value, and the mean of the scales of each of 224 layers
        ("nf4", LINEARS // 2, LINEARS // 64 + 4 * LINEARS // (64 * 256) + 4 * 224),
    ],
)
def test_weights_and_scales_take_the_bytes_of_their_formats(
    quantization: str, weights: int, scales: int
) -> None:
    trace = traced(quantization)
    assert sum(p.size_bytes for p in trace.parameters) == weights + 2 * (OUTSIDE + ADAPTERS)
    assert sum(trace.buffers) - sum(traced("none").buffers) == scales
    assert sum(p.made_of for p in trace.parameters) == (0 if quantization == "none" else LINEARS)


def kept_after_forward(trace: StepTrace) -> int:
    """Bytes that are there when the backward pass of the last block begins."""
    sizes: dict[int, int] = {}
    for event in trace.events:
        if event[0] == ALLOC:
            sizes[event[1]] = event[2]
        elif event[0] == FREE:
            del sizes[event[1]]
        elif event[0] == BACKWARD and trace.units[event[1]].block == 31:
            return sum(sizes.values())
    raise AssertionError("there is no such pass")


@pytest.mark.parametrize("quantization", ["int8", "nf4"])
@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_nothing_more_is_kept_for_the_backward_pass(quantization: str, checkpoint_every: int) -> None:
    low, bf16 = traced(quantization, checkpoint_every), traced("none", checkpoint_every)
    assert kept_after_forward(low) == kept_after_forward(bf16)


@pytest.mark.parametrize(("quantization", "scratch"), [("int8", 0), ("nf4", 4 * 4096 * 11008 // 64)])
def test_a_weight_is_whole_only_while_a_product_needs_it(quantization: str, scratch: int) -> None:
    """In each pass of a layer: its 16-bit weight, and NF4's scales in fp32 while it is made."""
    trace = traced(quantization, 1)
    names = Counter(trace.ops[e[1]].name for e in trace.events if e[0] == OP)
    # forward, again, backward; the first block's input needs no gradient, so q, k and v want no weight there
    assert names[f"dequantize_{quantization}"] == 3 * 224 - 3
    largest = 2 * 4096 * 11008
    sizes = Counter(e[2] for e in trace.events if e[0] == ALLOC)
    assert sizes[largest] >= 3 * 3 * 32
    there: set[int] = set()
    most = 0
    for event in trace.events:
        if event[0] == ALLOC and event[2] == largest:
            there.add(event[1])
        elif event[0] == FREE:
            there.discard(event[1])
        most = max(most, len(there))
    assert most == 1
    if scratch:
        assert sizes[scratch] >= 3 * 3 * 32


def test_unpacking_costs_its_bytes() -> None:
    ops = {
        kind: [op for op in traced(kind).ops if op.name.startswith("dequantize")] for kind in ("int8", "nf4")
    }
    square = 4096 * 4096
    (int8,) = [op for op in ops["int8"] if op.written_bytes == 2 * square]
    assert int8.read_bytes == square + 4 * 4096
    (nf4,) = [op for op in ops["nf4"] if op.written_bytes == 2 * square]
    assert nf4.read_bytes == square // 2 + square // 64 + 4 * square // (64 * 256) + 4
    assert {op.kind for op in ops["int8"] + ops["nf4"]} == {"elementwise"}


@pytest.mark.slow
def test_what_bf16_cannot_fit_on_16_gb_a_quantised_base_can() -> None:
    """Llama-2-7B with ZeRO-2 on four cards: 2 bytes a weight are 12.6 GiB of 14.5 before anything else."""
    fits = {}
    for quantization in ("none", "int8", "nf4"):
        changes = [
            "model.lora.rank=16",
            f"model.quantization={quantization}",
            "data.sequence_length=1024",
            "train.global_batch=4",
            "train.micro_batch=1",
            "train.checkpointing=full",
            "strategy=zero2",
        ]
        plan = make_plan(sketch("llama-2-7b", changes, world_size=4).job, parse_hardware("4x16GB"))
        (option,) = plan.options
        fits[quantization] = option.prediction.memory.needed_bytes if option.fit == "fits" else 0
    assert fits["none"] == 0
    assert 7 * 2**30 < fits["int8"] < 11 * 2**30
    # weights in 4 bits are 3 GiB less
    assert 2.5 * 2**30 < fits["int8"] - fits["nf4"] < 3.2 * 2**30


@pytest.mark.parametrize(("quantization", "copies"), [("int8", 2 + 2 + 1), ("nf4", 2 + 0.5)])
def test_filling_a_block_takes_its_values_in_fp32_and_copies_of_one_weight(
    quantization: str, copies: float
) -> None:
    """Fullest is the first weight's moment: its copies (int8: in fp16, too), its codes, nothing dropped."""
    trace = traced(quantization)
    memory = GpuMemory(CachingAllocator(capacity_bytes=1 << 50))
    fill(memory, trace, trace.parts[0])
    drawn = 4 * (LINEARS // 32 + 2 * 4096)
    assert memory.allocator.peak_allocated_bytes == drawn + copies * 4096**2


@pytest.mark.slow
def test_where_weights_are_what_does_not_fit_the_nearest_change_is_to_quantise_them() -> None:
    """Llama-2-7B on 12 GB: shorter rows leave its 12.6 GiB of weights, int8 halves them."""
    changes = ["model.lora.rank=16", "strategy=single", "data.sequence_length=1024"]
    job = sketch("llama-2-7b", [*changes, "train.global_batch=1"], world_size=1).job
    near = nearest_change(job, parse_hardware("1x12GB"))
    assert near is not None
    assert near.how == "--set model.quantization=int8"
    assert near.option.prediction.memory.needed_bytes < 11 * 2**30


@pytest.mark.slow
def test_where_only_offloading_fits_the_plan_says_that_nf4_would_do_without() -> None:
    """Llama-2-7B on 12 GB: 12.6 GiB of weights wait in host memory, or take 3.7 GiB in NF4."""
    changes = ["train.global_batch=1", "train.checkpointing=full", "data.sequence_length=512"]

    def plan(*more: str) -> Plan:
        job = sketch("llama-2-7b", [*changes, *more], world_size=1).job
        return make_plan(job, parse_hardware("1x12GB+64GiB"))

    made = plan("model.lora.rank=16")
    assert made.chosen is not None
    assert made.chosen.strategy.offload_parameters == "cpu"
    hint = made.chosen.why[-1]
    assert hint.startswith("without offloading --set model.quantization=nf4 fits, in ")
    with_less = make_plan(
        sketch("llama-2-7b", [*changes, "model.lora.rank=16"], world_size=1).job, parse_hardware("1x4GB")
    )
    assert with_less.chosen is not None
    assert with_less.chosen.why[-1].startswith("--set model.quantization=nf4 would keep ")
    assert with_less.chosen.why[-1].endswith(" in each host's memory: a base in nf4 instead of bf16")
    typed = plan("model.lora.rank=16", "model.quantization=nf4")
    assert typed.chosen is not None
    assert typed.chosen.strategy.offload_parameters == "none"
