"""Seconds of operators, against kernels timed on an H200 and against what must hold of any GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.hardware.parse import parse_hardware
from shardwise.simulate.step_trace import Op
from shardwise.simulate.time.roofline import Roofline, bandwidth_key

H200 = parse_hardware("1xH200").gpu
PEAK = 989.4e12
MIXTURES = Path(__file__).parents[3] / "benchmarks/mixtures/results/h200.jsonl"
ROOFLINE = Roofline(H200, "bf16")


def moving(read: int, written: int, *, kind: str = "elementwise", name: str = "add", item: int = 2) -> Op:
    return Op(kind=kind, flops=0.0, read_bytes=read, written_bytes=written, item_bytes=item, name=name)


def attention(keys: int, head: int, *, backward: bool = False, kernel: str = "cudnn") -> Op:
    """Causal, two rows of 32 heads."""
    flops = (10.0 if backward else 4.0) * 2 * 32 * keys * keys / 2 * head
    size = 2 * 32 * keys * head * 2
    name = f"_scaled_dot_product_{kernel}_attention{'_backward' if backward else ''}"
    shape = (2, 32, 32, keys, keys, head)
    return Op(kind="attention", flops=flops, read_bytes=3 * size, written_bytes=size, shape=shape, name=name)


# Profiles of whole steps (torch.profiler, H200): mean microseconds of one kind of kernel


@pytest.mark.parametrize(
    ("shapes", "microseconds"),
    [
        # TinyLlama, 8192 tokens: forward of q, o, gate, up and down; of k and v; their weights' gradients
        ([(8192, 2048, 2048)] * 2 + [(8192, 5632, 2048)] * 2 + [(8192, 2048, 5632)], 175.0),
        ([(8192, 256, 2048)], 14.6),
        ([(2048, 2048, 8192)] * 2 + [(5632, 2048, 8192)] * 2 + [(2048, 5632, 8192)], 191.7),
        ([(256, 2048, 8192)], 22.3),
        ([(8192, 32000, 2048)], 1343.0),
        # Llama-2-7B, 4096 tokens: q, k, v, o and down
        ([(4096, 4096, 4096)] * 4 + [(4096, 4096, 11008)], 242.1),
    ],
)
def test_products_take_what_they_took_on_an_h200(product, shapes, microseconds: float) -> None:
    mean = sum(ROOFLINE.seconds(product(*shape)) for shape in shapes) / len(shapes)
    assert mean * 1e6 == pytest.approx(microseconds, rel=0.1, abs=4.0)


@pytest.mark.parametrize("tokens", [256, 8192])
@pytest.mark.parametrize("width", [576, 4096])
def test_a_rank_that_is_not_aligned_saves_no_time(product, tokens: int, width: int) -> None:
    def seconds(rank: int) -> list[float]:
        roofline = Roofline(H200, "bf16", sizes=(rank, width))
        shapes = (tokens, rank, width), (tokens, width, rank), (rank, width, tokens)
        return [roofline.seconds(product(*shape)) for shape in shapes]

    for rank in range(8, 200):
        aligned = seconds(rank // 8 * 8)
        assert all(less <= more for less, more in zip(aligned, seconds(rank), strict=True)), rank


def test_products_of_experts_take_what_they_took_on_an_h200(product) -> None:
    """Calls of at least 0.1 ms, which include their launch. Tokens are routed at random."""
    differences = []
    for row in map(json.loads, MIXTURES.read_text(encoding="utf-8").splitlines()):
        if row["kind"] == "products":
            one = product(row["rows"], row["n"], row["k"], batch=row["experts"])
            seconds = ROOFLINE.seconds(replace(one, name="_grouped_mm"))
            measured = [row[name] / 1e3 for name in ("forward", "input", "weight")]
            differences += [seconds / each - 1 for each in measured if each >= 1e-4]
    assert len(differences) > 200
    assert sum(map(abs, differences)) / len(differences) < 0.1
    assert abs(sum(differences) / len(differences)) < 0.05


@pytest.mark.parametrize(
    ("op", "microseconds"),
    [
        (attention(2048, 128), 155.1),  # Llama-2-7B
        (attention(2048, 128, backward=True), 491.4),
    ],
)
def test_attention_takes_what_it_took_on_an_h200(op: Op, microseconds: float) -> None:
    assert ROOFLINE.seconds(op) * 1e6 == pytest.approx(microseconds, rel=0.05)


@pytest.mark.parametrize(
    ("op", "microseconds"),
    [
        (moving(2 * 33_554_432, 33_554_432), 23.4),  # TinyLlama's residual sums
        (moving(184_549_376, 92_274_688, name="liger_gated"), 63.9),
        (moving(805_306_368, 805_306_368, name="_softmax", kind="reduction", item=4), 545.5),  # GPT-Neo
        (moving(809_500_672, 805_306_368, name="where", item=4), 548.3),
        (moving(838_860_800, 805_306_368, item=4), 944.9),  # fp32 scores and a bf16 mask
        (moving(16_777_216, 16_777_216, name="clone", kind="copy"), 22.4),  # Gemma-3-1B
    ],
)
def test_kernels_that_move_bytes_take_what_they_took_on_an_h200(op: Op, microseconds: float) -> None:
    assert ROOFLINE.seconds(op) * 1e6 == pytest.approx(microseconds, rel=0.1, abs=3.0)


def test_norms_take_time_by_row_as_well() -> None:
    """Liger's backward pass over 8192 rows of 2048 and over 4096 rows of 4096: the same bytes."""
    op = moving(67_108_864, 33_554_432, name="liger_rms_norm_backward", kind="normalization")
    short, long = (Roofline(H200, "bf16", rows=rows).seconds(op) for rows in (8192, 4096))
    assert short * 1e6 == pytest.approx(71.9, rel=0.1)
    assert long * 1e6 == pytest.approx(47.2, rel=0.15)


