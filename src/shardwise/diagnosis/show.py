"""The report on a terminal: problems first, each with its fix; readable without colour."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.diagnosis.check import STATUSES, Check, Status, count
from shardwise.diagnosis.doctor import Report
from shardwise.diagnosis.gpus import size_of

SIGNS: dict[Status, tuple[str, str]] = {
    "problem": ("✗", "bold red"),
    "warning": ("!", "yellow"),
    "ok": ("✓", "green"),
    "skipped": ("·", "dim"),
}


def show(report: Report, *, console: Console | None = None) -> None:
    """Print the machine, the checks, and whether training can run."""
    console = console or Console()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False, highlight=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in sorted(report.checks, key=lambda one: STATUSES.index(one.status)):
        sign, style = SIGNS[check.status]
        name = Text(check.name, style="bold" if check.status == "problem" else "")
        table.add_row(Text(sign, style=style), name, Text("\n").join(_lines(check)))
    for part in (_heading(report), "", Padding(table, (0, 0, 0, 2), expand=False), "", _verdict(report)):
        console.print(part)


def _heading(report: Report) -> Text:
    """What the machine is."""
    gpus = report.gpus
    if not gpus.cards:
        what = f"{gpus.count} parts of GPUs" if gpus.count else "no GPU to train on"
        return Text.assemble(("this machine", "bold"), f": {what}")
    first = gpus.cards[0]
    name = first.name.removeprefix("NVIDIA ") if gpus.hardware is None else gpus.hardware.gpu.name
    link = "" if gpus.hardware is None or len(gpus.cards) == 1 else f" · {gpus.hardware.intra.name}"
    facts = f"{size_of(first)}{link} · driver {gpus.driver}"
    return Text.assemble((f"{len(gpus.cards)} × {name}", "bold"), facts)


def _verdict(report: Report) -> Text:
    """Whether training can run, in a line."""
    numbers = count(report.checks)
    counted = ", ".join(
        f"{numbers[status]} {status}{'' if numbers[status] == 1 else 's'}"
        for status in ("problem", "warning")
        if numbers[status]
    )
    tail = f"{' · ' if counted else ''}{counted} · {report.seconds:.0f} s"
    if not report.ready:
        return Text.assemble(("✗ not ready", "bold red"), f": training cannot run here as it is{tail}")
    number = report.gpus.count
    where = "the CPU" if number == 0 else "1 GPU" if number == 1 else f"{number} GPUs"
    return Text.assemble(("▶ ready", "bold green"), f": training can run on {where}{tail}")


def _lines(check: Check) -> Iterator[Text]:
    yield Text(check.finding, style="dim" if check.status == "skipped" else "")
    if check.fix and check.status in ("problem", "warning"):
        yield Text.assemble(("fix: ", "bold"), check.fix)
    elif check.fix and check.status == "skipped":
        yield Text(check.fix, style="dim")
