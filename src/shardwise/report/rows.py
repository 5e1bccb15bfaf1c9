"""Runs as rows of the same shape as a bench's, so that one page shows both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.record.read import RunRecord, read_run
from shardwise.report.compare import WARM_UP_STEPS, summary
from shardwise.report.measured import measured

NOT_PLANNED = "the strategy was not chosen by a plan"


def row_of(path: Path) -> tuple[dict[str, Any], RunRecord]:
    """A run as a row: what its plan predicted, what it measured; and its whole record.

    Speed is that of `report.compare.summary`. Nothing is measured before a first step is done. Raises
    JobError where the folder is no complete run folder.
    """
    run, numbers = read_run(path), summary(path)
    steps = [event for event in run.events if event.get("kind") == "step" and event.get("loss") is not None]
    header = next(event for event in run.events if event.get("kind") == "run")
    chosen = run.plan.get("chosen") or {}
    predicted = chosen.get("prediction")
    found = None
    if steps:
        warmup = min(WARM_UP_STEPS, len(steps) - 1)
        found = measured(steps, warmup=warmup, processes=int(header["processes"]))
        for name in ("tokens_per_second_per_gpu", "step_seconds", "mfu"):
            found[name] = numbers[name]
        found["step_numbers"] = [step["step"] for step in steps]
        found |= {"exposed_communication_fraction": None, "memory_in_step": []}
        found["exposed_unavailable"] = "a run is not profiled: `shardwise bench` is"
        found["evaluations"] = [(one["step"], one["loss"]) for one in numbers["evaluations"]]
    return {
        "label": str(numbers["name"]),
        "strategy": chosen.get("strategy"),
        "status": numbers["status"],
        "error": None if found else "no step is done yet",
        "predicted": predicted,
        "predicted_unavailable": None if predicted else NOT_PLANNED,
        "why": list(chosen.get("why", [])),
        "measured": found,
        "summary": numbers,
    }, run


def rows_of(paths: Sequence[Path]) -> list[tuple[dict[str, Any], RunRecord]]:
    """Each run's row and record, in order."""
    return [row_of(Path(path)) for path in paths]
