"""`shardwise generate RUN`: text from the trained model."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import RunFolder, stdout_to_stderr
from shardwise.errors import JobError


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
    _refuse_exported(run)
    with stdout_to_stderr():
        from shardwise.train.afterwards import generate_run

        answer = generate_run(run, prompt, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    print(answer.rstrip())


def _refuse_exported(folder: Path) -> None:
    """JobError where it holds weights and no run: how they are used, and which run may be meant."""
    from shardwise.record.read import is_run_folder

    kinds = {
        "adapter_config.json": ("an exported adapter", "peft.AutoPeftModelForCausalLM"),
        "config.json": ("a Hugging Face model", "transformers.AutoModelForCausalLM"),
    }
    found = next((kinds[name] for name in kinds if (folder / name).is_file()), None)
    if found is None or is_run_folder(folder):
        return
    kind, loader = found
    parent = folder.resolve().parent
    run = shlex.quote(str(folder.parent)) if is_run_folder(parent) else "RUN"
    raise JobError(
        f"{folder} is {kind}, not a run folder",
        where="RUN",
        fix=f"`shardwise generate {run} --prompt ...` with the run that it was exported from; the folder "
        f"itself is for {loader}.from_pretrained",
    )
