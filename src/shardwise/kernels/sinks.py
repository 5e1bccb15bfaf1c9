"""Attention over packed rows with sinks (gpt-oss), by flash attention, which has none of its own.

A sink is a number that each head learns. It takes part in every softmax of the head as the score of one more
key, whose value is 0 (Xiao et al. 2023, arXiv:2309.17453).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def flash_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, borders: Tensor, longest: int, scale: float | None,
    window: Sequence[int],
) -> Tensor:  # fmt: skip
    """Causal attention within segments, [T, heads, D]; arguments as those of `flash4_attention`.

    `sinks`: [heads]; they are not multiplied by `scale`.
    """
    out: Tensor = _WithSinks.apply(q, k, v, sinks, borders, longest, scale, tuple(window))
    return out


class _WithSinks(torch.autograd.Function):
    """The sink s changes the sum of a query's exponentials, whose logarithm l the kernel returns.

    With l' = log(exp(l) + exp(s)), the output is that of the kernel times exp(l - l'). The kernel's backward
    pass computes probabilities from l', and the softmax's gradient from the products of output and gradient:
    given l' and the new output, it returns the right gradients of q, k and v. That of s is the sum over the
    queries of -exp(s - l') times this product, as for a key whose value is 0.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, borders: Tensor, longest: int,
        scale: float | None, window: tuple[int, int],
    ) -> Tensor:  # fmt: skip
        from torch.nn.attention import varlen  # noqa: F401 - defines the operators

        causal = window == (-1, 0)
        out, sums, state = torch.ops.torch_attn._varlen_attn(
            q, k, v, borders, borders, longest, longest, causal, scale, list(window)
        )
        new = torch.logaddexp(sums, sinks.float().unsqueeze(1))
        out.mul_((sums - new).exp_().T.unsqueeze(-1))
        ctx.save_for_backward(q, k, v, out, new, borders, state, sinks)
        ctx.how = longest, causal, scale, list(window)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, sums, borders, state, sinks = ctx.saved_tensors
        longest, causal, scale, window = ctx.how
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            dout, q, k, v, out, sums, borders, borders, longest, longest, causal, state, scale, window
        )
        dsinks = None
        if ctx.needs_input_grad[3]:
            products = dout.float().mul_(out).sum(-1)
            shares = (sinks.float().unsqueeze(1) - sums).exp_()
            dsinks = -(products.T * shares).sum(1).to(sinks.dtype)
        return dq, dk, dv, dsinks, None, None, None, None
