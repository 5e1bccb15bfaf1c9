"""FLOPs that training a token takes: the numerator of TFLOP/s and MFU.

After PaLM (Chowdhery et al. 2022, appendix B): 6 per parameter in a matrix product, and 12 per attended key
and unit of attention width. What checkpointing recomputes does not count. Two conventions differ from PaLM's:

- Only keys that the causal mask or a window allows count: (S + 1) / 2 on average in a row of S tokens, where
  the paper counts S. Samples packed into a row attend to still fewer; that is not subtracted.
- A frozen matrix costs 4, forward and the gradient of its input; an adapter's costs 6.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import nn

from shardwise.models.families import family_code, family_of
from shardwise.models.structure import count_parameters

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from shardwise.models.build import BuiltModel

SCAN_FLOPS = 9.0
"""Per channel, state and token of Mamba's scan, forward (A. Gu, github.com/state-spaces/mamba, issue 110)."""

_NO_PRODUCT = ("linear_attention", "conv")
"""Kinds of layers without products of all queries with all keys."""


def train_flops_per_token(built: BuiltModel, *, sequence_length: int) -> float:
    """FLOPs of forward and backward pass per token, in rows of `sequence_length` tokens."""
    base = matmul_parameters(built.skeleton)
    weights = 6.0 * base
    if built.peft is not None:
        weights = 4.0 * base + 6.0 * (built.total - count_parameters(built.skeleton))
    config = built.skeleton.config
    code = family_code(family_of(config))
    if code is not None:
        return weights + code.mixer_flops_per_token(config)
    return weights + attention_flops_per_token(config, sequence_length)


def matmul_parameters(model: PreTrainedModel) -> float:
    """Parameters that a token is multiplied with: all matrices and the output head, tied or not.

    An embedding lookup is free. Of a mixture of experts only the share that a token is routed to counts.
    """
    config = model.config.get_text_config()
    others = family_of(config).not_multiplied
    total = 0.0
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        experts, active = _routing(config, module_name)
        for name, parameter in module.named_parameters(recurse=False):
            vector = parameter.numel() == max(parameter.shape, default=1)
            if name in others or name.endswith("bias") or (vector and not isinstance(module, nn.Linear)):
                continue
            stacked = parameter.ndim == 3 and parameter.shape[0] == experts
            if experts and (stacked or module_name.endswith("experts.mlp")):  # DBRX's are one tall matrix
                total += parameter.numel() * active / experts
            else:
                total += parameter.numel()
    return total


_EXPERTS = ("num_local_experts", "num_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "moe_top_k")


def _routing(config: PretrainedConfig, module_name: str) -> tuple[int, int]:
    """(experts, experts of a token) of a mixture's layer; (0, 0) of others."""
    of_ffn = getattr(config, "ffn_config", None)  # DBRX's
    found = []
    for names in (_EXPERTS, _ACTIVE):
        values = (getattr(part, name, None) for part in (config, of_ffn) for name in names)
        value: Any = next(filter(None, values), 0)
        if isinstance(value, list):  # one a layer
            layer = re.search(r"\.(\d+)\.", module_name)
            value = value[int(layer[1])] if layer else 0
        found.append(value)
    return (found[0], found[1]) if all(found) else (0, 0)


def attention_flops_per_token(config: PretrainedConfig, sequence_length: int) -> float:
    """FLOPs of the products of queries with keys and of weights with values, forward and backward."""
    config = config.get_text_config()
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return 0.0  # RWKV's state is updated value by value
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    both = 2 * size
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys are longer than values
        both = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None) or 0
    kinds = kinds or ["sliding_attention"] * config.num_hidden_layers
    windows = [
        window if kind in ("sliding_attention", "local") else 0 for kind in kinds if kind not in _NO_PRODUCT
    ]
    pairs = sum(attended_pairs(sequence_length, sequence_length, window) for window in windows)
    return 6.0 * heads * both * pairs / sequence_length


def attended_pairs(queries: int, keys: int, window: int = 0) -> float:
    """Pairs of a query and a key in causal segments of `keys` tokens, `queries` tokens in all.

    Token t (from 1) of a segment attends to the last min(t, window) tokens; without a window, 0, to t.
    """
    if 0 < window < keys:
        return queries / keys * (keys * window - window * (window - 1) / 2)
    return queries * (keys + 1) / 2
