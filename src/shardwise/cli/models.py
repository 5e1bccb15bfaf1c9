"""`shardwise export RUN`, the trained weights in Hugging Face's format; `generate RUN`, text from them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwise.cli.options import AsJson, RunFolder, stdout_to_stderr


def export(
    run: RunFolder,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into the base model.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="New folder to write.  [default: RUN/export]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the trained weights as Hugging Face safetensors.

    Shows what was written, its number format, and with --merge how far the merged logits differ.
    """
    from shardwise.app.models import export as write

    with stdout_to_stderr():  # DeepSpeed, which peft imports, logs there
        written = write(run, out, merge=merge)
    if as_json:
        print(json.dumps(written))
    else:
        print("\n".join(_lines(written)))


def _lines(written: Mapping[str, Any]) -> Iterator[str]:
    what = {"model": "the model", "adapter": "the adapter", "merged": "the model with the adapter merged in"}
    kind, step = what[written["kind"]], written["step"]
    yield f"wrote {kind} of step {step}, in {written['dtype']}, to {written['out']}"
    if written["kind"] == "merged":
        difference, largest = written["max_logit_difference"], written["max_logit"]
        yield f"  merging moved logits by at most {difference:.2g}; the largest is {largest:.3g}"
    loader = "peft.AutoPeftModelForCausalLM" if written["kind"] == "adapter" else "AutoModelForCausalLM"
    yield f"  load it with {loader}.from_pretrained; `shardwise generate` takes the run"


def generate(
    run: RunFolder,
    prompt: Annotated[str, typer.Option(help="What the model is asked.", show_default=False)],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 takes the likeliest token; higher is more varied.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling.")] = 0,
) -> None:
    """Let the trained model answer a prompt."""
    from shardwise.app.models import generate as write

    with stdout_to_stderr():
        answer = write(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    print(answer.rstrip())
