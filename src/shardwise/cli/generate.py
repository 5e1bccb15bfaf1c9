"""`shardwise generate RUN`: text from the trained model."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.options import RunFolder, stdout_to_stderr


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
