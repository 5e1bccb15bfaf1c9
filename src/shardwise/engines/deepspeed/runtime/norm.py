"""The gradient norm of DeepSpeed's ZeRO optimizers, all gradients of a group at once (decision 0012).

DeepSpeed 0.19.8 looks into each gradient for a value that is not finite (ZeRO-1 and 2), then copies each to
fp64 for its norm. A norm in fp32 says both: it is not finite where a gradient is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

INVALID = -1.0
"""What DeepSpeed's optimizers take a group's norm for that is not finite."""


def use_joint_norms(optimizer: Any) -> None:
    """Puts `group_norm` into a ZeRO-1, 2 or 3 optimizer that keeps its gradients on the device.

    Not for tensor parallelism, where a group's norm counts some parameters once and others on every rank.
    """
    group = optimizer.dp_process_group

    def get_grad_norm_direct(
        gradients: Iterable[torch.Tensor], _params: object, norm_type: float = 2.0
    ) -> torch.Tensor:
        if norm_type != 2.0:
            raise ValueError(f"the norm is Euclidean, {norm_type} was asked for")
        return group_norm(list(gradients), group, optimizer.device)

    optimizer.get_grad_norm_direct = get_grad_norm_direct
    if hasattr(optimizer, "check_grad_overflow"):
        optimizer.check_overflow = lambda **_: None


def group_norm(
    gradients: list[torch.Tensor], group: dist.ProcessGroup | None, device: torch.device | str
) -> torch.Tensor:
    """Euclidean norm of all `gradients` of all ranks of `group`: an fp32 scalar, INVALID if not finite."""
    total = torch.zeros((), device=device, dtype=torch.float32)
    if gradients:
        # public functions round each norm to the gradients' own format
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
        total = torch.stack(norms).double().square().sum().float()
    dist.all_reduce(total, group=group)
    norm = total.sqrt()
    return torch.where(norm.isfinite(), norm, INVALID)
