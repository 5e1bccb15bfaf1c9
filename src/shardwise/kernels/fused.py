"""Fused kernels put into a model that is already built: Liger's for norms, MLPs and rotary, and our LoRA.

The weights stay as they are, so the model may be on the meta device. LoRA layers must be there already. Ours
compute in one autograd node, without the extra passes over their outputs,

    y = x W^T + b + s (x A^T) B^T,  W and b frozen; W may be a quantised one

PEFT writes the update to a tensor of its own, scales it into a second and adds it into a third; autograd
then adds two gradients for x. Here the product with W adds itself to the update, and that of dy to the
update's gradient: it reads the summand while it computes (benchmarks/lora_linear). Per token and layer about
5 (inputs + outputs) fewer values are moved than by PEFT.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.util import find_spec
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.kernels.quantized_linear import LAYERS, QuantizedLinear, Unpack

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as PeftLinear
    from transformers import PreTrainedModel

_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")
_BASES = (nn.Linear, *LAYERS.values())


def apply_fused_kernels(model: PreTrainedModel, device: torch.device, *, liger: Collection[str]) -> list[str]:
    """Replace what a faster kernel exists for, in place, and return its names; on the CPU nothing.

    Those named in `liger` (`models.families.liger_kernels`) are replaced where Liger is installed.
    transformers' rotary embedding is a function of the model's Python module. It is replaced there, for every
    model of that type in this process.
    """
    if device.type != "cuda":
        return []
    applied = _apply_liger(model, liger) if liger and find_spec("liger_kernel") else []
    return [*applied, "lora_linear"] if fuse_lora(model) else applied


def _apply_liger(model: PreTrainedModel, kernels: Collection[str]) -> list[str]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _patch_rms_norm_module

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(apply).parameters
    choices = {name: name in kernels for name in _KERNELS if name in known}
    others = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in known}
    apply(model=model, **choices, **others)
    for module in model.modules() if "rms_norm" in kernels else ():
        if type(module).__name__.endswith("RMSNorm") and not hasattr(module, "casting_mode"):
            _patch_rms_norm_module(module, in_place=False)  # Liger forgets OLMo-2's norms of query and key
    return [f"liger_{name}" for name, wanted in choices.items() if wanted]


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
    (name,) = self.lora_A
    base, a, b = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight
    replaced = type(base) not in _BASES  # by tensor parallelism's own layer
    if args or kwargs or replaced or self.disable_adapters or self.merged:
        return type(self).forward(self, x, *args, **kwargs)
    if isinstance(base, QuantizedLinear):
        dtype, unpack, stored = base.dtype, base.unpack, base.stored()
    else:
        dtype, unpack, stored = base.weight.dtype, _plain, (base.weight,)
    if not x.dtype == dtype == a.dtype == b.dtype:
        return type(self).forward(self, x)
    given = x, base.bias, a, b, self.scaling[name]
    return _LoraLinear.apply(*given, unpack, *stored)  # type: ignore[no-any-return]


def _plain(weight: Tensor) -> Tensor:
    """The `unpack` of a weight that is not quantised."""
    return weight


class _LoraLinear(torch.autograd.Function):
    """(x [..., I], b [O] or None, A [R, I], B [O, R], stored W [O, I]) to y [..., O].

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
        return y.view(*x.shape[:-1], -1)

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
