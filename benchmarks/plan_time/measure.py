"""How long `shardwise plan` takes: the first time, and again.

    python benchmarks/plan_time/measure.py [--runs 3] [--match REGEX] [--out FILE]

Needs no GPU and no network. Each run is a new process; a cold one finds an empty cache folder
(SHARDWISE_CACHE). The first run does not count: after an installation Python compiles what it imports. Linux
only, because of the memory of all processes together.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROWS = {
    "8B on 8xH100": ["--gpus", "8xH100", "--model", "meta-llama/Llama-3.1-8B"],
    "8B LoRA on 4x24GB": ["--gpus", "4x24GB", "--model", "meta-llama/Llama-3.1-8B", "--lora", "16"],
    "70B on 64x8xH100": ["--gpus", "64x8xH100", "--model", "meta-llama/Llama-3.1-70B"],
    "70B on 64x8xH100, 2048 rows": [
        *("--gpus", "64x8xH100", "--model", "meta-llama/Llama-3.1-70B"),
        *("--global-batch", "2048"),
    ],
    "7B on 128x8xH100": ["--gpus", "128x8xH100", "--model", "meta-llama/Llama-2-7b-hf"],
    "70B on 128x8xH100": ["--gpus", "128x8xH100", "--model", "meta-llama/Llama-3.1-70B"],
}
SAMPLE_SECONDS = 0.1
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""Python keeps what it compiles, as by default. Where a machine forbids it, and pip has not compiled what it
installed either, each process compiles torch and transformers again: 5 CPU seconds."""


def run(arguments: list[str], cache: str, plan: Path) -> dict[str, float]:
    """One process: seconds, CPU seconds of all cores, and the peak memory of all its processes together."""
    command = [sys.executable, "-m", "shardwise", "plan", *arguments, "--out", str(plan)]
    load = os.getloadavg()[0]
    begin = time.perf_counter()
    process = subprocess.Popen(
        command,
        env={**os.environ, "SHARDWISE_CACHE": cache, **COMPILED},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    most, ended = [0], threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, most, ended), daemon=True)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    ended.set()
    watcher.join()
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return {
        "wall_seconds": round(seconds, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_memory_mib": most[0] >> 20,
        "load_before": round(load, 2),
    }


def _watch(session: int, most: list[int], ended: threading.Event) -> None:
    while not ended.wait(SAMPLE_SECONDS):
        most[0] = max(most[0], _session_bytes(session))


def _session_bytes(session: int) -> int:
    """Resident bytes of all processes of a session; pages that they share count for each."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):  # it has just ended
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                total += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return total


def measure(name: str, runs: int) -> list[dict[str, Any]]:
    """A job's rows: cold, and kept, which uses the cache of the last cold run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        caches = [tempfile.mkdtemp(dir=folder) for _ in range(runs)]
        cold = [run(ROWS[name], cache, plan) for cache in caches]
        strategies = _strategies(json.loads(plan.read_text(encoding="utf-8")))
        kept = [run(ROWS[name], caches[-1], plan) for _ in range(runs)]
    for what, found in (("cold", cold), ("kept", kept)):
        rows.append(
            {
                "row": f"{name}, {what}",
                "command": " ".join(["shardwise", "plan", *ROWS[name]]),
                "strategies": strategies,
                "median_wall_seconds": statistics.median(one["wall_seconds"] for one in found),
                "runs": found,
            }
        )
    return rows


def _strategies(plan: dict[str, Any]) -> dict[str, int]:
    """Number of simulated strategies, and of those skipped because a leaner one does not fit."""
    simulated = len(plan["alternatives"]) + (plan["chosen"] is not None)
    return {"simulated": simulated, "skipped": len(plan["skipped"])}


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds of shardwise plan")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--match", default="", metavar="REGEX", help="jobs whose name matches")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{os.cpu_count()}-cores.json")
    arguments = parser.parse_args()
    names = [name for name in ROWS if re.search(arguments.match, name)]
    with tempfile.TemporaryDirectory() as cache:
        run(ROWS[names[0]], cache, Path(cache) / "plan.json")
    rows = []
    for name in names:
        rows += measure(name, arguments.runs)
        for row in rows[-2:]:
            print(f"{row['row']:40} {row['median_wall_seconds']:6.2f} s  {row['strategies']}", flush=True)
    result = {
        "schema": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "peft")},
        },
        "rows": rows,
    }
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(f"{json.dumps(result, indent=1)}\n", encoding="utf-8")


def _cpu() -> str:
    with suppress(OSError):
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if found:
            return found[1]
    return platform.processor()


if __name__ == "__main__":
    main()
