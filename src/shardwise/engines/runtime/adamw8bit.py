"""bitsandbytes' AdamW with moments in 8 bits (Dettmers et al. 2022, https://arxiv.org/abs/2110.02861).

Its kernels without its optimizer class, which waits for the GPU after every tensor and cannot skip a step.
They take the divisor of the gradients from the host, so a step waits for the gradient norm once.
"""

from typing import Any

import torch

from shardwise.job import schema
from shardwise.simulate.memory.gpu import EIGHT_BIT_BLOCK, LEAST_EIGHT_BIT


class AdamW8bit:
    """Steps fp32 tensors. A block of 256 values shares a scale; small tensors keep fp32 moments."""

    def __init__(self, param_groups: list[dict[str, Any]], optimizer: schema.Optimizer) -> None:
        from bitsandbytes.functional import create_dynamic_map

        self.param_groups, self._settings = param_groups, optimizer
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._codes: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        for p in (p for group in param_groups for p in group["params"]):
            self.state[p] = _empty_state(p)
            if p.device not in self._codes:
                maps = create_dynamic_map(signed=True), create_dynamic_map(signed=False)
                self._codes[p.device] = (maps[0].to(p.device), maps[1].to(p.device))

    @torch.no_grad()
    def step(self, divisor: torch.Tensor, skipped: torch.Tensor) -> None:
        """Step with gradients divided by `divisor`, unless `skipped` is 1.0. Waits for both."""
        divide_by, stays = torch.stack([divisor, skipped]).tolist()
        if stays:
            return
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group, 1.0 / divide_by)

    def _update(self, p: torch.Tensor, group: dict[str, Any], scale: float) -> None:
        from bitsandbytes.functional import optimizer_update_8bit_blockwise, optimizer_update_32bit

        settings, state = self._settings, self.state[p]
        assert p.grad is not None
        gradient = p.grad.contiguous()  # the kernels read memory in order
        state["step"] += 1
        step, moments = int(state["step"]), (state["state1"], state["state2"])
        beta1, beta2, epsilon = settings.beta1, settings.beta2, settings.epsilon
        last: dict[str, Any] = {"weight_decay": group["weight_decay"], "gnorm_scale": scale}
        if "absmax1" not in state:
            optimizer_update_32bit(
                "adam", gradient, p, moments[0], beta1, epsilon, step, group["lr"], moments[1], beta2, **last
            )
            return
        optimizer_update_8bit_blockwise(
            "adam", gradient, p, *moments, beta1, beta2, 0.0, 0.0, epsilon, step, group["lr"],
            *self._codes[p.device], state["absmax1"], state["absmax2"], **last
        )  # fmt: skip


def _empty_state(p: torch.Tensor) -> dict[str, torch.Tensor]:
    """Step count, on the host, and moments of zero, as bitsandbytes makes them."""
    step = torch.zeros((), dtype=torch.int64)
    if p.numel() < LEAST_EIGHT_BIT:
        return {"step": step, "state1": torch.zeros_like(p), "state2": torch.zeros_like(p)}
    blocks = -(-p.numel() // EIGHT_BIT_BLOCK)
    codes = {name: torch.zeros_like(p, dtype=torch.uint8) for name in ("state1", "state2")}
    scales = {name: torch.zeros(blocks, device=p.device) for name in ("absmax1", "absmax2")}
    return {"step": step, **codes, **scales}
