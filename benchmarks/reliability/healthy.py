"""Whom the watcher accuses: nobody in healthy runs that are slow in many ways, in others the rank at fault.

    python benchmarks/reliability/healthy.py healthy [--repeat 3] [--at-once 3] [--out FILE]
    python benchmarks/reliability/healthy.py faults [--at-once 3] [--out FILE]

Runs of a tiny Llama on two CPU processes with gloo; tests/distributed/fault_worker.py slows or stops a rank.
Healthy runs have SHARDWISE_HANG_SECONDS=5, so that what is slow can be short: times below are in this unit.
Faults are noticed with the default of 60 s. "swaps": no memory is swapped; the rank runs 1 ms in every 5 s.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1] / "tests" / folder) for folder in ("distributed", "shared")]

from forked_command import forked_shardwise  # noqa: E402
from test_out_of_memory import write_job  # noqa: E402

UNIT, DEFAULT = 5.0, 60.0
ALWAYS = 99
STRATEGIES = ("zero2", "fsdp2")


def slow(step: int | None, units: float, rank: int = 0) -> dict[str, Any]:
    return {"rank": rank, "step": step, "do": "pause", "with": {"seconds": units * UNIT}, "times": ALWAYS}


def both(do: str, step: int = 2, **arguments: float) -> list[dict[str, Any]]:
    return [{"rank": rank, "step": step, "do": do, "with": arguments} for rank in range(2)]


HEALTHY: dict[str, dict[str, Any]] = {
    "nothing special": {},
    "the first two steps compile for 2 units": {"faults": [slow(1, 2.0), slow(2, 2.0, rank=1)]},
    "a save and an evaluation take 2 units": {"slow": 2 * UNIT},
    "data or step of one rank take 0.6 units once": {"faults": [slow(4, 0.6, rank=1)]},
    "each step takes 1.3 units": {"faults": [slow(None, 1.3)]},
    "one rank is slow by 0.5 units in each step": {"faults": [slow(None, 0.5, rank=1)]},
    "4 other processes compute on 2 cores": {"faults": both("load", processes=2)},
    "both ranks run half of the time": {"faults": both("duty", running=0.05, stopped=0.05)},
    "one rank runs a fifth of the time": {"faults": both("duty", running=0.05, stopped=0.2)[1:]},
    "several of these": {"faults": [slow(1, 2.0), slow(5, 0.5), *both("load", processes=1)], "slow": UNIT},
}  # fmt: skip

FAULTS: dict[str, dict[str, Any]] = {
    "stopped (SIGSTOP)": {"do": "stop"},
    "computes for ever": {"do": "spin"},
    "sleeps for ever": {"do": "sleep"},
    "waits in a collective that no other takes part in": {"do": "deadlock", "named": [0, 1]},
    "swaps (runs 1 ms in every 5 s)": {"do": "duty", "with": {"running": 0.001, "stopped": 5.0}},
    "its GPU answers no more (fake driver)": {"do": "lose_gpu", "arguments": ["--simulate-power"]},
}
"""`named`: the ranks that must be named, where it is not rank 1 alone."""


def train(folder: Path, strategy: str, case: dict[str, Any], *, steps: int, unit: float) -> dict[str, Any]:
    """One run: how it ended, when, and the headline of its error."""
    write_job(folder, strategy, steps=steps, save_every=3, eval_every=3)
    code, _, err = forked_shardwise(
        *("train", "job.yaml", "--processes", "2", *case.get("arguments", [])),
        cwd=folder,
        worker="fault_worker",
        timeout=600.0,
        SHARDWISE_HANG_SECONDS=str(unit),
        FAULTS=json.dumps(case.get("faults", [])),
        FAULTS_IN=str(folder),
        FAULTS_SLOW=str(case.get("slow", 0)),
    )
    ended = time.time()
    lines = [line for line in err.splitlines() if line.startswith(("error: ", "  - "))]
    came = [ended - file.stat().st_mtime for file in folder.glob("fault-0")]
    return {"exit_code": code, "said": lines, "seconds_after_fault": came[0] if came else None}


def healthy(number: int, name: str, strategy: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        found = train(Path(folder), strategy, HEALTHY[name], steps=6, unit=UNIT)
        return {
            "run": number,
            "case": name,
            "strategy": strategy,
            "as_expected": found["exit_code"] == 0 and not found["said"],
            "exit_code": found["exit_code"],
            "seconds": round(time.monotonic() - began, 1),
            "said": found["said"],
        }


def fault(name: str, strategy: str) -> dict[str, Any]:
    case = FAULTS[name]
    sent = {"rank": 1, "step": 8, "do": case["do"], "with": case.get("with", {})}
    with tempfile.TemporaryDirectory() as folder:
        found = train(Path(folder), strategy, {**case, "faults": [sent]}, steps=10, unit=DEFAULT)
    ranks = ", ".join(map(str, case.get("named", [1])))
    named = found["said"][:1] and found["said"][0].startswith(
        (f"error: rank {ranks} h", f"error: ranks {ranks} h")
    )
    seconds = found["seconds_after_fault"]
    passed = bool(named) and found["exit_code"] == 4 and seconds is not None and seconds <= 90
    return {"case": name, "strategy": strategy, "as_expected": passed, **found}


WORK: dict[str, Callable[..., dict[str, Any]]] = {"healthy": healthy, "faults": fault}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=WORK)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    asked: list[tuple[Any, ...]] = [*product(range(given.repeat), HEALTHY, STRATEGIES)]
    if given.what == "faults":
        asked = [*product(FAULTS, STRATEGIES)]
    rows = list[dict[str, Any]]()
    with ProcessPoolExecutor(given.at_once, mp_context=get_context("spawn")) as pool:
        for row in pool.map(WORK[given.what], *zip(*asked, strict=True)):
            rows.append(row)
            print(json.dumps(row), file=sys.stderr, flush=True)
    bad = [row for row in rows if not row["as_expected"]]
    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("shardwise", "torch", "deepspeed")},
        "hang_seconds": UNIT if given.what == "healthy" else DEFAULT,
        "cores": len(os.sched_getaffinity(0)),
        "at_once": given.at_once,
        "runs": len(rows),
        "failed": len(bad),
        "rows": rows,
    }
    text = json.dumps(found, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(f"{len(rows)} runs, {len(bad)} not as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
