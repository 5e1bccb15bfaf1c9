"""A module's parameters as every engine sees them: filling, names, and weight decay."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import nn


class Fill(Protocol):
    """Give the meta parameters and buffers below `module` their values, on `device`."""

    def __call__(self, module: nn.Module, device: torch.device) -> None: ...


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers (rotary frequencies and the like), which are never sharded, to `device`.

    Those on the meta device are left to `Fill`.
    """
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if not buffer.is_meta:
                setattr(owner, name, buffer.to(device))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Trainable parameters by name; tied ones once."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def chosen(module: nn.Module, names: Collection[str] | None) -> dict[str, nn.Parameter]:
    """Parameters for `Engine.weights`: all trainable ones, or those with a public name in `names`."""
    if names is None:
        return trainable(module)
    return {name: p for name, p in module.named_parameters() if public_name(name) in names}


def public_name(name: str) -> str:
    """The name in the Hugging Face model, which the loss module holds as `model`."""
    return name.removeprefix("model.")


def decay_by_name(module: nn.Module, weight_decay: float) -> dict[str, float]:
    """Weight decay of every trainable parameter. Call before sharding, which changes shapes and classes.

    Matrices decay, embeddings included. Vectors, biases, norms and what the model exempts
    (`_no_weight_decay`: Mamba's A_log and D) do not.
    """
    return {name: weight_decay if _decays(module, name, p) else 0.0 for name, p in trainable(module).items()}


_NORM = re.compile(r"[Nn]orm(Gated|\dd)?$")
"""How the class name of a norm ends. `NormedEmbedding` and `NormHead` are no norms: their matrices decay."""


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Biases and norms can be matrices, with a row for each expert or head."""
    if parameter.ndim < 2 or name.endswith("bias") or getattr(parameter, "_no_weight_decay", False):
        return False
    # the class, because names mislead: AXK2 has linear layers below modules called layernorm
    owner = module.get_submodule(name.rpartition(".")[0])
    return _NORM.search(type(owner).__name__) is None


def parameter_groups(
    parameters: Mapping[str, torch.Tensor], decay: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: one per weight decay."""
    return [
        {"params": [p for name, p in parameters.items() if decay[name] == value], "weight_decay": value}
        for value in sorted({decay[name] for name in parameters}, reverse=True)
    ]
