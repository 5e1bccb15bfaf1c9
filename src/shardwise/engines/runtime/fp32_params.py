"""Small parameters that a model wants in fp32 beside bf16 weights, under engines that would round them.

DeepSpeed casts every parameter of a module to the computation's format, FSDP2 gathers a block in one format.
What the model holds in fp32 (Mamba's A_log, D and dt's bias: one weight in a thousand) is therefore taken out
of the module before the engine sees it: each rank keeps it whole, gradients are summed here, and AdamW steps
it in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engines.runtime.adamw import AdamW
from shardwise.engines.runtime.parameters import public_name
from shardwise.engines.runtime.protocol import World
from shardwise.job import schema


class WholeParameters:
    """Those parameters of a module; none where it computes in fp32 anyway."""

    def __init__(self, module: nn.Module, *, precision: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """By their name in the module; filled by `take`."""
        self._names = {
            (owner, attribute): f"{prefix}.{attribute}"
            for prefix, owner in module.named_modules()
            for attribute, p in owner._parameters.items()
            if p is not None and p.dtype == torch.float32 and precision != "fp32"
        }

    def take(self, part: nn.Module) -> None:
        """Turns those below `part`, which hold values by now, from parameters into plain tensors."""
        for owner in part.modules():
            for attribute, p in list(owner._parameters.items()):
                name = self._names.pop((owner, attribute), None)
                if name is None or p is None:
                    continue
                tensor = p.detach().requires_grad_(p.requires_grad)
                del owner._parameters[attribute]
                owner.__dict__[attribute] = tensor  # the module's code reads it as before
                self.tensors[name] = tensor

    @property
    def trainable(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.requires_grad}

    def chosen(self, names: Collection[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that `Engine.weights` is asked for: all that are trained, or those with a public name."""
        if names is None:
            yield from self.trainable.items()
        else:
            yield from ((n, t) for n, t in self.tensors.items() if public_name(n) in names)

    @torch.no_grad()
    def reduce(self, *, divisor: int = 1) -> None:
        """Sums the gradients over all ranks, and divides them. Collective."""
        tensors = self.trainable.values()
        if not tensors:
            return
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in tensors]
        total = torch.cat([gradient.flatten() for gradient in gradients])
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        total /= divisor
        for tensor, gradient in zip(tensors, total.split([t.numel() for t in tensors]), strict=True):
            tensor.grad = gradient.view_as(tensor)

    def norm(self) -> torch.Tensor:
        """Euclidean norm of the reduced gradients; fp32 scalar."""
        return torch.nn.utils.get_total_norm([t.grad for t in self.trainable.values() if t.grad is not None])


class WholeOptimizer:
    """Steps them beside DeepSpeed's optimizer, clipped by the one norm of all gradients."""

    def __init__(
        self,
        whole: WholeParameters,
        decay: Mapping[str, float],
        optimizer: schema.Optimizer,
        deepspeed_optimizer: Any,
        *,
        clip_norm: float,
        world: World,
    ) -> None:
        self._whole = whole
        self._world = world
        self._clip_norm = clip_norm
        self.adamw = AdamW(
            whole.trainable,
            decay,
            optimizer,
            clip_norm=clip_norm,
            fp16=False,
            sharded=False,
            device=world.device,
        )
        _join_norm(deepspeed_optimizer, whole.norm)

    def before_step(self) -> None:
        """The gradients' mean over the ranks, as DeepSpeed takes it of its own. Collective."""
        self._whole.reduce(divisor=self._world.data_size)

    @torch.no_grad()
    def after_step(self, norm: float | torch.Tensor, *, skipped: bool, learning_rate: float) -> None:
        """Applies the gradients unless DeepSpeed has skipped its own; `norm` is that of all gradients."""
        if skipped:
            for tensor in self._whole.trainable.values():
                tensor.grad = None
            return
        divisor = torch.ones((), device=self._world.device)
        if self._clip_norm > 0:
            total = torch.as_tensor(norm, device=self._world.device, dtype=torch.float32)
            divisor = ((total + 1e-6) / self._clip_norm).clamp(min=1.0)
        self.adamw.apply(learning_rate, divisor=divisor, skipped=torch.zeros_like(divisor))


def _join_norm(optimizer: Any, further: Callable[[], torch.Tensor]) -> None:
    """Lets DeepSpeed (0.19.8) count `further` into its gradient norm, wherever its optimizers form it."""
    if hasattr(optimizer, "_get_norm_groups"):  # stage 3
        groups = optimizer._get_norm_groups

        def all_groups() -> list[torch.Tensor]:
            norms = list(groups())
            return [*norms, further().to(norms[0].device)]  # of an optimizer in host memory they are there

        optimizer._get_norm_groups = all_groups
    elif hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norm = optimizer.scaled_global_norm
        optimizer.scaled_global_norm = lambda *args, **kwargs: _both(norm(*args, **kwargs), further())
    else:  # stage 0, which has found its own norm finite when it comes to clip by it
        check, clip = optimizer.overflow_checker.check, optimizer.unscale_and_clip_grads

        def clip_by_both(norm: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer._global_grad_norm = _both(norm, further())
            return clip(optimizer._global_grad_norm, *args, **kwargs)

        optimizer.overflow_checker.check = lambda *args: check(*args) or not bool(further().isfinite())
        optimizer.unscale_and_clip_grads = clip_by_both


def _both(norm: Any, further: torch.Tensor) -> torch.Tensor:
    """Where `norm` is: in host memory if the gradients that it clips are."""
    own = torch.as_tensor(norm, dtype=torch.float32)
    return torch.hypot(own, further.to(own.device))
