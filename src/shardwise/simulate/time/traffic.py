"""Bytes of GPU memory that kernels read and write for one element: the terms that schedules add up."""

from __future__ import annotations

from shardwise.simulate.step_trace import FP32


def copied(item: int) -> int:
    """Read and written once: a copy, or a value scaled in place. `item`: bytes of an element."""
    return 2 * item


def converted(source: int, target: int) -> int:
    """Read in one format and written in another."""
    return source + target


def added(item: int, total: int) -> int:
    """Read and added to a sum of `total` bytes, which is read and written."""
    return item + 2 * total


NORM_BYTES = FP32
"""A norm reads each fp32 gradient (torch._foreach_norm)."""

ADAMW_BYTES = 7 * FP32
"""torch's fused AdamW reads weight, gradient and both moments in fp32, and writes all but the gradient
(FusedAdamKernel.cu)."""

TORCH_CPU_ADAMW_BYTES = ADAMW_BYTES + FP32
"""In host memory, with the clipped gradient written back by torch as it goes."""

DEEPSPEED_CPU_ADAMW_BYTES = ADAMW_BYTES + copied(FP32)
"""In host memory, after DeepSpeed has clipped the gradient in place (unscale_and_clip_grads)."""

NVME_ADAMW_BYTES = 7 * FP32
"""On a drive: weight, moments and gradient are read, all but the gradient are written
(pipelined_optimizer_swapper.py)."""
