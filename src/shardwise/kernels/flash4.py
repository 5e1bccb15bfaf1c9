"""Attention over packed rows by flash attention 4, on Hopper where the package flash-attn-4 is installed.

There it takes about half the time of torch's own flash attention 2 (decision 0096). The two functions called
here are those that torch calls (`torch.nn.attention._fa4`). Torch's own way, `activate_flash_attention_impl`,
replaces the kernels of all other attention, too, and has no backward pass with windows in torch 2.11.
"""

import os
import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import distributions
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import JobError
from shardwise.kernels.target import HOPPER, capability, target

HEADS = (64, 96, 128, 192, 256)
"""Sizes of heads whose results were compared with float64. With 80, the gradient of q is wrong (4.0.0b36)."""


@cache
def installed() -> bool:
    """Whether flash-attn-4 is installed; nothing is imported."""
    return any(distributions(name="flash-attn-4"))


def serves(device: torch.device, head: int) -> bool:
    """Whether packed rows of half precision on `device`, with heads of this size, take these kernels."""
    if head not in HEADS:
        return False
    if device.type == "meta":
        return target().flash4
    deterministic = torch.are_deterministic_algorithms_enabled()
    return not deterministic and capability(device)[0] == HOPPER.capability[0] and installed()


@torch.library.custom_op("shardwise::flash4_attention", mutates_args=(), device_types="cuda")
def flash4_attention(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Causal attention within segments: [T, heads, D], and the logarithms of the sums, fp32 [heads, T].

    `q` is [T, heads, D], `k` and `v` [T, key-value heads, D], in bf16 or fp16. `borders`, int32
    [segments + 1], are those of segments of up to `longest` tokens. `window`: how many tokens before its own
    a token sees, and 0; (-1, 0): all of its segment.
    """
    out, sums, *_ = _package()._flash_attn_fwd(
        q, k, v, return_lse=True, **_how(borders, longest, scale, window)
    )
    return out, sums


@torch.library.custom_op("shardwise::flash4_attention_backward", mutates_args=(), device_types="cuda")
def flash4_attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, borders: Tensor, longest: int,
    scale: float, window: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, from what `flash4_attention` was given and returned."""
    how = _how(borders, longest, scale, window)
    dq, dk, dv, *_ = _package()._flash_attn_bwd(q, k, v, out, dout, sums, **how)
    return dq, dk, dv


@flash4_attention.register_fake
def _fake(q: Tensor, _: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor]:
    tokens, heads, _size = q.shape
    return q.new_empty(tokens, heads, v.shape[-1]), q.new_empty(heads, tokens, dtype=torch.float32)


@flash4_attention_backward.register_fake
def _backward_fake(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, borders, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output, borders)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
    return *flash4_attention_backward(dout, *ctx.saved_tensors, *ctx.how), None, None, None, None


flash4_attention.register_autograd(_gradients, setup_context=_keep)


def _how(borders: Tensor, longest: int, scale: float, window: Sequence[int]) -> dict[str, Any]:
    how = {
        "cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest,
        "softmax_scale": scale,
    }  # fmt: skip
    before, after = window
    seen = {"causal": True} if before < 0 else {"window_size_left": before, "window_size_right": after}
    return how | seen


@cache
def _package() -> Any:
    # Each of its kernels is compiled for seconds; kept on disk, by the processes that come first.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    warnings.filterwarnings("ignore", "Argument aux_data")  # about a part of its own arguments, on compiling
    try:
        return import_module("flash_attn.cute.interface")
    except ImportError as error:
        what = f"flash-attn-4 is installed, but cannot be imported: {error}"
        fix = "pip install 'shardwise[hopper]'; or pip uninstall flash-attn-4, which only makes steps slower"
        raise JobError(what, where="flash-attn-4", fix=fix) from error
