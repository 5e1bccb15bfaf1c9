"""What it costs to know the block of a backward pass: `train.oom.FailureLocation` on and off, on one core.

    python benchmarks/out_of_memory/hook_cost.py --out benchmarks/out_of_memory/results/hook-cost.json

Blocks have one tiny operation, so that nearly all of the time is Python's and autograd's. Times are CPU
seconds of this process. On and off take turns; the smallest of each counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path

import torch
from torch import nn

from shardwise.training.oom import FailureLocation

BLOCKS = 32
MICRO_BATCHES = 50
TURNS = 40


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(BLOCKS))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden.sum()


def cpu_seconds(model: nn.Module) -> float:
    """CPU seconds of one micro-batch, forward and backward."""
    row = torch.ones(1, 8)
    began = time.process_time()
    for _ in range(MICRO_BATCHES):
        model(row).backward()
    return (time.process_time() - began) / MICRO_BATCHES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    off, on = Model(), Model()
    FailureLocation(on, list(on.layers))
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(TURNS):
        seconds["off"].append(cpu_seconds(off))
        seconds["on"].append(cpu_seconds(on))
    least = {name: min(values) for name, values in seconds.items()}
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blocks": BLOCKS,
        "cpu_seconds_per_micro_batch": least,
        "microseconds_per_block_and_micro_batch": 1e6 * (least["on"] - least["off"]) / BLOCKS,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
