"""A gated MLP with LoRA on its three layers, in one autograd node.

    gate = x Wg^T + s (x Ag^T) Bg^T,  up = x Wu^T + s (x Au^T) Bu^T
    hidden = act(gate) * up
    y = hidden Wd^T + s (hidden Ad^T) Bd^T

The updates of gate and up, and that of hidden's gradient, are products with a rank of a few columns. A kernel
of the activation computes them itself, from a few values a row: they are never written, and `hidden` is
computed again in the backward pass instead of being kept. Per token, 6 (width of the MLP) fewer values are
moved than by three layers of `lora_linear` and an activation, and one width less is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels.lora_linear import Parts, is_fused, parts_of, scaled
from shardwise.kernels.target import run_on_cuda

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_ROOT, _CUBIC = math.sqrt(2.0 / math.pi), 0.044715  # of GELU's tanh approximation


def fuse_lora_mlps(model: nn.Module, *, gelu: bool) -> int:
    """Give every gated MLP of plain LoRA layers the fused forward, after `fuse_lora`; return how many.

    `gelu`: the activation is GELU's tanh approximation, else SiLU. A call goes to the forward that the module
    has now where a layer has a bias, gate and up differ in rank, or `parts_of` a layer is None.
    """
    found = [m for m in model.modules() if all(is_fused(m._modules.get(name)) for name in _LAYERS)]
    for module in found:
        module.forward = partial(_forward, module, gelu, module.forward)
    return len(found)


def _forward(module: nn.Module, gelu: bool, otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    layers = _layers(module, x.dtype)
    if layers is None:
        return otherwise(x)
    gate, up, down = layers
    matrices = gate.a, gate.b, up.a, up.b, down.a, down.b
    how = gelu, (gate.scaling, down.scaling), [part.unpack for part in layers]
    stored = *gate.stored, *up.stored, *down.stored
    counts = [len(part.stored) for part in layers]
    return LoraMlp.apply(x, *matrices, *how, counts, *stored).view(x.shape)  # type: ignore[no-any-return]


def _layers(module: nn.Module, dtype: torch.dtype) -> tuple[Parts, Parts, Parts] | None:
    """What gate, up and down compute with, where they fit each other."""
    gate, up, down = (parts_of(getattr(module, name), dtype) for name in _LAYERS)
    if gate is None or up is None or down is None:
        return None
    plain = gate.bias is None and up.bias is None and down.bias is None
    alike = gate.a.shape == up.a.shape and gate.scaling == up.scaling
    return (gate, up, down) if plain and alike else None


class LoraMlp(torch.autograd.Function):
    """x [..., I] to y [tokens, I]; A [R, in], B [out, R] of gate, up and down, then their stored weights.

    Saves x, gate and up without their updates, s x A^T and the stored weights. The backward pass overwrites
    gate and up, as Liger's activations do.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, a_gate: Tensor, b_gate: Tensor, a_up: Tensor, b_up: Tensor, a_down: Tensor,
        b_down: Tensor, gelu: bool, scalings: tuple[float, float], unpack: list[Any], counts: list[int],
        *stored: Tensor,
    ) -> Tensor:  # fmt: skip
        rows = x.reshape(-1, x.shape[-1])
        w_gate, w_up, w_down = _split(stored, counts)
        reduced = scaled(rows, torch.cat([a_gate, a_up]).t(), scalings[0])
        gate = torch.mm(rows, unpack[0](*w_gate).t())
        up = torch.mm(rows, unpack[1](*w_up).t())
        hidden = lora_gated(gate, up, reduced, b_gate, b_up, gelu)
        reduced_down = scaled(hidden, a_down.t(), scalings[1])
        y = torch.mm(reduced_down, b_down.t()).addmm_(hidden, unpack[2](*w_down).t())
        matrices = a_gate, b_gate, a_up, b_up, a_down, b_down
        ctx.save_for_backward(rows, gate, up, reduced, reduced_down, *matrices, *stored)
        ctx.how, ctx.shape = (gelu, scalings, unpack, counts), x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        rows, gate, up, reduced, reduced_down, *others = ctx.saved_tensors
        a_gate, b_gate, a_up, b_up, a_down, b_down, *stored = others
        gelu, scalings, unpack, counts = ctx.how
        w_gate, w_up, w_down = _split(stored, counts)
        dy, rank = grad_y.reshape(-1, grad_y.shape[-1]), b_gate.shape[1]
        d_reduced = scaled(dy, b_down, scalings[1])
        hidden = torch.mm(dy, unpack[2](*w_down))  # its gradient, without the update's part
        lora_gated_backward(gate, up, hidden, reduced, b_gate, b_up, d_reduced, a_down, gelu)
        da_down, db_down = torch.mm(d_reduced.t(), hidden), torch.mm(dy.t(), reduced_down)
        del hidden
        d_both = torch.cat([scaled(gate, b_gate, scalings[0]), scaled(up, b_up, scalings[0])], dim=1)
        db_gate, db_up = torch.mm(gate.t(), reduced[:, :rank]), torch.mm(up.t(), reduced[:, rank:])
        da = torch.mm(d_both.t(), rows)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(d_both, torch.cat([a_gate, a_up])).addmm_(gate, unpack[0](*w_gate))
            dx = dx.addmm_(up, unpack[1](*w_up)).view(ctx.shape)
        adapters = da[:rank].clone(), db_gate, da[rank:].clone(), db_up, da_down, db_down
        return dx, *adapters, None, None, None, None, *(None for _ in stored)


