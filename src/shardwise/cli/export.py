"""`shardwise export RUN`: the trained weights in Hugging Face's format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import RunFolder, stdout_to_stderr
from shardwise.errors import JobError


def export(
    run: RunFolder,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the base model.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder to write.  [default: RUN/export]")
    ] = None,
) -> None:
    """Write the trained weights as Hugging Face safetensors.

    Prints one JSON object: what was written, its number format, and with --merge how far the merged
    logits differ.
    """
    out = out or run / "export"
    if out.exists() and not out.is_dir():
        raise JobError(f"{out} is not a folder", where="--out", fix="name a new folder")
    with stdout_to_stderr():  # DeepSpeed, which peft imports, logs there
        from shardwise.train.afterwards import export_run

        written = export_run(run, out, merge=merge)
    print(f"wrote {written['kind']} weights in {written['dtype']} to {out}", file=sys.stderr)
    print(json.dumps(written))
