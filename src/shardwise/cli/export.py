"""`shardwise export RUN`: the trained weights in Hugging Face's format."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.options import AsJson, RunFolder, stdout_to_stderr
from shardwise.errors import JobError


def export(
    run: RunFolder,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the base model.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder to write.  [default: RUN/export]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the trained weights as Hugging Face safetensors.

    Tells what was written, its number format, and with --merge how far the merged logits differ.
    """
    out = out or run / "export"
    if out.exists() and not out.is_dir():
        raise JobError(f"{out} is not a folder", where="--out", fix="name a new folder")
    with stdout_to_stderr():  # DeepSpeed, which peft imports, logs there
        from shardwise.train.afterwards import export_run

        written = export_run(run, out, merge=merge)
    if as_json:
        print(json.dumps(written))
    else:
        print("\n".join(_lines(written, out)))


def _lines(written: Mapping[str, Any], out: Path) -> Iterator[str]:
    what = {"model": "the model", "adapter": "the adapter", "merged": "the model with the adapter merged in"}
    yield f"wrote {what[written['kind']]} of step {written['step']}, in {written['dtype']}, to {out}"
    if written["kind"] == "merged":
        difference, largest = written["max_logit_difference"], written["max_logit"]
        yield f"  merging moved logits by at most {difference:.2g}; the largest is {largest:.3g}"
    loader = "peft.AutoPeftModelForCausalLM" if written["kind"] == "adapter" else "AutoModelForCausalLM"
    yield f"  load it with {loader}.from_pretrained; `shardwise generate` takes the run"
