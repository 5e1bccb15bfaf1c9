"""The products of a LoRA layer on a GPU: the update added to the base product, or the base product to it.

    python benchmarks/lora_linear/measure.py >results/h200.jsonl

Layers of Llama-3.1-8B, two of them stacked as well; 8,192 tokens, rank 16, bf16; milliseconds. `update_last`:
y = x W^T, then y += u B^T, which reads and writes y once more. `update_first`: y = u B^T, then y += x W^T,
whose product reads y while it computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch

TOKENS, RANK = 8192, 16
SHAPES = ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (4096, 6144), (4096, 28672))


def milliseconds(action: Callable[[], object], *, times: int = 30) -> float:
    for _ in range(5):
        action()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        action()
    end.record()
    torch.cuda.synchronize()
    return round(start.elapsed_time(end) / times, 4)


def layer(inputs: int, outputs: int) -> dict[str, float]:
    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, dy, reduced = values(TOKENS, inputs), values(TOKENS, outputs), values(TOKENS, RANK)
    w, a, b = values(outputs, inputs) * 0.02, values(RANK, inputs) * 0.02, values(outputs, RANK) * 0.02
    actions: dict[str, Callable[[], object]] = {
        "forward_base": lambda: torch.mm(x, w.t()),
        "forward_update_last": lambda: torch.mm(x, w.t()).addmm_(reduced, b.t()),
        "forward_update_first": lambda: torch.mm(reduced, b.t()).addmm_(x, w.t()),
        "backward_base": lambda: torch.mm(dy, w),
        "backward_update_last": lambda: torch.mm(dy, w).addmm_(reduced, a),
        "backward_update_first": lambda: torch.mm(reduced, a).addmm_(dy, w),
        "x_a": lambda: torch.mm(x, a.t()),
        "dy_b": lambda: torch.mm(dy, b),
        "d_a": lambda: torch.mm(reduced.t(), x),
        "d_b": lambda: torch.mm(dy.t(), reduced),
    }
    return {name: milliseconds(action) for name, action in actions.items()}


def main() -> None:
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": torch.cuda.get_device_name()}
    for inputs, outputs in SHAPES:
        print(
            json.dumps({"inputs": inputs, "outputs": outputs, **layer(inputs, outputs), **versions}),
            flush=True,
        )


if __name__ == "__main__":
    main()
