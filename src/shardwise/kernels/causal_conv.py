"""Mamba's short causal convolution along packed rows, one filter a channel, followed by SiLU.

    pre_t = bias + sum_j weight_{K-1-j} x_{t-j}    over the taps j within the token's sample
    out_t = silu(pre_t)

`positions` is the distance of each token from its sample's first. Sums are in fp32, or fp64 for fp64 inputs.
The CPU side is plain PyTorch; the CUDA side is in `causal_conv_triton`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.target import run_on_cuda

CONVOLVED = 64  # Tokens of a program on CUDA, each with its own sums of the gradients of weight and bias


def causal_conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """`causal_conv` in fp32 or fp64, gradients by autograd."""
    return functional.silu(_pre(x, weight, bias, positions))


def _pre(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    pre = torch.zeros_like(x, dtype=dtype) if bias is None else bias.to(dtype).expand(x.shape)
    for back, earlier in enumerate(_earlier(x.to(dtype), weight.shape[1], positions)):
        pre = pre + earlier * weight[:, -1 - back].to(dtype)
    return pre


def _earlier(x: Tensor, taps: int, positions: Tensor) -> list[Tensor]:
    """`x` shifted by 0, 1, ... tokens; 0 where the earlier token belongs to another sample."""
    length = x.shape[1]
    return [
        functional.pad(x, (0, 0, back, 0))[:, :length] * (positions >= back).unsqueeze(-1)
        for back in range(taps)
    ]


@torch.library.custom_op("shardwise::causal_conv", mutates_args=(), device_types="cpu")
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    """SiLU of the convolution: [B, T, W], contiguous, in x's format.

    `x` is [B, T, W], tokens at one stride; `weight` [W, K], whose last tap is the token's own; `bias` [W];
    `positions` int32 [B, T], 0 at the first token of a row and of every sample.
    """
    return causal_conv_reference(x, weight, bias, positions).to(x.dtype).contiguous()


@torch.library.custom_op("shardwise::causal_conv_backward", mutates_args=("dx",), device_types="cpu")
def causal_conv_backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, dout: Tensor, dx: Tensor
) -> Tensor:
    """Gradients of `causal_conv`.

    `dout` is [B, T, W], contiguous; `dx`, [B, T, W] with tokens at one stride, receives the gradient of `x`.
    Returns that of the weight and, in the last column, of the bias: fp32 (fp64) [W, K + 1].
    """
    pre, taps, length = _pre(x, weight, bias, positions), weight.shape[1], x.shape[1]
    sigmoid = torch.sigmoid(pre)
    g = dout.to(pre.dtype) * sigmoid * (1.0 + pre * (1.0 - sigmoid))
    total = torch.zeros_like(g)
    for ahead in range(taps):
        reached = g * (positions >= ahead).unsqueeze(-1) * weight[:, -1 - ahead].to(g.dtype)
        total += functional.pad(reached, (0, 0, 0, ahead))[:, ahead : ahead + length]
    dx.copy_(total)
    sums = [(g * earlier).sum((0, 1)) for earlier in _earlier(x.to(g.dtype), taps, positions)]
    return torch.stack([*reversed(sums), g.sum((0, 1))], dim=1)


run_on_cuda(causal_conv, "causal_conv_triton", "forward")


@causal_conv_backward.register_kernel("cuda")
def _backward_cuda(*arguments: Any) -> Any:
    from shardwise.kernels.causal_conv_triton import backward  # Triton is not installed without a GPU

    return backward(*arguments).contiguous()


causal_conv.register_fake(lambda x, *_: x.new_empty(x.shape))


@causal_conv_backward.register_fake
def _backward_fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    width, taps = weight.shape
    return weight.new_empty(width, taps + 1, dtype=torch.promote_types(x.dtype, torch.float32))