def test_large_products_reach_four_fifths_of_the_peak(product) -> None:
    """8192^3 in bf16 ran at 769 to 798 TFLOP/s on random data."""
    seconds = ROOFLINE.seconds(product(8192, 8192, 8192))
    assert 2 * 8192**3 / seconds == pytest.approx(0.8 * PEAK, rel=0.03)


def test_a_wave_that_is_not_full_takes_as_long(product) -> None:
    """132 multiprocessors: 12 x 11 tiles of 256 x 128 are one wave, one row of tiles more is two."""
    full = ROOFLINE.seconds(product(12 * 256, 11 * 128, 65536))
    more = ROOFLINE.seconds(product(13 * 256, 11 * 128, 65536))
    assert 1.3 < more / full < 2.1


def test_products_with_few_tiles_are_cut_along_their_inner_dimension(product) -> None:
    """One tile on one of 132 multiprocessors would take 65 times as long as the sixteen parts of it."""
    seconds = ROOFLINE.seconds(product(256, 128, 2**20))
    alone = 2 * 256 * 128 * 2**20 * 132 / (PEAK * 0.84)
    assert seconds < alone / 8


def test_the_sums_of_a_cut_product_are_written_and_read(product) -> None:
    """Eight tiles of 64 x 64 in 16 parts each: one wave, and 16 fp32 results for a second kernel."""
    k = 2**16
    wave = 2 * 64 * 64 * k / 16 / (PEAK * 0.46 / 132)
    sums = 2e-6 + 2 * 16 * 4 * 256 * 128 / (0.9 * H200.memory_bytes_per_second)
    launching = 2e-6 + 4e-6
    assert ROOFLINE.seconds(product(256, 128, k)) == pytest.approx(launching + wave + sums, rel=1e-6)


def test_an_odd_vocabulary_keeps_the_fast_kernels_out(product) -> None:
    """GPT-Neo's head: 3330 us forward; with a vocabulary that is a multiple of 8 it would be 400."""
    roofline = Roofline(H200, "bf16", sizes=(50257, 768))
    assert roofline.seconds(product(4096, 50257, 768)) * 1e6 == pytest.approx(3330, rel=0.25)
    assert roofline.seconds(product(4096, 50264, 768)) * 1e6 < 500
    # an odd number of tokens is no odd stride
    assert roofline.seconds(product(4095, 3072, 768)) < 2 * roofline.seconds(product(4096, 3072, 768))


def test_fp32_has_no_tensor_cores(product) -> None:
    """GPT-Neo's scores in fp32: 612 to 757 us."""
    seconds = ROOFLINE.seconds(product(2048, 2048, 64, batch=48, item_bytes=4))
    assert seconds * 1e6 == pytest.approx(685, rel=0.1)


def test_heads_are_filled_up_to_a_size_that_has_a_kernel() -> None:
    narrow, wide = ROOFLINE.seconds(attention(4096, 80)), ROOFLINE.seconds(attention(4096, 128))
    assert narrow == pytest.approx(wide, rel=0.01)


def test_short_rows_reach_less() -> None:
    rates = [op.flops / ROOFLINE.seconds(op) for op in (attention(n, 128) for n in (512, 2048, 8192))]
    assert rates == sorted(rates)
    assert rates[2] > 1.4 * rates[0]


