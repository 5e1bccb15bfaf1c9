"""Runs the rows of a bench one after the other; a row that fails is a result as well."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shardwise.errors import DoesNotFitError
from shardwise.launch.spec import LaunchSpec
from shardwise.record.read import EVENTS, read_events
from shardwise.report.compare import SIMULATED, measured
from shardwise.trials import process
from shardwise.trials.exposed import read_trace
from shardwise.trials.rows import Row
from shardwise.units import duration

MEASURED, OUT_OF_MEMORY, TIMED_OUT = "measured", "out of memory", "timed out"
FAILED, REFUSED = "failed", "refused"
FINAL = (MEASURED, OUT_OF_MEMORY)  # A row that ended so is not run again in the same folder
_NO_RESULT = {"measured": None, "trace": None}
_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How each row is run."""

    folder: Path
    processes: int
    warmup: int
    steps: int  # Steady steps, after the warm-up's
    timeout_seconds: float  # Of a row, from its start; then it is ended
    memory_cap_bytes: int | None = None
    profile: bool = True
    look: Callable[[], None] = lambda: None  # called while a row runs; it may raise


def run_rows(rows: Sequence[Row], settings: Settings) -> Iterator[dict[str, Any]]:
    """Runs each row and yields its result: JSON values, as they stand in `rows.jsonl`."""
    for row in rows:
        if row.refused is None:
            yield _run(row, settings)
        else:
            yield {**_about(row), "status": REFUSED, "error": row.refused, **_NO_RESULT, "seconds": 0.0}


def _run(row: Row, settings: Settings) -> dict[str, Any]:
    folder, began = settings.folder, time.monotonic()
    run_dir, log = folder / "runs" / row.slug, folder / "logs" / f"{row.slug}.log"
    trace = folder / "traces" / f"{row.slug}.json.gz"
    shutil.rmtree(run_dir, ignore_errors=True)  # what an attempt that did not finish left
    trace.unlink(missing_ok=True)
    spec = LaunchSpec(
        job={**row.job.model_dump(mode="json"), "name": row.slug, "output": str(run_dir.parent)},
        run_dir=str(run_dir),
        processes=settings.processes,
        memory_cap_bytes=settings.memory_cap_bytes,
        measure_steps=settings.warmup + settings.steps,
        profile=str(trace) if settings.profile else None,
        command=["shardwise", "bench", row.label],
        debug=True,  # what it prints goes to the row's log
    )
    file, limit = log.with_suffix(".spec.json"), settings.timeout_seconds
    code = process.run_to_the_end(spec, spec_file=file, log=log, timeout_seconds=limit, look=settings.look)
    seconds = time.monotonic() - began
    events = read_events(run_dir / EVENTS) if (run_dir / EVENTS).exists() else []
    steps = [event for event in events if event["kind"] == "step"]
    common = {**_about(row), "run": f"runs/{row.slug}", "log": f"logs/{log.name}"}
    common["seconds"] = round(seconds, 1)
    if len(steps) < settings.warmup + settings.steps:
        status, error = _failure(code, len(steps), seconds, settings, log)
        return {**common, "status": status, "error": error, **_NO_RESULT}
    header = next((event for event in events if event["kind"] == "run"), {})
    numbers = measured(steps, warmup=settings.warmup, count=settings.steps, processes=settings.processes)
    numbers |= SIMULATED if header.get("energy_source") == "simulated" else {}
    about = ("parameters", "trainable_parameters", "energy_source", "outside_allocator_source")
    numbers |= {name: header.get(name) for name in about}
    return {
        **common,
        "status": MEASURED,
        "error": None,
        "measured": {**numbers, **_profiled(trace, settings, code, seconds)},
        "trace": f"traces/{trace.name}" if trace.exists() else None,
    }


def _about(row: Row) -> dict[str, Any]:
    return {
        "key": row.key,
        "label": row.label,
        "strategy": row.strategy.to_json(),
        "sweep": dict(row.sweep),
        **row.predicted(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _failure(code: int | None, steps: int, seconds: float, settings: Settings, log: Path) -> tuple[str, str]:
    """(status, why) of a row that did not get through its steps."""
    done = f"{steps} of {settings.warmup + settings.steps} steps"
    if code is None:
        status, why = TIMED_OUT, f"after {duration(seconds)} (--timeout) and {done}"
    elif code == DoesNotFitError.exit_code:
        status, why = OUT_OF_MEMORY, f"after {done}"
    else:
        status, why = FAILED, f"with exit code {code} after {done}"
    return status, f"{why}\n{log_tail(log)}".strip()


def log_tail(log: Path) -> str:
    """The error block that ends a log, or else its last lines."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    last = max((place for place, line in enumerate(lines) if line.startswith("error: ")), default=None)
    return "\n".join(lines[-_TAIL_LINES:] if last is None else lines[last:])[-4000:]


def _profiled(trace: Path, settings: Settings, code: int | None, seconds: float) -> dict[str, Any]:
    """What the profiled step says; a trace that is missing or broken costs only these numbers."""
    step, why = None, None
    if not settings.profile:
        why = "not profiled: --no-profile"
    elif code is None:
        why = f"the profiled step was not done after {duration(seconds)}"
    elif code != 0:
        why = f"the profiled step ended with exit code {code}"
    else:
        try:
            step = read_trace(trace)
        except (OSError, EOFError, ValueError, KeyError) as error:
            why = f"the trace cannot be read: {error}"
    return {
        "exposed_communication_fraction": step and step.exposed_communication_fraction,
        "exposed_communication_seconds": step and step.exposed_communication_seconds,
        "gpu_idle_fraction": step and step.idle_fraction,
        "communication_seconds": step and step.communication_seconds,
        "profiled_step_seconds": step and step.step_seconds,
        "memory_in_step": step.memory if step else [],
        "exposed_unavailable": why,
    }
