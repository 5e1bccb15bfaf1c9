"""Mamba-1 for training: transformers' modules and names, our arithmetic, the authors' initialisation.

Names and shapes of weights stay Hugging Face's. Called with positions, as in training, a model uses
`kernels.mamba_inner`; without, as in generation, transformers' own code. Differences in training:

- Samples that share a row stay apart: position 0 resets the state and the convolution.
- A_log, D and dt's bias are used in fp32, also where softplus is taken; transformers adds the bias in bf16.
- The residual stream is normalised in fp32 before it is rounded, as in mamba_ssm; transformers rounds first.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.mamba import modeling_mamba as published

from shardwise.errors import JobError
from shardwise.kernels.mamba_inner import mamba_inner
from shardwise.models.flops import SCAN_FLOPS


class Norm(published.MambaRMSNorm):  # type: ignore[misc]
    """RMS norm of a hidden state of any format, at least in fp32; the result has the weight's format."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        weight: Tensor = self.weight
        normed = functional.rms_norm(x, weight.shape, weight.to(x.dtype), self.variance_epsilon)
        return normed.to(weight.dtype)


class Mixer(published.MambaMixer):  # type: ignore[misc]
    """The mixer. Its weights, except `in_proj`'s, are read without calling the modules that own them.

    An engine that shards must therefore gather entire blocks; every engine here does.
    """

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **others: Any) -> Tensor:
        if positions is None:
            return super().forward(hidden_states, **others)
        out = mamba_inner(
            self.in_proj(hidden_states),
            positions,
            conv_weight=self.conv1d.weight.squeeze(1),
            conv_bias=self.conv1d.bias,
            x_proj=self.x_proj.weight,
            dt_proj=self.dt_proj.weight,
            dt_bias=self.dt_proj.bias,
            a_log=self.A_log,
            d=self.D,
            out_proj=self.out_proj.weight,
        )
        return out if self.out_proj.bias is None else out + self.out_proj.bias


class Block(published.MambaBlock):  # type: ignore[misc]
    """Norm, mixer and residual."""

    def forward(self, hidden_states: Tensor, positions: Tensor | None = None, **others: Any) -> Tensor:
        if positions is None:
            return super().forward(hidden_states, **others)
        mixed = self.mixer(self.norm(hidden_states), positions)
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        return hidden_states + mixed


class Backbone(published.MambaModel):  # type: ignore[misc]
    """The model without its head."""

    def forward(
        self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, **others: Any
    ) -> Any:
        """Hidden states of `input_ids`, int64 [B, T]. `position_ids` restart at 0 in every sample."""
        if position_ids is None:
            return super().forward(input_ids, **others)
        positions = position_ids.to(torch.int32)
        hidden = self.embeddings(input_ids)
        for block in self.layers:
            hidden = block(hidden, positions)
        return published.MambaOutput(last_hidden_state=self.norm_f(hidden))


CLASSES = {
    published.MambaRMSNorm: Norm,
    published.MambaMixer: Mixer,
    published.MambaBlock: Block,
    published.MambaModel: Backbone,
}
"""transformers' classes and their replacements."""


EMBEDDING_STD = 0.02


def prepare(model: PreTrainedModel) -> None:
    """Install our modules and initialisation; A_log, D and dt's bias become fp32 and never decay."""
    for module in model.modules():
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]
        if isinstance(module, PreTrainedModel):
            module._init_weights = partial(initialise, layers=model.config.num_hidden_layers)  # type: ignore[method-assign]
        if isinstance(module, Mixer):
            for parameter in (module.A_log, module.D, module.dt_proj.bias):
                if parameter.dtype != torch.float64:
                    parameter.data = parameter.data.float()
                parameter._no_weight_decay = True


def check_config(config: PretrainedConfig, changed: dict[str, object]) -> None:
    """Raise JobError for what our modules do not compute; `changed` are the config values the job sets."""
    for name in ("initializer_range", "rescale_prenorm_residual"):
        if name in changed:
            what = "Mamba starts from its authors' initialisation, which has no such value"
            raise JobError(what, where=f"model.config.{name}", fix="leave it out")
    if config.hidden_act not in ("silu", "swish"):
        what = f"Mamba's convolution and gate are followed by SiLU, not by {config.hidden_act!r}"
        raise JobError(what, where="model.config.hidden_act", fix="hidden_act: silu")


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
    elif isinstance(module, published.MambaRMSNorm):
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
    elif isinstance(module, published.MambaMixer):
        module.init_mamba_weights()  # A_log, D, dt: transformers' are the authors'
        module.out_proj.weight.div_(math.sqrt(layers))
