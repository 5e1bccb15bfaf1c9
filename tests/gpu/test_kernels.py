"""On a GPU: the Triton and flash kernels equal float64 arithmetic, and nothing waits for the host."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.data.batch import IGNORED, MicroBatch
from shardwise.kernels import flash4
from shardwise.kernels import linear_cross_entropy as lce
from shardwise.kernels.attention import varlen_attention
from shardwise.kernels.fused import apply_fused_kernels
from shardwise.kernels.linear_cross_entropy import linear_cross_entropy
from shardwise.models.families import liger_kernels
from shardwise.objective.causal_lm import CausalLM
from shardwise.units import GIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    # kernels compiled for the first time and third-party code may warn
    pytest.mark.filterwarnings("default"),
]
DEVICE = torch.device("cuda")


def error(measured, expected):
    """Norm of the difference over the norm of the expected, in float64 on the CPU."""
    measured, expected = measured.detach().double().cpu(), expected.detach().double().cpu()
    return float((measured - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 1.0), (20.0, 0.5)])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("vocabulary", [50, 8192, 50257])
@pytest.mark.parametrize("chunks", [1, 3])
def test_linear_cross_entropy(monkeypatch, dtype, bound, softcap, scale, bias, vocabulary, chunks):
    tokens, width = 96, 64
    monkeypatch.setattr(lce, "CHUNK_BYTES", tokens // chunks * vocabulary * dtype.itemsize)
    generator = torch.Generator().manual_seed(0)
    shapes = [(tokens, width), (vocabulary, width)] + ([(vocabulary,)] if bias else [])
    # logits of about 1: bf16 rounds them to 0.4 %, as it would those of a model
    sizes = [1.0, width**-0.5, 1.0]
    values = [torch.randn(s, generator=generator) * size for s, size in zip(shapes, sizes, strict=False)]
    tensors = [v.to(DEVICE, dtype).requires_grad_() for v in values]
    exact = [t.detach().double().requires_grad_() for t in tensors]
    labels = torch.randint(vocabulary, (tokens,), generator=generator).to(DEVICE)
    labels[::5] = IGNORED
    loss = linear_cross_entropy(
        *tensors[:2], labels, bias=tensors[2] if bias else None, softcap=softcap, scale=scale
    )
    logits = torch.nn.functional.linear(*exact) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    (loss * 0.5).backward()
    (expected * 0.5).backward()
    assert error(loss, expected) <= bound
    for tensor, right in zip(tensors, exact, strict=True):
        assert error(tensor.grad, right.grad) <= bound


def test_the_full_logits_never_exist():
    """8192 tokens of a 128k vocabulary are 2 GiB of bf16 logits; a quarter of that is held."""
    hidden = torch.randn(8192, 1024, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(128256, 1024, device=DEVICE, dtype=torch.bfloat16)
    labels = torch.randint(128256, (8192,), device=DEVICE)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels).backward()
    assert torch.cuda.max_memory_allocated() - before < 0.6 * GIB


@pytest.mark.parametrize("kernel", ["torch", "flash4"])
@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 64])
def test_varlen_attention(kernel, head_size, key_heads, window, request):
    """Borders of recorded passes end with empty segments."""
    if kernel == "flash4":
        request.getfixturevalue("flash_attention_4")
        assert flash4.serves(DEVICE, 128), "for a Hopper GPU"
    segments = [200, 1, 333, 64, 0, 0]
    borders = torch.tensor([0, *torch.tensor(segments).cumsum(0)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(segments), head_size) for heads in (8, key_heads, key_heads)]
    tensors = [
        torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for s in shapes
    ]
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    outs = []
    for inputs, cu_seqlens in ((tensors, borders.to(DEVICE)), (exact, borders)):
        options = {"sliding_window": window, "cu_seq_lens_q": cu_seqlens, "max_length_q": max(segments)}
        outs.append(varlen_attention(torch.nn.Module(), *inputs, None, **options)[0])
    upstream = torch.randn(outs[1].shape, generator=generator, dtype=torch.float64)
    outs[0].backward(upstream.to(DEVICE, torch.bfloat16))
    outs[1].backward(upstream)
    assert error(*outs) <= 1e-2
    for tensor, right in zip(tensors, exact, strict=True):
        assert error(tensor.grad, right.grad) <= 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("window", [None, 64])
def test_sinks(dtype, key_heads, window):
    """Sinks from far below the scores to far above them, whose gradients are sums over all tokens."""
    segments, bound = [200, 1, 333, 64, 0], 1e-2 if dtype == torch.bfloat16 else 1e-5
    borders = torch.tensor([0, *torch.tensor(segments).cumsum(0)], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(segments), 64) for heads in (8, key_heads, key_heads)]
    given = [torch.randn(s, generator=generator) for s in shapes] + [torch.linspace(-9, 9, 8)]
    tensors = [t.to(DEVICE, dtype).requires_grad_() for t in given]
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    outs = []
    for (*inputs, sinks), cu_seqlens in ((tensors, borders.to(DEVICE)), (exact, borders)):
        options = {"sliding_window": window, "cu_seq_lens_q": cu_seqlens, "max_length_q": max(segments)}
        outs.append(varlen_attention(torch.nn.Module(), *inputs, None, s_aux=sinks, **options)[0])
    upstream = torch.randn(outs[1].shape, generator=generator, dtype=torch.float64)
    outs[0].backward(upstream.to(DEVICE, dtype))
    outs[1].backward(upstream)
    assert error(*outs) <= bound
    for tensor, right in zip(tensors, exact, strict=True):
        assert error(tensor.grad, right.grad) <= bound


@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("key_heads", [8, 2])
@pytest.mark.parametrize("rest", [[], [100, 28]])
def test_rows_of_a_single_segment(head_size, key_heads, rest):
    """Two rows of one segment each, on Hopper through cuDNN, alone and before a packed row."""
    segments = [256, 256, *rest]
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads, sum(segments), head_size) for heads in (8, key_heads, key_heads)]
    tensors = [
        torch.randn(s, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_() for s in shapes
    ]
    exact = [t.detach().double().cpu().requires_grad_() for t in tensors]
    borders = torch.tensor([0, *torch.tensor(segments).cumsum(0)], dtype=torch.int32)
    after = (borders[2:] - 512).to(DEVICE)
    options = {"cu_seq_lens_q": after, "max_length_q": 256, "single_segment_rows": 2}
    out, _ = varlen_attention(torch.nn.Module(), *tensors, None, **options)
    options = {"cu_seq_lens_q": borders, "max_length_q": 256}
    expected, _ = varlen_attention(torch.nn.Module(), *exact, None, **options)
    upstream = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    out.backward(upstream.to(DEVICE, torch.bfloat16))
    expected.backward(upstream)
    assert error(out, expected) <= 1e-2
    for tensor, right in zip(tensors, exact, strict=True):
        assert error(tensor.grad, right.grad) <= 1e-2


def batch(rows=2, length=96, vocabulary=500):
    """Rows of three samples each."""
    generator = torch.Generator().manual_seed(0)
    sizes = [length // 2, length // 3, length - length // 2 - length // 3]
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    labels = ids.roll(-1, 1)
    labels[:, torch.tensor(sizes).cumsum(0) - 1] = IGNORED
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        position_ids=torch.cat([torch.arange(size) for size in sizes]).repeat(rows, 1),
        cu_seqlens=torch.tensor([0, *torch.tensor(sizes * rows).cumsum(0)], dtype=torch.int32),
        max_seqlen=max(sizes),
    ).to(DEVICE)


def tiny(model_type, dtype, targets=("o_proj", "down_proj")):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=500,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        pad_token_id=0,
    )
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    settings = LoraConfig(r=8, target_modules=list(targets), init_lora_weights=False)
    return inject_adapter_in_model(settings, model).to(DEVICE, dtype)


def step(model):
    model.zero_grad()
    loss = CausalLM(model)(batch())
    loss.backward()
    return loss, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "model_type",
    [
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    ],
)
def test_fused_kernels_change_neither_loss_nor_gradients(model_type):
    """In fp32, where the two may differ by rounding only."""
    model = tiny(model_type, torch.float32)
    plain = step(model)
    applied = apply_fused_kernels(model, DEVICE, liger=liger_kernels(model.config))
    assert {"liger_rope", "liger_rms_norm", "lora_linear"} <= set(applied)
    fused = step(model)
    assert error(fused[0], plain[0]) <= 1e-5
    assert fused[1].keys() == plain[1].keys()
    whole = [torch.cat([g.flatten() for g in grads.values()]) for _, grads in (fused, plain)]
    assert error(*whole) <= 1e-4


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("model_type", ["llama", "gemma"])
def test_a_fused_mlp_changes_neither_loss_nor_gradients(model_type):
    """SiLU and GELU, in fp32; both compute from the same weights."""
    model = tiny(model_type, torch.float32, MLP)
    plain = step(model)
    assert "lora_mlp" in apply_fused_kernels(model, DEVICE, liger=liger_kernels(model.config))
    fused = step(model)
    assert error(fused[0], plain[0]) <= 1e-5
    assert fused[1].keys() == plain[1].keys()
    assert all(error(fused[1][name], gradient) <= 1e-4 for name, gradient in plain[1].items())


@pytest.mark.parametrize("targets", [("o_proj", "down_proj"), ("q_proj", "k_proj", "v_proj"), MLP])
def test_bf16_is_fp32_but_for_rounding(targets):
    model = tiny("llama", torch.bfloat16, targets)
    exact = copy.deepcopy(model).float()  # on the GPU: Liger's rotary embedding is now every Llama's here
    expected = CausalLM(exact)(batch())
    expected.backward()
    apply_fused_kernels(model, DEVICE, liger=liger_kernels(model.config))
    loss, gradients = step(model)
    assert error(loss, expected) <= 2e-3
    right = torch.cat([p.grad.flatten() for p in exact.parameters() if p.grad is not None])
    assert error(torch.cat([g.flatten() for g in gradients.values()]), right) <= 5e-2


def test_a_step_never_waits_for_the_gpu():
    model = tiny("llama", torch.bfloat16)
    apply_fused_kernels(model, DEVICE, liger=liger_kernels(model.config))
    loss, inputs = CausalLM(model), batch()
    loss(inputs).backward()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss(inputs).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
