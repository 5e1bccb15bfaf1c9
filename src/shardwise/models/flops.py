"""FLOPs that training a token takes: the numerator of TFLOP/s and MFU.

After PaLM (Chowdhery et al. 2022, appendix B): 6 per parameter that is in a matrix product, and 12 per
attended key and unit of attention width. Counted is what the model needs, not what is recomputed for
checkpointing.
Two conventions differ from that paper:

- Only keys that the causal mask or a window leaves are counted: (S + 1) / 2 on average in a row of S tokens
  where the paper counts S. Samples packed into a row see still fewer; that is not taken off.
- A frozen matrix costs 4, forward and the gradient of its input; an adapter's costs 6.

A state space model's scan takes 9 per channel and state in the forward pass (A. Gu,
github.com/state-spaces/mamba, number 110), and counts three times, as products do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn
from transformers.models.mamba.modeling_mamba import MambaMixer

from shardwise.models.mamba.prepare import MAMBA
from shardwise.models.structure import count_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from shardwise.models.build import BuiltModel


def train_flops_per_token(built: BuiltModel, *, sequence_length: int) -> float:
    """FLOPs of forward and backward pass per token, in rows of `sequence_length` tokens."""
    base = matmul_parameters(built.skeleton)
    if built.peft is None:
        weights = 6.0 * base
    else:
        weights = 4.0 * base + 6.0 * (built.total - count_parameters(built.skeleton))
    config = built.skeleton.config
    if config.model_type == MAMBA:
        return weights + scan_flops_per_token(config)
    return weights + attention_flops_per_token(config, sequence_length)


def matmul_parameters(model: PreTrainedModel) -> float:
    """Parameters that a token is multiplied with: all matrices and the output head, tied or not.

    Looking an embedding up is free. Of a mixture of experts only the share that a token is sent to counts.
    """
    config = model.config.get_text_config()
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    active = getattr(config, "num_experts_per_tok", None)
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 3 and experts and active and parameter.shape[0] == experts:
                total += parameter.numel() * active / experts
            elif parameter.ndim >= 2 and not _is_decay(module, parameter):
                total += parameter.numel()
    return total


def _is_decay(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Mamba's A: two dimensions, and no product; the scan's FLOPs are counted by themselves."""
    return isinstance(module, MambaMixer) and parameter is module.A_log


def scan_flops_per_token(config: PretrainedConfig) -> float:
    """FLOPs of Mamba's selective scan, forward and backward."""
    return 27.0 * config.intermediate_size * config.state_size * config.num_hidden_layers


def attention_flops_per_token(config: PretrainedConfig, sequence_length: int) -> float:
    """FLOPs of the products of queries with keys and of weights with values, forward and backward."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return sum(12.0 * width * _mean_keys(sequence_length, window) for window in _windows(config))


def _mean_keys(length: int, window: int | None) -> float:
    """Keys a token attends to on average: position t (from 1) sees the last min(t, window) tokens."""
    if window is None or window >= length:
        return (length + 1) / 2
    return window - window * (window - 1) / (2 * length)


def _windows(config: PretrainedConfig) -> list[int | None]:
    """The attention window of every layer; None: all earlier tokens."""
    layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    if kinds is None:
        return [window] * layers
    return [window if kind in ("sliding_attention", "local") else None for kind in kinds]
