"""Numbers of a run folder, and measurements of its steps with the units and names of the accuracy ledger."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from shardwise.errors import JobError
from shardwise.job.paths import unplaced
from shardwise.record.manifest import check_sizes, read_manifest, step_folders, verify
from shardwise.record.read import RunRecord, is_being_written, read_run, status
from shardwise.record.restarts import restarts_of
from shardwise.report.energy import energy

WARM_UP_STEPS = 5  # of a launch, which throughput leaves out (compilation, allocator, caches)

MOST_SPREAD = 0.05  # steps that spread, drift or are skewed by a larger share are noisy
FEWEST_STEPS = 5
LEAST_ENERGY_SECONDS = 1.0  # over less, a counter that moves every 20 to 100 ms is off by over a fifth

SIMULATED = {
    "joules_per_token": None,
    "joules_unavailable": "simulated, not measured",
    "verdict": "simulated",
    "verdict_why": ["a fake driver's GPUs: steps are slowed down on purpose, and nothing is measured"],
}
"""What becomes of a measurement where the GPUs are a fake driver's."""

BY_RANK = {
    "peak_allocated_bytes": "peak_memory_allocated_bytes",
    "peak_reserved_bytes": "peak_memory_reserved_bytes",
    "outside_allocator_bytes": "outside_allocator_bytes",
    "host_memory_bytes": "host_memory_bytes",
}
"""Key of a measurement: key of the step events."""


UNREAD = {"epoch", "target_tokens", "loss_scale", "memory_allocated_bytes", "memory_reserved_bytes"}
UNREAD |= {"pinned_memory_bytes", "not_finite"}
"""Keys of events that no report shows: half of what a long run takes in memory."""


def summary(run_dir: str | Path | RunRecord) -> dict[str, Any]:
    """Headline numbers of one run, from its folder alone.

    Losses are nats per target token; units are in the names. `status`: finished, paused (at
    --max-steps), stopped (on request), failed, running, or interrupted (no stop event). Throughput and
    step time are of the `steady_steps`. Numbers that the run has not produced are None. Raises JobError
    where the folder is not a complete run folder.
    """
    run = run_dir if isinstance(run_dir, RunRecord) else read_run(Path(run_dir), without=UNREAD)
    heads = _of_kind(run.events, "run")
    if not heads:
        what, fix = f"the run in {run.path} has not started", "run `shardwise train` first"
        if saved := ", ".join(path.name for _, path in step_folders(run.path / "checkpoints")):
            what, fix = f"what the run in {run.path} recorded is lost", f"there are {saved}; resume it"
        raise JobError(f"{what}: events.jsonl has no lines", where=str(run.path), fix=fix)
    head, steps = heads[-1], _of_kind(run.events, "step")
    losses = [(event["loss"], event["step"]) for event in _with_loss(run.events)]
    best_loss, best_step = min(losses, default=(None, None))
    latest = _latest(run.events)
    steady, (seconds, of_all) = _steady(latest), _wall_seconds(run.events)
    return {
        "name": run.job.get("name"),
        "path": str(run.path),
        "status": status(run.events[-1], in_use=is_being_written(run.path)),
        "strategy": head.get("strategy"),
        "processes": head.get("processes"),
        "steps": steps[-1]["step"] if steps else 0,
        "total_steps": head.get("total_steps"),
        "tokens": sum(event["tokens"] for event in steps),
        "first_loss": losses[0][0] if losses else None,
        "last_loss": losses[-1][0] if losses else None,
        "best_loss": best_loss,
        "best_loss_step": best_step,
        "skipped_steps": sum(bool(event.get("skipped")) for event in steps),
        "evaluations": [{key: one[key] for key in ("step", "loss")} for one in _of_kind(run.events, "eval")],
        **_throughput(steady, int(head.get("processes") or 1)),
        "peak_memory_reserved_bytes": _peak(_of_kind(latest, "step"), "peak_memory_reserved_bytes"),
        "peak_memory_allocated_bytes": _peak(_of_kind(latest, "step"), "peak_memory_allocated_bytes"),
        "wall_seconds": seconds,
        "supervised": restarts_of(run.path, run.events),
        "energy": energy(run, steady, gpu_seconds=of_all),
        "checkpoints": checkpoints(run.path / "checkpoints"),
        "events_missing_before_lines": run.gaps,
    }


