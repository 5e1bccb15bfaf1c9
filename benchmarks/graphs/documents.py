"""Fine-tune on real documents with several trees of the source, one after the other on the same GPU.

    python benchmarks/graphs/documents.py FOLDER --out OUT --source now=src --source before=../before/src

FOLDER has alpaca_en_demo.json and c4_demo.jsonl. A line of JSON is written for each run of `shardwise train`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "accuracy"))

from assets import Assets
from rows import Row
from run import describe_machine

from shardwise.record.read import read_events

ALL = "all weights"
CASES = (
    ("llama-3.2-1b", "alpaca_en_demo.json", "none", 1024, 4, 2),
    ("llama-3.2-1b", "alpaca_en_demo.json", "nf4", 1024, 4, 2),
    ("gemma-2-2b", "alpaca_en_demo.json", "none", 1024, 2, 2),
    ("llama-3.2-1b", "c4_demo.jsonl", "none", 2048, 4, 1),
    ("smollm2-135m", "alpaca_en_demo.json", ALL, 1024, 8, 1),
    ("gemma-3-270m", "alpaca_en_demo.json", ALL, 1024, 4, 1),
)
"""Model, documents, quantisation with LoRA 16 or ALL, length of a row, rows and number of micro-batches."""
STEPS, EVERY = 60, 20


def model(name: str, assets: Assets) -> Path:
    """A folder with random weights and our tokenizer."""
    folder = assets.source(Row(model=name))
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        with torch.device("cuda"):
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        made.save_pretrained(folder, max_shard_size="20GB")
    return folder.resolve()


def job(source: Path, data: Path, case: tuple[Any, ...], output: Path) -> dict[str, Any]:
    _, _, method, length, rows, accumulation = case
    adapters = {} if method == ALL else {"lora": {"rank": 16}, "quantization": method}
    return {
        "name": "run",
        "output": str(output),
        "model": {"source": str(source), **adapters},
        "data": {"train": str(data), "sequence_length": length, "eval_fraction": 0.05},
        "train": {
            "precision": "bf16",
            "micro_batch": rows,
            "global_batch": rows * accumulation,
            "steps": STEPS,
            "eval_every": EVERY,
            "save_every": 0,
        },
        "strategy": {"engine": "single"},
    }


def run(spec: dict[str, Any], code: str) -> dict[str, Any]:
    """One training, measured by its own events."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps({**spec, "output": f"{folder}/runs"}), encoding="utf-8")
        path = os.pathsep.join([code, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
        done = subprocess.run(
            [sys.executable, "-m", "shardwise", "train", str(file)],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            return {"error": done.stderr[-2000:]}
        events = read_events(next(Path(folder).rglob("events.jsonl")))
    steps = [event for event in events if event["kind"] == "step"]
    seconds = [round(step["seconds"], 4) for step in steps]
    return {
        "error": None,
        "step_seconds": statistics.median(seconds),
        "all_seconds": round(sum(seconds), 2),
        "step_seconds_all": seconds,
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "eval_loss": [event["loss"] for event in events if event["kind"] == "eval"],
        "peak_reserved_bytes": max(step["peak_memory_reserved_bytes"][0] for step in steps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fine-tune on real documents with several trees of the source"
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--only", default="", metavar="METHOD", help="cases of this quantisation, or ALL's")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    sources = [source.split("=", 1) for source in arguments.source]
    machine = {**describe_machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    with tempfile.TemporaryDirectory() as folder, arguments.out.open("a", encoding="utf-8") as out:
        assets = Assets(Path(folder), [arguments.folder / "c4_demo.jsonl"])
        for case in (case for case in CASES if arguments.only in case[2]):
            source, data = model(case[0], assets), (arguments.folder / case[1]).resolve()
            for name, code in sources:
                found = run(job(source, data, case, Path(folder)), str(Path(code).resolve()))
                out.write(json.dumps({"case": case, "source": name, **found, **machine}) + "\n")
                out.flush()
                print(
                    *case,
                    name,
                    found.get("step_seconds"),
                    found.get("all_seconds"),
                    found["error"],
                    flush=True,
                )


if __name__ == "__main__":
    main()
