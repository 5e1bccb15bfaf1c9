"""`shardwise emit JOB|PLAN`: engine files and launch scripts for a training script of your own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardwise.cli.options import Changes, placed, write_text
from shardwise.cli.plan import hardware_of, plan_of
from shardwise.errors import JobError

if TYPE_CHECKING:
    from shardwise.emit.request import Request


def emit(
    source: Annotated[
        Path, typer.Argument(metavar="JOB|PLAN", help="Job file, or a plan (plan --out).", show_default=False)
    ],
    to: Annotated[
        Literal["deepspeed", "accelerate", "torchrun", "slurm"],
        typer.Option(help="What starts the training; each writes a launch for the Trainer's scripts, too."),
    ] = "torchrun",
    gpus: Annotated[
        str | None,
        typer.Option(metavar="GPUS", help="For a job: 4xRTX4080, 2x8xH100.  [default: this machine's]"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("engine"),
    changes: Changes = [],
) -> None:
    """Write engine files and launch scripts for your own training script."""
    from shardwise.emit.files import emit as files_for

    plan = _plan(_text(source))
    for flag, value in {"--set": changes, "--gpus": gpus}.items():
        if plan is not None and value:
            raise JobError("a plan is not changed", where=flag, fix="name the job that it was made of")
    request = _of_job(source, changes, gpus, out) if plan is None else _of_plan(source, plan, out)
    emitted = files_for(to, request)
    taken = [name for name in emitted.files if (out / name).exists()]
    if taken:
        raise JobError(
            f"{out / taken[0]} exists already", where="--out", fix="name a new folder, or remove the file"
        )
    with placed(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
    for name, content in emitted.files.items():
        write_text(out / name, content, "--out")
        print(f"wrote {out / name}")
    for note in emitted.notes:
        print(f"note: {note}")
    for start in emitted.start:
        print(f"start: {start}")


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobError(f"there is no file {source}", where="shardwise emit", fix="check the path") from None
    except (OSError, UnicodeDecodeError):
        raise JobError("it cannot be read", where=str(source), fix="name a job file or a plan") from None


def _plan(text: str) -> dict[str, Any] | None:
    """The plan that a text holds; None for anything else, such as a job."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and "chosen" in values else None


def _of_plan(source: Path, plan: dict[str, Any], out: Path) -> Request:
    """The choice of a plan that `plan --out` wrote."""
    from shardwise.emit.request import Request
    from shardwise.plan.plan import SCHEMA

    try:
        if plan["schema"] != SCHEMA:
            raise ValueError(plan["schema"])
        request = Request.of_plan(plan, out.resolve().as_posix())
    except (ValueError, KeyError, TypeError, OverflowError):
        raise JobError(
            "it is no plan of this version", where=str(source), fix="shardwise plan JOB --out plan.json"
        ) from None
    if request is None:
        raise JobError(
            "nothing fits in this plan, so there is nothing to emit",
            where=str(source),
            fix="`shardwise plan` names the nearest change that fits",
        )
    return request


def _of_job(source: Path, changes: list[str], gpus: str | None, out: Path) -> Request:
    """The plan's choice for a job."""
    from shardwise.emit.request import Request
    from shardwise.job.load import load_job
    from shardwise.plan.why import does_not_fit

    job = load_job(source, changes).job
    hardware = hardware_of(gpus)
    plan = plan_of(job, hardware)
    place = out.resolve().as_posix()
    request = Request.of_plan(plan.to_json(), place, job=job)
    if request is None:
        raise does_not_fit(plan)
    return request
