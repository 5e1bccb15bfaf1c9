"""AdamW on fp32 weights with clipping and a guard against non-finite steps. The host never waits for the GPU.

Torch's fused kernel reads two scalars on the device. It divides the gradients by `grad_scale`: clipping and
the loss scale. It skips the step if `found_inf` is 1: the guard.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engines.runtime.parameters import Group, parameter_groups, set_rate
from shardwise.engines.runtime.protocol import StepResult
from shardwise.job import schema

# torch.amp.GradScaler's defaults: start at 2^16, halve on overflow, double after 2000 steps without one.
INITIAL_LOSS_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000


class FusedAdamW(torch.optim.AdamW):
    """torch's fused AdamW, whose kernel reads clipping and the guard on the device."""

    def __init__(self, param_groups: list[dict[str, Any]], optimizer: schema.Optimizer) -> None:
        betas = (optimizer.beta1, optimizer.beta2)
        super().__init__(
            param_groups, lr=optimizer.learning_rate, betas=betas, eps=optimizer.epsilon, fused=True
        )
        # With the state allocated here, a GPU that is too small fails before the first step, and every
        # checkpoint has the same tensors.
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p] = {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    def saved(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a tensor, not copied."""
        return dict(self.state[p])

    def step(self, divisor: torch.Tensor, skipped: torch.Tensor) -> None:  # type: ignore[override]
        """Step with gradients divided by `divisor`, unless `skipped` is 1.0."""
        # The kernel needs the scalars on the device of the weights, which may be offloaded.
        device = next(iter(self.state)).device if self.state else divisor.device
        self.grad_scale, self.found_inf = divisor.to(device), skipped.to(device)
        super().step()


def clipping(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients are divided by: the inverse of clip_grad_norm_'s min(1, clip / (norm + 1e-6))."""
    return ((norm + 1e-6) / clip_norm).clamp(min=1.0) if clip_norm > 0 else torch.ones_like(norm)


class Stage(NamedTuple):
    """Tensors that are stepped together, by name, and what is called when their kernels are issued."""

    names: Collection[str]
    after: Callable[[], None] = lambda: None


class AdamW:
    """Steps fp32 tensors whose `.grad` holds the gradient of this rank's share.

    With `sharded`, each rank holds a part of every tensor, and norms and losses are summed over all ranks.
    These hold `copies` complete copies. What is in `not_counted` other ranks of the same copy hold, too: one
    of them counts it into the norm.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        groups: Mapping[str, Group],
        optimizer: schema.Optimizer,
        *,
        clip_norm: float,
        fp16: bool,
        sharded: bool,
        copies: int = 1,
        device: torch.device,
        not_counted: Collection[str] = (),
        stages: Sequence[Stage] = (),
    ) -> None:
        """`stages`: all `parameters`, in the order in which they are stepped; if not given, at once."""
        # A rank may hold nothing of a small tensor.
        self.parameters = {name: p for name, p in parameters.items() if p.numel() > 0}
        self.clip_norm, self.device = clip_norm, device
        self.fp16, self.sharded, self.copies = fp16, sharded, copies
        self._not_counted = frozenset(not_counted)
        how: Any = FusedAdamW
        if optimizer.name == "adamw8bit":
            how = import_module("shardwise.engines.runtime.adamw8bit").AdamW8bit  # needs bitsandbytes
        self._stages: list[tuple[dict[str, torch.Tensor], Any, Callable[[], None]]] = []
        for names, after in stages or [Stage(self.parameters)]:
            own = {name: self.parameters[name] for name in names if name in self.parameters}
            moments = how(parameter_groups(own, groups), optimizer) if own else None
            self._stages.append((own, moments, after))
        self.stopped = torch.zeros((), device=device)
        """1.0 once a bf16 or fp32 step was not finite: no later step is applied either."""
        self.loss_scale = torch.tensor(INITIAL_LOSS_SCALE if fp16 else 1.0, device=device)
        """fp16's loss scale; 1.0 otherwise."""
        self.growth = torch.zeros((), dtype=torch.int32, device=device)
        """fp16 steps since the loss scale last changed."""

    @torch.no_grad()
    def step(self, loss: torch.Tensor, *, learning_rate: float) -> StepResult:
        """Apply the gradients and drop them.

        `loss` is this rank's share of the step's loss (fp32 scalar on `device`); the gradients are
        those of the loss times `self.loss_scale`.
        """
        numbers = torch.stack([loss, self._sum_of_squares()])
        if self.sharded:
            dist.all_reduce(numbers)
        loss_scale = self.loss_scale.clone()
        total_loss, norm = numbers[0], (numbers[1] / self.copies).sqrt() / loss_scale
        bad = (~torch.isfinite(total_loss + norm)).float()
        if not self.fp16:
            self.stopped.copy_(torch.maximum(self.stopped, bad))
        skipped = bad if self.fp16 else self.stopped.clone()
        self.apply(learning_rate, norm=norm, skipped=skipped, loss_scale=loss_scale)
        if self.fp16:
            torch._amp_update_scale_(self.loss_scale, self.growth, bad, GROWTH, BACKOFF, GROWTH_INTERVAL)
        scale = loss_scale if self.fp16 else None
        return StepResult(loss=total_loss, grad_norm=norm, skipped=skipped, loss_scale=scale)

    def _sum_of_squares(self) -> torch.Tensor:
        counted = (p for name, p in self.parameters.items() if name not in self._not_counted)
        gradients = [p.grad for p in counted if p.grad is not None]
        if not gradients:
            return torch.zeros((), device=self.device)
        # offloaded shards are on the host, parameters kept in fp32 (parameters.py) on the GPU
        places = {gradient.device for gradient in gradients}
        by_place = [[g for g in gradients if g.device == place] for place in places]
        norms = [torch.stack(torch._foreach_norm(alike)).square().sum() for alike in by_place]
        return torch.stack([norm.to(self.device) for norm in norms]).sum()

    def apply(
        self, learning_rate: float, *, norm: torch.Tensor, skipped: torch.Tensor, loss_scale: torch.Tensor
    ) -> None:
        """Step with gradients divided by `loss_scale` and clipped by `norm`, unless `skipped` is 1.0."""
        divisor = loss_scale * clipping(norm, self.clip_norm)
        for own, moments, after in self._stages:
            if moments is not None:
                set_rate(moments.param_groups, learning_rate)
                moments.step(divisor, skipped)
            for p in own.values():
                p.grad = None
            after()

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint by name, not copied."""
        tensors = {f"guard/{name}": getattr(self, name) for name in ("stopped", "loss_scale", "growth")}
        for own, moments, _ in self._stages:
            for name, p in own.items():
                tensors[f"parameter/{name}"] = p.detach()
                for key, tensor in moments.saved(p).items():
                    tensors[f"{key}/{name}"] = tensor
        return tensors
