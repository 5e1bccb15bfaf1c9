"""`shardwise tables KIND`: memory, speed, scaling and batch sizes over models, GPUs and modes."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import (
    Changes,
    Margin,
    MemoryCap,
    RowLength,
    progress,
    stdout_to_stderr,
    write_text,
)


def tables(
    kind: Annotated[
        Literal["memory", "speed", "scaling", "batch"],
        typer.Argument(help="`batch` is the largest micro-batch that fits.", show_default=False),
    ],
    models: Annotated[
        str | None, typer.Option(metavar="A,B", help="Names or hub ids.  [default: GPT-3's eight sizes]")
    ] = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="A,B", help="4x24GB,8xH100.  [default: this machine's]")
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Words joined by +: full, lora16, int8, nf4, fp16, nockpt, zero3-offload, ... "
            "as int8+lora16+zero2,full.",
        ),
    ] = None,
    sequence: RowLength = None,
    form: Annotated[
        Literal["text", "csv", "md", "html", "json"], typer.Option("--format", help="How to show it.")
    ] = "text",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there instead of printing it.")
    ] = None,
    changes: Changes = [],
    memory_cap: MemoryCap = None,
    margin: Margin = None,
) -> None:
    """Compare models, GPUs and ways to train in one table; every row is what `plan` says."""
    from shardwise.app import tables as app

    with stdout_to_stderr(), progress("planning") as show:
        table = app.tables(
            kind,
            app.MODELS if models is None else models,
            gpus=gpus,
            modes=modes,
            sequence=sequence,
            changes=changes,
            memory_cap=memory_cap,
            margin=margin,
            progress=lambda text: show(f"planning {text}"),
        )
    if out is None:
        print(table.to(form))
    else:
        write_text(out, f"{table.to(form)}\n", "--out")
        print(f"wrote {out}")
