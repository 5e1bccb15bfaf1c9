"""Stand-ins for Liger's kernels: what they allocate, save and compute, without Triton or a GPU.

Follows liger_kernel/ops/{rms_norm,swiglu,geglu,rope}.py, 0.8.5. Planning does not need Liger:
`traced_kernels` puts these where `kernels.fused` would put Liger's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.kernels.lora_linear import fuse_lora
from shardwise.kernels.target import target
from shardwise.models.families import family_of, liger_kernels
from shardwise.trace.recorder import record_pass

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@contextmanager
def traced_kernels(model: PreTrainedModel) -> Iterator[None]:
    """Put the stand-ins into `model`, and within the context into its type's rotary embedding."""
    kernels = liger_kernels(model.config)
    fuse_lora(model)
    in_place = family_of(model.config).norm_in_place
    for module in model.modules():
        name = type(module).__name__
        if "rms_norm" in kernels and name.endswith("RMSNorm"):
            module.forward = MethodType(_norm_forward(in_place), module)  # type: ignore[method-assign]
        if kernels & {"swiglu", "geglu"} and name.endswith("MLP"):
            module.forward = MethodType(_gated_forward, module)  # type: ignore[method-assign]
    code: Any = sys.modules[type(model).__module__]
    original = code.apply_rotary_pos_emb if "rope" in kernels else None
    try:
        if original is not None:
            code.apply_rotary_pos_emb = _rotate
        yield
    finally:
        if original is not None:
            code.apply_rotary_pos_emb = original


def _norm_forward(in_place: bool) -> Any:
    def forward(self: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _RmsNorm.apply(hidden, self.weight, in_place)
        return out

    return forward


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:  # type: ignore[override]
        x = x.contiguous()
        rows = x.view(-1, x.shape[-1])
        y = torch.empty_like(rows)
        scale = rows.new_empty(rows.shape[0], dtype=torch.float32)
        record_pass("liger_rms_norm", [rows, weight], [y, scale])
        ctx.save_for_backward(rows, weight, scale)
        ctx.in_place = in_place
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        rows, weight, scale = ctx.saved_tensors
        dy = dy.contiguous()
        partial = None
        if ctx.needs_input_grad[1]:
            partial = weight.new_empty(target().multiprocessors, weight.shape[0], dtype=torch.float32)
        dx = dy if ctx.in_place else torch.zeros_like(dy)
        record_pass("liger_rms_norm_backward", [dy, rows, weight, scale], [dx])
        return dx, None if partial is None else partial.sum(dim=0).to(weight.dtype), None


def _gated_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor
    if hasattr(self, "gate_up_proj"):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out = self.down_proj(_Gated.apply(gate, up))
    else:  # no names, as in Liger: what autograd does not keep is freed before the down projection
        out = self.down_proj(_Gated.apply(self.gate_proj(x), self.up_proj(x)))
    return out


class _Gated(torch.autograd.Function):
    """activation(gate) * up; the gradients overwrite the saved inputs."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        gate, up = gate.contiguous(), up.contiguous()
        out = torch.empty_like(gate)
        record_pass("liger_gated", [gate, up], [out])
        ctx.save_for_backward(gate, up)
        return out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        record_pass("liger_gated_backward", [d_out.contiguous(), gate, up], [gate, up])
        return gate.view(gate.shape), up.view(up.shape)


def _rotate(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out: tuple[torch.Tensor, torch.Tensor] = _Rope.apply(q, k, cos, sin)
    return out


class _Rope(torch.autograd.Function):
    """Rotate queries and keys in place where they are contiguous."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        record_pass("liger_rope", [q, k, cos, sin], [q, k])
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        dq, dk = dq.transpose(1, 2).contiguous(), dk.transpose(1, 2).contiguous()
        record_pass("liger_rope_backward", [dq, dk, cos, sin], [dq, dk])
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None
