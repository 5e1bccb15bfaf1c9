"""Attention over packed rows: every token attends to the earlier tokens of its own segment, and to no other.

Five ways, chosen by model type (`choose`):

- `varlen`: the rows are laid end to end, [1, B*S], and the borders of the segments go to the kernel. No mask
  exists and nothing is computed across segments. Registered with transformers as `shardwise_varlen`. Rows
  that are a single segment go to a faster kernel on Hopper (decision 0011).
- `positions`: transformers builds the block-diagonal mask itself from position ids that restart, for models
  that hand them to its mask function.
- `mask`: our own [B, 1, S, S] mask, for models that take one but ignore the position ids.
- `state`: a state space model, no attention; its mixers take the position ids and forget where they restart.
- `rows`: plain causal rows; only right where a row holds a single sample followed by padding.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface

from shardwise.kernels.target import capability, on_gpu

if TYPE_CHECKING:
    from transformers import PretrainedConfig

VARLEN = "shardwise_varlen"
"""Name of the attention in transformers' registry."""

VARLEN_TYPES = frozenset(
    {
        "cohere",
        "cohere2",
        "gemma",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "starcoder2",
    }
)
"""Softmax of scaled products, a window at most, through transformers' attention interface."""

_POSITION_TYPES = VARLEN_TYPES - {"opt"} | {"codegen", "gemma2", "gpt_neo", "gptj", "stablelm"}
"""Hand position ids to transformers' mask function, which sees where they restart."""

_MASK_TYPES = frozenset({"falcon", "opt"})

STATE_TYPES = frozenset({"mamba"})


@dataclass(frozen=True, kw_only=True)
class Attention:
    """How a model attends over rows."""

    packing: Literal["varlen", "positions", "mask", "state", "rows"]
    implementation: str | None
    """Name for `set_attn_implementation`; None leaves what transformers picks for the model."""
    windowed: bool = False
    """Some layers may see no further back than a sliding window."""


