"""LoRA's linear layers in one autograd node, without the extra passes over inputs and outputs.

    y = x W^T + b + s (x A^T) B^T,  W and b frozen; W may be a quantised one

PEFT writes the update to a tensor of its own, scales it into a second and adds it into a third; autograd
then adds two gradients for x. Here the product with W adds itself to the update, and that of dy to the
update's gradient: it reads the summand while it computes (benchmarks/lora_linear). Per token and layer about
5 (inputs + outputs) fewer values are moved than by PEFT. Layers that read the same input, as those of query,
key and value do, are one node: x is read once for all A, and has one gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
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
    return outputs(x, [parts])[0]


def outputs(x: Tensor, layers: Sequence[Parts]) -> list[Tensor]:
    """[..., O] of each layer, for x [..., I] and layers with one scaling."""
    tensors = [one for part in layers for one in (part.a, part.b, *part.stored)]
    how = [(part.unpack, len(part.stored)) for part in layers]
    ys = LoraLinear.apply(x, layers[0].scaling, [part.bias for part in layers], how, *tensors)
    # Here, not in the node: a view that a node returns cannot be changed in place, as Falcon's block does.
    return [y.view(*x.shape[:-1], -1) for y in ys]


class LoraLinear(torch.autograd.Function):
    """x [..., I] to y [tokens, O] of each layer.

    Of each, `biases` has b [O] or None, and `tensors` has A [R, I], B [O, R] and the stored W [O, I].
    Saves x, s x A^T of all layers in one tensor, and `tensors`.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, scaling: float, biases: list[Tensor | None], how: list[tuple[Unpack, int]],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        rows, layers = x.reshape(-1, x.shape[-1]), _by_layer(tensors, how)
        reduced = scaled(rows, _joined([a for a, *_ in layers]).t(), scaling)
        ys = []
        each = zip(layers, biases, _parts(reduced, layers, 1), strict=True)
        for (_, b, unpack, stored), bias, part in each:
            y = torch.mm(part, b.t()) if bias is None else torch.addmm(bias, part, b.t())
            ys.append(y.addmm_(rows, unpack(*stored).t()))
        ctx.save_for_backward(rows, reduced, *tensors)
        ctx.scaling, ctx.how, ctx.shape = scaling, how, x.shape
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, reduced, *tensors = ctx.saved_tensors
        layers = _by_layer(tensors, ctx.how)
        dys = [dy.reshape(-1, dy.shape[-1]) for dy in gradients]
        d_parts = [scaled(dy, b, ctx.scaling) for dy, (_, b, *_) in zip(dys, layers, strict=True)]
        d_reduced = _joined(d_parts, 1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(d_reduced, _joined([a for a, *_ in layers]))
            for dy, (*_, unpack, stored) in zip(dys, layers, strict=True):
                dx.addmm_(dy, unpack(*stored))
            dx = dx.view(ctx.shape)
        da = _parts(torch.mm(d_reduced.t(), rows), layers, 0)
        adapters: list[Tensor | None] = []
        for dy, one, part, (*_, stored) in zip(dys, da, _parts(reduced, layers, 1), layers, strict=True):
            own = one if len(layers) == 1 else one.clone()  # engines free and flatten them one by one
            adapters += [own, torch.mm(dy.t(), part), *(None for _ in stored)]
        return dx, None, None, None, *adapters


def scaled(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """Scaling (left right), by the product's kernel and rounded once; `right[0]` is not read."""
    return torch.addmm(right[0], left, right, beta=0, alpha=scaling)


def _by_layer(tensors: Sequence[Any], how: list[tuple[Unpack, int]]) -> list[tuple[Any, ...]]:
    """(A, B, unpack, stored weight) of each layer."""
    rest, found = iter(tensors), []
    for unpack, count in how:
        a, b, *stored = islice(rest, 2 + count)
        found.append((a, b, unpack, stored))
    return found


def _joined(parts: list[Tensor], dim: int = 0) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _parts(joined: Tensor, layers: list[tuple[Any, ...]], dim: int) -> Sequence[Tensor]:
    return joined.split([a.shape[0] for a, *_ in layers], dim)
