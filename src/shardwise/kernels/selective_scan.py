"""Mamba's selective scan (Gu & Dao 2023, arXiv:2312.00752, section 3.2) over packed rows, and its gradient.

Per channel d with N states, along the tokens t of a row:

    dt_t = softplus(delta_t + bias)
    h_t  = exp(dt_t * A) * h_{t-1} + dt_t * B_t * x_t      h = 0 before a token whose position is 0
    y_t  = sum_n C_t h_t + D * x_t
    out  = y_t * silu(z_t)

Everything is computed in fp32, whatever the format of `x`, `delta` and `z`, and in fp64 where they are fp64.
Three operators: `selective_scan`, and for its gradient `selective_scan_replay` and `selective_scan_backward`.
Between these two the caller may use the recomputed output, and free it. The CPU side is plain PyTorch, in
time and memory linear in the tokens; the CUDA side is in `selective_scan_triton` (decision 0018).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.target import run_on_cuda

TILE = 8
"""Tokens whose states a thread holds in the scan's backward pass; the state before each tile is saved."""

BLOCK = 32
"""Channels of a scan's program: one for each thread of a warp, so no data along tokens crosses threads."""

WARPS = 8192
"""Warps that keep a GPU busy: several times the 2100 to 3200 that 132 multiprocessors hold at once."""

SHORTEST = 64
"""Tokens of the shortest chunk: its fp32 state takes 64 bytes a channel, half of its bf16 activation."""