def test_what_a_gpu_lacks_it_takes_longer_for(product) -> None:
    slow = replace(H200, memory_bytes_per_second=H200.memory_bytes_per_second / 2)
    add, square = moving(2**30, 2**29), product(8192, 8192, 8192)
    half = Roofline(slow, "bf16")
    assert half.seconds(add) / ROOFLINE.seconds(add) == pytest.approx(2.0, rel=0.02)
    assert half.seconds(square) == ROOFLINE.seconds(square)
    weak = Roofline(replace(H200, flops={**H200.flops, "bf16": PEAK / 2}), "bf16")
    assert weak.seconds(square) / ROOFLINE.seconds(square) == pytest.approx(2.0, rel=0.02)


def test_a_gpu_without_bf16_uses_what_it_has(product) -> None:
    turing = parse_hardware("1xRTX2080Ti").gpu
    seconds = Roofline(turing, "bf16").seconds(product(8192, 8192, 8192))
    assert seconds > 2 * 8192**3 / turing.flops["fp16"]


@given(
    m=st.integers(1, 600).map(lambda n: 8 * n),
    n=st.integers(1, 600).map(lambda n: 8 * n),
    k=st.integers(1, 600).map(lambda n: 8 * n),
)
def test_no_product_is_faster_than_the_hardware(m: int, n: int, k: int) -> None:
    op = Op(
        kind="matmul",
        flops=2.0 * m * n * k,
        read_bytes=2 * (m * k + k * n),
        written_bytes=2 * m * n,
        shape=(1, m, n, k),
        name="mm",
    )
    seconds = ROOFLINE.seconds(op)
    assert seconds > op.flops / PEAK
    assert seconds > (op.read_bytes + op.written_bytes) / H200.memory_bytes_per_second
    twice = replace(op, flops=2 * op.flops, shape=(2, m, n, k))
    assert ROOFLINE.seconds(twice) >= seconds * 0.999


@pytest.mark.parametrize(
    ("op", "key"),
    [
        (moving(100, 200, kind="copy", name="_to_copy", item=4), "mixed"),
        (moving(200, 100, kind="copy", name="_to_copy", item=4), "copy"),
        (moving(200, 100), "elementwise"),
        (moving(110, 100, name="mul", item=4), "broadcast"),
        (moving(110, 100, name="mul"), "broadcast_half"),
        (moving(110, 100, name="liger_rope"), "broadcast"),
        (moving(100, 100, kind="copy", name="cat_strided"), "cat_strided"),
        (moving(110, 100, item=4), "mask"),
        (moving(100, 1, kind="reduction", name="sum"), "sum"),
        (moving(100, 100, kind="unheard of", name="unheard of"), "elementwise"),
    ],
)
def test_each_kind_of_kernel_has_its_bandwidth(op: Op, key: str) -> None:
    assert bandwidth_key(op) == key


@pytest.mark.parametrize(("hidden_gb", "bound"), [(0.1, "instructions"), (50.0, "memory")])
def test_a_scan_issues_its_instructions_or_moves_its_bytes(hidden_gb: float, bound: str) -> None:
    """Mamba's forward scan at the 7B shape: 15.4 instructions, 0.45 a clock, for each of 6.4e8 states."""
    tokens, width, states = 4096, 9728, 16
    moved = int(hidden_gb * 1e9)
    op = Op(
        kind="scan", flops=0.0, read_bytes=moved, written_bytes=0, shape=(tokens, width, states),
        name="selective_scan",
    )  # fmt: skip
    issuing = 15.4 * tokens * width * states / (0.45 * H200.flops["fp32"] / 2)
    moving_them = moved / (0.9 * H200.memory_bytes_per_second)
    expected = {"instructions": issuing, "memory": moving_them}[bound]
    assert ROOFLINE.seconds(op) == pytest.approx(expected + 3 * 2e-6, rel=1e-6)


def test_flash_attention_reaches_more_of_an_a100s_peak_than_of_an_h200s() -> None:
    """At most 73 % and 63 % of 312 TFLOP/s (Dao 2023); rows of 16384 tokens come near it."""
    a100 = Roofline(parse_hardware("A100-80GB").gpu, "bf16")
    for backward, share in ((False, 0.73), (True, 0.63)):
        op = attention(16384, 128, backward=backward, kernel="flash")
        assert op.flops / a100.seconds(op) / 312e12 == pytest.approx(share * 16384 / (16384 + 750), rel=0.01)
        assert op.flops / ROOFLINE.seconds(op) / PEAK < 0.42


def test_cards_before_ampere_keep_the_slower_kernels_share() -> None:
    v100 = parse_hardware("V100-32GB").gpu
    op = attention(16384, 128, kernel="flash")
    share = op.flops / Roofline(v100, "fp16").seconds(op) / v100.flops["fp16"]
    assert share == pytest.approx(0.42 * 16384 / (16384 + 750), rel=0.01)
