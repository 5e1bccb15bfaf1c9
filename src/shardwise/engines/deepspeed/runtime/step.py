"""A step of ZeRO for which the host does not wait (decisions 0104 to 0106).

DeepSpeed reads the gradient norm back to decide whether it steps. Torch's fused AdamW takes from the GPU
whether it steps, and what it divides the gradients by: as in `engines/runtime/adamw.py`.
"""

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from shardwise.engines.deepspeed.policy import stepped_together
from shardwise.engines.deepspeed.runtime.patches import group_norm, rely_on, replace
from shardwise.engines.runtime.adamw import clipping

_ASKS = "is_invalid_grad_norm"  # The function that reads the norm back


class StepOnGpu:
    """Makes the optimizer decide on the GPU; `policy.decides_on_gpu` says where that is possible."""

    def __init__(
        self, optimizer: Any, *, clip_norm: float, device: torch.device, wait: Callable[[], None]
    ) -> None:
        """To be made when all that counts into the norm is known (`patches.join_norm`).

        `wait` is called when the norm has been issued, and before memory is taken for the step.
        """
        module = sys.modules[type(optimizer).__module__]
        self._adamw, self._clip_norm = optimizer.optimizer, clip_norm
        self.stopped = torch.zeros((), device=device)
        """1.0 once a step was not finite: no later step is applied either."""
        self._norm: torch.Tensor | None = None
        asks, step = rely_on(module, _ASKS), rely_on(optimizer, "step")

        def not_invalid(_: object) -> bool:
            wait()
            return False

        def without_asking(*args: Any, **kwargs: Any) -> Any:
            setattr(module, _ASKS, not_invalid)
            try:
                return step(*args, **kwargs)
            finally:
                setattr(module, _ASKS, asks)

        replace(optimizer, "step", without_asking)
        replace(optimizer, "unscale_and_clip_grads", self._divide)

    def _divide(self, *parts_and_norm: Any) -> None:
        """Called with each part of the gradients, and one norm for all: infinite if it is not finite."""
        norm = parts_and_norm[-1]
        if norm is self._norm:
            return
        self._norm = norm
        bad = ~(norm.isfinite() & (norm >= 0))  # DeepSpeed's own test
        self.stopped.copy_(torch.maximum(self.stopped, bad.float()))
        self._adamw.found_inf, self._adamw.grad_scale = self.stopped, clipping(norm, self._clip_norm)


def step_in_parts(optimizer: Any) -> None:
    """Have ZeRO-0 take one norm of all bf16 gradients, and step some weights at a time.

    DeepSpeed's FP16_UnfusedOptimizer copies all gradients to fp32, takes some kernels for each and waits for
    each one's norm.
    """
    pairs = [
        pair
        for low, high in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
        for pair in zip(low, high, strict=True)
    ]
    rest = iter(pairs)
    parts = [[next(rest) for _ in part] for part in stepped_together([low.numel() for low, _ in pairs])]
    module = sys.modules[type(optimizer).__module__]
    skip, own = rely_on(optimizer, "_skip_invalid_grad_norm"), rely_on(optimizer, "step")

    def norm_of_all() -> torch.Tensor:
        norm = group_norm([low.grad for low, _ in pairs if low.grad is not None], (), pairs[0][0].device)
        return torch.where(norm < 0, torch.inf, norm)  # as DeepSpeed reports it

    @wraps(own)  # whose source `StepOnGpu` asks for
    @torch.no_grad()
    def step(*_: Any, **__: Any) -> bool:
        norm = optimizer.scaled_global_norm()
        if getattr(module, _ASKS)(norm):
            return bool(skip())
        optimizer.overflow, optimizer._global_grad_norm = False, norm
        for part in parts:
            for low, high in part:
                high.grad = torch.zeros_like(high) if low.grad is None else low.grad.to(high.dtype)
            optimizer.unscale_and_clip_grads(norm)
            optimizer.optimizer.step()
            for _, high in part:
                high.grad = None
            torch._foreach_copy_([low for low, _ in part], [high for _, high in part])
        return False

    replace(optimizer, "step", step)
    optimizer.scaled_global_norm = norm_of_all
