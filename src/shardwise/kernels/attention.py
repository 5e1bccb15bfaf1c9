"""Attention over packed rows: every token attends to the earlier tokens of its own segment, and to no other.

`models.families` says which models use it, and how the others keep samples apart.
"""

import inspect
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.kernels import flash4
from shardwise.kernels.sinks import flash_with_sinks
from shardwise.kernels.target import HOPPER, capability, on_gpu


def single_segments_are_faster(device: torch.device, head: int) -> bool:
    """Whether rows of a single segment have a faster kernel: cuDNN's, on Hopper (compute capability 9).

    Flash attention 4 is as fast, and takes all rows in one call. `head`: the size of one.
    """
    return capability(device)[0] == HOPPER.capability[0] and not flash4.serves(device, head)


def block_causal_mask(rows: torch.Size, cu_seqlens: Tensor, dtype: torch.dtype, window: int = 0) -> Tensor:
    """Additive [B, 1, S, S] mask: 0 within a segment up to the diagonal, the dtype's minimum elsewhere.

    `rows` is (B, S); `cu_seqlens`, int32 [segments + 1], runs over the flattened B*S tokens. A token sees
    `window` tokens, itself included; 0: all.
    """
    batch, length = rows
    tokens = torch.arange(batch * length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    segment = torch.bucketize(tokens, cu_seqlens[1:], right=True).view(batch, 1, length)
    allowed = (segment.unsqueeze(3) == segment.unsqueeze(2)).tril()
    if window:
        allowed = allowed.triu(1 - window)
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, torch.finfo(dtype).min)


def varlen_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, single_segment_rows: int = 0,
    s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention within segments, called by transformers' decoder layers.

    `query` is [1, heads, T, D]; `key` and `value` are [1, key-value heads, T, D]; the products are multiplied
    by `scaling`, by default 1 / sqrt(D). A token sees `sliding_window` tokens, itself included; where none is
    given, the layer's own counts: Qwen2-MoE passes its window to the mask only. `single_segment_rows`
    segments of `max_length_q` tokens, the longest, come first. `cu_seq_lens_q`, int32 [segments + 1] from 0,
    are the borders of the others. `s_aux`: the sinks of the heads (`kernels.sinks`), where a model has them.

    Returns [1, T, heads, D], and None where other implementations return attention weights.
    """
    if cu_seq_lens_q is None or max_length_q is None:
        raise RuntimeError("packed attention needs the borders of the segments; it is for training only")
    if dropout != 0.0:
        raise RuntimeError(f"packed attention supports no dropout, not {dropout}")
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    sliding_window = sliding_window or getattr(module, "sliding_window", None)
    window = (sliding_window - 1 if sliding_window else -1, 0)
    # flash attention exists for half precision on GPUs; fp32 there is for checking, not for speed
    segments = _flash if on_gpu(q) and q.dtype in (torch.bfloat16, torch.float16) else _segment_by_segment
    first = single_segment_rows * max_length_q
    if first and (sliding_window or s_aux is not None):
        raise RuntimeError(f"rows of one segment support no sinks and no window, not {sliding_window}")
    if first == 0:
        return segments(q, k, v, cu_seq_lens_q, max_length_q, scaling, window, s_aux).unsqueeze(0), None
    if first == len(q):
        return _single_segments(q, k, v, single_segment_rows, scaling).unsqueeze(0), None
    (q, q_rest), (k, k_rest), (v, v_rest) = (t.split([first, len(q) - first]) for t in (q, k, v))
    out = [
        _single_segments(q, k, v, single_segment_rows, scaling),
        segments(q_rest, k_rest, v_rest, cu_seq_lens_q, max_length_q, scaling, window),
    ]
    return torch.cat(out).unsqueeze(0), None


def _single_segments(q: Tensor, k: Tensor, v: Tensor, rows: int, scale: float | None) -> Tensor:
    """Causal attention within `rows` segments of the same length."""
    if q.dtype == torch.float32:
        k, v = (_for_each_head(t, q) for t in (k, v))
    qs, ks, vs = (t.unflatten(0, (rows, -1)).transpose(1, 2) for t in (q, k, v))
    how: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    # On Hopper torch's own order is cuDNN first, except under `train.deterministic`. `sdpa_kernel` is not
    # used: it would leave flash attention first, for every later call of the process.
    out = functional.scaled_dot_product_attention(qs, ks, vs, **how)
    return out.transpose(1, 2).flatten(0, 1)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None,
    window: tuple[int, int], sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    if sinks is not None:
        return flash_with_sinks(q, k, v, sinks, cu_seqlens, longest, scale, window)
    if flash4.serves(q.device, q.shape[-1]):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return flash4.flash4_attention(q, k, v, cu_seqlens, longest, scale, window)[0]
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scale, "window_size": window}
    if _wants_gqa_flag():
        options["enable_gqa"] = q.shape[1] != k.shape[1]
    return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options)  # type: ignore[return-value]


@cache
def _wants_gqa_flag() -> bool:
    """Whether this torch has a flag for fewer key than query heads; the kernel itself needs none."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _segment_by_segment(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None,
    window: tuple[int, int], sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Plain SDPA, one segment after the other; on the meta device every segment is the longest."""
    k, v = (_for_each_head(t, q) for t in (k, v))
    borders = [n * longest for n in range(len(cu_seqlens))] if cu_seqlens.is_meta else cu_seqlens.tolist()
    out = []
    for start, stop in pairwise(borders):
        qs, ks, vs = (t[start:stop].transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        mask = None
        if 0 <= window[0] < stop - start - 1 or sinks is not None:
            mask = torch.ones(stop - start, stop - start, dtype=torch.bool, device=q.device).tril()
            mask = mask.triu(-window[0]) if window[0] >= 0 else mask
            if sinks is not None:  # one more key, whose score is the sink and whose value is 0
                ks, vs = (functional.pad(t, (0, 0, 0, 1)) for t in (ks, vs))
                scores = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -torch.inf)
                sink = sinks.to(q.dtype).view(-1, 1, 1).expand(-1, len(mask), 1)
                mask = torch.cat([scores.expand(len(sinks), -1, -1), sink], -1).unsqueeze(0)
        causal = mask is None
        attended = functional.scaled_dot_product_attention(qs, ks, vs, mask, is_causal=causal, scale=scale)
        out.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(out)


def _for_each_head(shared: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for each query head that shares them.

    SDPA's memory-efficient kernel, the only one for fp32, takes no shared heads (torch: `enable_gqa`).
    """
    repeats = q.shape[1] // shared.shape[1]
    return shared if repeats == 1 else shared.repeat_interleave(repeats, dim=1)
