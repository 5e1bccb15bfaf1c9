"""The CUDA side of `lora_mlp`: a tile for each program, of which every value is read and written once."""
# mypy: ignore-errors, Triton is not installed without a GPU and its kernels carry no types

import torch
import triton
import triton.language as tl

TOKENS, WIDTH, WARPS = 32, 64, 4
"""Tile of a program: small, so that many programs wait for memory at the same time."""
RANK = 64
"""Columns of a rank that are multiplied at a time."""


@triton.jit
def _left(tensor, stride, t, tokens, first, rank: tl.constexpr, block: tl.constexpr):
    """Columns `first` to `first + block` of [tokens, rank], rows `t`."""
    r = first + tl.arange(0, block)
    return tl.load(
        tensor + t[:, None] * stride + r[None, :], mask=(t < tokens)[:, None] & (r < rank)[None, :], other=0.0
    )


@triton.jit
def _right(
    tensor, rank_stride, width_stride, w, width, first, rank: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    """Rows `first` to `first + block` of [rank, width], columns `w`."""
    r = first + tl.arange(0, block)
    place = r[:, None] * rank_stride + w[None, :] * width_stride
    return tl.load(tensor + place, mask=(r < rank)[:, None] & (w < width)[None, :], other=0.0)


@triton.jit
def _further(
    total, left, left_stride, right, rank_stride, width_stride, t, w, tokens, width, rank: tl.constexpr,
    block: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """`total` and the products of the columns of a rank beyond the first block."""
    for first in tl.static_range(block, rank, block):
        rows = _left(left, left_stride, t, tokens, first, rank, block)
        columns = _right(right, rank_stride, width_stride, w, width, first, rank, block)
        total = tl.dot(rows, columns, total, input_precision=precision)
    return total


@triton.jit
def _gates(gate, gelu: tl.constexpr):
    """The activation's value and slope."""
    if gelu:
        # the numbers are 2 sqrt(2 / pi), GELU's 0.044715, and three times that
        half = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        inner = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        return gate * half, half + gate * half * (1.0 - half) * inner
    sigmoid = tl.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


# Everything is loaded before the first product: a product waits, and what is loaded after it waits again.


@triton.jit
def _forward(
    gate, up, reduced, b_gate, b_up, out, tokens, width, rank: tl.constexpr, block_r: tl.constexpr,
    gelu: tl.constexpr, block_t: tl.constexpr, block_w: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    w = tl.program_id(0) * block_w + tl.arange(0, block_w)
    inside = (t < tokens)[:, None] & (w < width)[None, :]
    place = t[:, None].to(tl.int64) * width + w[None, :]
    for_gate = _left(reduced, 2 * rank, t, tokens, 0, rank, block_r)
    for_up = _left(reduced + rank, 2 * rank, t, tokens, 0, rank, block_r)
    of_gate = _right(b_gate, 1, rank, w, width, 0, rank, block_r)
    of_up = _right(b_up, 1, rank, w, width, 0, rank, block_r)
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0)
    g = tl.dot(for_gate, of_gate, input_precision=precision) + g.to(tl.float32)
    u = tl.dot(for_up, of_up, input_precision=precision) + u.to(tl.float32)
    g = _further(g, reduced, 2 * rank, b_gate, 1, rank, t, w, tokens, width, rank, block_r, precision)
    u = _further(u, reduced + rank, 2 * rank, b_up, 1, rank, t, w, tokens, width, rank, block_r, precision)
    value, _ = _gates(g, gelu)
    tl.store(out + place, (value * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate, up, hidden, reduced, b_gate, b_up, d_reduced, a_down, tokens, width, rank: tl.constexpr,
    block_r: tl.constexpr, rank_down: tl.constexpr, block_down: tl.constexpr, gelu: tl.constexpr,
    block_t: tl.constexpr, block_w: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(1) * block_t + tl.arange(0, block_t)
    w = tl.program_id(0) * block_w + tl.arange(0, block_w)
    inside = (t < tokens)[:, None] & (w < width)[None, :]
    place = t[:, None].to(tl.int64) * width + w[None, :]
    for_gate = _left(reduced, 2 * rank, t, tokens, 0, rank, block_r)
    for_up = _left(reduced + rank, 2 * rank, t, tokens, 0, rank, block_r)
    for_down = _left(d_reduced, rank_down, t, tokens, 0, rank_down, block_down)
    of_gate = _right(b_gate, 1, rank, w, width, 0, rank, block_r)
    of_up = _right(b_up, 1, rank, w, width, 0, rank, block_r)
    of_down = _right(a_down, width, 1, w, width, 0, rank_down, block_down)
    g = tl.load(gate + place, mask=inside, other=0.0)
    u = tl.load(up + place, mask=inside, other=0.0)
    dh = tl.load(hidden + place, mask=inside, other=0.0)
    g = tl.dot(for_gate, of_gate, input_precision=precision) + g.to(tl.float32)
    u = tl.dot(for_up, of_up, input_precision=precision) + u.to(tl.float32)
    dh = tl.dot(for_down, of_down, input_precision=precision) + dh.to(tl.float32)
    g = _further(g, reduced, 2 * rank, b_gate, 1, rank, t, w, tokens, width, rank, block_r, precision)
    u = _further(u, reduced + rank, 2 * rank, b_up, 1, rank, t, w, tokens, width, rank, block_r, precision)
    dh = _further(
        dh, d_reduced, rank_down, a_down, width, 1, t, w, tokens, width, rank_down, block_down, precision
    )
    value, slope = _gates(g, gelu)
    tl.store(hidden + place, (value * u).to(hidden.dtype.element_ty), mask=inside)
    tl.store(gate + place, (dh * u * slope).to(gate.dtype.element_ty), mask=inside)
    tl.store(up + place, (dh * value).to(up.dtype.element_ty), mask=inside)


def _block(rank: int) -> int:
    return min(RANK, max(16, triton.next_power_of_2(rank)))  # a product has at least 16 columns


def _how(gate: torch.Tensor, gelu: bool) -> dict:
    precision = "ieee" if gate.dtype == torch.float32 else "tf32"  # of no effect on halves
    blocks = {"block_t": TOKENS, "block_w": WIDTH, "precision": precision}
    return {"gelu": gelu, "num_warps": WARPS, **blocks}


def _grid(gate: torch.Tensor) -> tuple[int, int]:
    tokens, width = gate.shape
    return triton.cdiv(width, WIDTH), triton.cdiv(tokens, TOKENS)


def forward(
    gate: torch.Tensor, up: torch.Tensor, reduced: torch.Tensor, b_gate: torch.Tensor, b_up: torch.Tensor,
    gelu: bool,
) -> torch.Tensor:  # fmt: skip
    """Runs the kernel on the current stream; shapes as in `lora_gated`."""
    out, rank = torch.empty_like(gate), b_gate.shape[1]
    if gate.shape[0]:
        tensors = gate, up, reduced, b_gate, b_up, out
        _forward[_grid(gate)](*tensors, *gate.shape, rank, _block(rank), **_how(gate, gelu))
    return out


def backward(
    gate: torch.Tensor, up: torch.Tensor, hidden: torch.Tensor, reduced: torch.Tensor, b_gate: torch.Tensor,
    b_up: torch.Tensor, d_reduced: torch.Tensor, a_down: torch.Tensor, gelu: bool,
) -> None:  # fmt: skip
    """Runs the kernel on the current stream; shapes as in `lora_gated_backward`."""
    rank, down = b_gate.shape[1], a_down.shape[0]
    ranks = rank, _block(rank), down, _block(down)
    if gate.shape[0]:
        tensors = gate, up, hidden, reduced, b_gate, b_up, d_reduced, a_down
        _backward[_grid(gate)](*tensors, *gate.shape, *ranks, **_how(gate, gelu))
