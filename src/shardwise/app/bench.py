"""Strategies side by side on this machine: measured, and compared with what was predicted."""

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.app.jobs import AnyJob, Changes, cap_in_bytes, read, texts, trainable
from shardwise.hardware.detect import detect_hardware, driver_version, gpu_count
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.launch import handled
from shardwise.planner.planning import Making, make_plan
from shardwise.record.bench import SCHEMA, BenchRecord, append, opened, read_bench
from shardwise.record.environment import environment
from shardwise.report.bench import show_bench
from shardwise.report.compare import FEWEST_STEPS
from shardwise.screen import as_text
from shardwise.trials.rows import PlanFor, Row, make_rows
from shardwise.trials.run import FINAL, Settings, run_rows
from shardwise.trials.sweep import ALL, chosen_names, points
from shardwise.units import count, gib


class Bench(BenchRecord):
    """What a bench measured. `print` shows the tables of `shardwise report`; `rows` has all numbers."""

    def __repr__(self) -> str:
        return as_text(show_bench, self)


def bench(
    job: AnyJob,
    *,
    strategies: str | Sequence[str] | None = None,
    sweep: Sequence[str] = (),
    processes: int | None = None,
    steps: int = 10,
    warmup: int = 3,
    timeout_seconds: float = 900.0,
    profile: bool = True,
    out: str | Path | None = None,
    changes: Changes = (),
    memory_cap: str | int | None = None,
    command: Sequence[str] = ("shardwise.bench",),
    say: Callable[[str], None] = print,
    making: Making = nullcontext,
) -> Bench:
    """Run strategies for a few steps each.

    Args:
        job: a job file, or a job.
        strategies: `zero2,fsdp2,...`, a list, or `all`; None: all that fit, with `sweep` the job's own.
        sweep: `key=v1,v2` texts; all combinations are run.
        processes: one per GPU; None: all GPUs, or 1.
        steps: optimizer steps that count.
        warmup: steps before them.
        timeout_seconds: end a strategy that takes longer.
        profile: record one more step with torch.profiler.
        out: folder of the results, which the same call continues; None: bench/NAME.
        changes: what the command line's `--set` is for: `{"train.precision": "fp32"}`, or `key=value` texts.
        memory_cap: use no more of each GPU; bytes, or `16GiB`.
        command: what the user typed, for the record.
        say: called with each line of progress.
        making: entered while a plan is made.

    Raises:
        JobError: the job or an argument is wrong, or no strategy is allowed.
        DoesNotFitError: nothing fits.
    """
    changes = texts(changes)
    base, gpus = read(job, changes).job, gpu_count()
    processes = processes or max(1, gpus)
    cap = cap_in_bytes(memory_cap, gpus)
    names: list[str] | None = None if sweep else [ALL]
    if strategies is not None:
        if not isinstance(strategies, str):
            listed: Any = strategies
            strategies = ",".join(map(str, listed if isinstance(listed, Sequence) else [listed]))
        names = [ALL] if strategies.strip() == ALL else chosen_names(strategies, processes)
    hardware = detect_hardware() if gpus else None
    plan_for: PlanFor | None = None
    if hardware is not None:
        used = replace(hardware, gpus_per_node=processes)
        plan_for = partial(make_plan, hardware=used, memory_cap_bytes=cap, making=making)

    def load(more: Sequence[str]) -> Job:
        return trainable(read(job, [*changes, *more])).job

    rows, left_out = make_rows(points(load, sweep), names, processes=processes, plan_for=plan_for)
    settings = Settings(
        folder=Path("bench") / base.name if out is None else Path(out),
        processes=processes,
        warmup=warmup,
        steps=steps,
        timeout_seconds=timeout_seconds,
        memory_cap_bytes=cap,
        profile=profile,
    )
    head = _head(base, settings, hardware, command)
    if steps < FEWEST_STEPS:
        say(f"note: {steps} steps are too few to compare speeds: use --steps {FEWEST_STEPS} or more")
    if processes == 1 and len({row.strategy.name for row in rows}) > 1:
        say("note: one process shards nothing, so strategies hardly differ: use --processes 2")
    _run(rows, settings, {**head, "left_out": left_out, "order": [row.key for row in rows]}, say)
    return Bench(**vars(read_bench(settings.folder)))


def _head(job: Job, settings: Settings, hardware: Hardware | None, command: Sequence[str]) -> dict[str, Any]:
    """What `bench.json` says of all rows."""
    cards = []
    if hardware is not None:
        gpu = {"name": hardware.gpu.name, "memory_bytes": hardware.gpu.memory_bytes}
        cards = [gpu] * hardware.gpus_per_node
    return {
        "schema": SCHEMA,
        "name": job.name,
        "job": job.model_dump(mode="json", exclude={"output", "tracking", "strategy"}),
        "processes": settings.processes,
        "memory_cap_bytes": settings.memory_cap_bytes,
        "warmup_steps": settings.warmup,
        "steps": settings.steps,
        "environment": environment(gpus=cards, driver=driver_version(), command=list(command)),
        "hardware": None if hardware is None else hardware.to_json(),
    }


def _run(rows: Sequence[Row], settings: Settings, head: dict[str, Any], say: Callable[[str], None]) -> None:
    """Run what the folder does not have yet; each row's result is written as soon as there is one."""
    asked: list[int] = []

    def look() -> None:
        if asked:
            sys.exit(128 + asked[0])  # and so through every `finally`, which ends the row's processes

    # what a handler raises is lost where Python calls it within a callback, such as one of a fork
    noted = handled((signal.SIGTERM,), lambda number, _: asked.append(number))
    with opened(settings.folder, head), noted:
        done = {row["key"] for row in read_bench(settings.folder).rows if row.get("status") in FINAL}
        waiting = [row for row in rows if row.key not in done]
        if len(waiting) < len(rows):
            say(f"{len(rows) - len(waiting)} of {len(rows)} are done already, in {settings.folder}")
        each = "GPU" if head["environment"]["gpus"] else "process"
        try:
            results = run_rows(waiting, replace(settings, look=look))
            for number, row in enumerate(waiting, start=1):
                say(f"[{number}/{len(waiting)}] {row.label} ...")
                result = next(results)
                append(settings.folder, result)
                say(f"[{number}/{len(waiting)}] {row.label}: {_outcome(result, each)}")
                look()
        except KeyboardInterrupt:
            say(f"stopped; the same command continues in {settings.folder}")
            raise


def _outcome(result: dict[str, Any], each: str) -> str:
    found = result["measured"]
    if found is None:
        return f"{result['status']}, {str(result['error']).splitlines()[0]}"
    rate, memory = count(found["tokens_per_second_per_gpu"]), gib(found["peak_reserved_bytes"])
    return f"{rate} tok/s/{each}, {memory}, {found['verdict']}; took {result['seconds']:.0f} s"
