"""Cross entropy of rows of logits and its gradient, which overwrites the logits: one op for CPU and CUDA.

    z = scale * x,  z = softcap * tanh(z / softcap) where there is a cap
    loss = logsumexp(z) - z[label]
    d loss / d x = (softmax(z) - onehot(label)) * (1 - (z / softcap)^2) * scale

An ignored row has loss 0 and gradient 0. The softmax is in fp32 whatever the logits' dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise.kernels.target import run_on_cuda


@torch.library.custom_op(
    "shardwise::cross_entropy_",
    mutates_args=("logits", "losses"),
    device_types="cpu",
    schema="(Tensor(a!) logits, Tensor labels, Tensor(b!) losses, float? softcap, float scale,"
    " int ignore_index, bool with_gradient) -> ()",
)
def cross_entropy_(
    logits: torch.Tensor, labels: torch.Tensor, losses: torch.Tensor, softcap: float | None, scale: float,
    ignore_index: int, with_gradient: bool,
) -> None:  # fmt: skip
    """Write each row's loss into `losses` and, if wanted, its gradient over `logits`.

    Args:
        logits: [T, V], contiguous rows; overwritten with the gradient if `with_gradient`.
        labels: int64 [T], each in [0, V) or `ignore_index`.
        losses: fp32 [T] (fp64 for fp64 logits), in nats.
        softcap: bound on the logits, None for none.
        scale: factor on the logits.
        ignore_index: the label of rows that do not count.
        with_gradient: whether `logits` become their gradient.
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


@cross_entropy_.register_fake
def _fake(*_: Any) -> None:
    """The op only writes in place: it returns nothing to describe."""
