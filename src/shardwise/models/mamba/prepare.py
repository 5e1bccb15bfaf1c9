"""From transformers' Mamba, just built on the meta device, to the model that is trained."""

from __future__ import annotations

from types import MethodType

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwise.errors import JobError
from shardwise.models.flops import SCAN_FLOPS
from shardwise.models.mamba.initial import initialise
from shardwise.models.mamba.modules import CLASSES, Mixer

_UNUSED = ("initializer_range", "rescale_prenorm_residual")
"""Config values that the authors' initialisation does not use."""


def prepare(model: PreTrainedModel) -> None:
    """Install our modules and initialisation; A_log, D and dt's bias become fp32 and never decay."""
    layers = model.config.num_hidden_layers

    def init_weights(_: PreTrainedModel, module: nn.Module) -> None:
        initialise(module, layers=layers)

    for module in model.modules():
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]
        if isinstance(module, PreTrainedModel):
            module._init_weights = MethodType(init_weights, module)  # type: ignore[method-assign]
        if isinstance(module, Mixer):
            for parameter in (module.A_log, module.D, module.dt_proj.bias):
                if parameter.dtype != torch.float64:
                    parameter.data = parameter.data.float()
                parameter._no_weight_decay = True


def check_config(config: PretrainedConfig, changed: dict[str, object]) -> None:
    """Raise JobError for what our modules do not compute; `changed` are the config values the job sets."""
    for name in _UNUSED:
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


def mixer_flops_per_token(config: PretrainedConfig) -> float:
    """FLOPs of the selective scan in all layers, forward and backward: three times the forward pass's."""
    channels = config.intermediate_size * config.num_hidden_layers
    return 3.0 * SCAN_FLOPS * channels * config.state_size  # type: ignore[no-any-return]
