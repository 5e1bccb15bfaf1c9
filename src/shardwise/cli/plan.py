"""`shardwise plan [JOB]`: what fits the GPUs, how fast each strategy is, and which to choose."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from shardwise.cli.options import AsJson, Changes, size_in_bytes, stdout_to_stderr, write_text
from shardwise.errors import JobError, MachineError

if TYPE_CHECKING:
    from shardwise.hardware.hardware import Hardware
    from shardwise.job.load import LoadedJob
    from shardwise.job.schema import Job
    from shardwise.plan.plan import Objective, Plan


def plan(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="Job file (YAML); without it --model.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="GPUS",
            help="4xRTX4080, 2x8xH100, 4x24GB; 4xRTX4080@pcie4x8+128GiB also says slots and host memory.  "
            "[default: this machine's]",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Hub id, folder or known name.")] = None,
    lora: Annotated[
        int | None, typer.Option(min=1, metavar="RANK", help="Train LoRA adapters of this rank.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights.")] = False,
    sequence: Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens in a row.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of a step, over all GPUs.")
    ] = None,
    objective: Annotated[
        Literal["throughput", "memory", "energy"], typer.Option(help="What the best is best at.")
    ] = "throughput",
    everything: Annotated[bool, typer.Option("--all", help="Show every strategy.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where memory and time go, and what more memory buys.")
    ] = False,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan there, as JSON.")
    ] = None,
    changes: Changes = [],
    memory_cap: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Use no more of each GPU, e.g. 16GiB.")
    ] = None,
) -> None:
    """Show what fits and how fast it is, before any GPU is touched."""
    if lora is not None and full:
        raise JobError("--lora and --full say opposite things", where="shardwise plan", fix="keep one")
    if job is None and model is None:
        raise JobError(
            "there is nothing to plan",
            where="shardwise plan",
            fix="name a job file, or a model: --model EleutherAI/gpt-neo-2.7B",
        )
    flags = {
        "model.source": model if job is not None else None,
        "model.lora.rank": lora,
        "model.lora": "null" if full else None,
        "data.sequence_length": sequence,
        "train.global_batch": global_batch,
    }
    wanted = [*changes, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    cap = None if memory_cap is None else size_in_bytes(memory_cap, "--memory-cap")
    hardware = hardware_of(gpus)
    loaded, assumed = job_of(job, model, wanted, hardware)

    from shardwise.hardware.parse import with_slot
    from shardwise.plan.explain import show_explanation
    from shardwise.plan.table import show
    from shardwise.plan.why import does_not_fit, uses_host

    try:
        made = plan_of(loaded.job, hardware, objective=objective, memory_cap_bytes=cap)
    except JobError as error:
        raise loaded.located(error) from None
    slot = None if gpus is None else with_slot(gpus, hardware)
    if slot is not None and (hardware.world_size > 1 or (made.chosen is not None and uses_host(made.chosen))):
        assumed = (*assumed, f"--gpus {slot}")
    made = replace(made, job=replace(made.job, assumed=(*made.job.assumed, *assumed)))
    text = json.dumps(made.to_json())
    if out is not None:
        write_text(out, f"{text}\n", "--out")
    if as_json:
        print(text)
    else:
        show(made, everything=everything)
        if explain:
            print()
            show_explanation(made)
    if made.chosen is None:
        raise does_not_fit(made)


def plan_of(
    job: Job, hardware: Hardware, *, objective: Objective = "throughput", memory_cap_bytes: int | None = None
) -> Plan:
    """The job's plan: kept on disk, or made."""
    from shardwise.planner.cache import kept_plan, plan_key

    made = kept_plan(plan_key(job, hardware, objective=objective, memory_cap_bytes=memory_cap_bytes))
    if made is None:  # the model has to be built, which takes torch
        from shardwise.planner.planning import make_plan

        with stdout_to_stderr(), _watched():
            made = make_plan(job, hardware, objective=objective, memory_cap_bytes=memory_cap_bytes)
    return made


@contextmanager
def _watched() -> Iterator[None]:
    """What a terminal shows of the seconds that a plan takes; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    from shardwise.plan.progress import telling

    console = Console(stderr=True)
    with console.status("planning: building the model, without its weights", refresh_per_second=4) as shown:

        def told(decided: int, strategies: int) -> None:
            shown.update(f"planning: {decided} of {strategies} strategies simulated or skipped")

        with telling(told):
            yield


def hardware_of(gpus: str | None) -> Hardware:
    """What --gpus describes, else this machine; MachineError where it has no GPU to plan for."""
    from shardwise.hardware.detect import detect_hardware
    from shardwise.hardware.parse import EXAMPLES, parse_hardware

    if gpus is not None:
        return parse_hardware(gpus)
    found = detect_hardware()
    if found is None:
        raise MachineError(
            "no GPU is visible here to plan for", where="--gpus", fix=f"name the GPUs: --gpus {EXAMPLES}"
        )
    return found


def job_of(
    file: Path | None, model: str | None, changes: list[str], hardware: Hardware
) -> tuple[LoadedJob, tuple[str, ...]]:
    """The job of the file, or of a model's name alone, and what of it nobody said."""
    from shardwise.job.load import LoadedJob, load_job
    from shardwise.plan.sketch import sketch

    if file is not None:
        return load_job(file, changes), ()
    drawn = sketch(model or "", changes, world_size=hardware.world_size)
    return LoadedJob(job=drawn.job, origins={}), drawn.assumed
