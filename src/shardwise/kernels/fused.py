"""Fused kernels put into a model that is already built: Liger's for norms, MLPs and rotary, and our LoRA.

The weights stay as they are, so the model may be on the meta device. LoRA layers must be there already.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import nn

from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.lora_mlp import fuse_lora_mlps
from shardwise.kernels.lora_shared import share_inputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")
_GATED = ("swiglu", "geglu")
_TANH_GELU = ("NewGELUActivation", "FastGELUActivation", "BloomGelu")


def apply_fused_kernels(model: PreTrainedModel, device: torch.device, *, liger: Collection[str]) -> list[str]:
    """Replace what a faster kernel exists for, in place, and return its names; on the CPU nothing.

    Those named in `liger` (`models.families.liger_kernels`) are replaced where Liger is installed.
    transformers' rotary embedding is a function of the model's Python module. It is replaced there, for every
    model of that type in this process.
    """
    if device.type != "cuda":
        return []
    applied = _apply_liger(model, liger) if liger and find_spec("liger_kernel") else []
    return [*applied, *fuse_adapters(model, liger)]


def fuse_gelu(model: nn.Module) -> None:
    """Let torch's kernel compute GELU's tanh approximation, on any device.

    transformers' code of it makes nine passes over the MLP's widest tensor, and keeps five for the backward.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child).__name__ in _TANH_GELU:
                setattr(parent, name, nn.GELU(approximate="tanh"))


def fuse_adapters(model: nn.Module, liger: Collection[str]) -> list[str]:
    """Fuse LoRA's layers, MLPs that are gated as Liger's kernel of them says, and layers with one input.

    Last: an MLP keeps the forward that it has now for calls that it cannot fuse.
    """
    if not fuse_lora(model):
        return []
    gated = [name for name in _GATED if name in liger]
    fused = bool(gated) and fuse_lora_mlps(model, gelu=gated == ["geglu"]) > 0
    share_inputs(model)
    return ["lora_linear", *["lora_mlp"] * fused]


def _apply_liger(model: PreTrainedModel, kernels: Collection[str]) -> list[str]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _patch_rms_norm_module

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(apply).parameters
    choices = {name: name in kernels for name in _KERNELS if name in known}
    others = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in known}
    code = vars(sys.modules[type(model).__module__])
    classes = {name: value for name, value in code.items() if isinstance(value, type)}
    apply(model=model, **choices, **others)
    code.update(classes)  # a model that is built later, to predict one, has no kernels of Triton
    for module in model.modules() if "rms_norm" in kernels else ():
        if type(module).__name__.endswith("RMSNorm") and not hasattr(module, "casting_mode"):
            _patch_rms_norm_module(module, in_place=False)  # Liger forgets OLMo-2's norms of query and key
    return [f"liger_{name}" for name, wanted in choices.items() if wanted]
