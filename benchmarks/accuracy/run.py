"""Measure the rows of a file on the GPUs present, as many at a time as fit.

    python benchmarks/accuracy/run.py --out measured.jsonl
    python benchmarks/accuracy/run.py --gpus 1 --match 'llama.*lora' --text c4.jsonl --out measured.jsonl

Each row runs shardwise's launcher and loop on its own GPUs and CPU cores, and ends after a few steady steps.
A line of JSON is appended as soon as a row is done; rows that the file has already are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from assets import Assets
from measure import Limits, Running
from rows import SETS, Row, load_rows

from shardwise.device.find import find
from shardwise.diagnosis.probes.ranks import host_call_seconds
from shardwise.hardware.detect import gpu_count
from shardwise.record.environment import versions
from shardwise.trials.process import end_session

HERE = Path(__file__).parent


def main() -> None:
    arguments = parse()
    rows = chosen(arguments)
    if arguments.list:
        print("\n".join(f"{row.set:8} {row.id}" for row in rows))
        return
    places: list[str] = [""] * arguments.cpu if arguments.cpu else visible_gpus()
    if not places:
        sys.exit("there is no GPU; --cpu N takes N processes on CPUs instead")
    for row in rows:
        if row.gpus > len(places):
            print(f"needs more than the {len(places)} here: {row.id}", file=sys.stderr)
    machine = describe_machine()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and so through `finally`
    with tempfile.TemporaryDirectory(prefix="accuracy-") as folder, arguments.out.open("a") as out:
        os.environ.setdefault("SHARDWISE_CACHE", f"{folder}/cache")
        assets = Assets(arguments.assets or Path(folder) / "assets", arguments.text)
        waiting = [row for row in rows if row.gpus <= len(places)]
        for result in measure_all(waiting, places, assets, arguments):
            date = datetime.now(UTC).isoformat(timespec="seconds")
            out.write(json.dumps({**result, "date": date, **machine}) + "\n")
            out.flush()
            print(summary(result), file=sys.stderr, flush=True)


def measure_all(
    waiting: list[Row], places: list[str], assets: Assets, arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Run the rows, large ones first, and yield each as it ends. Rows still running at the end are ended.

    A row that offloads runs alone: its optimizer is bound by the memory that all processors share.
    `places`: entries of CUDA_VISIBLE_DEVICES, one per GPU; empty strings for CPUs.
    """
    limits = Limits(
        warmup_steps=arguments.warmup,
        steady_steps=arguments.steps,
        steady_seconds=arguments.steady_seconds,
        row_seconds=arguments.row_seconds,
        timeout_seconds=arguments.timeout,
        profile=arguments.profile,
    )
    # Rows that need the compiled optimizer come last of their size: it is built meanwhile.
    waiting = sorted(waiting, key=lambda row: (-row.gpus, row.offloads))
    built = Build() if any(row.offloads for row in waiting) else None
    for row in waiting:
        assets.source(row), assets.text(row)  # made now, not while others run
    free = list(range(len(places)))
    running: dict[Running, list[int]] = {}
    deadline = time.monotonic() + arguments.budget if arguments.budget else math.inf
    try:
        while waiting or running:
            if time.monotonic() > deadline:
                print(f"the time is over; {len(waiting) + len(running)} rows are left", file=sys.stderr)
                return
            ready = built is None or built.ended()
            alone = any(one.row.offloads for one in running)
            fitting = (
                row
                for row in waiting
                if row.gpus <= len(free) and not alone and (not row.offloads or (ready and not running))
            )
            row = next(fitting, None)
            if row is not None:
                waiting.remove(row)
                mine, free = free[: row.gpus], free[row.gpus :]
                gpus = [places[place] for place in mine]
                cores = [core for place in mine for core in share_of_cores(place, len(places))]
                keep = arguments.keep
                started = Running(row, assets=assets, gpus=gpus, cores=cores, limits=limits, keep=keep)
                running[started] = mine
                continue
            for one in list(running):
                result = one.look()
                if result is not None:
                    free = sorted(free + running.pop(one))
                    yield result
            time.sleep(0.1)
    finally:
        for one in running:
            one.end()
        if built is not None:
            built.end()


