"""A Mamba mixer from its convolution to its output projection, with little memory in both passes.

    x, z = xz                                   [.., W] each
    u = silu(conv(x))
    r, B, C = u x_proj^T                        [.., R], [.., N], [.., N]
    out = scan(u, r dt_proj^T, A, B, C, D, z) out_proj^T

As in mamba_ssm's `mamba_inner_fn` one autograd node saves `xz` and the small product, and recomputes the
rest. Unlike there, it recomputes the scan's output too, which takes more memory than the states it comes
from. Temporary tensors of the backward pass overwrite each other.
"""

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.causal_conv import causal_conv, causal_conv_backward
from shardwise.kernels.selective_scan import (
    scan_dtype,
    selective_scan,
    selective_scan_backward,
    selective_scan_replay,
)


def mamba_inner(
    xz: Tensor, positions: Tensor, *, conv_weight: Tensor, conv_bias: Tensor | None, x_proj: Tensor,
    dt_proj: Tensor, dt_bias: Tensor, a_log: Tensor, d: Tensor, out_proj: Tensor,
) -> Tensor:  # fmt: skip
    """Convolution, scan, gate and output projection: [B, T, H] in xz's format.

    `xz` is the input projection's output, [B, T, 2 W] and contiguous; `positions` int32 [B, T], 0 at the
    first token of a row and of every sample, which sees no earlier one; `conv_weight` [W, K]; `x_proj`
    [R + 2 N, W]; `dt_proj` [W, R]; `out_proj` [H, W]; the biases and `d` [W]; `a_log` [W, N]. `dt_bias`,
    `a_log` and `d` may have any format, and are used in fp32 (fp64 for fp64).
    """
    dtype = scan_dtype(xz)
    dt_bias, a, d = dt_bias.to(dtype), -torch.exp(a_log.to(dtype)), d.to(dtype)
    weights = conv_weight, conv_bias, x_proj, dt_proj, dt_bias, a, d, out_proj
    return _MambaInner.apply(xz, positions, *weights)  # type: ignore[no-any-return]


class _MambaInner(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, xz: Tensor, positions: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
        x_proj: Tensor, dt_proj: Tensor, dt_bias: Tensor, a: Tensor, d: Tensor, out_proj: Tensor,
    ) -> Tensor:  # fmt: skip
        call = _calls(xz)
        x, z = xz.chunk(2, dim=-1)
        u = call.conv(x, conv_weight, conv_bias, positions)
        small = u @ x_proj.t()
        delta, bc = _delta_and_bc(small, dt_proj)
        gated, states = call.scan(u, delta, a, bc, d, z, dt_bias, positions)
        ctx.save_for_backward(
            xz, positions, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, a, d, out_proj, small, states
        )
        return gated @ out_proj.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (
            xz, positions, conv_weight, conv_bias, x_proj, dt_proj, dt_bias, a, d, out_proj, small, states
        ) = ctx.saved_tensors  # fmt: skip
        call = _calls(xz)
        *_, wants_x_proj, wants_dt_proj, _, _, _, wants_out_proj = ctx.needs_input_grad
        x, z = xz.chunk(2, dim=-1)
        dxz = torch.empty_like(xz)
        dx, dz = dxz.chunk(2, dim=-1)

        u = call.conv(x, conv_weight, conv_bias, positions)
        delta, bc = _delta_and_bc(small, dt_proj)
        dout = grad @ out_proj
        gated, fine, adjoints = call.replay(u, delta, a, bc, d, z, dt_bias, positions, states, dout, dz)
        d_out_proj = _weight_gradient(grad, gated) if wants_out_proj else None
        del gated
        da, dbc, dd, d_dt_bias = call.backward(u, delta, a, bc, d, dt_bias, positions, fine, adjoints, dout)
        del fine, adjoints, bc
        ddelta, du = delta, dout  # overwritten by the scan's backward pass

        rank = dt_proj.shape[1]
        dsmall = torch.empty_like(small)
        dsmall[..., rank:] = dbc
        dsmall[..., :rank] = ddelta @ dt_proj
        d_dt_proj = _weight_gradient(ddelta, small[..., :rank]) if wants_dt_proj else None
        d_x_proj = _weight_gradient(dsmall, u) if wants_x_proj else None
        del u, delta, ddelta
        du.view(-1, du.shape[-1]).addmm_(dsmall.view(-1, dsmall.shape[-1]), x_proj)
        dconv = call.conv_backward(x, conv_weight, conv_bias, positions, du, dx).to(conv_weight.dtype)
        d_conv_bias = None if conv_bias is None else dconv[:, -1].contiguous()
        d_conv = dconv[:, :-1].contiguous()
        return dxz, None, d_conv, d_conv_bias, d_x_proj, d_dt_proj, d_dt_bias, da, dd, d_out_proj


_Calls = namedtuple("_Calls", "conv conv_backward scan replay backward")
_OPERATORS = _Calls(
    causal_conv, causal_conv_backward, selective_scan, selective_scan_replay, selective_scan_backward
)


def _calls(x: Tensor) -> _Calls:
    """The operators; on a GPU the functions behind them: an operator costs 80 us of Python (2.13)."""
    if not x.is_cuda or torch.compiler.is_compiling():
        return _OPERATORS
    from shardwise.kernels import causal_conv_triton as conv
    from shardwise.kernels import selective_scan_backward_triton as back
    from shardwise.kernels import selective_scan_triton as scan

    return _Calls(conv.forward, conv.backward, scan.forward, scan.replay, back.backward)


def _delta_and_bc(small: Tensor, dt_proj: Tensor) -> tuple[Tensor, Tensor]:
    """The scan's inputs from the small product: delta [B, T, W]; B and C [B, T, 2 N], in its format."""
    rank = dt_proj.shape[1]
    return small[..., :rank] @ dt_proj.t(), small[..., rank:].to(scan_dtype(small)).contiguous()


def _weight_gradient(out: Tensor, into: Tensor) -> Tensor:
    """A linear layer's, from its output's gradient [.., O] and its input [.., I]: [O, I]."""
    return out.reshape(-1, out.shape[-1]).t() @ into.reshape(-1, into.shape[-1])
