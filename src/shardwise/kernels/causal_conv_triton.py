"""The CUDA side of `causal_conv`: a warp goes along the tokens, each thread with four adjacent channels.

A thread keeps its channels' filters and the last inputs in registers, so every value is read once. It loads
the next tokens before it computes on the current ones.
"""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types
# ruff: noqa: RUF005, which would unpack tuples: Triton only adds them

import torch
import triton
import triton.language as tl

from shardwise.kernels.causal_conv import CONVOLVED

CHANNELS = 128
AHEAD, AHEAD_BACK = 4, 2
"""Tokens loaded at once; in the backward pass, of two tensors, more would cost too many registers."""

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def sigmoid(v):
    """1 / (1 + e^-v)."""
    return 1.0 / (1.0 + tl.exp2(v * -LOG2E))


@triton.jit
def _load(at, column, here, token, end, stride, count: tl.constexpr):
    """`count` tokens' values, nothing from `end` on."""
    found = ()
    for i in tl.static_range(count):
        found = found + (tl.load(at + i * stride + column, mask=here & (token + i < end), other=0.0),)
    return found


@triton.jit
def _shift(first, values, count: tl.constexpr):
    """`first`, then the `count` - 1 first of `values`."""
    out = (first,)
    for i in tl.static_range(count - 1):
        out = out + (values[i],)
    return out


@triton.jit
def _filter(weight, column, here, taps: tl.constexpr):
    """By how many tokens back."""
    found = ()
    for back in tl.static_range(taps):
        w = tl.load(weight + column * taps + (taps - 1 - back), mask=here, other=0.0)
        found = found + (w.to(tl.float32),)
    return found


@triton.jit
def _before(x, column, here, token, stride, taps: tl.constexpr):
    """The inputs before `token`: one token back, two, ..."""
    found = ()
    for back in tl.static_range(1, taps):
        at = x + (token - back) * stride + column
        found = found + (tl.load(at, mask=here & (token >= back), other=0.0),)
    return found


