"""`shardwise checkpoint`: lists and verifies a run's checkpoints, and writes one into a single file."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import AsJson
from shardwise.errors import CheckpointError, JobError


def checkpoint(
    action: Annotated[
        Literal["list", "verify", "convert"],
        typer.Argument(help="verify: read every byte; convert: into one safetensors file."),
    ],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    step: Annotated[int | None, typer.Option(metavar="N", help="Only of this step.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="The new file of convert.")] = None,
    as_json: AsJson = False,
) -> int:
    """List and verify the checkpoints of a run, or write one into a single file.

    To resume from a step, under any strategy, nothing has to be converted.
    """
    from shardwise.app.checkpoint import checkpoints, convert
    from shardwise.units import gib, processes

    if (out is None) == (action == "convert"):
        raise JobError("--out FILE is for convert, which needs it", where="shardwise checkpoint --out")
    if out is not None:
        written = convert(run, out, step)
        text = f"{out}: {written['tensors']} tensors of step {written['step']}, {gib(written['bytes'])}"
        print(json.dumps(written) if as_json else text)
        return 0
    found = checkpoints(run, step, every_byte=action == "verify")
    sound = "sound" if action == "verify" else "complete"
    for one in [] if as_json else found:
        texts = [sound if one["complete"] else "; ".join(one["problems"][:3])]
        if one["bytes"] is not None:
            texts += [gib(one["bytes"]), f"{one['strategy']} on {processes(one['processes'])}"]
        print(f"step {one['step']}: {', '.join(texts)}")
    if as_json:
        print(json.dumps(found))
    wrong = action == "verify" and not all(one["complete"] for one in found)
    return CheckpointError.exit_code if wrong else 0
