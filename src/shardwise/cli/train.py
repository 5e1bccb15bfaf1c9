"""`shardwise train JOB`: starts the processes that train, and waits for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardwise.cli.options import AsJson, Changes, size_in_bytes, stdout_to_stderr
from shardwise.errors import JobError

if TYPE_CHECKING:
    from shardwise.job.load import LoadedJob


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
            min=1, metavar="N", help="Processes, one per GPU.  [default: the resumed run's, all GPUs, or 1]"
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the run's newest checkpoint.")] = False,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Stop after this step; the schedule stays the job's."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run; train nothing.")] = False,
    changes: Changes = [],
    memory_cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Use no more of each GPU, e.g. 16GiB.")
    ] = None,
    on_oom: Annotated[
        Literal["stop", "retry"],
        typer.Option(
            help="After a GPU ran out of memory: end, or go on with a strategy that needs less.",
        ),
    ] = "stop",
    as_json: AsJson = False,
) -> int:
    """Train a model as the job file says."""
    from shardwise.hardware.detect import gpu_count
    from shardwise.job.load import load_job
    from shardwise.launch.local import launch
    from shardwise.launch.resume import check_same_job, job_file, processes_of
    from shardwise.launch.spec import LaunchSpec
    from shardwise.report.compare import summary

    file = job_file(job, resume=resume)
    loaded = load_job(file, changes)
    asked, gpus = loaded.job, gpu_count()
    run_dir = job if file != job else Path(asked.output) / asked.name
    if resume or not dry_run:
        check_run_folder(run_dir, resume=resume)
    if resume:
        check_same_job(loaded, run_dir)
        processes = processes or processes_of(run_dir)
    processes = processes or (1 if asked.strategy == "single" else max(1, gpus))
    check_strategy(loaded, processes, gpus)
    spec = LaunchSpec(
        job=asked.model_dump(mode="json"),
        run_dir=str(run_dir),
        processes=processes,
        resume=resume,
        max_steps=max_steps,
        dry_run=dry_run,
        as_json=as_json,
        memory_cap_bytes=cap_in_bytes(memory_cap, gpus) if memory_cap is not None else None,
        on_oom=on_oom,
        command=["shardwise", *sys.argv[1:]],
        debug=bool(context.obj),
    )
    if not as_json or dry_run:  # a dry run's stdout is its plan, as JSON
        return launch(spec)
    with stdout_to_stderr():
        code = launch(spec)
    if code == 0:
        print(json.dumps(summary(run_dir)))
    return code


def cap_in_bytes(memory_cap: str, gpus: int) -> int:
    """The value of --memory-cap; JobError where it is no size, or there is no GPU to cap."""
    size = size_in_bytes(memory_cap, "--memory-cap")
    if not gpus:
        raise JobError(
            "--memory-cap limits the memory of GPUs, and no GPU is visible here",
            where="--memory-cap",
            fix="leave it out",
        )
    return size


def check_strategy(loaded: LoadedJob, processes: int, gpus: int) -> None:
    """Says what cannot be combined before any process starts, at the job file's lines.

    The workers resolve the strategy again, then knowing the model's size and the GPU's memory.
    """
    from shardwise.space.auto import resolve

    job = loaded.job
    try:
        resolve(
            job.strategy,
            train=job.train,
            clip_norm=job.optimizer.clip_norm,
            world_size=processes,
            devices="cuda" if gpus else "cpu",
            trainable_parameters=0,
            total_parameters=0,
            device_memory_bytes=None,
            lora=job.model.lora is not None,
            quantization=job.model.quantization,
        )
    except JobError as error:
        raise loaded.located(error) from None


def check_run_folder(run_dir: Path, *, resume: bool) -> None:
    """A new run needs an empty place, a resumed one a run; JobError names the flag that fits."""
    from shardwise.launch.resume import resume_command
    from shardwise.record.read import is_run_folder

    if resume and not is_run_folder(run_dir):
        raise JobError("there is no run to resume", where=str(run_dir), fix="run without --resume")
    if not resume and run_dir.is_dir() and any(run_dir.iterdir()):
        goes_on = f"`{resume_command(run_dir)}` goes on with it; " if is_run_folder(run_dir) else ""
        raise JobError(
            "the run folder exists already",
            where=str(run_dir),
            fix=f"{goes_on}--set name={run_dir.name}-2 starts another",
        )
