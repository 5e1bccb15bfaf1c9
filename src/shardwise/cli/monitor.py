"""`shardwise monitor [RUN]`: what the GPUs and a run do now, until Ctrl-C."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.options import AsJson, placed
from shardwise.errors import JobError

if TYPE_CHECKING:
    from shardwise.report.live.rows import RowFile

Show = Callable[[Mapping[str, Any]], None]

RUN = typer.Argument(
    metavar="RUN", help="Run folder.  [default: the newest running one in runs/]", show_default=False
)
EVERY = typer.Option(metavar="SECONDS", help="From one sample to the next.  [default: 2]")
CSV = typer.Option(metavar="FILE", help="Append one row a GPU and sample to a CSV file.")
JSONL = typer.Option(metavar="FILE", help="The same as JSON objects, one a line.")
ONCE = typer.Option("--once", help="Show one frame and end.")


def monitor(
    run: Annotated[Path | None, RUN] = None,
    every: Annotated[float | None, EVERY] = None,
    csv: Annotated[Path | None, CSV] = None,
    jsonl: Annotated[Path | None, JSONL] = None,
    once: Annotated[bool, ONCE] = False,
    as_json: AsJson = False,
) -> None:
    """Show memory, power, clocks and energy of GPUs and a run live.

    A terminal shows a live view; otherwise one line a sample is printed. Ctrl-C and SIGTERM end it with exit
    code 0. The GPUs are only asked, through the driver: nothing of them is used or changed.
    """
    from shardwise.app.monitor import EVERY_SECONDS
    from shardwise.app.monitor import monitor as samples_of

    if as_json and not once:
        fix = "add --once; --jsonl FILE records a row for each GPU and sample"
        raise JobError("--json shows one sample", where="--json", fix=fix)
    if once and every is not None:
        raise JobError("--once takes one sample", where="--every", fix="leave out --every or --once")
    seconds = EVERY_SECONDS if every is None else every
    with (
        contextlib.closing(samples_of(run, every_seconds=seconds)) as samples,
        contextlib.ExitStack() as stack,
    ):
        first = next(samples)  # what is wrong with RUN is known before a file is made
        files = [stack.enter_context(contextlib.closing(file)) for file in _files(csv, jsonl)]
        kept = "".join(f", recorded in {path}" for path in (csv, jsonl) if path is not None)
        shown = _once(as_json=as_json) if once else stack.enter_context(_live(f"  every {seconds:g} s{kept}"))
        for sample in itertools.chain([first], samples):
            for file in files:
                file.write(sample)
            shown(sample)
            if once:
                break


def _files(csv: Path | None, jsonl: Path | None) -> Iterator[RowFile]:
    from shardwise.report.live.rows import RowFile

    for flag, path in (("--csv", csv), ("--jsonl", jsonl)):
        if path is not None:
            with placed(path, flag):
                yield RowFile(path, as_csv=flag == "--csv")


def _once(*, as_json: bool) -> Show:
    if as_json:
        return lambda sample: print(json.dumps(sample))
    from shardwise.report.live.frame import frame
    from shardwise.screen import screen

    console = screen()
    return lambda sample: console.print(frame(sample, width=console.width))


@contextlib.contextmanager
def _live(note: str) -> Iterator[Show]:
    """Shows each sample: on a terminal in place, and the last one again at the end; else as a line."""
    from rich.console import Console, RenderableType
    from rich.live import Live

    from shardwise.report.live.frame import frame, line

    console = Console()
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        yield lambda sample: print(line(sample), flush=True)
        return
    last: RenderableType = ""

    def show(sample: Mapping[str, Any]) -> None:
        nonlocal last
        last = frame(sample, width=console.width, note=f"{note}, Ctrl-C ends")
        live.update(last, refresh=True)

    with Live(console=console, screen=True, auto_refresh=False) as live:
        yield show
    console.print(last)
