"""Packed attention for models with an attention of their own, which transformers' interface does not reach.

Their code computes all scores in fp32 and keeps them for the backward pass, or has SDPA do so: 71 query heads
that share one key head fit none of its fused kernels (torch 2.13). Here they call the kernel of other models.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwise.kernels.attention import varlen_attention
from shardwise.models.families import VARLEN

Borders = dict[str, Any]
"""Arguments of `varlen_attention` about the segments of the batch that the model is called with."""

_NONE: Borders = {"cu_seq_lens_q": None, "max_length_q": None, "single_segment_rows": 0}


def route(model: PreTrainedModel) -> None:
    """Let the attention of `model` call `varlen_attention`; does nothing for other architectures.

    Its layers do not pass the borders on, so a hook keeps those of the last call. They are read again where a
    block is recomputed: a batch's backward pass must end before the next one's forward pass begins.
    """
    named = [(module, type(module).__name__) for module in model.modules()]
    routed = [(module, _ROUTES[name]) for module, name in named if name in _ROUTES]
    if not routed:
        return
    model.config._attn_implementation = VARLEN  # there is no mask function of this name: none is made
    borders: Borders = {}

    def keep(called: nn.Module, _: Any, given: dict[str, Any]) -> None:
        if called is model or "cu_seq_lens_q" in given:  # a model with a head may not pass them on
            borders.update({name: given.get(name, none) for name, none in _NONE.items()})

    model.register_forward_pre_hook(keep, with_kwargs=True)
    model.base_model.register_forward_pre_hook(keep, with_kwargs=True)
    for module, (method, replacement) in routed:
        setattr(module, method, partial(replacement, module, borders))


def _gpt_neo(
    module: Any, borders: Borders, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    """Products are not scaled; a local layer sees `window_size` tokens, itself included."""
    window = module.config.window_size if module.attention_type == "local" else None
    how = {"scaling": 1.0, "sliding_window": window, **borders}
    return varlen_attention(module, query, key, value, None, **how)[0].transpose(1, 2), None


def _gpt_j(
    module: Any, borders: Borders, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> tuple[Tensor, None]:
    return varlen_attention(module, query, key, value, None, **borders)[0].transpose(1, 2), None


def _falcon(
    module: Any, borders: Borders, hidden: Tensor, *_: Any, position_embeddings: Any, **__: Any
) -> tuple[Tensor, None]:
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key, value = (t.transpose(1, 2) for t in _falcon_heads(module, module.query_key_value(hidden)))
    query, key = rotate(query, key, *position_embeddings)
    attended, _unused = varlen_attention(module, query, key, value, None, **borders)
    return module.dense(attended.flatten(2)), None


def _falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, S, heads, D]. Transformers indexes shared heads with lists, which copies from the host."""
    if not (module.new_decoder_architecture or module.multi_query):
        return module._split_heads(fused)  # type: ignore[no-any-return]
    groups = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
    return groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]


_ROUTES: dict[str, tuple[str, Callable[..., tuple[Tensor, None]]]] = {
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTJAttention": ("_attn", _gpt_j),
    "CodeGenAttention": ("_attn", _gpt_j),
    "FalconAttention": ("forward", _falcon),
}
"""Transformers' class, the method that is replaced, and what replaces it (5.17 to 5.23)."""
