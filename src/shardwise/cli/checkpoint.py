"""`shardwise checkpoint`: lists and verifies a run's checkpoints, and writes one into a single file."""

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import AsJson
from shardwise.errors import CheckpointError, JobError


def checkpoint(
    action: Annotated[
        Literal["list", "verify", "convert"],
        typer.Argument(help="list; verify: read every byte; convert: into one safetensors file."),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder, such as runs/NAME.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Only of this step.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The new file of convert.")] = None,
    as_json: AsJson = False,
) -> int:
    """List, verify or convert the checkpoints of a run.

    To resume from a step, under any strategy, nothing has to be converted.
    """
    from shardwise.app.models import checkpoints, convert
    from shardwise.units import processes, size

    if (out is None) == (action == "convert"):
        fix = f"shardwise checkpoint convert {shlex.quote(str(run))} --out state.safetensors"
        raise JobError("--out FILE is for convert, which needs it", where="shardwise checkpoint", fix=fix)
    if out is not None:
        written = convert(run, out, step)
        text = f"{out}: {written['tensors']} tensors of step {written['step']}, {size(written['bytes'])}"
        print(json.dumps(written) if as_json else text)
        return 0
    found = checkpoints(run, step, every_byte=action == "verify")
    sound = "sound" if action == "verify" else "complete"
    for one in [] if as_json else found:
        about = "" if one["bytes"] is None else f", {size(one['bytes'])}, {one['strategy']} on "
        about += processes(one["processes"]) if about else ""
        about += "" if one["loss"] is None else f", evaluation loss {one['loss']:.4f}"
        print(f"step {one['step']}: {'; '.join(one['problems'][:3]) or sound}{about}")
    if as_json:
        print(json.dumps(found))
    elif action == "list":
        name = shlex.quote(str(run))
        print(f"go on from one: shardwise train {name} --resume-from STEP; weights: shardwise export {name}")
    return CheckpointError.exit_code if action == "verify" and any(one["problems"] for one in found) else 0
