"""Fused kernels put into a model that is already built: Liger's for norms, MLPs and rotary, and our LoRA.

The weights stay as they are, so the model may be on the meta device. LoRA layers must be there already.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardwise.kernels.lora_linear import fuse_lora

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")


def apply_fused_kernels(model: PreTrainedModel, device: torch.device, *, liger: Collection[str]) -> list[str]:
    """Replace what a faster kernel exists for, in place; on the CPU nothing.

    transformers' rotary embedding is a function of the model's Python module. It is replaced there, for every
    model of that type in this process. A fused LoRA layer reads weights without calling the modules that own
    them: an engine that shards must gather entire blocks, and every engine here does.

    Args:
        model: built, with its adapters.
        device: where it will run.
        liger: kernels of Liger to use (`models.families.liger_kernels`), where Liger is installed.

    Returns:
        Names of what was replaced.
    """
    if device.type != "cuda":
        return []
    applied = _apply_liger(model, liger) if liger and find_spec("liger_kernel") else []
    if fuse_lora(model):
        applied.append("lora_linear")
    return applied


def _apply_liger(model: PreTrainedModel, kernels: Collection[str]) -> list[str]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(apply).parameters
    choices = {name: name in kernels for name in _KERNELS if name in known}
    others = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in known}
    apply(model=model, **choices, **others)
    return [f"liger_{name}" for name, wanted in choices.items() if wanted]
