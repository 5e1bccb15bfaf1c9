"""A report that a person reads at a glance: what is wrong first, each with its fix; no colour is needed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.doctor.check import Check, Status, count, worst_first
from shardwise.doctor.doctor import Report
from shardwise.units import gib

SIGNS: dict[Status, tuple[str, str]] = {
    "problem": ("✗", "bold red"),
    "warning": ("!", "yellow"),
    "ok": ("✓", "green"),
    "skipped": ("·", "dim"),
}


def show(report: Report, *, console: Console | None = None) -> None:
    """Prints the machine, the checks, and whether training can run."""
    console = console or Console()
    console.print(heading(report))
    console.print()
    console.print(Padding(_table(report), (0, 0, 0, 2), expand=False))
    console.print()
    console.print(verdict(report))


def heading(report: Report) -> Text:
    """What the machine is."""
    gpus = report.gpus
    if not gpus.cards:
        what = f"{gpus.count} parts of GPUs" if gpus.count else "no GPU to train on"
        return Text.assemble(("this machine", "bold"), f": {what}")
    first = gpus.cards[0]
    name = first.name.removeprefix("NVIDIA ") if gpus.hardware is None else gpus.hardware.gpu.name
    link = "" if gpus.hardware is None or len(gpus.cards) == 1 else f" · {gpus.hardware.intra.name}"
    return Text.assemble(
        (f"{len(gpus.cards)} × {name}", "bold"),
        f", {gib(first.memory_bytes)} each{link} · driver {gpus.driver}",
    )


def verdict(report: Report) -> Text:
    """Whether training can run, in a line."""
    numbers = count(report.checks)
    told = [
        f"{numbers[status]} {status}{'' if numbers[status] == 1 else 's'}"
        for status in ("problem", "warning")
        if numbers[status]
    ]
    tail = f" · {', '.join(told)}" if told else ""
    seconds = f" · {report.seconds:.0f} s"
    if not report.ready:
        return Text.assemble(
            ("✗ not ready", "bold red"), f": training cannot run here as it is{tail}{seconds}"
        )
    number = report.gpus.count
    where = f"{number} GPU{'' if number == 1 else 's'}" if number else "the CPU"
    return Text.assemble(("▶ ready", "bold green"), f": training can run on {where}{tail}{seconds}")


def _table(report: Report) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, highlight=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in worst_first(report.checks):
        sign, style = SIGNS[check.status]
        table.add_row(
            Text(sign, style=style),
            Text(check.name, style="bold" if check.status == "problem" else ""),
            Text("\n").join(_lines(check)),
        )
    return table


def _lines(check: Check) -> Iterator[Text]:
    yield Text(check.finding, style="dim" if check.status == "skipped" else "")
    if check.fix and check.status in ("problem", "warning"):
        yield Text.assemble(("fix: ", "bold"), check.fix)
    elif check.fix and check.status == "skipped":
        yield Text(check.fix, style="dim")
