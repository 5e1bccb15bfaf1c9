"""Attention over segments equals attention with an explicit block-diagonal mask."""

from __future__ import annotations

import pytest
import torch

from shardwise.kernels.attention import block_causal_mask, varlen_attention

SEGMENTS = [5, 1, 9, 3]
TOTAL = sum(SEGMENTS)
CU_SEQLENS = torch.tensor([0, *torch.tensor(SEGMENTS).cumsum(0)], dtype=torch.int32)
OWNER = torch.repeat_interleave(torch.arange(len(SEGMENTS)), torch.tensor(SEGMENTS))


def allowed(window):
    """[T, T]: who may see whom, from the definition."""
    query, key = torch.arange(TOTAL)[:, None], torch.arange(TOTAL)[None, :]
    near = query - key < (window or TOTAL)
    return (OWNER[:, None] == OWNER[None, :]) & (key <= query) & near


@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_values_and_gradients_equal_masked_attention(window, key_heads, sinks):
    """A sink is one more column of scores, which the softmax counts and which has no value."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, TOTAL, 8, generator=generator, dtype=torch.float64).requires_grad_()
    k, v = (
        torch.randn(1, key_heads, TOTAL, 8, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in "kv"
    )
    scores = q @ k.repeat_interleave(4 // key_heads, 1).transpose(2, 3) * 0.7
    scores = scores.masked_fill(~allowed(window), float("-inf"))
    sink = torch.randn(4, generator=generator, dtype=torch.float64).requires_grad_()
    column = sink.view(1, 4, 1, 1).expand(-1, -1, TOTAL, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1] if sinks else scores.softmax(-1)
    expected = (weights @ v.repeat_interleave(4 // key_heads, 1)).transpose(1, 2)
    out, _ = varlen_attention(
        torch.nn.Module(), q, k, v, None, scaling=0.7, sliding_window=window,
        cu_seq_lens_q=CU_SEQLENS, max_length_q=max(SEGMENTS), s_aux=sink if sinks else None,
    )  # fmt: skip
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    learned = (q, k, v, sink) if sinks else (q, k, v)
    right = torch.autograd.grad(expected, learned, upstream)
    left = torch.autograd.grad(out, learned, upstream)
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(left, right, strict=True))


def test_a_window_that_only_the_layer_knows_holds_and_the_argument_goes_first():
    """Qwen2-MoE's layers have one and do not hand it on."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, TOTAL, 8, generator=generator, dtype=torch.float64) for _ in "qkv")
    borders = {"cu_seq_lens_q": CU_SEQLENS, "max_length_q": max(SEGMENTS)}
    plain, layer = torch.nn.Module(), torch.nn.Module()
    layer.sliding_window = 4
    for window in (4, 2):
        expected, _ = varlen_attention(plain, q, k, v, None, sliding_window=window, **borders)
        given = None if window == 4 else window
        assert torch.equal(
            varlen_attention(layer, q, k, v, None, sliding_window=given, **borders)[0], expected
        )
    for module, sinks in ((layer, None), (plain, torch.zeros(2))):
        with pytest.raises(RuntimeError, match="window"):
            varlen_attention(module, q, k, v, None, single_segment_rows=1, s_aux=sinks, **borders)


def test_the_mask_opens_exactly_the_segments():
    mask = block_causal_mask(torch.Size([2, 9]), CU_SEQLENS, torch.float32)
    whole = allowed(None)
    assert mask.shape == (2, 1, 9, 9)
    assert torch.equal(mask[0, 0] == 0, whole[:9, :9])
    assert torch.equal(mask[1, 0] == 0, whole[9:, 9:])
    assert mask.min() == torch.finfo(torch.float32).min
    windowed = block_causal_mask(torch.Size([2, 9]), CU_SEQLENS, torch.float32, window=2)
    assert torch.equal(windowed[1, 0] == 0, allowed(2)[9:, 9:])


def test_dropout_is_refused_because_the_kernel_has_none():
    q = torch.zeros(1, 1, TOTAL, 8)
    with pytest.raises(RuntimeError, match="dropout"):
        varlen_attention(
            torch.nn.Module(),
            q,
            q,
            q,
            None,
            dropout=0.1,
            cu_seq_lens_q=CU_SEQLENS,
            max_length_q=max(SEGMENTS),
        )
