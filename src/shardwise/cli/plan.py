"""`shardwise plan [JOB]`: what fits the GPUs, how fast each strategy is, and which to choose."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shardwise.cli.options import AsJson, Changes, MemoryCap, RowLength, planning, write_text
from shardwise.errors import JobError


def plan(
    job: Annotated[
        Path | None,
        typer.Argument(metavar="JOB", help="Job file (YAML); without it --model.", show_default=False),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="GPUS",
            help="4xRTX4080, 2x8xH100, 4x24GB; 4xRTX4080@pcie4x8+128GiB also says slots and host memory.  "
            "[default: this machine's]",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="Hub id, folder or known name.")] = None,
    lora: Annotated[
        int | None, typer.Option(min=1, metavar="RANK", help="Train LoRA adapters of this rank.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train all weights.")] = False,
    sequence: RowLength = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Rows of a step, over all GPUs.")
    ] = None,
    objective: Annotated[
        Literal["throughput", "memory", "energy"], typer.Option(help="Metric to rank strategies by.")
    ] = "throughput",
    max_slowdown: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="With --objective energy: also choose a power limit and how many GPUs, this much slower.",
        ),
    ] = None,
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show time against energy over strategies and power limits.")
    ] = False,
    everything: Annotated[bool, typer.Option("--all", help="Show every strategy.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show where memory and time go, and what more memory buys.")
    ] = False,
    as_json: AsJson = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the plan there, as JSON.")
    ] = None,
    changes: Changes = [],
    memory_cap: MemoryCap = None,
) -> None:
    """Show what fits and how fast it is, before any GPU is touched."""
    if lora is not None and full:
        raise JobError("--lora and --full say opposite things", where="shardwise plan", fix="keep one")
    from shardwise.app.plan import plan as make
    from shardwise.planner.explain import show_explanation
    from shardwise.planner.pareto import show_pareto
    from shardwise.planner.table import show
    from shardwise.planner.why import does_not_fit

    flags = {
        "model.lora.rank": lora,
        "model.lora": "null" if full else None,
        "data.sequence_length": sequence,
        "train.global_batch": global_batch,
    }
    made = make(
        job,
        gpus=gpus,
        model=model,
        changes=[*changes, *(f"{key}={value}" for key, value in flags.items() if value is not None)],
        objective=objective,
        memory_cap=memory_cap,
        max_slowdown=max_slowdown,
        pareto=pareto,
        making=planning,
    )
    text = json.dumps(made.to_json())
    if out is not None:
        write_text(out, f"{text}\n", "--out")
    if as_json:
        print(text)
    else:
        show(made, everything=everything)
        if made.pareto:
            show_pareto(made)
        if explain:
            print()
            show_explanation(made)
    if made.chosen is None:
        raise does_not_fit(made)
