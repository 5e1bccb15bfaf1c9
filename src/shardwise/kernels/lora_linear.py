"""LoRA's linear layer in one autograd node, without the extra passes over its outputs.

    y = x W^T + b + s (x A^T) B^T,  W and b frozen; W may be a quantised one

PEFT writes the update to a tensor of its own, scales it into a second and adds it into a third; autograd
then adds two gradients for x. Here the product with W adds itself to the update, and that of dy to the
update's gradient: it reads the summand while it computes (benchmarks/lora_linear). Per token and layer about
5 (inputs + outputs) fewer values are moved than by PEFT.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.kernels.quantized_linear import LAYERS, QuantizedLinear, Unpack

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as PeftLinear

_BASES = (nn.Linear, *LAYERS.values())


def fuse_lora(model: nn.Module) -> int:
    """Give every plain LoRA layer of `model` the fused forward; return how many there were.

    Plain means one adapter, without dropout, bias or variants such as DoRA, on a frozen `nn.Linear`,
    quantised or not. Others keep PEFT's forward, and so does any call while the adapter is merged or
    disabled.

    The weights of the three linear modules inside a layer are read without calling those modules, so an
    engine that shards must gather entire blocks, as every engine here does.
    """
    if not any(".lora_A." in name for name, _ in model.named_parameters()):
        return 0
    from peft.tuners.lora.layer import Linear as PeftLinear  # imports a second's worth of compilers

    layers = [module for module in model.modules() if isinstance(module, PeftLinear) and _is_plain(module)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)  # type: ignore[method-assign]
    return len(layers)


def is_fused(layer: nn.Module | None) -> bool:
    """Whether this is a layer that `fuse_lora` has changed."""
    return layer is not None and getattr(layer.__dict__.get("forward"), "__func__", None) is _forward


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a plain LoRA layer computes with."""

    bias: Tensor | None
    a: Tensor  # [R, I]
    b: Tensor  # [O, R]
    scaling: float
    unpack: Unpack
    stored: tuple[Tensor, ...]


def parts_of(layer: PeftLinear, dtype: torch.dtype) -> Parts | None:
    """The parts of a layer that was fused, for an input of `dtype`; None where PEFT's forward has to run.

    That is while its adapter is merged or disabled, for mixed formats, and where tensor parallelism has put
    forward functions of its own into the modules inside, or another module in place of one.
    """
    (name,) = layer.lora_A
    base, a, b = layer.base_layer, layer.lora_A[name], layer.lora_B[name]
    own = any("forward" in module.__dict__ for module in (base, a, b))
    if own or type(base) not in _BASES or layer.disable_adapters or layer.merged:
        return None
    if isinstance(base, QuantizedLinear):
        base_dtype, unpack, stored = base.dtype, base.unpack, base.stored()
    else:
        base_dtype, unpack, stored = base.weight.dtype, plain, (base.weight,)
    if not dtype == base_dtype == a.weight.dtype == b.weight.dtype:
        return None
    scaling = layer.scaling[name]
    return Parts(bias=base.bias, a=a.weight, b=b.weight, scaling=scaling, unpack=unpack, stored=stored)


def plain(weight: Tensor) -> Tensor:
    """The `unpack` of a weight that is not quantised."""
    return weight


def _is_plain(layer: PeftLinear) -> bool:
    names, base = list(layer.lora_A), layer.base_layer
    return (
        type(base) in _BASES
        and not any(p.requires_grad for p in base.parameters())
        and layer.active_adapters == names
        and len(names) == 1
        and not layer.fan_in_fan_out
        and not layer.lora_variant
        and isinstance(layer.lora_dropout[names[0]], nn.Identity)
        and layer.lora_B[names[0]].bias is None
    )


def _forward(self: PeftLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    parts = None if args or kwargs else parts_of(self, x.dtype)
    if parts is None:
        return type(self).forward(self, x, *args, **kwargs)
    given = x, parts.bias, parts.a, parts.b, parts.scaling, parts.unpack
    y = LoraLinear.apply(*given, *parts.stored)
    # Here, not in the node: a view that a node returns cannot be changed in place, as Falcon's block does.
    return y.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class LoraLinear(torch.autograd.Function):
    """(x [..., I], b [O] or None, A [R, I], B [O, R], stored W [O, I]) to y [tokens, O].

    Saves x, s x A^T and the stored weight.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, unpack: Unpack,
        *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        reduced = torch.mm(rows, a.t()).mul_(scaling)
        y = torch.mm(reduced, b.t()) if bias is None else torch.addmm(bias, reduced, b.t())
        y.addmm_(rows, unpack(*stored).t())
        ctx.save_for_backward(rows, reduced, a, b, *stored)
        ctx.scaling, ctx.unpack, ctx.shape = scaling, unpack, x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, reduced, a, b, *stored = ctx.saved_tensors
        dy = grad_y.reshape(-1, grad_y.shape[-1])
        dx = da = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
            d_reduced = torch.mm(dy, b).mul_(ctx.scaling)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(d_reduced, a).addmm_(dy, ctx.unpack(*stored)).view(ctx.shape)
        if ctx.needs_input_grad[2]:
            da = torch.mm(d_reduced.t(), rows)
        if ctx.needs_input_grad[3]:
            db = torch.mm(dy.t(), reduced)
        return dx, None, da, db, None, None, *(None for _ in stored)
