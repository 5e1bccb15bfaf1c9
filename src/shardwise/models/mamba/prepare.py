"""From transformers' Mamba, just built on the meta device, to the model that is trained."""

from __future__ import annotations

import math
from types import MethodType

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.mamba.modeling_mamba import MambaMixer, MambaRMSNorm

from shardwise.errors import JobError
from shardwise.models.flops import SCAN_FLOPS
from shardwise.models.mamba.modules import CLASSES, Mixer

EMBEDDING_STD = 0.02
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


@torch.no_grad()
def initialise(module: nn.Module, *, layers: int) -> None:
    """Initialise as mamba_ssm 2.3 (`_init_weights` and `Mamba.__init__`) what `module` itself holds.

    transformers draws embeddings and input projections at a standard deviation of 0.1, five to twelve times
    the authors', and does not scale the output projections: its first loss is far above theirs. Of a mixer,
    parameters below that depend on it are set, too.

    `layers`: of the model. Output projections are divided by its square root (Radford et al. 2019), as each
    layer has one residual addition.
    """
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STD)
    elif isinstance(module, MambaRMSNorm):
        nn.init.ones_(module.weight)
    elif isinstance(module, nn.Conv1d):
        module.reset_parameters()
    elif isinstance(module, nn.Linear):
        if getattr(module.weight, "_is_hf_initialized", False):
            return  # the output head, tied to the embedding, which is set already
        # nn.Linear's own, without its bias
        nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, MambaMixer):
        module.init_mamba_weights()  # A_log, D, dt: transformers' are the authors'
        module.out_proj.weight.div_(math.sqrt(layers))
