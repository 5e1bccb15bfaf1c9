"""What a linear layer under ZeRO-3 costs the host: DeepSpeed's, shardwise's and torch's own, on tiny tensors.

    python benchmarks/deepspeed_host/linear.py --out results/linear.json

No GPU is needed: the arithmetic is next to nothing. Each time is the median of the rounds, which take turns.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap

from shardwise.engines.deepspeed.runtime.zero3 import _linear

WAYS = {"deepspeed": zero3_linear_wrap, "shardwise": _linear, "torch": torch.nn.functional.linear}
ROUNDS, CALLS = 15, 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    x = torch.randn(1, 2, 8, requires_grad=True)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(ROUNDS):
        for name, linear in WAYS.items():
            found[name].append(measured(linear, x, weight))
    medians = {
        name: [statistics.median(part) for part in zip(*rounds, strict=True)]
        for name, rounds in found.items()
    }
    result = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"torch": torch.__version__, "deepspeed": deepspeed.__version__},
        "processor": platform.processor() or platform.machine(),
        "microseconds": {
            name: dict(zip(("forward", "backward"), part, strict=True)) for name, part in medians.items()
        },
    }
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result["microseconds"]))


def measured(linear: Any, x: torch.Tensor, weight: torch.Tensor) -> list[float]:
    """Microseconds of a forward call, and of a backward pass through it."""
    begin = time.perf_counter()
    outputs = [linear(x, weight) for _ in range(CALLS)]
    middle = time.perf_counter()
    gradient = torch.ones_like(outputs[0])
    for output in outputs:
        output.backward(gradient)
    end = time.perf_counter()
    return [round(1e6 * seconds / CALLS, 1) for seconds in (middle - begin, end - middle)]


if __name__ == "__main__":
    main()
