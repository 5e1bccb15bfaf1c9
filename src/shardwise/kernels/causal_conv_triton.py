"""The CUDA side of `causal_conv`: a program takes a block of tokens and channels."""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

from __future__ import annotations

import torch
import triton
import triton.language as tl

from shardwise.kernels.mamba_work import CONVOLVED

CHANNELS = 64


@triton.jit
def _pre(
    x, weight, bias, t, column, here, since, valid, x_stride, taps: tl.constexpr, has_bias: tl.constexpr
):
    """The convolution's sum for tokens `t`, [tokens, channels]."""
    inside = here[None, :]
    total = tl.zeros(valid.shape, tl.float32)
    if has_bias:
        total += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)[None, :]
    for back in tl.static_range(taps):
        w = tl.load(weight + column * taps + (taps - 1 - back), mask=here, other=0.0).to(tl.float32)
        reached = valid & inside & (since >= back)[:, None]
        earlier = tl.load(x + (t - back)[:, None] * x_stride + column[None, :], mask=reached, other=0.0)
        total += earlier.to(tl.float32) * w[None, :]
    return total


@triton.jit
def _forward(
    x, weight, bias, positions, out, tokens, width, x_stride,
    taps: tl.constexpr, has_bias: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * block + tl.arange(0, block)
    t = tl.program_id(1).to(tl.int64) * block_t + tl.arange(0, block_t)
    here = column < width
    valid = (t < tokens)[:, None] & here[None, :]
    since = tl.load(positions + t, mask=t < tokens, other=0)
    pre = _pre(x, weight, bias, t, column, here, since, valid, x_stride, taps, has_bias)
    place = out + t[:, None] * width + column[None, :]
    tl.store(place, (pre * tl.sigmoid(pre)).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _through_silu(
    x, weight, bias, positions, dout, sums, tokens, width, x_stride,
    taps: tl.constexpr, has_bias: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """`dout` becomes the gradient of the sum before SiLU; `sums` takes this block's dweight and dbias."""
    column = tl.program_id(0) * block + tl.arange(0, block)
    part = tl.program_id(1).to(tl.int64)
    t = part * block_t + tl.arange(0, block_t)
    here = column < width
    valid = (t < tokens)[:, None] & here[None, :]
    since = tl.load(positions + t, mask=t < tokens, other=0)
    pre = _pre(x, weight, bias, t, column, here, since, valid, x_stride, taps, has_bias)
    sigmoid = tl.sigmoid(pre)
    place = dout + t[:, None] * width + column[None, :]
    g = tl.load(place, mask=valid, other=0.0).to(tl.float32) * sigmoid * (1.0 + pre * (1.0 - sigmoid))
    tl.store(place, g.to(dout.dtype.element_ty), mask=valid)
    at_sums = sums + (part * width + column) * (taps + 1)
    for back in tl.static_range(taps):
        reached = valid & (since >= back)[:, None]
        earlier = tl.load(x + (t - back)[:, None] * x_stride + column[None, :], mask=reached, other=0.0)
        tl.store(at_sums + (taps - 1 - back), tl.sum(g * earlier.to(tl.float32), axis=0), mask=here)
    tl.store(at_sums + taps, tl.sum(g, axis=0), mask=here)


@triton.jit
def _to_input(
    weight, positions, dpre, dx, tokens, width, dx_stride,
    taps: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * block + tl.arange(0, block)
    t = tl.program_id(1).to(tl.int64) * block_t + tl.arange(0, block_t)
    here = column < width
    total = tl.zeros([block_t, block], tl.float32)
    for ahead in tl.static_range(taps):
        later = t + ahead
        since = tl.load(positions + later, mask=later < tokens, other=-1)
        reached = (since >= ahead)[:, None] & here[None, :]
        w = tl.load(weight + column * taps + (taps - 1 - ahead), mask=here, other=0.0).to(tl.float32)
        g = tl.load(dpre + later[:, None] * width + column[None, :], mask=reached, other=0.0)
        total += g.to(tl.float32) * w[None, :]
    place = dx + t[:, None] * dx_stride + column[None, :]
    tl.store(place, total.to(dx.dtype.element_ty), mask=(t < tokens)[:, None] & here[None, :])


def _warps(block_t, block):
    """So many that a thread has 8 values of a block, and room for them in its registers."""
    return max(block_t * block // 256, 1)


def forward(x, weight, bias, positions, *, block_t=CONVOLVED, block=CHANNELS):
    """`causal_conv` on the current stream. `block_t` and `block` are for tests and tuning."""
    rows, length, width = x.shape
    out = x.new_empty(rows, length, width)
    grid = (triton.cdiv(width, block), triton.cdiv(rows * length, block_t))
    _forward[grid](
        x, weight, weight if bias is None else bias, positions, out, rows * length, width, x.stride(-2),
        taps=weight.shape[1], has_bias=bias is not None, block_t=block_t, block=block,
        num_warps=_warps(block_t, block),
    )  # fmt: skip
    return out


def backward(x, weight, bias, positions, dout, dx, *, block_t=CONVOLVED, block=CHANNELS):
    """`causal_conv_backward` on the current stream."""
    rows, length, width = x.shape
    taps = weight.shape[1]
    parts = triton.cdiv(rows * length, block_t)
    grid = (triton.cdiv(width, block), parts)
    sums = x.new_empty(parts, width, taps + 1, dtype=torch.float32)
    _through_silu[grid](
        x, weight, weight if bias is None else bias, positions, dout, sums, rows * length, width,
        x.stride(-2), taps=taps, has_bias=bias is not None, block_t=block_t, block=block,
        num_warps=_warps(block_t, block),
    )  # fmt: skip
    _to_input[grid](
        weight, positions, dout, dx, rows * length, width, dx.stride(-2),
        taps=taps, block_t=block_t, block=block,
        num_warps=_warps(block_t, block),
    )  # fmt: skip
    return sums.sum(0)