def _split(stored: Any, counts: list[int]) -> tuple[Any, Any, Any]:
    first, second = counts[0], counts[0] + counts[1]
    return stored[:first], stored[first:second], stored[second:]


def _completed(base: Tensor, reduced: Tensor, matrix: Tensor) -> Tensor:
    dtype = torch.promote_types(base.dtype, torch.float32)
    return base.to(dtype) + reduced.to(dtype) @ matrix.to(dtype)


def _activation(gate: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Its values and slopes."""
    if gelu:
        half = torch.sigmoid(2.0 * _ROOT * (gate + _CUBIC * gate**3))
        inner = _ROOT * (1.0 + 3.0 * _CUBIC * gate**2)
        return gate * half, half + 2.0 * gate * half * (1.0 - half) * inner
    sigmoid = torch.sigmoid(gate)
    return gate * sigmoid, sigmoid * (1.0 + gate * (1.0 - sigmoid))


@torch.library.custom_op("shardwise::lora_gated", mutates_args=(), device_types="cpu")
def lora_gated(gate: Tensor, up: Tensor, reduced: Tensor, b_gate: Tensor, b_up: Tensor, gelu: bool) -> Tensor:
    """act(gate + reduced[:, :R] b_gate^T) * (up + reduced[:, R:] b_up^T), rounded once.

    `gate`, `up` and the result are [T, H], `reduced` [T, 2 R], `b_gate` and `b_up` [H, R], all contiguous and
    of one format. Sums are in fp32, or fp64 for fp64.
    """
    rank = b_gate.shape[1]
    gate_full = _completed(gate, reduced[:, :rank], b_gate.t())
    up_full = _completed(up, reduced[:, rank:], b_up.t())
    return (_activation(gate_full, gelu)[0] * up_full).to(gate.dtype)


@torch.library.custom_op(
    "shardwise::lora_gated_backward", mutates_args=("gate", "up", "hidden"), device_types="cpu"
)
def lora_gated_backward(
    gate: Tensor, up: Tensor, hidden: Tensor, reduced: Tensor, b_gate: Tensor, b_up: Tensor,
    d_reduced: Tensor, a_down: Tensor, gelu: bool,
) -> None:  # fmt: skip
    """Gradients of `lora_gated`, in place.

    `hidden` has the gradient of the result without the update's part, d_reduced a_down ([T, R] x [R, H]), and
    receives the result itself. `gate` and `up` receive the gradients of both with their updates.
    """
    rank = b_gate.shape[1]
    gate_full = _completed(gate, reduced[:, :rank], b_gate.t())
    up_full = _completed(up, reduced[:, rank:], b_up.t())
    value, slope = _activation(gate_full, gelu)
    total = _completed(hidden, d_reduced, a_down)
    hidden.copy_(value * up_full)
    gate.copy_(total * up_full * slope)
    up.copy_(total * value)


run_on_cuda(lora_gated, "lora_mlp_triton", "forward")
run_on_cuda(lora_gated_backward, "lora_mlp_triton", "backward")
lora_gated.register_fake(lambda gate, *_: torch.empty_like(gate))
lora_gated_backward.register_fake(lambda *_: None)