def row_of(path: Path) -> tuple[dict[str, Any], RunRecord]:
    """Return a run as a row of the same shape as a bench's, and its record.

    Speed is that of `summary`. Nothing is measured before the first step. Raises JobError as `summary` does.
    """
    run = read_run(path, without=UNREAD)
    numbers = summary(run)
    steps, header = _with_loss(run.events), _of_kind(run.events, "run")[-1]
    chosen = run.plan.get("chosen") or {}
    predicted = chosen.get("prediction")
    found = None
    if steps:
        warmup = min(WARM_UP_STEPS, len(steps) - 1)
        found = measured(steps, warmup=warmup, processes=int(header["processes"]))
        for name in ("tokens_per_second_per_gpu", "step_seconds", "mfu"):
            found[name] = numbers[name]
        found |= SIMULATED if numbers["energy"]["simulated"] else {}
        found["step_numbers"] = [step["step"] for step in steps]
        found["learning_rate"] = [step.get("learning_rate") for step in steps]
        found |= {"exposed_communication_fraction": None, "memory_in_step": []}
        found["exposed_unavailable"] = "a run is not profiled: `shardwise bench` is"
        found["evaluations"] = [(one["step"], one["loss"]) for one in numbers["evaluations"]]
    return {
        "label": str(numbers["name"]),
        "about": " on ".join(about(run.job)),
        "strategy": chosen.get("strategy"),
        "status": numbers["status"],
        "error": None if found else "no step is done yet",
        "predicted": predicted,
        "predicted_unavailable": None if predicted else "the strategy was not chosen by a plan",
        "why": list(chosen.get("why", [])),
        "measured": found,
        "summary": numbers,
    }, run


def about(job: Mapping[str, Any]) -> tuple[str, str]:
    """The model and the data; of paths the last part."""
    short = unplaced({key: job.get(key) or {} for key in ("model", "data")})
    trained = short["data"].get("train")
    data = ", ".join(map(str, trained)) if isinstance(trained, list) else str(trained)
    return str(short["model"].get("source")), data


def _with_loss(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in _of_kind(events, "step") if event.get("loss") is not None]


def _of_kind(events: Sequence[Mapping[str, Any]], kind: str) -> list[Mapping[str, Any]]:
    return [event for event in events if event.get("kind") == kind]


