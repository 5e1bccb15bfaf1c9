"""`shardwise export RUN`, the trained weights in Hugging Face's format."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.options import AsJson, RunFolder, progress, say, stdout_to_stderr

MERGE = typer.Option("--merge", help="Merge LoRA adapters into the base model.")
OUT = typer.Option(metavar="DIR", help="New folder to write.  [default: RUN/export]")
GGUF = typer.Option("--gguf", help="Also write DIR/NAME.gguf, by llama.cpp.")
PUSH = typer.Option(metavar="REPO", help="Upload to the hub; a new REPO is private.")


def export(
    run: RunFolder,
    merge: Annotated[bool, MERGE] = False,
    out: Annotated[Path | None, OUT] = None,
    gguf: Annotated[bool, GGUF] = False,
    push: Annotated[str | None, PUSH] = None,
    as_json: AsJson = False,
) -> None:
    """Write trained weights as Hugging Face or GGUF files.

    Shows what was written, its number format, and with --merge how far the merged logits differ.
    --gguf needs llama.cpp's convert_hf_to_gguf.py on PATH or in the folder $LLAMA_CPP.
    """
    with stdout_to_stderr(), progress("export: starting") as show:  # DeepSpeed, which peft imports, logs
        from shardwise.app.models import export as write

        def report(what: str) -> None:
            (show if sys.stderr.isatty() else say)(f"export: {what}")

        written = write(run, out, merge=merge, gguf=gguf, push=push, show=report)
    if as_json:
        print(json.dumps(written))
    else:
        print("\n".join(_lines(written)))


def _lines(written: Mapping[str, Any]) -> Iterator[str]:
    what = {"model": "the model", "adapter": "the adapter", "merged": "the model with the adapter merged in"}
    kind, step = what[written["kind"]], str(written["step"])
    step += ", which has the lowest evaluation loss" if written["best"] else ""
    yield f"wrote {kind} of step {step}, in {written['dtype']}, to {written['out']}"
    if written["kind"] == "merged":
        difference, largest = written["max_logit_difference"], written["max_logit"]
        yield f"  merging moved logits by at most {difference:.2g}; the largest is {largest:.3g}"
    loader = "peft.AutoPeftModelForCausalLM" if written["kind"] == "adapter" else "AutoModelForCausalLM"
    yield f"  load it with {loader}.from_pretrained; `shardwise chat {written['out']}` talks to it"
    if "gguf" in written:
        yield f"  for llama.cpp: {written['gguf']}"
    if "url" in written:
        yield f"  uploaded to {written['url']}"
