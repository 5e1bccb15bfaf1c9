"""Functions that CUDA runs as one kernel; on meta tensors torch would decompose them, and save more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from shardwise.kernels.target import HOPPER, target
from shardwise.trace.recorder import record_pass


@contextmanager
def cuda_functions() -> Iterator[None]:
    """Within, `scaled_dot_product_attention`, `dropout` and `rms_norm` are the kernels of the target GPU.

    torch picks attention's kernel in this order (sdp_utils.cpp): cuDNN on Hopper and newer, flash attention
    where there is no mask, memory-efficient attention. All but the last need half precision. The functions
    replace torch's: a function mode would not be active while a checkpointed block is recomputed.
    """
    stand_ins = {"scaled_dot_product_attention": _attention, "dropout": _dropout, "rms_norm": _rms_norm}
    replaced = {name: getattr(functional, name) for name in stand_ins}
    for name, function in stand_ins.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in replaced.items():
            setattr(functional, name, function)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    half = query.dtype in (torch.bfloat16, torch.float16)
    aten = torch.ops.aten
    options: dict[str, Any] = {"scale": scale}
    if half and target().capability >= HOPPER.capability:
        return aten._scaled_dot_product_cudnn_attention(  # type: ignore[no-any-return]
            query, key, value, attn_mask, True, dropout_p, is_causal, False, **options
        )[0]
    if half and attn_mask is None:
        return aten._scaled_dot_product_flash_attention(  # type: ignore[no-any-return]
            query, key, value, dropout_p, is_causal, False, **options
        )[0]
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # convert_boolean_attn_mask
        attn_mask = torch.where(attn_mask, 0.0, torch.full((), -torch.inf, dtype=query.dtype, device="meta"))
    return aten._scaled_dot_product_efficient_attention(  # type: ignore[no-any-return]
        query, key, value, attn_mask, True, dropout_p, is_causal, **options
    )[0]


def _dropout(
    input: torch.Tensor,  # noqa: A002 - torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,  # noqa: ARG001 - no model here uses it
) -> torch.Tensor:
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]


def _rms_norm(
    input: torch.Tensor,  # noqa: A002 - torch's name
    normalized_shape: Any,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    if weight is None or weight.dtype != input.dtype:  # torch has no kernel for these either
        return _UNFUSED_RMS_NORM(input, normalized_shape, weight, eps)
    out: torch.Tensor = _RmsNorm.apply(input, weight)
    return out


_UNFUSED_RMS_NORM = functional.rms_norm


class _RmsNorm(torch.autograd.Function):
    """CUDA's `_fused_rms_norm`, missing for meta tensors: saves its input and a number for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = torch.empty_like(x)
        scale = x.new_empty(*x.shape[:-1], 1)
        record_pass("rms_norm", [x, weight], [y, scale])
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        dx = torch.empty_like(x)
        dweight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        written = [dx] if dweight is None else [dx, dweight]
        record_pass("rms_norm_backward", [dy, x, weight, scale], written)
        return dx, dweight
