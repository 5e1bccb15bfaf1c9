"""Shared by every row of the benchmark: the text, the clock, and the final line of JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import statistics
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "deepspeed",
    "unsloth", "llamafactory", "xformers", "bitsandbytes", "flash-attn-4",
)  # fmt: skip


def documents(assets: Path) -> list[str]:
    """The benchmark's text, one document per item."""
    # not splitlines: it also splits at the line separators that are part of a document
    lines = (assets / "text.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line)["text"] for line in lines if line]


def packed_rows(assets: Path, length: int, count: int, *, seed: int = 0) -> torch.Tensor:
    """int64 [count, length]: documents one after the other, each with its end-of-text token; no padding."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    texts = documents(assets)
    order = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length * count:
        order.shuffle(texts)
        for ids in tokenizer(texts)["input_ids"]:
            tokens += [*ids, tokenizer.eos_token_id]
    return torch.tensor(tokens[: length * count]).view(count, length)


class Clock:
    """Marks the end of each step on the GPU's own time line, without a wait."""

    def __init__(self) -> None:
        self.marks: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds of each step from the second on; the first mark is the start of the count."""
        torch.cuda.synchronize()
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [start.elapsed_time(stop) / 1000 for start, stop in pairs]


def row(
    name: str, seconds: list[float], tokens: list[int], *, warmup: int, gpus: int, **more: Any
) -> dict[str, Any]:
    """One result: steps `warmup` and later count; `tokens` are those of all GPUs, per step."""
    steady, counted = seconds[warmup:], tokens[warmup : len(seconds)]
    return {
        "row": name,
        "gpus": gpus,
        "tokens_per_second_per_gpu": round(sum(counted) / sum(steady) / gpus, 1),
        "step_seconds_median": round(statistics.median(steady), 4),
        "step_seconds_range": [round(min(steady), 4), round(max(steady), 4)],
        "tokens_per_step": round(sum(counted) / len(steady)),
        "step_seconds": [round(value, 4) for value in seconds],
        "steady_steps": len(steady),
        "warmup_steps": warmup,
        **more,
    }


def peak_memory() -> dict[str, float]:
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["python"] = sys.version.split()[0]
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "versions": versions,
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def emit(result: dict[str, Any]) -> None:
    """Print the row, with the machine it ran on, as one line of JSON: the last line on stdout."""
    print(json.dumps({**result, "environment": environment()}), flush=True)
