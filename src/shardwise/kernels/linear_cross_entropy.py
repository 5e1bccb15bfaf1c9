"""Cross entropy of a linear output head without ever holding the full logits.

The head is applied to one chunk of tokens at a time. The chunk's gradients are computed while its logits
exist, and saved for the backward pass, which only multiplies them by the incoming scalar. This is the method
of Liger Kernel's fused linear cross entropy (Hsu et al. 2024, arXiv:2410.10989).
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels.target import on_gpu, run_on_cuda

CHUNK_BYTES = 512 * 1024**2
"""Logits held at a time. 2048 rows of a 128k vocabulary in bf16: a matrix product still at full speed."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None,
    softcap: float | None = None, scale: float = 1.0, ignore_index: int = -100,
) -> Tensor:  # fmt: skip
    """Sum of the cross entropy of `softcap * tanh(scale * (hidden @ weight.T + bias) / softcap)`.

    `hidden` is [T, H], `weight` [V, H] and `bias` [V], of the same dtype; `labels` int64 [T]. Models have a
    `softcap` (Gemma 2) or a `scale` (Cohere, Granite) of their logits. Rows with the label `ignore_index` do
    not count and get zero gradients.

    Returns an fp32 scalar (fp64 for fp64 inputs), in nats. Only inputs that require gradients get one; a
    frozen weight costs nothing.
    """
    wanted = [t is not None and t.requires_grad and torch.is_grad_enabled() for t in (hidden, weight, bias)]
    how = softcap, scale, ignore_index, tuple(wanted)
    return _LinearCrossEntropy.apply(hidden, weight, bias, labels, *how)  # type: ignore[no-any-return]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, softcap: float | None,
        scale: float, ignore_index: int, wanted: tuple[bool, bool, bool],
    ) -> Tensor:  # fmt: skip
        hidden, labels = hidden.contiguous(), labels.contiguous()
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        losses = hidden.new_empty(hidden.shape[0], dtype=dtype)
        d_hidden = torch.empty_like(hidden) if wanted[0] else None
        d_weight: Tensor | None = None
        d_bias: Tensor | None = None
        entries, width = weight.shape[0], aligned_width(weight.shape[0], weight.element_size())
        if width > entries:  # further logits of 0, which have gradients of 0
            weight = functional.pad(weight, (0, 0, 0, width - entries))
            bias = None if bias is None else functional.pad(bias, (0, width - entries))
        rows = chunk_rows(hidden.shape[0], width * weight.element_size())
        buffer = hidden.new_empty(rows, width)  # one buffer, reused by every chunk
        for start in range(0, hidden.shape[0], rows):
            chunk = slice(start, min(start + rows, hidden.shape[0]))
            logits = buffer[: chunk.stop - chunk.start]
            if bias is None:
                torch.mm(hidden[chunk], weight.t(), out=logits)
            else:
                torch.addmm(bias, hidden[chunk], weight.t(), out=logits)
            # it leaves the gradient of the logits in their place
            how = softcap, scale, ignore_index, any(wanted)
            cross_entropy_(logits[:, :entries], labels[chunk], losses[chunk], *how)
            if d_hidden is not None:
                torch.mm(logits, weight, out=d_hidden[chunk])
            if wanted[1] and rows == hidden.shape[0]:
                d_weight = torch.mm(logits.t(), hidden)  # one chunk: the product's own fp32 sum is enough
            elif wanted[1]:
                d_weight = _add_product(d_weight, logits.t(), hidden[chunk])
            if wanted[2]:
                d_bias = _add(d_bias, logits.sum(0, dtype=dtype))
        d_weight, d_bias = (None if grad is None else grad[:entries] for grad in (d_weight, d_bias))
        ctx.gradients, ctx.dtype = (d_hidden, d_weight, d_bias), weight.dtype
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError("linear_cross_entropy saves its gradients for one backward pass only")
        scaled = [None if g is None else _scaled(g, grad_output, ctx.dtype) for g in gradients]
        return (*scaled, None, None, None, None, None)


def _scaled(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`gradient * factor` in `dtype`, multiplied in fp32: a factor rounded to bf16 would scale them all."""
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor).to(dtype)  # in place: no second weight-sized tensor
    return (gradient.to(factor.dtype) * factor).to(dtype)


def _add(total: Tensor | None, more: Tensor) -> Tensor:
    return more if total is None else total.add_(more)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right` in fp32 (in place once there is a total), for operands of any dtype."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    if left.dtype == dtype or not on_gpu(left):
        left, right = left.to(dtype), right.to(dtype)
        return torch.mm(left, right) if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=dtype)
    return torch.addmm(total, left, right, out_dtype=dtype, out=total)


def aligned_width(entries: int, item_bytes: int) -> int:
    """Logits of a token in memory: GPT-2's 50257 are not aligned, and products take six times as long."""
    return entries if entries * item_bytes % 16 == 0 else -(-entries // 64) * 64


def chunk_rows(tokens: int, row_bytes: int) -> int:
    """Tokens per chunk: as few chunks as CHUNK_BYTES allows, all of about the same size."""
    limit = max(CHUNK_BYTES // row_bytes, 1)
    chunks = max(-(-tokens // limit), 1)
    return max(-(-tokens // chunks), 1)


@torch.library.custom_op(
    "shardwise::cross_entropy_",
    mutates_args=("logits", "losses"),
    device_types="cpu",
    schema="(Tensor(a!) logits, Tensor labels, Tensor(b!) losses, float? softcap, float scale,"
    " int ignore_index, bool with_gradient) -> ()",
)
def cross_entropy_(
    logits: Tensor, labels: Tensor, losses: Tensor, softcap: float | None, scale: float, ignore_index: int,
    with_gradient: bool,
) -> None:  # fmt: skip
    """Write each row's loss into `losses` and, if wanted, its gradient over `logits`.

        z = scale * x,  z = softcap * tanh(z / softcap) where there is a cap
        loss = logsumexp(z) - z[label]
        d loss / d x = (softmax(z) - onehot(label)) * (1 - (z / softcap)^2) * scale

    An ignored row has loss 0 and gradient 0. The softmax is in fp32 whatever the logits' dtype.

    `logits` are [T, V], each row contiguous, overwritten if `with_gradient`; `labels` int64 [T], each in
    [0, V) or `ignore_index`; `losses` fp32 [T] (fp64 for fp64 logits), in nats.
    """
    ignored = labels == ignore_index
    targets = labels.masked_fill(ignored, 0).unsqueeze(1)
    z = logits.to(losses.dtype) * scale
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    log_total = torch.logsumexp(z, dim=1, keepdim=True)
    losses.copy_((log_total - z.gather(1, targets)).squeeze(1).masked_fill(ignored, 0.0))
    if not with_gradient:
        return
    gradient = torch.exp(z - log_total)
    gradient.scatter_add_(1, targets, torch.full_like(log_total, -1.0))
    if softcap is not None:
        gradient *= 1.0 - (z / softcap) ** 2
    logits.copy_(gradient.mul_(scale).masked_fill_(ignored.unsqueeze(1), 0.0))


run_on_cuda(cross_entropy_, "cross_entropy_triton", "launch")
cross_entropy_.register_fake(lambda *_: None)
