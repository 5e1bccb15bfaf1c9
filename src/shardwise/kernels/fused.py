"""Fused kernels put into a model that is already built: Liger's for norms, MLPs and rotary, and our LoRA.

Nothing about the weights changes, so it works on the meta device. LoRA layers have to be there already.
"""

from __future__ import annotations

import inspect
from importlib.util import find_spec
from typing import TYPE_CHECKING

from shardwise.kernels.lora_linear import fuse_lora

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

_LIGER_TYPES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3_text",
        "granite",
        "llama",
        "mistral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "smollm3",
    }
)
"""Model types for which tests/gpu compares Liger with the plain model."""

_KERNELS = ("rope", "rms_norm", "swiglu", "geglu")

_ACTIVATIONS = {"swiglu": ("silu", "swish"), "geglu": ("gelu_pytorch_tanh",)}
"""The activation that each of Liger's gated MLPs computes, whatever the config says."""


def apply_fused_kernels(model: PreTrainedModel, device: torch.device) -> list[str]:
    """Replaces what a faster kernel exists for; returns the names of what was replaced.

    On the CPU nothing is. The rotary embedding is a function of the model's module in transformers: it
    is replaced there, for every model of that type in this process.

    A fused LoRA layer reads weights without calling the modules that own them, so an engine that shards has
    to gather a block as a whole; every engine here does.
    """
    if device.type != "cuda":
        return []
    applied = _apply_liger(model) if find_spec("liger_kernel") else []
    if fuse_lora(model):
        applied.append("lora_linear")
    return applied


def _apply_liger(model: PreTrainedModel) -> list[str]:
    kernels = liger_kernels(model.config)
    if not kernels:
        return []
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    apply = MODEL_TYPE_TO_APPLY_LIGER_FN[model.config.model_type]
    known = inspect.signature(apply).parameters
    choices = {name: name in kernels for name in _KERNELS if name in known}
    others = {name: False for name in ("cross_entropy", "fused_linear_cross_entropy") if name in known}
    apply(model=model, **choices, **others)
    return [f"liger_{name}" for name, wanted in choices.items() if wanted]


def liger_kernels(config: PretrainedConfig) -> frozenset[str]:
    """Which of Liger's kernels a model takes: `rope`, `rms_norm`, and `swiglu` or `geglu`."""
    kind = config.model_type
    if kind not in _LIGER_TYPES:
        return frozenset()
    gated = "geglu" if kind.startswith("gemma") else "swiglu"
    return frozenset(name for name in ("rope", "rms_norm", gated) if _computes(name, config))


def _computes(kernel: str, config: PretrainedConfig) -> bool:
    """Whether Liger's kernel is the function that the config names."""
    if kernel not in _ACTIVATIONS:
        return True
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    return activation in _ACTIVATIONS[kernel]
