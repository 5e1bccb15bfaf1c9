"""`shardwise train JOB`: starts the processes that train, and waits for them."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import QLORA, AsJson, Changes, MemoryCap, QLora, say_to_dos, stdout_to_stderr

JOB = typer.Argument(
    metavar="JOB", help="Job file (YAML); with --resume also a run folder.", show_default=False
)
PROCESSES = typer.Option(
    min=1,
    metavar="N",
    help="Processes on this machine, one per GPU.  [default: the resumed run's, all GPUs, or 1]",
)
NODES = typer.Option(min=1, metavar="N", help="Machines that train together; run this on each of them.")
NODE_RANK = typer.Option(min=0, metavar="R", help="Which of them this is, from 0.")
RENDEZVOUS = typer.Option(metavar="HOST:PORT", help="Address and port of node 0, the same on all.")
HOSTFILE = typer.Option(metavar="FILE", help="Machines that train together: HOST slots=N; started over ssh.")
WORKDIR = typer.Option(metavar="DIR", help="Folder on the other hosts.  [default: this one]")
RESUME = typer.Option("--resume", help="Continue from the run's newest checkpoint.")
OR_START = typer.Option("--resume-or-start", help="The same if the run has one, else start it.")
RESUME_FROM = typer.Option(
    metavar="STEP", help="Resume from step-000400, final or latest; set newer ones aside."
)
TRUST = typer.Option("--trust-checkpoint", help="Load DeepSpeed's own files whatever code they name.")
MAX_STEPS = typer.Option(min=1, metavar="N", help="Stop after this step; the schedule stays the job's.")
DRY_RUN = typer.Option("--dry-run", help="Show what would run; train nothing.")
ON_OOM = typer.Option(help="After a GPU ran out of memory: stop, or retry with a strategy that needs less.")
SUPERVISE = typer.Option(
    "--supervise", help="Start again by itself after a crash, a hang, a lost GPU or memory that ran out."
)
SIMULATE = typer.Option("--simulate-power", help="Rehearse power limits on the CPU with fake GPUs; slow.")


def train(
    context: typer.Context,
    job: Annotated[Path, JOB],
    processes: Annotated[int | None, PROCESSES] = None,
    nodes: Annotated[int | None, NODES] = None,
    node_rank: Annotated[int | None, NODE_RANK] = None,
    rendezvous: Annotated[str | None, RENDEZVOUS] = None,
    hostfile: Annotated[Path | None, HOSTFILE] = None,
    workdir: Annotated[Path | None, WORKDIR] = None,
    resume: Annotated[bool, RESUME] = False,
    resume_or_start: Annotated[bool, OR_START] = False,
    resume_from: Annotated[str | None, RESUME_FROM] = None,
    trust_checkpoint: Annotated[bool, TRUST] = False,
    max_steps: Annotated[int | None, MAX_STEPS] = None,
    dry_run: Annotated[bool, DRY_RUN] = False,
    changes: Changes = [],
    qlora: QLora = False,
    memory_cap: MemoryCap = None,
    on_oom: Annotated[Literal["stop", "retry"], ON_OOM] = "stop",
    supervise: Annotated[bool, SUPERVISE] = False,
    simulate_power: Annotated[bool, SIMULATE] = False,
    as_json: AsJson = False,
) -> int:
    """Train a model as the job file says."""
    from shardwise.app.train import train as start

    say_to_dos(job)
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
