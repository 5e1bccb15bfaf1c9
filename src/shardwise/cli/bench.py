"""`shardwise bench JOB`: strategies side by side on this machine, measured beside predicted."""

from __future__ import annotations

import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, Changes, JobFile

if TYPE_CHECKING:
    from shardwise.bench.rows import PlanFor, Row
    from shardwise.bench.run import Settings
    from shardwise.job.schema import Job


def bench(
    job: JobFile,
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="zero2,fsdp2,..., or all.  [default: all that fit; with --sweep the job's]"
        ),
    ] = None,
    sweep: Annotated[
        list[str],
        typer.Option(metavar="KEY=V,V", help="Each of a key's values; repeated, all combinations."),
    ] = [],
    processes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Processes, one per GPU.  [default: all GPUs, or 1]"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="N", help="Steps that count.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, metavar="N", help="Steps before them.")] = 3,
    timeout: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="End a strategy that takes longer.")
    ] = 900.0,
    profile: Annotated[
        bool, typer.Option("--profile/--no-profile", help="Record one more step with torch.profiler.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the results.  [default: bench/NAME]")
    ] = None,
    changes: Changes = [],
    memory_cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Use no more of each GPU, e.g. 16GiB.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run strategies for a few steps each: memory, speed and energy beside what was predicted."""
    from shardwise.bench.rows import make_rows
    from shardwise.bench.run import Settings
    from shardwise.bench.sweep import ALL, chosen_names, points
    from shardwise.cli.train import cap_in_bytes
    from shardwise.hardware.detect import gpu_count
    from shardwise.job.load import load_job
    from shardwise.record.bench import read_bench
    from shardwise.report.bench import show_bench, to_json

    base = load_job(job, changes).job
    gpus = gpu_count()
    processes = processes or max(1, gpus)
    cap = None if memory_cap is None else cap_in_bytes(memory_cap, gpus)
    names: list[str] | None = None if sweep else [ALL]
    if strategies is not None:
        names = [ALL] if strategies.strip() == ALL else chosen_names(strategies, processes)
    rows, left_out = make_rows(
        points(job, changes, sweep), names, processes=processes, plan_for=_planner(gpus, processes, cap)
    )
    settings = Settings(
        folder=out or Path("bench") / base.name,
        processes=processes,
        warmup=warmup,
        steps=steps,
        timeout_seconds=timeout,
        memory_cap_bytes=cap,
        profile=profile,
    )
    head = {**_head(base, settings, gpus), "left_out": left_out, "order": [row.key for row in rows]}
    _run(rows, settings, head)
    record = read_bench(settings.folder)
    if as_json:
        print(json.dumps(to_json(record)))
    else:
        show_bench(record)
        print(f"\nThe results are in {settings.folder}")
        print(f"As a page: shardwise report {settings.folder} --html bench.html")


def _planner(gpus: int, processes: int, cap: int | None) -> PlanFor | None:
    """What plans a job for these GPUs of this machine; None where it has none."""
    from dataclasses import replace

    from shardwise.cli.plan import plan_of
    from shardwise.hardware.detect import detect_hardware

    hardware = detect_hardware() if gpus else None
    if hardware is None:
        return None
    return partial(plan_of, hardware=replace(hardware, gpus_per_node=processes), memory_cap_bytes=cap)


def _head(job: Job, settings: Settings, gpus: int) -> dict[str, Any]:
    """What `bench.json` says besides the rows."""
    from shardwise.hardware.detect import detect_hardware
    from shardwise.record.bench import SCHEMA
    from shardwise.record.environment import environment

    hardware = detect_hardware() if gpus else None
    cards = (
        [] if hardware is None else [{"name": hardware.gpu.name, "memory_bytes": hardware.gpu.memory_bytes}]
    )
    return {
        "schema": SCHEMA,
        "name": job.name,
        "job": job.model_dump(mode="json", exclude={"output", "tracking", "strategy"}),
        "processes": settings.processes,
        "memory_cap_bytes": settings.memory_cap_bytes,
        "warmup_steps": settings.warmup,
        "steps": settings.steps,
        "environment": environment(
            gpus=cards * (hardware.gpus_per_node if hardware else 0), command=["shardwise", *sys.argv[1:]]
        ),
        "hardware": None if hardware is None else hardware.to_json(),
    }


def _run(rows: list[Row], settings: Settings, head: dict[str, Any]) -> None:
    """Runs what the folder does not have yet; each row's result is kept as soon as there is one."""
    from shardwise.bench.folder import append, opened
    from shardwise.bench.run import FINAL, run_rows
    from shardwise.record.bench import read_bench

    def stop(number: int, _: object) -> None:
        sys.exit(128 + number)  # and so through every `finally`, which ends the row's processes

    with opened(settings.folder, head):
        done = {row["key"] for row in read_bench(settings.folder).rows if row.get("status") in FINAL}
        waiting = [row for row in rows if row.key not in done]
        if len(waiting) < len(rows):
            _say(f"{len(rows) - len(waiting)} of {len(rows)} are done already, in {settings.folder}")
        before = signal.signal(signal.SIGTERM, stop)
        try:
            results = run_rows(waiting, settings)
            for number, row in enumerate(waiting, start=1):
                _say(f"[{number}/{len(waiting)}] {row.label} ...")
                result = next(results)
                append(settings.folder, result)
                _say(f"[{number}/{len(waiting)}] {row.label}: {_outcome(result)}")
        except KeyboardInterrupt:
            _say(f"stopped; the same command goes on in {settings.folder}")
            raise
        finally:
            signal.signal(signal.SIGTERM, before)


def _outcome(result: dict[str, Any]) -> str:
    from shardwise.units import count, gib

    found = result["measured"]
    if found is None:
        return f"{result['status']}, {str(result['error']).splitlines()[0]}"
    rate, memory = count(found["tokens_per_second_per_gpu"]), gib(found["peak_reserved_bytes"])
    return f"{rate} tok/s/GPU, {memory}, {found['verdict']}; {result['seconds']:.0f} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
