"""A step of ZeRO-1, 2 and 3 for which the host does not wait (decisions 0104 and 0105).

DeepSpeed reads the gradient norm back to decide whether it steps. Torch's fused AdamW takes from the GPU
whether it steps, and what it divides the gradients by: as in `engines/runtime/adamw.py`.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from shardwise.engines.deepspeed.runtime.patches import rely_on, replace
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

    def _divide(self, _: object, norm: torch.Tensor) -> None:
        """Called with each part of the gradients, and one norm for all: infinite if it is not finite."""
        if norm is self._norm:
            return
        self._norm = norm
        bad = ~(norm.isfinite() & (norm >= 0))  # DeepSpeed's own test
        self.stopped.copy_(torch.maximum(self.stopped, bad.float()))
        self._adamw.found_inf, self._adamw.grad_scale = self.stopped, clipping(norm, self._clip_norm)
