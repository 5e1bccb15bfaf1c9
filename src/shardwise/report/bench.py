"""A bench on the terminal and as JSON: predicted beside measured, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.plan.why import TERMS
from shardwise.record.bench import SCHEMA, BenchRecord
from shardwise.units import GIB, count

Row = Mapping[str, Any]
ABSENT = "-"


def to_json(bench: BenchRecord) -> dict[str, Any]:
    """Schema 1: the folder's head and rows; bytes, seconds, joules. What is null has `NAME_unavailable`."""
    return {"schema": SCHEMA, "path": str(bench.path), **bench.head, "rows": bench.rows}


def show_bench(bench: BenchRecord, *, console: Console | None = None) -> None:
    """Prints what was predicted beside what was measured, then what failed and why."""
    console = console or Console()
    rows = [row for row in bench.rows if row["measured"] is not None]
    head, job = bench.head, bench.head["job"]
    console.print(
        Text.assemble(
            (str(head["name"]), "bold"),
            f"  {job['train']['global_batch']} rows of {job['data']['sequence_length']} tokens a step on "
            f"{head['processes']} {device(head)}; {head['warmup_steps']} steps to warm up, "
            f"{head['steps']} counted",
        ),
        soft_wrap=True,
    )
    if rows:
        console.print(_beside(rows))
        console.print(_more(rows))
        if any(row["predicted"] for row in rows):
            console.print(_terms(rows))
    for line in _remarks(bench):
        console.print(line, soft_wrap=True)


def device(head: Mapping[str, Any]) -> str:
    """What the processes ran on: the GPU's name, or CPU processes."""
    gpus = head["environment"].get("gpus") or []
    return str(gpus[0]["name"]) if gpus else "CPU processes"


def needed(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) bytes a process takes of its GPU: reserved, and outside the allocator."""
    predicted, found = row["predicted"], row["measured"]
    foretold = None
    if predicted is not None:
        memory = predicted["memory"]
        foretold = memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"]
    if found is None:
        return foretold, None
    return foretold, found["peak_reserved_bytes"] + (found["outside_allocator_bytes"] or 0)


def speed(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) tokens a second and GPU."""
    return _pair(row, ("time", "tokens_per_second_per_gpu"), "tokens_per_second_per_gpu")


def exposed(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) share of the step in which only communication runs."""
    return _pair(row, ("time", "exposed_communication_fraction"), "exposed_communication_fraction")


def energy(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) joules a token."""
    return _pair(row, ("energy", "joules_per_token"), "joules_per_token")


def batch(row: Row) -> str:
    """`4 x 2, full`: micro-batch, accumulation, checkpointing."""
    strategy = row["strategy"]
    every = strategy["checkpoint_every"]
    recomputed = {0: "no checkpointing", 1: "checkpointing"}.get(every, f"one block in {every}")
    return f"{strategy['micro_batch']} x {strategy['accumulation']}, {recomputed}"


def _pair(row: Row, path: tuple[str, str], name: str) -> tuple[float | None, float | None]:
    predicted, found = row["predicted"], row["measured"]
    return (
        None if predicted is None else predicted[path[0]][path[1]],
        None if found is None else found[name],
    )


def _beside(rows: Sequence[Row]) -> Table:
    """Each quantity in three columns: predicted, measured, by how much the prediction is off."""
    columns: tuple[
        tuple[str, Callable[[Row], tuple[float | None, float | None]], Callable[[float], str]], ...
    ]
    columns = (
        ("GiB", needed, lambda value: f"{value / GIB:.2f}"),
        ("tok/s/GPU", speed, count),
        ("exposed", exposed, lambda value: f"{value:.0%}"),
        ("J/token", energy, lambda value: f"{value:.3g}"),
    )
    foretold = any(row["predicted"] for row in rows)
    table = _table("predicted > measured" if foretold else "measured")
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        cells = [_cell(read(row), text, both=foretold) for _, read, text in columns]
        verdict = row["measured"]["verdict"]
        table.add_row(Text(row["label"]), *cells, Text(verdict, style="" if verdict == "valid" else "yellow"))
    return table


def _cell(values: tuple[float | None, float | None], text: Callable[[float], str], *, both: bool) -> Text:
    foretold, found = values
    value = ABSENT if found is None else text(found)
    if not both:
        return Text(value)
    guess = ABSENT if foretold is None else text(foretold)
    return Text.assemble((f"{guess} > ", "dim"), value)


def _more(rows: Sequence[Row]) -> Table:
    table = _table("measured")
    for name in ("micro x acc", "s/step", "TFLOP/s", "MFU", "loss", "grad norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = row["measured"]
        flops, mfu = found["tflops_per_gpu"], found["mfu"]
        table.add_row(
            Text(row["label"]),
            batch(row),
            f"{found['step_seconds']:.3g}",
            ABSENT if flops is None else f"{flops:.3g}",
            ABSENT if mfu is None else f"{mfu:.1%}",
            _from_to(found["loss"]),
            _from_to(found["grad_norm"]),
        )
    return table


def _terms(rows: Sequence[Row]) -> Table:
    """Of what is predicted by term, in GiB; then its sum and what was measured."""
    table = _table("GiB predicted")
    for name in TERMS.values():
        table.add_column(name.replace("output head and ", ""), justify="right")
    table.add_column("sum", justify="right")
    table.add_column("measured", justify="right")
    for row in rows:
        if row["predicted"] is None:
            continue
        memory = row["predicted"]["memory"]
        values = {**memory["terms"], "outside_allocator_bytes": memory["outside_allocator_bytes"]}
        cells = [f"{values[key] / GIB:.2f}" for key in TERMS]
        table.add_row(Text(row["label"]), *cells, *(f"{(v or 0) / GIB:.2f}" for v in needed(row)))
    return table


def _remarks(bench: BenchRecord) -> list[Text]:
    """Noisy rows, failed ones, numbers that are missing, and what was not run; each with its reason."""
    lines = []
    for row in bench.rows:
        found = row["measured"]
        if found is None:
            reason = "\n      ".join(str(row["error"]).splitlines())
            lines.append(Text.assemble((f"  {row['label']}: {row['status']}", "red"), f", {reason}"))
        elif found["verdict"] != "valid":
            lines.append(Text(f"  {row['label']}: noisy, {'; '.join(found['verdict_why'])}", style="yellow"))
    for reason, labels in reasons(bench.rows).items():
        lines.append(Text(f"  {reason} ({labels})", style="dim"))
    lines += [
        Text(f"  not run: {left['strategy']}, {left['reason']}", style="dim")
        for left in bench.head["left_out"]
    ]
    return lines


def reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Why numbers are missing, each with the rows it holds for: `no MFU: no GPU` to `all` or labels."""
    found: dict[str, list[str]] = {}
    measured = [row for row in rows if row["measured"] is not None]
    for row in measured:
        values = row["measured"]
        for name, reason in (
            ("prediction", row["predicted_unavailable"]),
            ("MFU", values["mfu_unavailable"]),
            ("exposed communication", values["exposed_unavailable"]),
            ("J/token", values["joules_unavailable"]),
        ):
            if reason:
                found.setdefault(f"no {name}: {reason}", []).append(row["label"])
    return {
        reason: "all" if len(labels) == len(measured) else ", ".join(labels)
        for reason, labels in found.items()
    }


def _table(title: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(title, header_style="dim", no_wrap=True)
    return table


def _from_to(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{known[0]:.4g} → {known[-1]:.4g}" if known else ABSENT
