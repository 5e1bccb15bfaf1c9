"""`shardwise plan [JOB]`: what fits the GPUs, how fast each strategy is, and which to choose."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardwise.cli.options import (
    PAGE,
    QLORA,
    AsJson,
    Changes,
    Margin,
    MemoryCap,
    QLora,
    RowLength,
    planning,
    say,
    say_to_dos,
    stdout_to_stderr,
    write_text,
)
from shardwise.errors import JobError

JOB = typer.Argument(metavar="JOB", help="Job file (YAML); without it --model.", show_default=False)
GPUS = typer.Option(
    metavar="GPUS",
    help="4xRTX4080, 2x8xH100, 4x24GB; 4xRTX4080@pcie4x8+128GiB also says slots and host memory.  "
    "[default: this machine's]",
)
MODEL = typer.Option(metavar="MODEL", help="Hub id, folder or known name.")
LORA = typer.Option(min=1, metavar="RANK", help="Train LoRA adapters of this rank.")
FULL = typer.Option("--full", help="Train all weights.")
DOCUMENTS = typer.Option(metavar="N", help="Tokens of a document in packed rows.  [default: a row's]")
BATCH = typer.Option(min=1, metavar="N", help="Rows of a step, over all GPUs.")
OBJECTIVE = typer.Option(help="Metric to rank strategies by.")
SLOWDOWN = typer.Option(
    metavar="SHARE",
    help="With --objective energy: also choose a power limit and how many GPUs, this much slower.",
)
PARETO = typer.Option("--pareto", help="Show time against energy over strategies and power limits.")
SCALE = typer.Option(metavar="SIZES", help="Plan for several numbers of GPUs: 1,2,4,8,16x8. Needs --gpus.")
STRAGGLER = typer.Option(metavar="SHARE", help="Spread of GPUs' step times; 1.5% on several nodes.")
ALL = typer.Option("--all", help="Show every strategy.")
EXPLAIN = typer.Option("--explain", help="Show where memory and time go, and what more memory buys.")
HTML = typer.Option(metavar="FILE", help="Also write one HTML page, which needs nothing else.")
OUT = typer.Option(metavar="FILE", help="Also write the plan there, as JSON.")


def plan(
    job: Annotated[Path | None, JOB] = None,
    gpus: Annotated[str | None, GPUS] = None,
    model: Annotated[str | None, MODEL] = None,
    lora: Annotated[int | None, LORA] = None,
    full: Annotated[bool, FULL] = False,
    qlora: QLora = False,
    sequence: RowLength = None,
    documents: Annotated[int | None, DOCUMENTS] = None,
    global_batch: Annotated[int | None, BATCH] = None,
    objective: Annotated[Literal["throughput", "memory", "energy"], OBJECTIVE] = "throughput",
    max_slowdown: Annotated[str | None, SLOWDOWN] = None,
    pareto: Annotated[bool, PARETO] = False,
    scale: Annotated[str | None, SCALE] = None,
    straggler: Annotated[str | None, STRAGGLER] = None,
    everything: Annotated[bool, ALL] = False,
    explain: Annotated[bool, EXPLAIN] = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, OUT] = None,
    html: Annotated[Path | None, HTML] = None,
    changes: Changes = [],
    memory_cap: MemoryCap = None,
    margin: Margin = None,
) -> None:
    """Show what fits and how fast it is, before any GPU is touched."""
    say_to_dos(job)
    if (lora is not None or qlora) and full:
        what = f"{'--qlora' if qlora else '--lora'} and --full say opposite things"
        raise JobError(what, where="shardwise plan", fix="keep one")
    flags = {
        "model.lora.rank": lora,
        "model.lora": "null" if full else None,
        "data.sequence_length": sequence,
        "train.global_batch": global_batch,
    }
    asked: dict[str, Any] = {
        "gpus": gpus,
        "model": model,
        "changes": [
            *changes,
            *[QLORA] * qlora,
            *(f"{key}={value}" for key, value in flags.items() if value is not None),
        ],
        "objective": objective,
        "memory_cap": memory_cap,
        "straggler": straggler,
        "margin": margin,
        "making": planning,
    }
    if scale is not None:
        if max_slowdown is not None or pareto or everything or explain or html is not None:
            what = "--scale shows the choice for each number of GPUs, without its alternatives"
            fix = "leave --max-slowdown, --pareto, --all, --explain and --html out, or --scale"
            raise JobError(what, where="shardwise plan", fix=fix)
        from shardwise.app.tables import scale as make_table

        asked |= {"making": stdout_to_stderr, "progress": lambda text: say(f"planning {text}")}
        table = make_table(scale, job, **asked)
        _write(table.to_json(), out, as_json=as_json)
        if not as_json:
            print(table)
        return
    from shardwise.app.plan import plan as make
    from shardwise.planner.explain import show_explanation
    from shardwise.planner.table import show, show_pareto
    from shardwise.planner.why import does_not_fit

    made = make(job, max_slowdown=max_slowdown, pareto=pareto, documents=documents, **asked)
    _write(made.to_json(), out, as_json=as_json, everything=everything)
    if html is not None:
        from shardwise.board.pages import plan_document

        write_text(html, plan_document(made, shlex.join(["shardwise", *sys.argv[1:]])), "--html", PAGE)
    if not as_json:
        show(made, everything=everything)
        if made.pareto:
            show_pareto(made)
        if explain:
            print()
            show_explanation(made)
        if wrote := [str(path) for path in (out, html) if path is not None]:
            print(f"\nwrote {' and '.join(wrote)}")
    if made.chosen is None:
        raise does_not_fit(made)


def _write(values: dict[str, Any], out: Path | None, *, as_json: bool, everything: bool = True) -> None:
    """All into the file, which `emit` reads; on stdout what fits, and the rest with --all."""
    if out is not None:
        write_text(out, f"{json.dumps(values)}\n", "--out", '{"schema": 1,')
    if not everything and values["chosen"] is not None:
        fitting = [one for one in values["alternatives"] if one["fits"]]
        values = {**values, "alternatives": fitting, "skipped": [], "refused": []}
    if as_json:
        print(json.dumps(values))
