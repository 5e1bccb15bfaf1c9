"""How long the GPU waits: of each profiled row, the share of a step in which it ran no kernel.

A step's time is the median of steps without the profiler, and the kernels' is of one step with it (run.py
--profile): the profiler slows the host, not the kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MEASURED = Path(__file__).parent / "results" / "idle.jsonl"
ALLOWED = 0.05


def profiled() -> list[dict[str, Any]]:
    """The last measurement of each row on each kind of GPU, those that wait longest first."""
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    last = {(row["id"], row["gpu"]): row for row in rows if row["error"] is None}
    return sorted(last.values(), key=lambda row: -_waits(row))


def summary() -> str:
    """How many rows stay within ALLOWED, and how many cannot be judged."""
    rows = profiled()
    judged = [row for row in rows if share(row) is not None]
    within = sum(_waits(row) <= ALLOWED for row in judged)
    gpus = ", ".join(sorted({row["gpu"] for row in rows}))
    day = min(row["date"] for row in rows)[:10]
    return (
        f"{gpus}, since {day}: in {within} of {len(judged)} rows the GPU waits for at most"
        f" {100 * ALLOWED:.0f} % of the step. Of {len(rows) - len(judged)} more nothing can be said."
    )


def share(row: dict[str, Any]) -> float | None:
    """Of a step; None where a collective waited for another rank's host, which the profiler had slowed."""
    busy, step = row["profiled_busy_seconds"], row["step_seconds"]
    waited = row["row"]["gpus"] > 1 and busy > step * (1 + 1e-3)
    return None if waited else max(0.0, 1 - busy / step)


def lines() -> Iterator[list[str]]:
    """Cells of the page's table: row, GPU, step, kernels, share, microseconds of a call on the host."""
    for row in profiled():
        waits, call = share(row), row["host_call_seconds_meanwhile"]
        yield [
            f"`{row['id']}`",
            row["gpu"].split()[1],
            f"{row['step_seconds']:.3f}",
            "?" if waits is None else f"{row['profiled_busy_seconds']:.3f}",
            "?" if waits is None else f"{100 * waits:.1f} %",
            f"{1e6 * call:.1f}",
        ]


def _waits(row: dict[str, Any]) -> float:
    found = share(row)
    return -1.0 if found is None else found