def _latest(events: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """The events of the newest strategy and processes: others have another speed and other ranks."""
    return events[max((at for at, event in enumerate(events) if event.get("kind") == "run"), default=0) :]


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


def rate(events: Sequence[Mapping[str, Any]]) -> float | None:
    """The speed over these events in tokens per second, by `summary`'s rule; None where they lack it."""
    with suppress(LookupError, ArithmeticError, TypeError):  # of a log that another program wrote or changed
        found: float | None = _throughput(_steady(_latest(events)), 1)["tokens_per_second"]
        return found
    return None


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
    by_step = [event[field] for event in steps if event.get(field)]
    by_step = [values for values in by_step if len(values) == len(by_step[-1])]  # of the ranks of now
    return [max(values) for values in zip(*by_step, strict=True)]


def _wall_seconds(events: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Sum of the launches, each from its first to its last line, and of all their processes."""
    wall, of_all, processes = 0.0, 0.0, 1
    for a, b in pairwise(events):
        processes = int(a["processes"]) if a["kind"] == "run" else processes
        seconds = b["time"] - a["time"] if b["kind"] not in ("run", "resume") else 0.0
        wall, of_all = wall + seconds, of_all + processes * seconds
    return wall, of_all


def checkpoints(folder: Path, *, every_byte: bool = False) -> list[dict[str, Any]]:
    """List checkpoints, newest first. `complete`: manifest and sizes are right, and contents where read."""
    found = []
    for step, path in step_folders(folder):
        one: dict[str, Any] = {"step": step, "path": str(path), "bytes": None}
        try:
            manifest = read_manifest(path)
            one |= {"bytes": manifest.size_bytes, "strategy": manifest.origin.strategy.get("name")}
            one["processes"] = manifest.origin.world_size
            problems = verify(path, node=0) if every_byte else check_sizes(path, manifest, node=0)
        except ValueError as error:
            problems = [str(error)]
        found.append({**one, "complete": not problems, "problems": problems})
    return found


def measured(
    steps: Sequence[Mapping[str, Any]], *, warmup: int, count: int | None = None, processes: int
) -> dict[str, Any]:
    """Memory, time, energy and curves of a run's step events; at least one must be left after `warmup`.

    Time and energy are measured over the `count` steps after the first `warmup`; later steps are ignored.
    Memory is the worst rank's and includes the warm-up, because the warm-up has to fit as well. Without a
    GPU, `peak_allocated_bytes` and `peak_reserved_bytes` are the process's resident set. A null number has
    its reason in `NAME_unavailable`.
    """
    steps = steps[: None if count is None else warmup + count]
    steady = steps[warmup:]
    seconds = [float(step["seconds"]) for step in steady]
    per_gpu = sum(step["tokens"] for step in steady) / sum(seconds) / processes
    verdict, why = judge(seconds)
    return {
        **_memory(steps),
        "steps": len(steps),
        "warmup_steps": warmup,
        "step_seconds": median(seconds),
        "step_seconds_all": [step["seconds"] for step in steps],
        "tokens_all": [step["tokens"] for step in steps],
        "tokens_per_second_per_gpu": per_gpu,
        **_rates(steady[-1], per_gpu),
        **_energy(steady),
        "loss": [step["loss"] for step in steps],
        "grad_norm": [step["grad_norm"] for step in steps],
        "verdict": verdict,
        "verdict_why": why,
    }


def judge(seconds: Sequence[float]) -> tuple[str, list[str]]:
    """Judge the seconds of steady steps: (`valid` or `noisy`, why noisy); docs/bench.md has the rule."""
    why = []
    middle = median(seconds)
    if len(seconds) < FEWEST_STEPS:
        why.append(f"only {len(seconds)} steps were counted: use --steps {FEWEST_STEPS} or more")
    if len(seconds) >= 2:
        low, _, high = quantiles(seconds, n=4, method="inclusive")
        if (spread := (high - low) / middle) > MOST_SPREAD:
            why.append(f"step times vary: their middle half spreads over {spread:.0%} of the median")
    if abs(skew := fmean(seconds) / middle - 1) > MOST_SPREAD:
        why.append(f"a few steps differ from the rest: the mean is {skew:+.0%} off the median")
    half = len(seconds) // 2
    if half >= 2:
        drift = median(seconds[-half:]) / median(seconds[:half]) - 1
        if abs(drift) > MOST_SPREAD:
            side = "longer" if drift > 0 else "less"
            why.append(f"the second half of the steps took {abs(drift):.0%} {side}: use more --warmup steps")
    return ("noisy" if why else "valid"), why


def _memory(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, key in BY_RANK.items():
        by_rank = _peak(steps, key) or None
        found |= {name: by_rank and max(by_rank), f"{name}_by_rank": by_rank}

    def worst(key: str) -> list[int | None]:  # of all ranks, after each step
        return [max(step[key]) if step.get(key) else None for step in steps]

    on_gpu = found["outside_allocator_bytes"] is not None
    return {
        **found,
        "memory_of": "gpu" if on_gpu else "process",
        "outside_allocator_unavailable": None if on_gpu else "no GPU",
        **{f"{kind}_by_step_bytes": worst(f"memory_{kind}_bytes") for kind in ("reserved", "allocated")},
    }


def _rates(step: Mapping[str, Any], per_gpu: float) -> dict[str, Any]:
    """TFLOP/s and MFU at `per_gpu` tokens a second: both are proportional to it."""
    share = per_gpu / step["tokens_per_second_per_gpu"]
    known = {key: step.get(key) for key in ("tflops_per_gpu", "mfu")}
    rates = {key: None if value is None else value * share for key, value in known.items()}
    return {**rates, "mfu_unavailable": step.get("mfu_unavailable")}


def _energy(steady: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Joules a token over the steady steps with a reading, of all GPUs without the host."""
    known = [step for step in steady if step.get("joules") is not None]
    seconds = sum(step["seconds"] for step in known)
    reason = None
    if not known:
        reason = next((step.get("joules_unavailable") for step in steady), None) or "no reading"
    elif seconds < LEAST_ENERGY_SECONDS:
        reason = f"the steps took {seconds:.1f} s together, too short for the counter: more --steps"
    tokens = sum(step["tokens"] for step in known)
    joules = None if reason else sum(step["joules"] for step in known) / tokens
    return {"joules_per_token": joules, "joules_unavailable": reason}
