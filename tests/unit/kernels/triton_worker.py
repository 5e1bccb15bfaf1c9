"""Runs the Triton kernels of the mixer in Triton's interpreter: `python -m triton_worker`, errors as JSON.

The interpreter has to be chosen before Triton is imported, and torch imports it: hence a process of its own.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from shardwise.kernels import causal_conv_triton, selective_scan_backward_triton, selective_scan_triton
from shardwise.kernels.causal_conv import causal_conv_reference
from shardwise.kernels.selective_scan import selective_scan_reference


def dot(self, a, b, added, *_):
    """Triton's interpreter multiplies the bits of bf16 as integers (3.9)."""

    def values(t):
        return (t.data.astype(np.uint32) << 16).view(np.float32) if t.dtype.scalar == tl.bfloat16 else t.data

    return interpreter.TensorHandle(values(a) @ values(b) + added.data, added.dtype.scalar)


interpreter.InterpreterBuilder.create_dot = dot

CASES = {
    # rows, length, width, states, chunk (None: a row), samples begin at, dtype
    "row": (1, 18, 6, 3, None, (), torch.float32),
    "rows": (2, 7, 6, 4, None, (), torch.float32),
    "chunks": (1, 37, 6, 3, 16, (), torch.float32),
    "packed": (1, 36, 18, 3, 16, (5, 8, 16, 33), torch.float32),
    "packed rows": (2, 13, 6, 4, 8, (3,), torch.float32),
    "bf16": (2, 13, 6, 4, 8, (3,), torch.bfloat16),
}


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def where(rows: int, length: int, borders: tuple[int, ...]) -> torch.Tensor:
    found = torch.arange(length).repeat(rows, 1)
    for border in borders:
        found[:, border:] = torch.arange(length - border)
    return found.int()


def scan(rows, length, width, states, chunk, borders, dtype) -> dict[str, float]:
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    x, delta = values(rows, length, width).to(dtype), (values(rows, length, width) - 1).to(dtype)
    z = values(rows, length, 2 * width).to(dtype)[..., width:]
    a, bc, d, bias = (
        -torch.exp(values(width, states)),
        values(rows, length, 2 * states),
        values(width),
        values(width),
    )
    positions, upstream = where(rows, length, borders), values(rows, length, width).to(dtype)
    exact = {
        name: t.double().requires_grad_()
        for name, t in {"x": x, "delta": delta, "a": a, "bc": bc, "d": d, "bias": bias, "z": z}.items()
    }
    y = selective_scan_reference(*(exact[n] for n in ("x", "delta", "a", "bc", "d", "bias")), positions)
    expected = y * torch.nn.functional.silu(exact["z"])
    right = dict(zip(exact, torch.autograd.grad(expected, exact.values(), upstream.double()), strict=True))

    options = {"chunk": chunk, "block": 8}
    out, kept = selective_scan_triton.forward(x, delta, a, bc, d, z, bias, positions, **options)
    dz, dy, ddelta = torch.empty_like(z.repeat(1, 1, 2))[..., width:], upstream.clone(), delta.clone()
    again, fine, adjoints = selective_scan_triton.replay(
        x, ddelta, a, bc, d, z, bias, positions, kept, dy, dz, **options
    )
    da, dbc, dd, dbias = selective_scan_backward_triton.backward(
        x, ddelta, a, bc, d, bias, positions, fine, adjoints, dy, chunk=chunk, block=16
    )
    found = {"x": dy, "delta": ddelta, "a": da, "bc": dbc, "d": dd, "bias": dbias, "z": dz}
    return {
        "out": error(out, expected),
        "replayed": float(not torch.equal(out, again)),
        **{name: error(found[name], right[name]) for name in found},
    }


def convolution(rows, length, width, states, chunk, borders, dtype) -> dict[str, float]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(rows, length, 2 * width, generator=random).to(dtype)[..., :width]
    weight, bias = (
        torch.randn(width, 4, generator=random).to(dtype),
        torch.randn(width, generator=random).to(dtype),
    )
    upstream, positions = (
        torch.randn(rows, length, width, generator=random).to(dtype),
        where(rows, length, borders),
    )
    exact = [t.double().requires_grad_() for t in (x, weight, bias)]
    expected = causal_conv_reference(*exact, positions)
    gx, gw, gb = torch.autograd.grad(expected, exact, upstream.double())
    blocks = {"block_t": 8, "block": 16}
    out = causal_conv_triton.forward(x, weight, bias, positions, **blocks)
    dx = torch.empty_like(x.repeat(1, 1, 2))[..., :width]
    sums = causal_conv_triton.backward(x, weight, bias, positions, upstream.clone(), dx, **blocks)
    return {
        "out": error(out, expected),
        "x": error(dx, gx),
        "weight": error(sums[:, :-1], gw),
        "bias": error(sums[:, -1], gb),
    }


if __name__ == "__main__":
    print(
        json.dumps(
            {
                f"{kind.__name__}: {name}": kind(*case)
                for name, case in CASES.items()
                for kind in (scan, convolution)
            }
        )
    )
