"""`shardwise train JOB`: starts the processes that train, and waits for them."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import QLORA, AsJson, Changes, MemoryCap, QLora, stdout_to_stderr


def train(
    context: typer.Context,
    job: Annotated[
        Path,
        typer.Argument(
            metavar="JOB", help="Job file (YAML); with --resume also a run folder.", show_default=False
        ),
    ],
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes on this machine, one per GPU.  [default: the resumed run's, all GPUs, or 1]",
        ),
    ] = None,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Machines that train together; run this on each of them."),
    ] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, metavar="R", help="Which of them this is, from 0.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address and port of node 0, the same on all.")
    ] = None,
    hostfile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Machines that train together: HOST slots=N; started over ssh."),
    ] = None,
    workdir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder on the other hosts.  [default: this one]")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the run's newest checkpoint.")
    ] = False,
    resume_or_start: Annotated[
        bool, typer.Option("--resume-or-start", help="The same if the run has one, else start it.")
    ] = False,
    resume_from: Annotated[
        str | None,
        typer.Option(metavar="STEP", help="Resume from step-000400, final or latest; set newer ones aside."),
    ] = None,
    trust_checkpoint: Annotated[
        bool, typer.Option("--trust-checkpoint", help="Load DeepSpeed's own files whatever code they name.")
    ] = False,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop after this step; the schedule stays the job's."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; train nothing.")] = False,
    changes: Changes = [],
    qlora: QLora = False,
    memory_cap: MemoryCap = None,
    on_oom: Annotated[
        Literal["stop", "retry"],
        typer.Option(help="After a GPU ran out of memory: stop, or retry with a strategy that needs less."),
    ] = "stop",
    supervise: Annotated[
        bool,
        typer.Option(
            "--supervise",
            help="Start again by itself after a crash, a hang, a lost GPU or memory that ran out.",
        ),
    ] = False,
    simulate_power: Annotated[
        bool,
        typer.Option("--simulate-power", help="Rehearse power limits on the CPU with fake GPUs; slow."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Train a model as the job file says."""
    from shardwise.app.train import train as start

    # a dry run's stdout is its plan, as JSON
    with stdout_to_stderr() if as_json and not dry_run else contextlib.nullcontext():
        run = start(
            job,
            processes=processes,
            nodes=nodes,
            node_rank=node_rank,
            rendezvous=rendezvous,
            hostfile=hostfile,
            workdir=workdir,
            resume=resume,
            resume_or_start=resume_or_start,
            resume_from=resume_from,
            trust_checkpoint=trust_checkpoint,
            max_steps=max_steps,
            dry_run=dry_run,
            changes=[*changes, *[QLORA] * qlora],
            memory_cap=memory_cap,
            on_oom=on_oom,
            supervise=supervise,
            simulate_power=simulate_power,
            as_json=as_json,
            debug=bool(context.obj),
            command=["shardwise", *sys.argv[1:]],
        )
    if as_json and not dry_run and run.exit_code == 0:
        print(json.dumps(run.summary()))
    return run.exit_code
