"""transformers' Mamba with our forward pass for training, put into a model that is already built.

Names and shapes of weights stay Hugging Face's. Called with positions, as in training, a model uses
`kernels.mamba_inner`; without, as in generation, transformers' own code. Differences in training:

- Samples that share a row stay apart: position 0 resets the state and the convolution.
- A_log, D and dt's bias are used in fp32, also where softplus is taken; transformers adds the bias in bf16.
- The residual stream is normalised in fp32 before it is rounded, as in mamba_ssm; transformers rounds first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.models.mamba.modeling_mamba import (
    MambaBlock,
    MambaMixer,
    MambaModel,
    MambaOutput,
    MambaRMSNorm,
)

from shardwise.kernels.mamba_inner import mamba_inner


class Norm(MambaRMSNorm):  # type: ignore[misc]
    """RMS norm of a hidden state of any format, at least in fp32; the result has the weight's format."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        weight: torch.Tensor = self.weight
        normed = functional.rms_norm(
            hidden_states.to(dtype), weight.shape, weight.to(dtype), self.variance_epsilon
        )
        return normed.to(weight.dtype)


class Mixer(MambaMixer):  # type: ignore[misc]
    """The mixer. Its weights, except `in_proj`'s, are read without calling the modules that own them.

    An engine that shards must therefore gather entire blocks; every engine here does.
    """

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
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


class Block(MambaBlock):  # type: ignore[misc]
    """Norm, mixer and residual."""

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor | None = None, **others: Any
    ) -> torch.Tensor:
        if positions is None:
            return super().forward(hidden_states, **others)
        mixed = self.mixer(self.norm(hidden_states), positions)
        if self.residual_in_fp32:
            hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        return hidden_states + mixed


class Backbone(MambaModel):  # type: ignore[misc]
    """The model without its head."""

    def forward(
        self, input_ids: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **others: Any
    ) -> Any:
        """Hidden states of `input_ids`, int64 [B, T]. `position_ids` restart at 0 in every sample."""
        if position_ids is None:
            return super().forward(input_ids, **others)
        positions = position_ids.to(torch.int32)
        hidden = self.embeddings(input_ids)
        for block in self.layers:
            hidden = block(hidden, positions)
        return MambaOutput(last_hidden_state=self.norm_f(hidden))


CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    MambaRMSNorm: Norm,
    MambaMixer: Mixer,
    MambaBlock: Block,
    MambaModel: Backbone,
}
"""transformers' classes and their replacements."""
