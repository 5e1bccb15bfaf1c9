"""Runs on the terminal: one in full, several in a table. Text from a run is never read as markup."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.job.load import differences
from shardwise.record.read import read_run
from shardwise.report.bench import NEEDED, pair
from shardwise.report.compare import UNREAD, row_of, summary
from shardwise.report.energy import lines
from shardwise.screen import screen
from shardwise.units import count, duration, gib

_BARS = "▁▂▃▄▅▆▇█"


def show(run_dirs: Sequence[str | Path], *, console: Console | None = None) -> None:
    """Print one run in full, or a table of several. JobError where a folder is no run folder."""
    console = console or screen()
    if len(run_dirs) == 1:
        row, _ = row_of(Path(run_dirs[0]))
        _show_one(row, (row["measured"] or {"loss": []})["loss"], console)
    else:
        runs = [read_run(Path(path), without=UNREAD) for path in run_dirs]
        _show_several([summary(run) for run in runs], _differing([run.job for run in runs]), console)


def compared(row: dict[str, Any]) -> dict[str, str]:
    """What was measured, with its prediction and the error of that; empty where one of them is missing."""
    shown: dict[str, tuple[str, Callable[[float], str]]] = {
        "memory per GPU": (NEEDED, gib),
        "tokens/s per GPU": ("tokens_per_second_per_gpu", "{:,.0f}".format),
        "energy": ("joules_per_token", lambda joules: f"{joules:.3g} J/token"),
    }
    found = {}
    for label, (quantity, text) in shown.items():
        predicted, measured = pair(row, quantity)
        if predicted is not None and measured:
            error = f"{100 * (predicted / measured - 1):+.1f} %"
            found[label] = f"{text(measured)} measured, {text(predicted)} predicted ({error})"
    return found


def sparkline(values: Sequence[float], width: int = 48) -> str:
    """A curve in one line of text: each character is the mean of an equal share of the values."""
    if not values:
        return ""
    width = min(width, len(values))
    borders = [index * len(values) // width for index in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(borders)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _show_one(row: dict[str, Any], curve: Sequence[float], console: Console) -> None:
    run = row["summary"]
    steps = f"{run['steps']} of {run['total_steps']} steps"
    progress = f"  {run['status']}, {steps}, {duration(run['wall_seconds'])}"
    console.print(Text.assemble((str(run["name"]), "bold"), progress))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, read in _ROWS:
        table.add_row(label, Text(read(run)))
    if (found := run["supervised"]) is not None and found["ettr"] is not None:
        table.add_row("ETTR", f"{found['ettr']:.1%}, {len(found['failures'])} failures")
    for label, text in lines(run["energy"]).items():
        table.add_row(label, Text(text))
    for label, text in compared(row).items():
        table.add_row(f"{label}, predicted", Text(text))
    console.print(table)
    if curve:
        console.print(f"loss  {sparkline(curve)}", highlight=False)
    for evaluation in run["evaluations"]:
        line = f"evaluation after step {evaluation['step']}: {_number(evaluation['loss'])}"
        console.print(line, highlight=False)
    if run["events_missing_before_lines"]:
        places = ", ".join(map(str, run["events_missing_before_lines"][:5]))
        what = (
            f"events.jsonl: lines are missing or were changed before line {places}; curves and sums lack them"
        )
        console.print(Text(what, style="yellow"), soft_wrap=True)
    complete = [checkpoint for checkpoint in run["checkpoints"] if checkpoint["complete"]]
    if complete:
        console.print(Text(f"newest checkpoint: {complete[0]['path']}"), soft_wrap=True)
    for checkpoint in run["checkpoints"]:
        if not checkpoint["complete"]:
            warning = Text.assemble(("incomplete checkpoint: ", "yellow"), checkpoint["path"])
            console.print(warning, soft_wrap=True)


def _differing(jobs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The keys of jobs with values that differ, and the value of each; `-` where a file does not have it."""
    empty: dict[str, Any] = {
        key: {} for job in jobs for key, value in job.items() if isinstance(value, Mapping)
    }
    jobs = [{**empty, **job} for job in jobs]
    changes = [{key: (old, new) for key, old, new in differences(jobs[0], job)} for job in jobs]
    firsts = {key: old for one in changes for key, (old, _) in one.items() if key not in ("name", "output")}
    values = {key: [one.get(key, (old, old))[1] for one in changes] for key, old in firsts.items()}
    return {key: ["-" if one is None else str(one) for one in row] for key, row in values.items()}


def _show_several(runs: Sequence[dict[str, Any]], differing: dict[str, list[str]], console: Console) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", overflow="fold")
    for run in runs:
        table.add_column(Text(str(run["name"])), justify="right")
    table.add_row("status", *(Text(run["status"]) for run in runs))
    table.add_row("steps", *(f"{run['steps']}/{run['total_steps']}" for run in runs))
    for label, read in _ROWS:
        table.add_row(label, *(Text(read(run)) for run in runs))
    energies = [lines(run["energy"]) for run in runs]
    for label in ("energy", "energy used", "power limit"):
        if any(label in one for one in energies):
            table.add_row(label, *(Text(one.get(label, "-")) for one in energies))
    for key, values in differing.items():
        table.add_row(Text(key), *map(Text, values))
    console.print(table)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _eval_loss(run: dict[str, Any]) -> str:
    evaluations = run["evaluations"]
    if not evaluations:
        return "-"
    return f"{_number(evaluations[0]['loss'])} → {_number(evaluations[-1]['loss'])}"


def _rate(run: dict[str, Any]) -> str:
    if run["tokens_per_second"] is None:
        return "-"
    steady = run["steady_steps"]
    per_gpu = count(run["tokens_per_second_per_gpu"])
    first, last, counted = steady["first"], steady["last"], steady["count"]
    some = f"{counted} of " if counted <= last - first else ""  # without the first few after each resume
    return f"{count(run['tokens_per_second'])} ({per_gpu} each; {some}steps {first}-{last})"


def _peak(run: dict[str, Any]) -> str:
    peaks = run["peak_memory_reserved_bytes"]
    return gib(max(peaks)) if peaks else "-"


_ROWS: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
    ("strategy", lambda run: f"{run['strategy']} on {run['processes']}"),
    ("train loss", lambda run: f"{_number(run['first_loss'])} → {_number(run['last_loss'])}"),
    ("eval loss", _eval_loss),
    ("tokens", lambda run: count(run["tokens"])),
    ("tokens/s, mean", _rate),
    ("step, median", lambda run: "-" if run["step_seconds"] is None else duration(run["step_seconds"])),
    ("MFU, median", lambda run: "-" if run["mfu"] is None else f"{run['mfu']:.1%}"),
    ("peak memory", _peak),
    ("wall time", lambda run: duration(run["wall_seconds"])),
)
