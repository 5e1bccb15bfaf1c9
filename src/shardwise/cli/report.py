"""`shardwise report RUN...`: what runs did, side by side; or a bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson, write_text
from shardwise.errors import JobError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or the folder of a bench.", show_default=False),
    ],
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one HTML page, which needs nothing else.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what runs or a bench did: losses, speed, memory, energy."""
    from shardwise.record.bench import is_bench_folder

    if html is not None:
        write_text(html, _page(runs), "--html")
    if any(map(is_bench_folder, runs)):
        _show_bench(_only(runs), as_json=as_json, quiet=html is not None)
    else:
        _show_runs(runs, as_json=as_json, quiet=html is not None)
    if html is not None and not as_json:
        print(f"wrote {html}")


def _page(runs: list[Path]) -> str:
    from shardwise.record.bench import is_bench_folder, read_bench
    from shardwise.report.html.pages import bench_page, run_page

    return (
        bench_page(read_bench(_only(runs), to_show=True))
        if any(map(is_bench_folder, runs))
        else run_page(runs)
    )


def _only(runs: list[Path]) -> Path:
    """The bench, which stands alone: its rows are side by side already."""
    if len(runs) > 1:
        fix = "name one bench, or run folders only (a bench's are in its folder `runs`)"
        raise JobError("a bench is reported by itself", where=" ".join(map(str, runs)), fix=fix)
    return runs[0]


def _show_bench(path: Path, *, as_json: bool, quiet: bool) -> None:
    from shardwise.record.bench import read_bench
    from shardwise.report.bench import show_bench, to_json

    bench = read_bench(path, to_show=True)
    if as_json:
        print(json.dumps(to_json(bench)))
    elif not quiet:
        show_bench(bench)


def _show_runs(runs: list[Path], *, as_json: bool, quiet: bool) -> None:
    from shardwise.report.compare import summary
    from shardwise.report.terminal import show

    if as_json:
        print(json.dumps({"runs": [summary(run) for run in runs]}))
    elif not quiet:
        show(runs)
