"""Small parameters that a model keeps in fp32 among bf16 weights, under engines that would round them.

DeepSpeed casts every parameter to the computation's format, and FSDP2 gathers a block in one format. What
the model holds in fp32 (Mamba's A_log, D and dt's bias: 0.1 % of its weights) is therefore taken out of the
module before the engine sees it. Every rank keeps all of it, gradients are summed here, and AdamW steps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engines.runtime.parameters import public_name


class Fp32Parameters:
    """The fp32 parameters of a module that computes in another format."""

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
        """Turn those below `part`, once filled, from parameters into plain tensors."""
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
        """Tensors for `Engine.weights`: the trainable ones, or those with a public name in `names`."""
        if names is None:
            yield from self.trainable.items()
        else:
            yield from ((n, t) for n, t in self.tensors.items() if public_name(n) in names)

    @torch.no_grad()
    def reduce(self, *, divisor: int = 1) -> None:
        """Sum the gradients over all ranks and divide them. Collective."""
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
