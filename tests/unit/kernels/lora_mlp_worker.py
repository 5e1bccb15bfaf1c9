"""Runs the kernels of the fused MLP in Triton's interpreter: `python -m lora_mlp_worker`, errors as JSON."""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"  # before torch imports Triton

import torch
from triton_worker import error

from shardwise.kernels import lora_mlp_triton
from shardwise.kernels.lora_mlp import lora_gated, lora_gated_backward

CASES = {
    # tokens, width, rank of gate and up, rank of down, GELU, dtype
    "silu": (70, 150, 16, 16, False, torch.float32),
    "gelu": (70, 150, 16, 16, True, torch.float32),
    "one token": (1, 8, 1, 3, False, torch.float32),
    "blocks of a rank": (65, 129, 72, 8, False, torch.float32),
    "other ranks": (64, 128, 3, 65, True, torch.float32),
    "bf16": (70, 150, 8, 16, False, torch.bfloat16),
}


def case(tokens, width, rank, rank_down, gelu, dtype) -> dict[str, float]:
    random = torch.Generator().manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    gate, up, dh = values(tokens, width), values(tokens, width), values(tokens, width)
    inputs = [values(tokens, 2 * rank), values(width, rank), values(width, rank)]
    further = [values(tokens, rank_down), values(rank_down, width)]
    out = lora_mlp_triton.forward(gate, up, *inputs, gelu)
    exact = [t.double() for t in (gate, up, dh, *inputs, *further)]
    expected = lora_gated(*exact[:2], *exact[3:6], gelu)
    lora_mlp_triton.backward(gate, up, dh, *inputs, *further, gelu)
    lora_gated_backward(*exact, gelu)
    found = {
        "out": (out, expected),
        "d gate": (gate, exact[0]),
        "d up": (up, exact[1]),
        "hidden": (dh, exact[2]),
    }
    return {name: error(*pair) for name, pair in found.items()}


if __name__ == "__main__":
    print(json.dumps({name: case(*sizes) for name, sizes in CASES.items()}))
