"""LoRA linear layers in one autograd node, without the extra passes over their outputs.

    y = x W^T + b + s (x A^T) B^T,  W and b frozen

PEFT writes the update to a tensor of its own, scales it into a second and adds it into a third; autograd
then adds two gradients for x. Here the update goes into y, and its gradient into dx, by the accumulating
form of the matrix product. Per token and layer that is about 5 (inputs + outputs) fewer values to move.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import nn


def fuse_lora(model: nn.Module) -> int:
    """Gives every plain LoRA layer of `model` the fused forward; returns how many there were.

    Plain: one adapter, without dropout, bias or variants such as DoRA, on a frozen `nn.Linear`. Others keep
    PEFT's forward, and so does any call while the adapter is merged or switched off.

    The weights of the three linear modules inside a layer are read without calling those modules. An engine
    that gathers weights in hooks on each module's call (ZeRO-3) would not see it: do not fuse there. FSDP2
    gathers block by block and is fine.
    """
    layers = [module for module in model.modules() if isinstance(module, PeftLinear) and _is_plain(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def _is_plain(layer: PeftLinear) -> bool:
    names = list(layer.lora_A)
    base = layer.base_layer
    return (
        type(base) is nn.Linear
        and not any(p.requires_grad for p in base.parameters())
        and layer.active_adapters == names
        and len(names) == 1
        and not layer.fan_in_fan_out
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
    )


def _forward(self: PeftLinear, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    (name,) = self.lora_A
    base, a, b = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
    same_dtype = x.dtype == base.weight.dtype == a.dtype == b.dtype
    replaced = type(base) is not nn.Linear  # tensor parallelism puts its own layer there
    if args or kwargs or replaced or not same_dtype or self.disable_adapters or self.merged:
        return PeftLinear.forward(self, x, *args, **kwargs)
    out: torch.Tensor = _LoraLinear.apply(x, base.weight, base.bias, a, b, self.scaling[name])
    return out


class _LoraLinear(torch.autograd.Function):
    """x [..., I], W [O, I], b [O] or None, A [R, I], B [O, R] to y [..., O]; keeps x and s x A^T."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        reduced = torch.mm(rows, a.t()).mul_(scaling)
        y = nn.functional.linear(rows, weight, bias)
        y.addmm_(reduced, b.t())
        ctx.save_for_backward(rows, reduced, weight, a, b)
        ctx.scaling, ctx.shape = scaling, x.shape
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad_y: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, reduced, weight, a, b = ctx.saved_tensors
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        dx = da = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[3]:
            d_reduced = torch.mm(dy, b).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dy, weight).addmm_(d_reduced, a).view(ctx.shape)
        if ctx.needs_input_grad[3]:
            da = torch.mm(d_reduced.t(), rows)
        if ctx.needs_input_grad[4]:
            db = torch.mm(dy.t(), reduced)
        return dx, None, None, da, db, None