def choose(config: PretrainedConfig) -> Attention:
    """The fastest exact way for a model; `rows` if nothing is known about it."""
    kind = config.model_type
    if kind in STATE_TYPES:
        return Attention(packing="state", implementation=None)
    dropout = max(getattr(config, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop"))
    softcap = getattr(config, "attn_logit_softcapping", None)
    if kind in VARLEN_TYPES and dropout == 0.0 and softcap is None and _kernel_takes(_head_size(config)):
        # Mistral and others ask nothing else, whatever their layers are called
        windowed = bool(getattr(config, "sliding_window", None))
        return Attention(packing="varlen", implementation=VARLEN, windowed=windowed)
    # transformers 5.17 would take SDPA, which leaves the softcap out without a word
    implementation = "eager" if softcap is not None else None
    if kind in _POSITION_TYPES:
        return Attention(packing="positions", implementation=implementation)
    if kind in _MASK_TYPES and not getattr(config, "alibi", False):
        return Attention(packing="mask", implementation=implementation)
    return Attention(packing="rows", implementation=implementation)


def whole_rows_are_faster(device: torch.device) -> bool:
    """Whether rows of a single segment are worth a kernel of their own: on Hopper (compute capability 9)."""
    return capability(device)[0] == HOPPER


HOPPER = 9


def _head_size(config: PretrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _kernel_takes(head_size: int) -> bool:
    return head_size % 8 == 0 and head_size <= 256


def block_causal_mask(rows: torch.Size, cu_seqlens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Additive [B, 1, S, S] mask: 0 within a segment up to the diagonal, the dtype's minimum elsewhere.

    `rows` is (B, S); `cu_seqlens`, int32 [segments + 1], runs over the flattened B*S tokens.
    """
    batch, length = rows
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = torch.bucketize(tokens, cu_seqlens[1:], right=True).view(batch, 1, length)
    allowed = (segment.unsqueeze(3) == segment.unsqueeze(2)).tril()
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    whole_rows: int = 0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within segments, called by transformers' decoder layers.

    `query` is [1, heads, T, D], `key` and `value` [1, key-value heads, T, D]. A token sees `sliding_window`
    tokens, itself included; where none is given, what the attention layer, `module`, has under this name:
    Qwen2-MoE tells its window to the mask only. `cu_seq_lens_q`, int32 [segments + 1] from 0 to T, and
    `max_length_q`, the tokens in the longest segment, are given to the model's forward (transformers' names).
    With `whole_rows`, the tokens begin with so many segments of `max_length_q` each, and `cu_seq_lens_q` has
    those behind them only. Returns [1, T, heads, D], and None where others return attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError(f"{VARLEN} needs the segments' borders; outside training use another attention")
    if dropout != 0.0:
        raise RuntimeError(f"{VARLEN} has no attention dropout, {dropout} was asked for")
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    sliding_window = sliding_window or getattr(module, "sliding_window", None)
    window = (sliding_window - 1 if sliding_window else -1, 0)
    # flash attention exists for half precision on GPUs; fp32 there is for checking, not for speed
    segments = _flash if on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) else _segment_by_segment
    whole = whole_rows * max_length_q
    if whole and sliding_window:
        raise RuntimeError(f"rows of one segment have no window, {sliding_window} was asked for")
    if whole == 0:
        return segments(q, k, v, cu_seq_lens_q, max_length_q, scaling, window).unsqueeze(0), None
    if whole == len(q):
        return _whole_rows(q, k, v, whole_rows, scaling).unsqueeze(0), None
    parts = [whole, len(q) - whole]
    (q, q_rest), (k, k_rest), (v, v_rest) = (t.split(parts) for t in (q, k, v))
    out = [
        _whole_rows(q, k, v, whole_rows, scaling),
        segments(q_rest, k_rest, v_rest, cu_seq_lens_q, max_length_q, scaling, window),
    ]
    return torch.cat(out).unsqueeze(0), None


def _whole_rows(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: int, scale: float | None
) -> torch.Tensor:
    """Causal attention within `rows` segments of the same length."""
    if q.dtype == torch.float32:
        k, v = (_for_each_head(t, q) for t in (k, v))
    qs, ks, vs = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out = functional.scaled_dot_product_attention(
            qs, ks, vs, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2).flatten(0, 1)


_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,  # not taken where `train.deterministic` is asked for
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def _flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": window}
    if _wants_gqa_flag():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)  # type: ignore[return-value]


@cache
def _wants_gqa_flag() -> bool:
    """Whether this torch wants to be told of fewer key than query heads; the kernel itself never asked."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _segment_by_segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor,
    longest: int,
    scale: float | None,
    window: tuple[int, int],
) -> torch.Tensor:
    """The same with plain SDPA, one segment after the other; on the meta device all are the longest."""
    k, v = (_for_each_head(t, q) for t in (k, v))
    borders = [n * longest for n in range(len(cu_seqlens))] if cu_seqlens.is_meta else cu_seqlens.tolist()
    out = []
    for start, stop in pairwise(borders):
        qs, ks, vs = (t[start:stop].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        mask = None
        if 0 <= window[0] < stop - start - 1:
            mask = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device)
            mask = mask.tril().triu(-window[0])
        attended = functional.scaled_dot_product_attention(
            qs, ks, vs, mask, is_causal=mask is None, scale=scale
        )
        out.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _for_each_head(shared: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Keys or values once for each query head that shares them.

    For fp32 SDPA has one kernel that makes no matrix of all pairs, and it takes no shared heads (torch's
    documentation of `enable_gqa`).
    """
    repeats = q.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)


AttentionInterface.register(VARLEN, varlen_attention)
# No mask function is registered under this name on purpose: transformers then makes no mask at all, and does
# not read the position ids back from the GPU to look for packed samples.
