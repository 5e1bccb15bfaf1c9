"""`shardwise emit JOB|PLAN`: files that start a training script of your own, or the job itself."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import Changes, placed, planning, write_text
from shardwise.errors import JobError

SOURCE = typer.Argument(metavar="JOB|PLAN", help="Job file, or a plan (plan --out).", show_default=False)
TO = typer.Option(help="Launcher to write files for; a Hugging Face Trainer variant is always included.")
RUN = typer.Option(help="What starts: a script of your own, or `shardwise train` of the job.")
GPUS = typer.Option(metavar="GPUS", help="For a job: 4xRTX4080, 2x8xH100.  [default: this machine's]")
PRESET = typer.Option(metavar="NAME", help="Instead of a job: DeepSpeed's files of zero2-offload, zero3, ...")
TARGETS = Literal["deepspeed", "accelerate", "torchrun", "slurm", "kubernetes", "skypilot"]


def emit(
    source: Annotated[Path | None, SOURCE] = None,
    to: Annotated[TARGETS, TO] = "torchrun",
    run: Annotated[Literal["script", "shardwise"], RUN] = "script",
    gpus: Annotated[str | None, GPUS] = None,
    preset: Annotated[str | None, PRESET] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")] = Path("engine"),
    changes: Changes = [],
) -> None:
    """Write files that start your script, or the job on a cluster."""
    from shardwise.app.emit import emit as texts
    from shardwise.app.emit import library
    from shardwise.emit.files import PURPOSES

    if (source is None) == (preset is None) or (preset is not None and to != "deepspeed"):
        fix = "shardwise emit job.yaml, or shardwise emit --to deepspeed --preset zero2-offload"
        raise JobError("it takes a job, a plan or a preset of deepspeed", where="shardwise emit", fix=fix)
    if source is None:
        emitted = library(str(preset), out)
    else:
        emitted = texts(source, to=to, run=run, gpus=gpus, out=out, changes=changes, making=planning)
    with placed(out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
    for name, content in emitted.files.items():
        write_text(out / name, content, "--out")
        purpose = next((f": {text}" for part, text in PURPOSES.items() if part in name), "")
        print(f"wrote {out / name}{purpose}")
    for note in emitted.notes:
        print(f"note: {note}")
    if missing := sorted(set(re.findall(r"YOUR-[A-Z]+", " ".join(emitted.files.values())))):
        print(f"first: write your own for {', '.join(missing)}; the files say at their heads what each is")
    for start in emitted.start:
        print(f"start: {start}")