def chunk_tokens(rows: int, length: int, width: int) -> int:
    """Tokens of one program: as many as leave WARPS of work, at least SHORTEST.

    The backward pass holds three tensors of the states before each chunk: 3 bytes a channel and token where
    chunks are shortest. Half of WARPS is enough to halve that. A chunk is an entire row where the rows alone
    are enough work; then no state is carried from one chunk to the next.
    """
    columns = -(-width // BLOCK)
    if rows * columns >= WARPS or length <= SHORTEST:
        return length
    chunk, enough = SHORTEST, WARPS // 2
    while 2 * chunk < length and rows * length // (2 * chunk) * columns >= enough:
        chunk, enough = 2 * chunk, WARPS
    return chunk


def chunks_of(rows: int, length: int, width: int) -> int:
    """Chunks of all rows laid end to end."""
    return -(-rows * length // chunk_tokens(rows, length, width))


def tiles_of(rows: int, length: int, width: int) -> int:
    """Tiles of all chunks; a short last tile of a chunk counts in full."""
    return chunks_of(rows, length, width) * -(-chunk_tokens(rows, length, width) // TILE)


def scan_dtype(x: Tensor) -> torch.dtype:
    """The format of the computation: fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def selective_scan_reference(
    x: Tensor, delta: Tensor, a: Tensor, bc: Tensor, d: Tensor, bias: Tensor, positions: Tensor
) -> Tensor:
    """The scan without the gate, y, in plain PyTorch; gradients come from autograd.

    Shapes as in `selective_scan`. Returns [B, T, W] in `scan_dtype`. The states of all tokens exist at once.
    """
    terms = _Terms(x, delta, a, bc, bias, positions)
    h = torch.stack(terms.states(), dim=1)
    return (h * terms.c).sum(-1) + d.to(h.dtype) * x.to(h.dtype)


class _Terms:
    """Terms of the recurrence h_t = decay_t h_{t-1} + added_t; [B, T, W, N] or broadcast to it."""

    def __init__(
        self, x: Tensor, delta: Tensor, a: Tensor, bc: Tensor, bias: Tensor, positions: Tensor
    ) -> None:
        dtype = scan_dtype(x)
        self.a = a.to(dtype)
        self.x = x.to(dtype).unsqueeze(-1)
        self.before_softplus = (delta.to(dtype) + bias.to(dtype)).unsqueeze(-1)
        self.dt = functional.softplus(self.before_softplus)
        self.b, self.c = (t.unsqueeze(-2) for t in bc.to(dtype).chunk(2, dim=-1))
        decay = torch.exp(self.dt * self.a)
        self.decay = decay.masked_fill((positions == 0)[..., None, None], 0.0)
        self.added = self.dt * self.x * self.b

    def states(self) -> list[Tensor]:
        """The state after every token, [B, W, N] each."""
        state = torch.zeros_like(self.added[:, 0])
        states = []
        # unbind, not indexing: the gradient of each index would be a tensor as large as all tokens
        for keep, new in zip(self.decay.unbind(1), self.added.unbind(1), strict=True):
            state = keep * state + new
            states.append(state)
        return states

    def adjoints(self, dy: Tensor) -> Tensor:
        """Gradients of the states, [B, T, W, N], from that of y, [B, T, W, 1]."""
        reaching = torch.zeros_like(self.added[:, 0])
        adjoints = []
        own = (self.c * dy).unbind(1)
        for keep, g in zip(reversed(self.decay.unbind(1)), reversed(own), strict=True):
            adjoints.append(g + reaching)
            reaching = keep * adjoints[-1]
        return torch.stack(adjoints[::-1], dim=1)


@torch.library.custom_op("shardwise::selective_scan", mutates_args=(), device_types="cpu")
def selective_scan(
    x: Tensor, delta: Tensor, a: Tensor, bc: Tensor, d: Tensor, z: Tensor, bias: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """The gated output of the scan, and the states that its backward pass starts from.

    `x` and `delta` (before bias and softplus) are [B, T, W] and contiguous, `z` is [B, T, W] with tokens at
    one stride. In `scan_dtype` are `a`, negative [W, N]; `bc`, [B, T, 2 N] and contiguous: B, then C; `d` and
    `bias` (delta's), [W]. `positions`, int32 [B, T], are 0 at the first token of a row and of every sample.

    Returns the output, [B, T, W] in x's format, and the states before the first token of each chunk,
    [chunks, N, W] in `scan_dtype`; on the CPU empty.
    """
    y = selective_scan_reference(x, delta, a, bc, d, bias, positions)
    return (y * functional.silu(z.to(y.dtype))).to(x.dtype), y.new_empty(0)


@torch.library.custom_op("shardwise::selective_scan_replay", mutates_args=("dout", "dz"), device_types="cpu")
def selective_scan_replay(
    x: Tensor, delta: Tensor, a: Tensor, bc: Tensor, d: Tensor, z: Tensor, bias: Tensor, positions: Tensor,
    states: Tensor, dout: Tensor, dz: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Repeat the forward pass: the output that was not saved, and all that the gate's gradient needs.

    Arguments are those of `selective_scan`, the `states` that it returned, and: `dout`, [B, T, W] and
    contiguous, the gradient of the gated output, which becomes that of the ungated one; `dz`, [B, T, W] with
    tokens at one stride, which receives the gradient of `z`.

    Returns:
        out: [B, T, W], the gated output.
        fine: [tiles, N, W] in x's format: states before every TILE tokens of a chunk; on the CPU empty.
        adjoints: [chunks, N, W]: gradient of the state after each chunk; on the CPU empty.
    """
    del states  # the CPU computes the states again
    y = selective_scan_reference(x, delta, a, bc, d, bias, positions)
    gate = torch.sigmoid(z.to(y.dtype))
    silu = z.to(y.dtype) * gate
    g = dout.to(y.dtype)
    dz.copy_(g * y * (gate + silu * (1.0 - gate)))
    dout.copy_(g * silu)
    return (y * silu).to(x.dtype), y.new_empty(0), y.new_empty(0)


@torch.library.custom_op(
    "shardwise::selective_scan_backward", mutates_args=("delta", "dy"), device_types="cpu"
)
def selective_scan_backward(
    x: Tensor, delta: Tensor, a: Tensor, bc: Tensor, d: Tensor, bias: Tensor, positions: Tensor, fine: Tensor,
    adjoints: Tensor, dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of all inputs but the gate's.

    `fine`, `adjoints` and `dy` (the gradient of the ungated output) come from `selective_scan_replay`.
    `delta` becomes its own gradient, `dy` that of `x`. Returns the gradients of a, bc, d and bias.
    """
    del fine, adjoints  # the CPU computes the states again
    terms = _Terms(x, delta, a, bc, bias, positions)
    dy_ = dy.to(terms.dt.dtype).unsqueeze(-1)
    h, g = torch.stack(terms.states(), dim=1), terms.adjoints(dy_)
    through_decay = g * (h - terms.added)  # decay_t h_{t-1} g_t
    g_b = (g * terms.b).sum(-1, keepdim=True)
    ddelta = terms.x * g_b + (through_decay * terms.a).sum(-1, keepdim=True)
    ddelta = ddelta * torch.sigmoid(terms.before_softplus)
    dbc = torch.cat([(g * terms.dt * terms.x).sum(-2), (h * dy_).sum(-2)], dim=-1)
    dd = (dy_ * terms.x).sum((0, 1, 3))
    delta.copy_(ddelta.squeeze(-1))
    dy.copy_((d.to(h.dtype).unsqueeze(-1) * dy_ + terms.dt * g_b).squeeze(-1))
    return (through_decay * terms.dt).sum((0, 1)), dbc, dd, ddelta.sum((0, 1, 3))


run_on_cuda(selective_scan, "selective_scan_triton", "forward")
run_on_cuda(selective_scan_replay, "selective_scan_triton", "replay")
run_on_cuda(selective_scan_backward, "selective_scan_backward_triton", "backward")


selective_scan.register_fake(lambda x, _, a, *__: (torch.empty_like(x), _states(x, a)))


@selective_scan_replay.register_fake
def _replay_fake(x: Tensor, _delta: Tensor, a: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    fine = x.new_empty(tiles_of(*x.shape), a.shape[1], x.shape[2])
    return torch.empty_like(x), fine, _states(x, a)


@selective_scan_backward.register_fake
def _backward_fake(
    _x: Tensor, _delta: Tensor, a: Tensor, bc: Tensor, d: Tensor, bias: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.empty_like(a), torch.empty_like(bc), torch.empty_like(d), torch.empty_like(bias)


def _states(x: Tensor, a: Tensor) -> Tensor:
    return x.new_empty(chunks_of(*x.shape), a.shape[1], x.shape[2], dtype=scan_dtype(x))
