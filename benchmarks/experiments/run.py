"""The three experiments of a first course on DeepSpeed: a plain loop, a sweep, memory over the run.

    python benchmarks/experiments/run.py                                   # a small model, on this CPU
    python benchmarks/experiments/run.py --gpu --out experiments.jsonl     # 1.1B and Llama-2-7B, on one GPU
    python benchmarks/experiments/run.py --only sweep --full               # all 36 points of the sweep

A line of JSON is written as soon as a row is done. Rows that OUT has already are skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments import EXPERIMENTS, Rows, sweep
from programs import Place, run, summary

from shardwise.hardware.detect import detect_hardware

COMPILE_SECONDS = 300.0
COMPILE = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"


def main() -> None:
    arguments = parse()
    hardware = detect_hardware() if arguments.gpu else None
    if arguments.gpu and hardware is None:
        sys.exit("there is no GPU here; without --gpu a small model runs on the CPU")
    if not arguments.gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    deadline = time.monotonic() + arguments.budget
    building = compile_operator()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    done = finished(arguments.out)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="experiments-") as temporary:
        os.environ.setdefault("SHARDWISE_CACHE", f"{temporary}/cache")
        folder = arguments.folder or Path(temporary)
        place = Place(folder=folder.absolute(), gpu=hardware.gpu.name if hardware else "")
        for experiment in arguments.only or EXPERIMENTS:
            for setting, program in rows_of(experiment, arguments):
                name = (experiment, f"{setting.name}, {program.name}")
                if name in done:
                    continue
                if time.monotonic() > deadline:
                    print(f"the time is over before {name}", file=sys.stderr)
                    sys.exit(1)
                if "offload_optimizer" in (program.strategy or {}):
                    building.wait(COMPILE_SECONDS)  # where it fails, so will the row, with the reason
                row = run(experiment, setting, program, place)
                with arguments.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                print(f"{experiment}: {summary(row)}", flush=True)
                failed += row["measured"] is None
    if failed:
        sys.exit(f"{failed} rows have no measurement; OUT has their errors")


def rows_of(experiment: str, arguments: argparse.Namespace) -> Rows:
    if experiment == "sweep":
        return sweep(arguments.gpu, full=arguments.full)
    return EXPERIMENTS[experiment](arguments.gpu)


def compile_operator() -> subprocess.Popen[bytes]:
    """Compile DeepSpeed's optimizer for the host, meanwhile: rows that offload use it."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja is there
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE],
        env={**os.environ, "PATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def finished(out: Path) -> set[tuple[str, str]]:
    """(experiment, row) of the rows that were measured already."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    rows = [json.loads(line) for line in lines]
    return {(row["experiment"], row["row"]) for row in rows if row["measured"] is not None}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true", help="the presets of one large GPU")
    parser.add_argument("--out", type=Path, default=Path("experiments.jsonl"), help="lines are added to it")
    parser.add_argument("--only", choices=EXPERIMENTS, action="append", help="may be repeated")
    parser.add_argument("--full", action="store_true", help="all points of the sweep")
    parser.add_argument("--folder", type=Path, help="keep models and run folders there")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no row begins")
    return parser.parse_args()


if __name__ == "__main__":
    main()
