"""Functions that CUDA runs as one kernel; on meta tensors torch would decompose them, and save more.

And stand-ins for Liger's kernels: what they allocate, save and compute, without Triton or a GPU, after
liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py, 0.8.5. Planning does not need Liger: `traced_kernels` puts
them where `kernels.fused` would put Liger's.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from shardwise.kernels.fused import fuse_adapters
from shardwise.kernels.target import target
from shardwise.models.families import family_of, liger_kernels
from shardwise.trace.recorder import record_pass


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Within, `scaled_dot_product_attention`, `dropout` and `rms_norm` are the kernels of the target GPU.

    They replace torch's: a function mode would not be active while a checkpointed block is recomputed.
    """
    stand_ins: dict[str, Any] = {"dropout": _dropout, "rms_norm": _rms_norm}
    with patch.multiple(functional, scaled_dot_product_attention=_attention, **stand_ins):
        yield


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    aten: Any = torch.ops.aten
    kernel, how = sdpa_kernel_of(query, key, value, attn_mask, dropout_p, enable_gqa), (dropout_p, is_causal)
    if kernel == "math":
        math = aten._scaled_dot_product_attention_math
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        return math(query, key, value, attn_mask, *how, **options)[0]  # type: ignore[no-any-return]
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.where(attn_mask, 0.0, torch.full((), -torch.inf, dtype=query.dtype, device="meta"))
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention
        return cudnn(query, key, value, attn_mask, True, *how, False, scale=scale)[0]  # type: ignore[no-any-return]
    if kernel == "flash":
        size = query.shape[-1]
        query, key, value = (
            functional.pad(t, (0, -size % 8)) if size % 8 else t for t in (query, key, value)
        )
        flash = aten._scaled_dot_product_flash_attention
        out: Tensor = flash(query, key, value, *how, False, scale=scale or size**-0.5)[0]
        return out[..., :size] if size % 8 else out
    efficient = aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, attn_mask, True, *how, scale=scale)[0]  # type: ignore[no-any-return]


def sdpa_kernel_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, enable_gqa: bool
) -> Literal["cudnn", "flash", "efficient", "math"]:
    """The kernel that torch 2.11 to 2.13 picks for SDPA on the target GPU, in training.

    Source: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; compared in 270 cases with torch 2.11
    on an H200. cuDNN comes first on compute capability 9 and 10, flash attention elsewhere; then the
    memory-efficient kernel; `math` keeps all scores, in fp32.
    """
    capability, half = target().capability, query.dtype in (torch.bfloat16, torch.float16)
    sizes = query.shape[-1], value.shape[-1]
    grouped = query.shape[1] != key.shape[1]
    if grouped and not enable_gqa:  # one key head for all, too
        return "math"
    fast = half and (8, 0) <= capability <= (12, 1)
    if fast and capability[0] in (9, 10) and max(sizes) <= 256 and not any(size % 8 for size in sizes):
        return "cudnn"
    # the backward pass of large heads needs more shared memory than these have
    narrow = capability[0] == 12 or (8, 6) <= capability <= (8, 9)
    fits = sizes[0] <= (192 if narrow else 256) or (narrow and 224 < sizes[0] <= 256 and not dropout)
    if fast and mask is None and sizes[0] == sizes[1] and fits:
        return "flash"
    if grouped or any(size % (8 if half else 4) for size in sizes):
        return "math"
    return "math" if query.dtype == torch.bfloat16 and capability < (8, 0) else "efficient"


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p != 0.0 else x


def _rms_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is None or weight.dtype != x.dtype:  # torch has no kernel for these either
        return _UNFUSED_RMS_NORM(x, normalized_shape, weight, eps)
    return _RmsNorm.apply(x, weight)  # type: ignore[no-any-return]


_UNFUSED_RMS_NORM = functional.rms_norm


class _RmsNorm(torch.autograd.Function):
    """CUDA's `_fused_rms_norm`, missing for meta tensors: saves its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        y = torch.empty_like(x)
        scale = x.new_empty(*x.shape[:-1], 1)
        record_pass("rms_norm", [x, weight], [y, scale])
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        written = [dx] if dweight is None else [dx, dweight]
        record_pass("rms_norm_backward", [dy, x, weight, scale], written)
        return dx, dweight


@contextmanager
def traced_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Put the stand-ins into `model`, and within the context into its type's rotary embedding."""
    kernels = liger_kernels(model.config)
    in_place = family_of(model.config).norm_in_place
    for module in model.modules():
        name = type(module).__name__
        if "rms_norm" in kernels and name.endswith("RMSNorm"):
            module.forward = partial(_norm_forward, module, in_place=in_place)
        if kernels & {"swiglu", "geglu"} and name.endswith("MLP"):
            module.forward = MethodType(_gated_forward, module)  # type: ignore[method-assign]
    fuse_adapters(model, kernels)
    code = sys.modules[type(model).__module__]
    with patch.object(code, "apply_rotary_pos_emb", _rotate) if "rope" in kernels else nullcontext():
        yield


def _norm_forward(self: nn.Module, hidden: Tensor, *, in_place: bool) -> Tensor:
    return _LigerNorm.apply(hidden, self.weight, in_place)  # type: ignore[no-any-return]


class _LigerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:  # type: ignore[override]
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        y = torch.empty_like(rows)
        scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
        record_pass("liger_rms_norm", [rows, weight], [y, scale])
        ctx.save_for_backward(rows, weight, scale)
        ctx.in_place = in_place
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, weight, scale = ctx.saved_tensors
        dy = dy.contiguous()
        sums = None
        if ctx.needs_input_grad[1]:
            sums = weight.new_empty(target().multiprocessors, weight.shape[0], dtype=torch.float32)
        dx = dy if ctx.in_place else torch.zeros_like(dy)
        record_pass("liger_rms_norm_backward", [dy, rows, weight, scale], [dx])
        return dx, None if sums is None else sums.sum(dim=0).to(weight.dtype), None


def _gated_forward(self: Any, x: Tensor) -> Tensor:
    if hasattr(self, "gate_up_proj"):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(_Gated.apply(gate, up))  # type: ignore[no-any-return]
    # no names, as in Liger: what autograd does not keep is freed before the down projection
    return self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    """activation(gate) * up; the gradients overwrite the saved inputs."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:  # type: ignore[override]
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        record_pass("liger_gated", [gate, up], [out])
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        record_pass("liger_gated_backward", [d_out.contiguous(), gate, up], [gate, up])
        return gate.view(gate.shape), up.view(up.shape)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _Rope.apply(q, k, cos, sin)  # type: ignore[no-any-return]


class _Rope(torch.autograd.Function):
    """Rotate queries and keys in place where they are contiguous."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        record_pass("liger_rope", [q, k, cos, sin], [q, k])
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        dq, dk = dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous()
        record_pass("liger_rope_backward", [dq, dk, cos, sin], [dq, dk])
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None
