"""bitsandbytes' AdamW with moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

Its own `step` waits for the GPU after every tensor, and cannot be skipped. Here a step waits once, for that.
"""

from typing import Any

import torch
from bitsandbytes.optim import AdamW8bit as Theirs

from shardwise.engines.runtime.adamw import Rounded, follow
from shardwise.job import schema

KEPT = ("state1", "state2", "absmax1", "absmax2")


class AdamW8bit(Theirs):  # type: ignore[misc]
    """Steps fp32 tensors. A block of 256 values shares a scale; small tensors keep fp32 moments."""

    def __init__(
        self, param_groups: list[dict[str, Any]], optimizer: schema.Optimizer, rounded: Rounded
    ) -> None:
        betas = (optimizer.beta1, optimizer.beta2)
        super().__init__(param_groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon)
        groups = enumerate(self.param_groups)
        self._each = [(group, p, g, i) for g, group in groups for i, p in enumerate(group["params"])]
        for one in self._each:
            self.init_state(*one)
        self._rounded = rounded
        self._steps = {p: torch.zeros((), dtype=torch.int64) for p in self.state}

    @torch.no_grad()
    def step(self, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        """Step with gradients divided by `divisor`, unless `skipped` is 1.0, for which it waits."""
        if skipped.item():
            return
        for group, p, *place in self._each:
            if p.grad is not None:
                p.grad = p.grad.to(p.dtype).div_(divisor)
                self.state[p]["step"] = int(self._steps[p])  # `update_step` adds one
                self.update_step(group, p, *place)
                self._steps[p] += 1
                p.grad = None
        follow(self._rounded)

    def saved(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a tensor, not copied."""
        kept = {key: self.state[p][key] for key in KEPT if key in self.state[p]}
        return {"step": self._steps[p], **kept}
