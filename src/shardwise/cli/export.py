"""`shardwise export RUN`: the trained weights in Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import RunFolder


def export(
    run: RunFolder,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the base model.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder to write.  [default: RUN/export]")
    ] = None,
) -> None:
    """Write the trained weights as Hugging Face safetensors.

    Prints one JSON object: what was written, and with --merge how far the merged logits differ.
    """
    from shardwise.train.afterwards import export_run

    print(json.dumps(export_run(run, out or run / "export", merge=merge)))
