"""`shardwise bench JOB`: strategies side by side on this machine, measured and predicted."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, Changes, JobFile, MemoryCap, planning, say

STRATEGIES = typer.Option(
    metavar="A,B", help="zero2,fsdp2,..., or all.  [default: all that fit; with --sweep the job's]"
)
SWEEP = typer.Option(metavar="KEY=V,V", help="Each of a key's values; repeated, all combinations.")
PROCESSES = typer.Option(min=1, metavar="N", help="Processes, one per GPU.  [default: all GPUs, or 1]")
STEPS = typer.Option(min=1, metavar="N", help="Steps that count.")
WARMUP = typer.Option(min=1, metavar="N", help="Steps before them.")
TIMEOUT = typer.Option(min=1, metavar="SECONDS", help="End a strategy that takes longer.")
PROFILE = typer.Option("--profile/--no-profile", help="Record one more step with torch.profiler.")
OUT = typer.Option(metavar="DIR", help="Folder of the results.  [default: bench/NAME]")


def bench(
    job: JobFile,
    strategies: Annotated[str | None, STRATEGIES] = None,
    sweep: Annotated[list[str], SWEEP] = [],
    processes: Annotated[int | None, PROCESSES] = None,
    steps: Annotated[int, STEPS] = 10,
    warmup: Annotated[int, WARMUP] = 3,
    timeout: Annotated[float, TIMEOUT] = 900.0,
    profile: Annotated[bool, PROFILE] = True,
    out: Annotated[Path | None, OUT] = None,
    changes: Changes = [],
    memory_cap: MemoryCap = None,
    as_json: AsJson = False,
) -> None:
    """Measure strategies, a few steps each, and compare with plans."""
    from shardwise.app.bench import bench as run
    from shardwise.report.bench import show_bench, to_json

    record = run(
        job,
        strategies=strategies,
        sweep=sweep,
        processes=processes,
        steps=steps,
        warmup=warmup,
        timeout_seconds=timeout,
        profile=profile,
        out=out,
        changes=changes,
        memory_cap=memory_cap,
        command=["shardwise", *sys.argv[1:]],
        say=say,
        making=planning,
    )
    if as_json:
        print(json.dumps(to_json(record)))
    else:
        show_bench(record)
        print(f"\nThe results are in {record.path}")
        print(f"As a page: shardwise report {record.path} --html bench.html")
