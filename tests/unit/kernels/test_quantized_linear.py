"""Quantised layers hold what bitsandbytes' own would, compute what theirs compute, and keep less."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.quantized_linear import LAYERS, Int8Linear, Nf4Linear, QuantizedLinear

bitsandbytes = pytest.importorskip("bitsandbytes")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OUT, IN = 60, 128
"""Rows of whole NF4 blocks: others are wrong in bitsandbytes 0.50 on processors with AVX-512."""


def weight(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.05 * torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0))).to(dtype)


def layer(kind: str, dtype: torch.dtype = torch.float32, *, bias: bool = False) -> QuantizedLinear:
    vector = nn.Parameter(torch.linspace(-1, 1, OUT).to(dtype), requires_grad=False) if bias else None
    made = LAYERS[kind](IN, OUT, vector, dtype=dtype)
    made.quantize(weight(dtype))
    return made


def theirs(kind: str, dtype: torch.dtype, *, bias: bool = False) -> nn.Module:
    """bitsandbytes' layer, as transformers sets it up for training."""
    if kind == "int8":
        made = bitsandbytes.nn.Linear8bitLt(IN, OUT, bias=bias, has_fp16_weights=False, threshold=6.0)
        made.weight = bitsandbytes.nn.Int8Params(weight(dtype), requires_grad=False, has_fp16_weights=False)
    else:
        made = bitsandbytes.nn.Linear4bit(
            IN, OUT, bias=bias, compute_dtype=dtype, quant_type="nf4", compress_statistics=True
        )
        made.weight = bitsandbytes.nn.Params4bit(
            weight(dtype), requires_grad=False, quant_type="nf4", compress_statistics=True
        )
    if bias:
        made.bias = nn.Parameter(torch.linspace(-1, 1, OUT).to(dtype), requires_grad=False)
    return made.to("cpu").train()


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_and_gradients_are_those_of_bitsandbytes(kind: str, dtype: torch.dtype, bias: bool) -> None:
    mine, other = layer(kind, dtype, bias=bias), theirs(kind, dtype, bias=bias)
    x = torch.randn(3, 5, IN, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    found, expected = mine(x), other(x)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    upstream = torch.randn_like(found)
    (dx,), (their_dx,) = torch.autograd.grad(found, x, upstream), torch.autograd.grad(expected, x, upstream)
    assert torch.equal(dx, their_dx)


def test_int8_rows_are_exact_to_half_a_step() -> None:
    found, values = layer("int8"), weight()
    step = values.half().float().abs().amax(1, keepdim=True) / 127
    assert isinstance(found, Int8Linear)
    codes = found.weight.view(torch.int8)
    assert codes.shape == (OUT, IN)
    assert codes.abs().amax(1).eq(127).all()
    assert ((found.dequantized() - values).abs() <= 0.57 * step).all()  # fp16 first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_takes_half_a_byte_a_value_and_its_scales_a_64th(dtype: torch.dtype) -> None:
    found = layer("nf4", dtype)
    assert isinstance(found, Nf4Linear)
    assert (found.weight.shape[1:], found.weight.dtype) == ((1,), dtype)
    assert found.weight.nbytes == OUT * IN // 2
    blocks = OUT * IN // 64
    assert [(b.dtype, b.numel()) for b in found.buffers()] == [
        (torch.uint8, blocks),
        (torch.float32, -(-blocks // 256)),
        (torch.float32, 1),
    ]
    # normal weights: 8 % of their size is what 16 values leave (QLoRA's figure 2 has the order)
    values = weight(dtype).float()
    assert (found.dequantized().float() - values).norm() < 0.1 * values.norm()


@pytest.mark.parametrize("shape", [(96, 80), (80, 96), (24, 320), (7680, 1), (1, 7680), (50, 152), (12, 26)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nf4_blocks_may_be_cut_by_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Blocks are of the flat weight: its values do not depend on how long its rows are."""
    values = weight(dtype).flatten()[: shape[0] * shape[1]]
    cut, whole = (
        Nf4Linear(columns, rows, None, dtype=dtype) for rows, columns in (shape, (1, values.numel()))
    )
    for made in (cut, whole):
        made.quantize(values.view(made.out_features, made.in_features))
    assert torch.equal(cut.dequantized().flatten(), whole.dequantized().flatten())
    assert cut.holds(values.view(shape), cut.weight)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_knows_the_weight_it_was_made_of(kind: str) -> None:
    found = layer(kind, torch.bfloat16)
    assert found.holds(weight(), found.weight.clone())
    assert not found.holds(weight().roll(1, 0), found.weight)
    assert not found.holds(weight(), torch.zeros_like(found.weight))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_transposed_weight_is_stored_upright(kind: str) -> None:
    turned = LAYERS[kind](IN, OUT, None, dtype=torch.float32, transposed=True)
    turned.quantize(weight().t())
    assert torch.equal(turned.dequantized(), layer(kind).dequantized())
    assert turned.holds(weight().t(), turned.weight)


@pytest.mark.parametrize("kind", LAYERS)
def test_only_what_is_stored_is_kept_for_the_backward_pass(kind: str) -> None:
    mine = layer(kind)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        mine(torch.randn(4, IN, requires_grad=True))
    assert [id(t) for t in kept] == [id(t) for t in mine.stored()]


@pytest.mark.parametrize(
    ("make", "stays"),
    [
        (lambda: layer("int8"), False),
        (lambda: layer("nf4"), False),
        # the reason not to take bitsandbytes' layer (decision 0021)
        (lambda: theirs("int8", torch.float32), True),
    ],
)
def test_checkpointing_drops_the_input(make: Callable[[], nn.Module], stays: bool) -> None:
    module = make()
    seen: list[weakref.ref[torch.Tensor]] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = x * 2.0
        seen.append(weakref.ref(hidden))
        return module(hidden).sum()

    loss = checkpoint(block, torch.randn(4, IN, requires_grad=True), use_reentrant=False)
    gc.collect()
    assert (seen[0]() is not None) == stays
    loss.backward()


def lora(kind: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], init_lora_weights=False)
    return inject_adapter_in_model(config, nn.Sequential(layer(kind, dtype, bias=True))).to(dtype)


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_a_fused_adapter_around_it_is_pefts(kind: str, needs_gradient: bool) -> None:
    peft = lora(kind, torch.float32)
    fused = copy.deepcopy(peft)
    assert fuse_lora(fused) == 1
    x = torch.randn(2, 3, IN, requires_grad=needs_gradient)
    upstream = torch.randn(2, 3, OUT)
    outcomes = []
    for model in (peft, fused):
        wanted = [p for p in model.parameters() if p.requires_grad] + ([x] if needs_gradient else [])
        y = model(x)
        outcomes.append([y, *torch.autograd.grad(y, wanted, upstream)])
    assert len(outcomes[0]) == (4 if needs_gradient else 3)
    for left, right in zip(*outcomes, strict=True):
        assert torch.allclose(left, right, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_fused_adapter_keeps_the_stored_weight_not_the_whole(kind: str) -> None:
    model = lora(kind, torch.bfloat16)
    fuse_lora(model)
    x = torch.randn(64, IN).bfloat16()
    sizes: list[tuple[torch.Size, torch.dtype]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append((t.shape, t.dtype)) or t, lambda t: t
    ):
        model(x)
    base = model[0].base_layer
    rank = [(4, IN), (OUT, 4)]
    expected = [(64, IN), (64, 4), *rank, *(tuple(t.shape) for t in base.stored())]
    assert [tuple(size) for size, _ in sizes] == expected
