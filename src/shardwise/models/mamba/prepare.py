"""From transformers' Mamba, just built on the meta device, to the one that is trained."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError
from shardwise.models.mamba.initial import initialise
from shardwise.models.mamba.modules import CLASSES, Mixer

MAMBA = "mamba"
"""Hugging Face's name of the architecture."""

RELATED = frozenset({"mamba2", "falcon_mamba", "bamba", "zamba", "zamba2", "jamba"})
"""Architectures with mixers that are not Mamba-1's, or not only: no kernel here computes them."""

OURS = ("initializer_range", "rescale_prenorm_residual")
"""Values of the config that the authors' initialisation does not ask for."""


def prepare(model: PreTrainedModel) -> None:
    """Puts in our modules and initialisation; A_log, D and dt's bias become fp32 and never decay."""
    layers = model.config.num_hidden_layers
    for module in model.modules():
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]
        if isinstance(module, PreTrainedModel):
            module._init_weights = MethodType(_initialiser(layers), module)  # type: ignore[method-assign]
        if isinstance(module, Mixer):
            for parameter in (module.A_log, module.D, module.dt_proj.bias):
                if parameter.dtype != torch.float64:
                    parameter.data = parameter.data.float()
                parameter._no_weight_decay = True


def refuse_related(kind: str, where: str) -> None:
    """Refuses what transformers would train in plain PyTorch, far too slowly. Raises JobError."""
    if kind in RELATED:
        raise JobError(
            f"of the Mamba family Mamba-1 is trained here, and {kind!r} is another architecture",
            where=where,
            fix="use a Mamba-1, such as 130m_mamba or 1b_mamba, or a transformer",
        )


def check_config(config: PretrainedConfig, changed: dict[str, object]) -> None:
    """Refuses what our modules do not compute. Raises JobError.

    `changed`: what the job changes of the config.
    """
    for name in OURS:
        if name in changed:
            raise JobError(
                "Mamba starts from its authors' initialisation, which has no such value",
                where=f"model.config.{name}",
                fix="leave it out",
            )
    if config.hidden_act not in ("silu", "swish"):
        raise JobError(
            f"Mamba's convolution and gate are followed by SiLU, not by {config.hidden_act!r}",
            where="model.config.hidden_act",
            fix="hidden_act: silu",
        )


def _initialiser(layers: int) -> Callable[[PreTrainedModel, nn.Module], None]:
    def initialise_module(_: PreTrainedModel, module: nn.Module) -> None:
        initialise(module, layers=layers)

    return initialise_module
