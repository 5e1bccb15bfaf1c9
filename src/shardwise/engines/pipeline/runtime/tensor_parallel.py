"""Layers split over the ranks that share rows, as transformers' plan says, with plain local weights.

A column-split layer has some of the outputs: the gradient of its input is summed. A row-split layer has some
of the inputs: its output is summed, before the bias. So do the two matrices of LoRA (models/tensor_plan.py).
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import linear

from shardwise.engines.runtime.state import Cut, Part
from shardwise.errors import JobError
from shardwise.models.tensor_plan import planned


class _Sum(torch.autograd.Function):
    """A sum over the group in the forward pass, or of the gradient in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup, in_forward: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.in_forward = group, in_forward
        return _summed(x, group) if in_forward else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        return gradient if ctx.in_forward else _summed(gradient, ctx.group), None, None


def _summed(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


class TensorParallel:
    """The split layers of a model on this rank."""

    def __init__(self, model: Any, group: dist.ProcessGroup, prefix: str) -> None:
        """`prefix`: of the model's names in its module."""
        self._group, self._ranks, self._rank = group, dist.get_world_size(group), dist.get_rank(group)
        layers = list(planned(model)) if self._ranks > 1 else []
        self._styles = {id(layer): (name, style) for name, layer, style in layers}
        self.dims: dict[str, int] = {}  # Of split parameters by name: the dimension that is split
        self.partial: set[str] = set()
        """Complete parameters whose gradient is a sum over the ranks: norms of a rank's heads."""
        for name, layer, style in layers:
            for kind in layer._parameters:
                full = f"{prefix}{name}.{kind}"
                if style == "replicated_with_grad_allreduce":
                    self.partial.add(full)
                elif style == "colwise" or (style == "rowwise" and kind == "weight"):
                    self.dims[full] = 0 if style == "colwise" else 1

    def split(self, part: nn.Module) -> None:
        """Keep this rank's share of the layers below a part that was filled."""
        for layer in part.modules():
            name, style = self._styles.get(id(layer), ("", ""))
            if style not in ("colwise", "rowwise"):
                continue
            for kind, p in list(layer._parameters.items()):
                if p is None or (style == "rowwise" and kind == "bias"):
                    continue
                layer._parameters[kind] = self._share(p, 0 if style == "colwise" else 1, name)
            layer.forward = self._forward(layer, style)  # type: ignore[method-assign]

    def _share(self, p: nn.Parameter, dim: int, name: str) -> nn.Parameter:
        if p.shape[dim] % self._ranks:
            what = f"{self._ranks} GPUs cannot share the {p.shape[dim]} rows or columns of {name} equally"
            raise JobError(what, where="strategy.tensor_parallel", fix="a smaller tensor_parallel")
        mine = p.detach().chunk(self._ranks, dim)[self._rank].clone()
        return nn.Parameter(mine, requires_grad=p.requires_grad)

    def _forward(self, layer: nn.Module, style: str) -> Callable[[torch.Tensor], torch.Tensor]:
        original, group = layer.forward, self._group

        @wraps(original)
        def columns(x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = original(_Sum.apply(x, group, False))
            return out

        @wraps(original)
        def rows(x: torch.Tensor) -> torch.Tensor:
            weight, bias = layer._parameters["weight"], layer._parameters["bias"]
            assert weight is not None
            out: torch.Tensor = _Sum.apply(linear(x, weight), group, True)
            return out if bias is None else out + bias

        return columns if style == "colwise" else rows

    def add_up(self, gradients: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Sum the gradients of `partial`. Collective."""
        for name, gradient in gradients:
            if name in self.partial and gradient is not None:
                dist.all_reduce(gradient, group=self._group)

    def part(self, name: str, shape: tuple[int, ...], begin: int) -> Part:
        """The part of a parameter whose share on this rank has that shape, from element `begin` on."""
        if name not in self.dims:
            return Part(shape, begin)
        dim = self.dims[name]
        cut = Cut(dim, self._rank * shape[dim], (self._rank + 1) * shape[dim])
        return Part((*shape[:dim], self._ranks * shape[dim], *shape[dim + 1 :]), begin, cut)

    def full(self, name: str, share: torch.Tensor) -> torch.Tensor:
        """The complete parameter. Collective."""
        if name not in self.dims:
            return share
        parts = [torch.empty_like(share) for _ in range(self._ranks)]
        dist.all_gather(parts, share.contiguous(), group=self._group)
        return torch.cat(parts, self.dims[name])
