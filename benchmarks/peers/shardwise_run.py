"""A run of `shardwise train` on the same text, read from its run folder.

    python shardwise_run.py --assets assets/8b --lora 16 --strategy single
    python shardwise_run.py --assets assets/7b --processes 4 --strategy zero2 --micro-batch 2 --sequence 2048

The run is ended after enough steps: its last checkpoint would only measure the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from common import emit, row

from shardwise.job.schema import Job
from shardwise.kernels.flash4 import installed
from shardwise.launch.spec import LaunchSpec

LAUNCH = """
import json, sys
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec
sys.exit(launch(LaunchSpec.from_json(json.load(open(sys.argv[1])))))
"""


def job(arguments: argparse.Namespace, output: Path) -> dict[str, Any]:
    model: dict[str, Any] = {"source": str(arguments.assets / "model"), "weights": "random"}
    if arguments.lora:
        model["lora"] = {"rank": arguments.lora, "alpha": 2.0 * arguments.lora, "targets": "all-linear"}
    if arguments.nf4:
        model["quantization"] = "nf4"
    return {
        "name": "throughput",
        "output": str(output),
        "model": model,
        "data": {
            "train": str(arguments.assets / "text.jsonl"),
            "format": "text",
            "sequence_length": arguments.sequence,
            "eval_fraction": 0.0,
        },
        "optimizer": {"learning_rate": arguments.learning_rate, "schedule": "constant", "warmup_steps": 0},
        "train": {
            "steps": 100_000,
            "global_batch": arguments.micro_batch * arguments.processes,
            "micro_batch": arguments.micro_batch,
            "checkpointing": arguments.checkpointing,
            "eval_every": 0,
            "save_every": 0,
            "worst_case_first": False,
        },
        "strategy": json.loads(arguments.strategy) if "{" in arguments.strategy else arguments.strategy,
        "tracking": [],
    }


def read_steps(run: Path) -> list[dict[str, Any]]:
    """The step events written so far; a line still being written is left for later."""
    events = run / "events.jsonl"
    lines = events.read_text(encoding="utf-8").split("\n")[:-1] if events.exists() else []
    return [event for event in map(json.loads, lines) if event["kind"] == "step"]


def train(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Run until there are enough steps, then end the run with all its processes."""
    run = folder / "runs" / "throughput"
    spec = LaunchSpec(
        job=Job.model_validate(job(arguments, folder / "runs")).model_dump(mode="json"),
        run_dir=str(run),
        processes=arguments.processes,
        memory_cap_bytes=int(arguments.memory_cap * 2**30) if arguments.memory_cap else None,
    )
    path = folder / "spec.json"
    path.write_text(json.dumps(spec.to_json()), encoding="utf-8")
    # Not `shardwise train`: it refuses adapters on random weights, which nobody could load again.
    command = [sys.executable, "-c", LAUNCH, str(path)]
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        while process.poll() is None and len(read_steps(run)) < arguments.steps:
            time.sleep(0.5)
        steps = read_steps(run)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if len(steps) < arguments.steps:
        sys.exit(f"the run ended with exit code {process.returncode} after {len(steps)} steps")
    if arguments.keep:
        shutil.copytree(run, arguments.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("checkpoints"))
    return steps[: arguments.steps]


def parse(description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--strategy", default="single", help="as in a job; its parts as JSON")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--lora", type=int, default=0, help="rank; 0 trains all weights")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--checkpointing", type=yaml.safe_load, default="none", help="as in a job")
    parser.add_argument("--nf4", action="store_true", help="the base in NF4")
    parser.add_argument("--memory-cap", type=float, help="GiB of each GPU that its process may use")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--keep", type=Path, help="copy the run folder there")
    return parser.parse_args()


def main() -> None:
    arguments = parse(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        steps = train(arguments, Path(folder))
    name = f"shardwise {arguments.strategy}{f' lora{arguments.lora}' if arguments.lora else ''}"
    name += " nf4" if arguments.nf4 else ""
    name += f" checkpointing {arguments.checkpointing}" if arguments.checkpointing != "none" else ""
    name += " flash4" if installed() else ""
    emit(
        row(
            name,
            [step["seconds"] for step in steps],
            [step["tokens"] for step in steps],
            warmup=arguments.warmup,
            gpus=arguments.processes,
            micro_batch=arguments.micro_batch,
            sequence_length=arguments.sequence,
            memory_cap_gib=arguments.memory_cap,
            peak_allocated_gib=gib(steps, "peak_memory_allocated_bytes"),
            peak_reserved_gib=gib(steps, "peak_memory_reserved_bytes"),
            mfu=steps[-1]["mfu"],
            loss=[step["loss"] for step in steps],
            grad_norm=[step["grad_norm"] for step in steps],
        )
    )


def gib(steps: list[dict[str, Any]], key: str) -> float:
    return round(max(max(step[key], default=0) for step in steps) / 2**30, 2)


if __name__ == "__main__":
    main()