class Build:
    """Compiles DeepSpeed's optimizer for CPUs once, before rows use it.

    A row that is ended while it compiles would leave a lock that all later ones wait for.
    """

    def __init__(self) -> None:
        code = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            # ninja is in the folder of this Python, which is not on PATH if the environment is not activated
            env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ended(self) -> bool:
        """Whether it is done or failed; after a failure the rows that need it report the reason."""
        return self._process.poll() is not None

    def end(self) -> None:
        end_session(self._process)


def share_of_cores(place: int, places: int) -> list[int]:
    """An equal, contiguous share of the cores this process may use; at least one."""
    cores = sorted(os.sched_getaffinity(0))
    first, last = place * len(cores) // places, (place + 1) * len(cores) // places
    return cores[first : max(last, first + 1)]


def visible_gpus() -> list[str]:
    """The GPUs as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(index) for index in range(gpu_count())]
    return names[: gpu_count()]


def describe_machine() -> dict[str, Any]:
    """What every row of this call has in common."""
    device, gpu = find(), {}
    if device.cards:
        card = device.cards[0]
        limit = device.read(card.uuid, "power_limit_watts")
        gpu = {
            "gpu": card.name,
            "driver": device.driver_version(),
            "gpu_memory": f"{card.memory_bytes >> 20} MiB",
            "power_limit": f"{limit:.2f} W",
        }
    return {
        **gpu,
        "versions": {"python": platform.python_version(), **versions()},
        "allocator": allocator(),
        "host_call_seconds": host_call_seconds(),
        "command": shlex.join(["python", "benchmarks/accuracy/run.py", *sys.argv[1:]]),
    }


def allocator() -> str:
    """The setting of torch's allocator that the launcher leaves or gives to the workers."""
    given = (os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return next((value for value in given if value is not None), "expandable_segments:True")


def summary(result: dict[str, Any]) -> str:
    """One line of progress."""
    name, seconds = result["id"], f"{result['row_seconds']:5.1f} s"
    if result["error"] is not None:
        return (
            f"{seconds}  {name}: {'out of memory' if result['oom'] else 'FAILED: ' + result['error'][-300:]}"
        )
    reserved, joules = result["peak_reserved_bytes"] / 2**30, result["joules_per_step"]
    return f"{seconds}  {name}: {reserved:.2f} GiB, {result['step_seconds']:.3f} s/step, {joules} J/step"


def chosen(arguments: argparse.Namespace) -> list[Row]:
    """The rows that the arguments select, without those already measured."""
    rows = load_rows(HERE / "smoke.toml" if arguments.smoke else arguments.rows)
    done: set[str] = set()
    if arguments.out.exists() and not arguments.again:
        lines = arguments.out.read_text(encoding="utf-8").splitlines()
        results = [json.loads(line) for line in lines]
        done = {result["id"] for result in results if result["error"] is None or result["oom"]}
    return [
        row
        for row in rows
        if row.id not in done
        and (not arguments.gpus or row.gpus in arguments.gpus)
        and (not arguments.set or row.set == arguments.set)
        and re.search(arguments.match, row.id)
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=Path, default=HERE / "rows.toml")
    parser.add_argument("--smoke", action="store_true", help="run a few tiny rows instead")
    parser.add_argument("--out", type=Path, default=Path("measured.jsonl"), help="lines are appended")
    parser.add_argument("--again", action="store_true", help="also run rows that OUT has already")
    parser.add_argument("--list", action="store_true", help="list the rows that would run")
    parser.add_argument("--gpus", type=int, action="append", help="rows for N GPUs; may be repeated")
    parser.add_argument("--match", default="", help="regular expression on the row's id")
    parser.add_argument("--set", choices=SETS)
    parser.add_argument("--text", type=Path, action="append", default=[], help="txt, or jsonl with `text`")
    parser.add_argument("--assets", type=Path, help="keep tokenizers and texts there")
    parser.add_argument("--cpu", type=int, metavar="N", help="N processes on CPUs instead of GPUs")
    parser.add_argument("--warmup", type=int, default=3, help="steps that do not count")
    parser.add_argument("--steps", type=int, default=5, help="minimum number of steady steps")
    parser.add_argument("--steady-seconds", type=float, default=4.0, help="minimum seconds of steady steps")
    parser.add_argument("--row-seconds", type=float, default=30.0, help="then three steady steps are enough")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds until a row counts as failed")
    parser.add_argument("--budget", type=float, help="seconds for all rows; unfinished ones are ended")
    parser.add_argument("--profile", action="store_true", help="record one step's GPU work; for idle.py")
    parser.add_argument("--keep", type=Path, help="copy run folders and logs there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
