"""AdamW on fp32 weights with clipping and a guard against non-finite steps. The host never waits for the GPU.

Kernels read two scalars on the device. They divide the gradients by one: clipping and the loss scale. They
skip the step if the other is 1: the guard.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engines.runtime.parameters import Group, parameter_groups, set_rate
from shardwise.engines.runtime.protocol import StepResult
from shardwise.job import schema

# torch.amp.GradScaler's defaults: start at 2^16, halve on overflow, double after 2000 steps without one.
INITIAL_LOSS_SCALE = 2.0**16
GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000

STATE = ("exp_avg", "exp_avg_sq", "step")  # torch's names

Rounded = Mapping[torch.Tensor, torch.Tensor]
"""By a tensor that is stepped, the same weight in the computation's format, which follows it."""


@torch.no_grad()
def follow(rounded: Rounded) -> None:
    """Give the weights the values of the tensors that were stepped."""
    if rounded:
        torch._foreach_copy_([*rounded.values()], [*rounded])


class FusedAdamW(torch.optim.AdamW):
    """Kernels that read clipping and the guard on the device: on GPUs ours (decision 0111), else torch's."""

    def __init__(
        self, param_groups: list[dict[str, Any]], optimizer: schema.Optimizer, rounded: Rounded
    ) -> None:
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
        self._on_cpu = [p for p in self.state if not p.is_cuda]
        self._rounded = {p: rounded[p] for p in self._on_cpu if p in rounded}
        self._on_gpu: list[tuple[dict[str, Any], Any]] = []
        for group in self.param_groups:
            on_gpu = [p for p in group["params"] if p.is_cuda]
            rows = [[p, *(self.state[p][key] for key in STATE), rounded.get(p)] for p in on_gpu]
            if rows:
                kernel = import_module("shardwise.kernels.adamw_triton")  # Triton needs a GPU
                self._on_gpu.append((group, kernel.Tensors(rows)))

    def saved(self, p: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of a tensor, not copied."""
        return dict(self.state[p])

    def step(self, divisor: torch.Tensor, skipped: torch.Tensor) -> None:  # type: ignore[override]
        """Step with gradients divided by `divisor`, unless `skipped` is 1.0."""
        for group, tensors in self._on_gpu:
            how = {"rate": group["lr"], "betas": group["betas"], "epsilon": group["eps"]}
            tensors.step(divisor, skipped, weight_decay=group["weight_decay"], **how)
        if not self._on_cpu:
            return
        self.grad_scale, self.found_inf = divisor.cpu(), skipped.cpu()
        for p in self.state:  # torch's kernel steps what has a gradient, of the same format
            p.grad = None if p.is_cuda or p.grad is None else p.grad.to(p.dtype)
        super().step()
        follow(self._rounded)


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
        rounded: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        """`stages`: all `parameters`, in the order in which they are stepped; if not given, at once.

        `rounded`: by the name of a parameter, the weight in the computation's format, which follows it.
        """
        # A rank may hold nothing of a small tensor.
        self.parameters = {name: p for name, p in parameters.items() if p.numel() > 0}
        self.clip_norm, self.device = clip_norm, device
        self.fp16, self.sharded, self.copies = fp16, sharded, copies
        self._not_counted, self._rounded = frozenset(not_counted), rounded
        how: Any = FusedAdamW
        if optimizer.name == "adamw8bit":
            how = import_module("shardwise.engines.runtime.adamw8bit").AdamW8bit  # needs bitsandbytes
        self._stages: list[tuple[dict[str, torch.Tensor], Any, Callable[[], None]]] = []
        for names, after in stages or [Stage(self.parameters)]:
            own = {name: self.parameters[name] for name in names if name in self.parameters}
            low = {p: rounded[name] for name, p in own.items() if name in rounded}
            moments = how(parameter_groups(own, groups), optimizer, low) if own else None
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
        kinds = dict.fromkeys((gradient.device, gradient.dtype) for gradient in gradients)  # in one order
        alike = [[g for g in gradients if (g.device, g.dtype) == kind] for kind in kinds]
        norms = [torch.stack(torch._foreach_norm(some, 2, torch.float32)).square().sum() for some in alike]
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

    def round(self) -> None:
        """Have the rounded weights follow what was loaded."""
        follow({self.parameters[name]: low for name, low in self._rounded.items() if name in self.parameters})

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors of a checkpoint by name, not copied."""
        tensors = {f"guard/{name}": getattr(self, name) for name in ("stopped", "loss_scale", "growth")}
        for own, moments, _ in self._stages:
            for name, p in own.items():
                tensors[f"parameter/{name}"] = p.detach()
                for key, tensor in moments.saved(p).items():
                    tensors[f"{key}/{name}"] = tensor
        return tensors
