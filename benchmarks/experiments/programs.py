"""A row of an experiment: a few steps of one program in its own processes, as one JSON object."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from inputs import Setting, prepare

import shardwise

HERE = Path(__file__).parent
MEASURED = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "memory_of",
    "host_memory_bytes",
    "step_seconds",
    "step_seconds_all",
    "tokens_per_second_per_gpu",
    "joules_per_token",
    "loss",
    "grad_norm",
    "allocated_by_step_bytes",
    "reserved_by_step_bytes",
    "memory_in_step",
    "verdict",
)
"""What is kept of a bench's measurement; docs/bench.md says what it is."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What runs a setting: the plain loop, or shardwise with a strategy."""

    name: str
    strategy: dict[str, Any] | None = None
    """As in a job; None: the plain loop."""
    steps: int = 6
    """Steps that count."""
    warmup: int = 2
    profile: bool = False
    """Also measure memory within a step, with torch.profiler."""
    about: dict[str, Any] = field(default_factory=dict)
    """What the experiment says of the row."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the experiments run."""

    folder: Path
    """Of models, texts and run folders."""
    gpu: str
    """Its name; empty without one."""
    timeout_seconds: float = 180.0


def run(experiment: str, setting: Setting, program: Program, place: Place) -> dict[str, Any]:
    """Run one row; a failure is a row with its `error`."""
    began = time.monotonic()
    prepare(setting.shape, place.folder)
    job, name = setting.job(place.folder), f"{setting.name}, {program.name}"
    if program.strategy is None:
        ran = _plain(job, program, place)
    else:
        ran = _bench(job, program, place, re.sub("[^A-Za-z0-9.]+", "-", f"{experiment} {name}"))
    return {
        "experiment": experiment,
        "row": name,
        "setting": asdict(setting),
        "program": program.name,
        **program.about,
        **ran,
        "warmup_steps": program.warmup,
        "steps": program.steps,
        "row_seconds": round(time.monotonic() - began, 1),
        "gpu": place.gpu or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
    }


def _bench(job: shardwise.Job, program: Program, place: Place, folder: str) -> dict[str, Any]:
    record = shardwise.bench(
        job,
        changes=[f"strategy={json.dumps(program.strategy)}"],
        sweep=[f"train.micro_batch={job.train.micro_batch}"],  # plan this strategy, as it is
        processes=1,
        steps=program.steps,
        warmup=program.warmup,
        profile=program.profile,
        timeout_seconds=place.timeout_seconds,
        out=place.folder / "benches" / folder,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    row = record.rows[-1]
    measured, predicted = row["measured"], row["predicted"]
    return {
        "strategy": row["strategy"],
        "status": row["status"],
        "error": row["error"],
        "measured": measured and {key: measured[key] for key in MEASURED},
        "predicted": predicted,
        "predicted_unavailable": row["predicted_unavailable"],
    }


def _plain(job: shardwise.Job, program: Program, place: Place) -> dict[str, Any]:
    file = place.folder / "plain.json"
    file.write_text(job.model_dump_json(), encoding="utf-8")
    command = [sys.executable, str(HERE / "plain_loop.py"), str(file)]
    command += ["--steps", str(program.steps), "--warmup", str(program.warmup)]
    none = {"strategy": None, "predicted": None, "predicted_unavailable": "the plain loop is not planned"}
    try:
        done = subprocess.run(
            command,
            env={"PYTORCH_ALLOC_CONF": "expandable_segments:True", **os.environ},  # as shardwise sets it
            capture_output=True,
            text=True,
            timeout=place.timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {**none, "status": "timed out", "error": f"after {place.timeout_seconds} s", "measured": None}
    if done.returncode:
        status = "out of memory" if "OutOfMemoryError" in done.stderr else "failed"
        return {**none, "status": status, "error": done.stderr[-2000:], "measured": None}
    found = json.loads(done.stdout.splitlines()[-1])
    seconds, tokens = (found[key][program.warmup :] for key in ("step_seconds_all", "tokens"))
    return {
        **none,
        "status": "measured",
        "error": None,
        "measured": {
            **found,
            "step_seconds": median(seconds),
            "tokens_per_second_per_gpu": sum(tokens) / sum(seconds),
            "memory_of": "gpu" if place.gpu else "process",
        },
    }


def versions() -> dict[str, str]:
    from shardwise.record.environment import versions

    return versions()


def summary(row: dict[str, Any]) -> str:
    """One line for a person."""
    found = row["measured"]
    if found is None:
        return (
            f"{row['row']}: {row['status']}: {(row['error'].strip() or 'no output').splitlines()[-1][:200]}"
        )
    gib = found["peak_reserved_bytes"] / 2**30
    planned = row["predicted"]
    memory = f", predicted {planned['memory']['peak_reserved_bytes'] / 2**30:.2f}" if planned else ""
    speed = f", predicted {planned['time']['tokens_per_second_per_gpu']:,.0f}" if planned else ""
    return (
        f"{row['row']}: {gib:.2f} GiB{memory}; {found['tokens_per_second_per_gpu']:,.0f} tokens/s{speed}; "
        f"loss {found['loss'][0]:.4f} to {found['loss'][-1]:.4f}, gradient norm {found['grad_norm'][0]:.3f} "
        f"to {found['grad_norm'][-1]:.3f}; {row['row_seconds']:.0f} s"
    )
