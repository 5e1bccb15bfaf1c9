"""Numbers of a run folder: for `report --json`, the terminal's tables, and pages (`row_of`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import JobError
from shardwise.record.manifest import check_sizes, read_manifest, step_folders
from shardwise.record.read import RunRecord, is_being_written, read_run
from shardwise.report.measured import measured

WARM_UP_STEPS = 5
"""Steps at the start of a launch that throughput leaves out (compilation, allocator, caches)."""


def summary(run_dir: str | Path) -> dict[str, Any]:
    """Headline numbers of one run, from its folder alone.

    Losses are nats per target token; units are in the names. `status`: finished, paused (at
    --max-steps), stopped (on request), failed, running, or interrupted (no stop event). Throughput and
    step time are of the `steady_steps`. Numbers that the run has not produced are None. Raises JobError
    where the folder is not a complete run folder.
    """
    run = read_run(Path(run_dir))
    head = _head(run)
    steps = _of_kind(run.events, "step")
    losses = [(event["loss"], event["step"]) for event in steps if event.get("loss") is not None]
    steady = _steady(run.events)
    return {
        "name": run.job.get("name"),
        "path": str(run.path),
        "status": _status(run),
        "strategy": head.get("strategy"),
        "processes": head.get("processes"),
        "steps": steps[-1]["step"] if steps else 0,
        "total_steps": head.get("total_steps"),
        "tokens": sum(event["tokens"] for event in steps),
        "first_loss": losses[0][0] if losses else None,
        "last_loss": losses[-1][0] if losses else None,
        "best_loss": min(losses)[0] if losses else None,
        "best_loss_step": min(losses)[1] if losses else None,
        "skipped_steps": sum(bool(event.get("skipped")) for event in steps),
        "evaluations": [
            {"step": event["step"], "loss": event["loss"]} for event in _of_kind(run.events, "eval")
        ],
        **_throughput(steady, int(head.get("processes") or 1)),
        "peak_memory_reserved_bytes": _peak(steps, "peak_memory_reserved_bytes"),
        "peak_memory_allocated_bytes": _peak(steps, "peak_memory_allocated_bytes"),
        "wall_seconds": _wall_seconds(run.events),
        "checkpoints": _checkpoints(run.path / "checkpoints"),
    }


def row_of(path: Path) -> tuple[dict[str, Any], RunRecord]:
    """Return a run as a row of the same shape as a bench's, and its record.

    Speed is that of `summary`. Nothing is measured before the first step. Raises JobError as `summary` does.
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
        "predicted_unavailable": None if predicted else "the strategy was not chosen by a plan",
        "why": list(chosen.get("why", [])),
        "measured": found,
        "summary": numbers,
    }, run


def losses(run_dir: str | Path) -> list[float]:
    """Finite training losses in step order, for curves."""
    events = _of_kind(read_run(Path(run_dir)).events, "step")
    return [event["loss"] for event in events if event.get("loss") is not None]


def _head(run: RunRecord) -> Mapping[str, Any]:
    """Return the newest `run` event. JobError where there is none: the run has not started."""
    heads = _of_kind(run.events, "run")
    if not heads:
        raise JobError(
            f"the run in {run.path} has not started: events.jsonl has no lines",
            where=str(run.path),
            fix="run `shardwise train` first",
        )
    return heads[-1]


def _of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == kind]


def _status(run: RunRecord) -> str:
    last = run.events[-1]
    if last["kind"] == "stop":
        return str(last["status"])
    return "running" if is_being_written(run.path) else "interrupted"


def _steady(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Steps without the first few of every launch; all steps where nothing would be left."""
    steady, since_launch = [], 0
    for event in events:
        if event.get("kind") in ("run", "resume"):
            since_launch = 0
        elif event.get("kind") == "step":
            since_launch += 1
            if since_launch > WARM_UP_STEPS:
                steady.append(event)
    return steady or _of_kind(events, "step")


def _throughput(steps: Sequence[Mapping[str, Any]], processes: int) -> dict[str, Any]:
    """Mean tokens per second and median seconds of a step, and the steps that were measured."""
    if not steps:
        names = ("steady_steps", "tokens_per_second", "tokens_per_second_per_gpu", "step_seconds", "mfu")
        return dict.fromkeys(names)
    seconds = sum(event["seconds"] for event in steps)
    rate = sum(event["tokens"] for event in steps) / seconds
    mfus = [event["mfu"] for event in steps if event.get("mfu") is not None]
    return {
        "steady_steps": {"first": steps[0]["step"], "last": steps[-1]["step"], "count": len(steps)},
        "tokens_per_second": rate,
        "tokens_per_second_per_gpu": rate / processes,
        "step_seconds": median(event["seconds"] for event in steps),
        "mfu": median(mfus) if mfus else None,
    }


def _peak(steps: Sequence[Mapping[str, Any]], field: str) -> list[int]:
    """The largest value per rank over all steps."""
    by_step = [event[field] for event in steps if event.get(field)]
    return [max(values) for values in zip(*by_step, strict=True)]


def _wall_seconds(events: Sequence[Mapping[str, Any]]) -> float:
    """Sum of the launches, each from its first to its last line; time between launches does not count."""
    spans = (
        float(event["time"] - before["time"])
        for before, event in pairwise(events)
        if event["kind"] not in ("run", "resume")
    )
    return sum(spans, 0.0)


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """List checkpoints, newest first. `complete`: manifest and sizes are right; contents are not read."""
    found = []
    for step, path in step_folders(folder):
        try:
            manifest = read_manifest(path)
            size, complete = manifest.size_bytes, not check_sizes(path, manifest)
        except ValueError:
            size, complete = None, False
        found.append({"step": step, "path": str(path), "bytes": size, "complete": complete})
    return found
