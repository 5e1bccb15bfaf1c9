"""`shardwise report RUN...`: what runs did, side by side; or a bench."""

from pathlib import Path
from typing import Annotated

import typer
from pydantic_core import to_json

from shardwise.cli.options import PAGE, AsJson, write_text
from shardwise.errors import JobError

RUNS = typer.Argument(metavar="RUN...", help="Run folders, or the folder of a bench.", show_default=False)
HTML = typer.Option(metavar="FILE", help="Write one HTML page, which needs nothing else.")


def report(
    runs: Annotated[list[Path], RUNS], html: Annotated[Path | None, HTML] = None, as_json: AsJson = False
) -> None:
    """Show what runs or a bench did: losses, speed, memory, energy."""
    from shardwise.record.bench import is_bench_folder

    of_bench = any(map(is_bench_folder, runs))
    if of_bench and len(runs) > 1:  # its rows are side by side already
        fix = "name one bench, or run folders only (a bench's are in its folder `runs`)"
        raise JobError("a bench is reported by itself", where=" ".join(map(str, runs)), fix=fix)
    try:
        if of_bench:
            _report_bench(runs[0], html, as_json=as_json)
        else:
            _report_runs(runs, html, as_json=as_json)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"a file holds a value that no version writes there ({type(error).__name__}: {error})"
        fix = "restore the folder's files from a copy. If nothing has changed them, it is a bug: see --debug"
        raise JobError(what, where=" ".join(map(str, runs)), fix=fix) from error
    if html is not None and not as_json:
        print(f"wrote {html}")


def _report_bench(path: Path, html: Path | None, *, as_json: bool) -> None:
    from shardwise.record.bench import read_bench
    from shardwise.report import bench as of_bench

    bench = read_bench(path)
    if html is not None:
        from shardwise.report.html.pages import bench_page

        write_text(html, bench_page(bench), "--html", PAGE)
    if as_json:
        print(to_json(of_bench.to_json(bench), inf_nan_mode="null").decode())
    elif html is None:
        of_bench.show_bench(bench)


def _report_runs(runs: list[Path], html: Path | None, *, as_json: bool) -> None:
    from shardwise.report.compare import summary
    from shardwise.report.terminal import show

    if html is not None:
        from shardwise.report.html.pages import run_page

        write_text(html, run_page(runs), "--html", PAGE)
    if as_json:
        print(to_json({"runs": [summary(run) for run in runs]}, inf_nan_mode="null").decode())
    elif html is None:
        show(runs)
