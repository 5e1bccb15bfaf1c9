"""Attention over packed rows: torch's flash attention 2 and flash attention 4, on one Hopper GPU.

    python benchmarks/attention/kernels.py --out benchmarks/attention/results/h200.jsonl

Forward and backward pass of 8192 tokens in bf16, each as a CUDA graph, so that the host does not count. FLOPs
are those that the mask leaves, 2.5 times as many in the backward pass. `differs`: norm of the difference of
output, dq, dk and dv over the norm of torch's.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from shardwise.kernels import attention
from shardwise.kernels.flash4 import flash4_attention

TOKENS, REPEATS = 8192, 20
CASES: list[tuple[int, int, int, int, int]] = [
    *((32, 8, 128, 0, length) for length in (4096, 2048, 1024, 512, 256, 40)),
    *((32, 32, 128, 0, length) for length in (2048, 512)),
    *((32, 8, 64, 0, length) for length in (4096, 2048, 512)),
    (32, 32, 96, 0, 2048),
    (16, 16, 192, 0, 2048),
    (8, 4, 256, 0, 2048),
    (8, 4, 256, 512, 2048),
    (32, 8, 128, 512, 4096),
    (32, 8, 128, 2048, 4096),
]
"""Heads, key-value heads, size of a head, window, and tokens of a document."""


def flash2(
    q: Tensor, k: Tensor, v: Tensor, borders: Tensor, longest: int, scale: float, window: tuple[int, int]
) -> Tensor:
    options = {"enable_gqa": q.shape[1] != k.shape[1]} if attention._wants_gqa_flag() else {}
    return varlen_attn(
        q, k, v, borders, borders, longest, longest, scale=scale, window_size=window, **options
    )


def flash4(*given: Any) -> Tensor:
    return flash4_attention(*given)[0]


def measure(heads: int, key_heads: int, head: int, window: int, length: int) -> list[dict[str, Any]]:
    """A row for each kernel."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    lengths = [length] * (TOKENS // length)
    tokens = sum(lengths)
    given = [normal(n, tokens, head).transpose(0, 1).requires_grad_() for n in (heads, key_heads, key_heads)]
    upstream = normal(tokens, heads, head)
    borders = torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)
    options = borders, length, head**-0.5, (window - 1, 0)
    seen = min(window or length, length)
    flops = 4.0 * heads * head * sum(seen * (seen + 1) / 2 + (one - seen) * seen for one in lengths)
    rows, results = [], []
    for kernel in (flash2, flash4):
        forward, both, result = _graphs(partial(kernel, *given, *options), given, upstream)
        results.append(result)
        backward = both - forward
        shape = {"heads": heads, "key_heads": key_heads, "head": head, "window": window}
        documents = {"documents": len(lengths), "document_tokens": length}
        seconds = {"forward_us": round(forward, 1), "backward_us": round(backward, 1)}
        rates = {"forward": flops / forward, "backward": 2.5 * flops / backward}
        tflops = {f"{name}_tflops": round(rate / 1e6) for name, rate in rates.items()}
        rows.append({"kernel": kernel.__name__, **shape, **documents, **seconds, **tflops})
    rows[1]["differs"] = [float(f"{_differs(new, old):.1e}") for old, new in zip(*results, strict=True)]
    return rows


def _graphs(
    attend: Callable[[], Tensor], given: Sequence[Tensor], upstream: Tensor
) -> tuple[float, float, list[Tensor]]:
    """Microseconds of the forward pass and of both, and the result with the gradients."""
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            out = attend()
            gradients = torch.autograd.grad(out, given, upstream)
    torch.cuda.synchronize()
    result = [out.detach(), *gradients]
    forward, both = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        attend()
    with torch.cuda.graph(both):
        torch.autograd.grad(attend(), given, upstream)
    return _microseconds(forward), _microseconds(both), result


def _microseconds(graph: torch.cuda.CUDAGraph) -> float:
    for _ in range(3):
        graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS * 1e3


def _differs(new: Tensor, old: Tensor) -> float:
    return float((new.double() - old.double()).norm() / old.double().norm())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    versions = {name: version(name) for name in ("torch", "flash-attn-4", "nvidia-cutlass-dsl")}
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "versions": versions,
    }
    with out.open("w") as file:
        for line in itertools.chain([about], *(measure(*case) for case in CASES)):
            print(json.dumps(line), file=file, flush=True)
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
