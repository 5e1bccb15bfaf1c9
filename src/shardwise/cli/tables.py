"""`shardwise tables KIND`: memory, speed, scaling and batch sizes over models, GPUs and modes."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardwise.cli import options
from shardwise.errors import JobError

KINDS = "memory: GiB a GPU. speed: tokens/s and days. scaling: 1, 2, 4, ... GPUs. batch: the most that fits."
KIND = typer.Argument(help=KINDS, show_default=False)
MODELS = typer.Option(metavar="A,B", help="Names or hub ids.  [default: GPT-3's eight sizes]")
GPUS = typer.Option(metavar="A,B", help="4x24GB,8xH100.  [default: this machine's]")
MODES = typer.Option(
    metavar="A,B",
    help="What to compare: words joined by +, as in full+zero2,nf4+lora16+zero3-offload,full+nockpt.",
)
FORMAT = typer.Option("--format", help="How to show it.")
OUT = typer.Option(metavar="FILE", help="Write it there instead of printing it.")


def tables(
    kind: Annotated[Literal["memory", "speed", "scaling", "batch"], KIND],
    models: Annotated[str | None, MODELS] = None,
    gpus: Annotated[str | None, GPUS] = None,
    modes: Annotated[str | None, MODES] = None,
    sequence: options.RowLength = None,
    form: Annotated[Literal["text", "csv", "md", "html", "json"], FORMAT] = "text",
    out: Annotated[Path | None, OUT] = None,
    changes: options.Changes = [],
    memory_cap: options.MemoryCap = None,
    margin: options.Margin = None,
) -> None:
    """Compare models, GPUs and ways to train; each row is a plan."""
    from shardwise.app import tables as app

    if out is not None and out.exists():
        raise JobError(f"{out} exists already", where="--out", fix="name another file, or delete it")
    asked: dict[str, Any] = {"gpus": gpus, "modes": modes, "sequence": sequence, "changes": changes}
    asked |= {"memory_cap": memory_cap, "margin": margin}
    with options.stdout_to_stderr(), options.progress("planning", every=True) as show:
        table = app.tables(
            kind, models or app.MODELS, progress=lambda text: show(f"planning {text}"), **asked
        )
    if out is None:
        print(table.to(form))
    else:
        options.write_text(out, f"{table.to(form)}\n", "--out")
        print(f"wrote {out}")