@triton.jit
def _forward(
    x, weight, bias, positions, out, tokens, width, x_stride,
    taps: tl.constexpr, has_bias: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
    ahead: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * block + tl.arange(0, block)
    here = column < width
    start = tl.program_id(1).to(tl.int64) * block_t
    token = start + column * 0
    end = tl.minimum(start + block_t, tokens)
    w = _filter(weight, column, here, taps)
    earlier = _before(x, column, here, token, x_stride, taps)
    offset = tl.zeros([block], tl.float32)
    if has_bias:
        offset += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    x += start * x_stride
    out += start * width
    positions += start
    following = _load(x, column, here, token, end, x_stride, ahead)
    for first in range(0, block_t, ahead):
        now = following
        x += ahead * x_stride
        following = _load(x, column, here, token + first + ahead, end, x_stride, ahead)
        for i in tl.static_range(ahead):
            since = tl.load(positions + first + i, mask=start + first + i < end, other=0)
            pre = offset + now[i].to(tl.float32) * w[0]
            for back in tl.static_range(1, taps):
                pre += tl.where(since >= back, earlier[back - 1].to(tl.float32), 0.0) * w[back]
            real = here & (token + first + i < end)
            tl.store(out + column, (pre * sigmoid(pre)).to(out.dtype.element_ty), mask=real)
            out += width
            earlier = _shift(now[i], earlier, taps - 1)


@triton.jit
def _backward(
    x, weight, bias, positions, dout, dx, sums, tokens, width, x_stride, dx_stride,
    taps: tl.constexpr, has_bias: tl.constexpr, block_t: tl.constexpr, block: tl.constexpr,
    ahead: tl.constexpr,
):  # fmt: skip
    """`sums`, [parts, taps + 1, W], takes this part's dweight and dbias.

    A token's dx needs the gradients before SiLU of the `taps` - 1 tokens after it as well: what it has so far
    is `owed`, and those past the part's end are computed here too.
    """
    column = tl.program_id(0) * block + tl.arange(0, block)
    here = column < width
    part = tl.program_id(1).to(tl.int64)
    start = part * block_t
    token = start + column * 0
    end = tl.minimum(start + block_t, tokens)
    w = _filter(weight, column, here, taps)
    earlier = _before(x, column, here, token, x_stride, taps)
    offset = tl.zeros([block], tl.float32)
    if has_bias:
        offset += tl.load(bias + column, mask=here, other=0.0).to(tl.float32)
    dbias = tl.zeros([block], tl.float32)
    owed = ()
    dw = (dbias,)
    for _ in tl.static_range(1, taps):
        owed = owed + (dbias,)
        dw = dw + (dbias,)
    x += start * x_stride
    dx += (start - (taps - 1)) * dx_stride
    dout += start * width
    positions += start
    following = _load(x, column, here, token, tokens, x_stride, ahead)
    g_following = _load(dout, column, here, token, tokens, width, ahead)
    for first in range(0, block_t + taps - 1, ahead):
        now, g_now = following, g_following
        x += ahead * x_stride
        dout += ahead * width
        following = _load(x, column, here, token + first + ahead, tokens, x_stride, ahead)
        g_following = _load(dout, column, here, token + first + ahead, tokens, width, ahead)
        for i in tl.static_range(ahead):
            at = token + first + i
            since = tl.load(positions + first + i, mask=start + first + i < tokens, other=0)
            pre = offset + now[i].to(tl.float32) * w[0]
            seen = (now[i].to(tl.float32),)
            for back in tl.static_range(1, taps):
                seen = seen + (tl.where(since >= back, earlier[back - 1].to(tl.float32), 0.0),)
                pre += seen[back] * w[back]
            s = sigmoid(pre)
            g = g_now[i].to(tl.float32) * s * (1.0 + pre * (1.0 - s))
            own = tl.where(at < end, g, 0.0)
            dbias += own
            dw_so_far = dw
            dw = (dw_so_far[0] + own * seen[0],)
            paid = (g * w[0],)
            for back in tl.static_range(1, taps):
                dw = dw + (dw_so_far[back] + own * seen[back],)
                paid = paid + (owed[back - 1] + tl.where(since >= back, g, 0.0) * w[back],)
            settled = here & (at >= start + taps - 1) & (at < end + taps - 1)
            tl.store(dx + column, paid[taps - 1].to(dx.dtype.element_ty), mask=settled)
            dx += dx_stride
            owed = paid[: taps - 1]
            earlier = _shift(now[i], earlier, taps - 1)
    sums += part * (taps + 1) * width + column
    for back in tl.static_range(taps):
        tl.store(sums + (taps - 1 - back) * width, dw[back], mask=here)
    tl.store(sums + taps * width, dbias, mask=here)


def forward(x, weight, bias, positions, *, block_t=CONVOLVED, block=CHANNELS):
    """`causal_conv` on the current stream. `block_t` and `block` are for tests and tuning."""
    rows, length, width = x.shape
    out = x.new_empty(rows, length, width)
    grid = (triton.cdiv(width, block), triton.cdiv(rows * length, block_t))
    _forward[grid](
        x, weight, weight if bias is None else bias, positions, out, rows * length, width, x.stride(-2),
        taps=weight.shape[1], has_bias=bias is not None, block_t=block_t, block=block, ahead=AHEAD,
        num_warps=1,
    )  # fmt: skip
    return out


def backward(x, weight, bias, positions, dout, dx, *, block_t=CONVOLVED, block=CHANNELS):
    """`causal_conv_backward` on the current stream."""
    rows, length, width = x.shape
    taps = weight.shape[1]
    parts = triton.cdiv(rows * length, block_t)
    sums = x.new_empty(parts, taps + 1, width, dtype=torch.float32)
    _backward[triton.cdiv(width, block), parts](
        x, weight, weight if bias is None else bias, positions, dout, dx, sums, rows * length, width,
        x.stride(-2), dx.stride(-2), taps=taps, has_bias=bias is not None, block_t=block_t, block=block,
        ahead=AHEAD_BACK, num_warps=1,
    )  # fmt: skip
    return sums.sum(0).t()
