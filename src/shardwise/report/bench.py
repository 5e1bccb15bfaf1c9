"""A bench on the terminal and as JSON: predicted compared with measured, row by row."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.planner.why import TERMS
from shardwise.record.bench import SCHEMA, BenchRecord
from shardwise.screen import screen
from shardwise.units import GIB, count, steps

Row = Mapping[str, Any]
Pair = tuple[float | None, float | None]  # (predicted, measured)
Column = tuple[str, str, Callable[[float], str]]  # title, quantity as `pair` names it, text of a value

ABSENT, NEEDED = "-", "needed_bytes"
PART_OF_PREDICTION = {
    **dict.fromkeys(("peak_reserved_bytes", "peak_allocated_bytes", "outside_allocator_bytes"), "memory"),
    **dict.fromkeys(("tokens_per_second_per_gpu", "exposed_communication_fraction"), "time"),
    "joules_per_token": "energy",
}
"""Quantities with the same name in a prediction and in a measurement, and where a prediction has them."""

RATE = "tokens_per_second_per_gpu"
ALIKE = 0.05  # rates closer than this share are equal: steps of a valid row spread as much
SLOWED = 1.1  # a profiled step that takes longer than the others by this factor also waited for the profiler
IDLE = 0.1  # share of the profiled step from which an idle GPU is reported


def to_json(bench: BenchRecord) -> dict[str, Any]:
    """Schema 1: the bench's head and rows; bytes, seconds, joules. A null value has `NAME_unavailable`."""
    return {"schema": SCHEMA, "path": str(bench.path), **bench.head, "rows": bench.rows}


def pair(row: Row, quantity: str) -> Pair:
    """(predicted, measured) of a key of PART_OF_PREDICTION, or of NEEDED.

    NEEDED is the bytes that a process takes of its GPU: reserved by torch's allocator, and outside of it.
    """
    if quantity == NEEDED:
        both = zip(pair(row, "peak_reserved_bytes"), pair(row, "outside_allocator_bytes"), strict=True)
        predicted, found = (None if one is None else one + (two or 0) for one, two in both)
        return predicted, found
    part = None if row["predicted"] is None else row["predicted"][PART_OF_PREDICTION[quantity]]
    return part and part[quantity], row["measured"] and row["measured"][quantity]


def ran(rows: Sequence[Row]) -> list[Row]:
    """The rows that have measurements."""
    return [row for row in rows if row["measured"] is not None]


def by_speed(rows: Sequence[Row]) -> list[Row]:
    """The fastest first; rows without measurements come last, as they are."""
    return sorted(rows, key=lambda row: -(row["measured"] or {}).get(RATE, 0.0))


def recommended(rows: Sequence[Row]) -> tuple[Row, str] | None:
    """The row to train with and why; None where nothing was measured.

    Rows within ALIKE of the fastest count as equally fast: the one that needs the least memory wins.
    """
    order = by_speed([row for row in ran(rows) if row["measured"]["verdict"] != "simulated"])
    if not order:
        return None
    rate = order[0]["measured"][RATE]
    alike = [row for row in order if row["measured"][RATE] >= (1 - ALIKE) * rate]
    best = min(alike, key=lambda row: pair(row, NEEDED)[1] or 0)
    noisy = best["measured"]["verdict"] == "noisy"
    doubt = "; its measurement is noisy (see below), so measure more steps (--steps)" if noisy else ""
    if len(alike) > 1:
        why = f"it needs the least memory of the {len(alike)} within {ALIKE:.0%} of the fastest"
    else:
        why = (
            f"the fastest, with {rate / order[1]['measured'][RATE]:.2f} times the tok/s of the next"
            if order[1:]
            else "the only one measured"
        )
    return best, why + doubt


def last_finite(values: Sequence[float | None]) -> float | None:
    """The last value that is finite: others are None."""
    return next((value for value in reversed(values) if value is not None), None)


def device(head: Mapping[str, Any]) -> str:
    """What the processes ran on: the GPU's name, or CPU processes."""
    gpus = head["environment"].get("gpus") or []
    return str(gpus[0]["name"]) if gpus else "CPU process" + "es" * (head["processes"] != 1)


def batch(row: Row) -> str:
    """`4 x 2, full`: micro-batch, accumulation, checkpointing."""
    strategy = row["strategy"]
    every = strategy["checkpoint_every"]
    recomputed = {0: "no checkpointing", 1: "checkpointing"}.get(every, f"one block in {every}")
    return f"{strategy['micro_batch']} x {strategy['accumulation']}, {recomputed}"


def reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Why numbers are missing or doubtful, and the rows: `no MFU: no GPU` to `all` or their labels."""
    found: dict[str, list[str]] = {}
    lacking = {"MFU": "mfu", "exposed communication": "exposed", "J/token": "joules"}
    for row in ran(rows):
        values = row["measured"]
        missing = {"prediction": row["predicted_unavailable"]}
        missing |= {name: values[f"{key}_unavailable"] for name, key in lacking.items()}
        for name, reason in missing.items():
            if reason:
                found.setdefault(f"no {name}: {reason}", []).append(row["label"])
        profiled = values.get("profiled_step_seconds")
        if profiled and profiled > SLOWED * values["step_seconds"]:
            longer = f"step, which took {profiled / values['step_seconds']:.1f} times as long as the others"
            found.setdefault(f"exposed communication is of the profiled {longer}", []).append(row["label"])
        idle = values.get("gpu_idle_fraction")
        if idle and idle >= IDLE:
            waited = f"the GPU was idle for {idle:.0%} of the profiled step: it waited for the host"
            found.setdefault(f"{waited}, which the profiler slows down", []).append(row["label"])
    all_rows = len(ran(rows))
    return {why: "all" if len(labels) == all_rows else ", ".join(labels) for why, labels in found.items()}


def show_bench(bench: BenchRecord, *, console: Console | None = None) -> None:
    """Print predicted compared with measured, then what failed and why."""
    console = console or screen()
    rows, head, job = by_speed(ran(bench.rows)), bench.head, bench.head["job"]
    sizes = f"{job['train']['global_batch']} rows of {job['data']['sequence_length']} tokens a step"
    warmup = f"{steps(head['warmup_steps'])} to warm up, {head['steps']} counted"
    rest = f"  {sizes} on {head['processes']} {device(head)}; {warmup}"
    console.print(Text.assemble((str(head["name"]), "bold"), rest), soft_wrap=True)
    if rows:
        predicted = any(row["predicted"] for row in rows)
        console.print()
        if predicted:
            console.print(Text("each cell: predicted > measured", style="dim"))
        each = "GPU" if head["environment"].get("gpus") else "process"
        headline = [(name.format(each=each), quantity, text) for name, quantity, text in _HEADLINE]
        tables = (_compared(rows, headline, verdicts=True), Text(), _compared(rows, _MEMORY), Text())
        console.print(*tables, _details(rows), sep="\n")
        if predicted:
            console.print(Text("\npredicted memory by term, GiB", style="dim"))
            console.print(_terms(rows))
        console.print()
    if not bench.rows:
        goes_on = f"`shardwise bench JOB --out {shlex.quote(str(bench.path))}` goes on"
        console.print(f"no row has a result yet; {goes_on}", soft_wrap=True)
    if found := recommended(rows):
        best, why = found
        console.print(Text.assemble((f"▶ {best['label']}", "bold green"), f": {why}"), soft_wrap=True)
    for line in _remarks(bench):
        console.print(line, soft_wrap=not console.is_terminal)


def _table(*names: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", max_width=22)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _compared(rows: Sequence[Row], columns: Sequence[Column], *, verdicts: bool = False) -> Table:
    both = any(row["predicted"] for row in rows)
    table = _table(*(name for name, _, _ in columns))
    table.add_column("")
    for row in rows:
        cells = []
        for _, quantity, text in columns:
            guess, found = (ABSENT if value is None else text(value) for value in pair(row, quantity))
            cells.append(Text.assemble((f"{guess} > ", "dim"), found) if both else Text(found))
        verdict = row["measured"]["verdict"] if verdicts else ""
        table.add_row(Text(row["label"]), *cells, Text(verdict, "" if verdict == "valid" else "yellow"))
    return table


def _in_gib(value: float) -> str:
    return f"{value / GIB:.3g}"


_HEADLINE: tuple[Column, ...] = (
    ("GiB", NEEDED, _in_gib),
    ("mean tok/s/{each}", "tokens_per_second_per_gpu", count),
    ("exposed comm.", "exposed_communication_fraction", lambda value: f"{value:.0%}"),
    ("J/token", "joules_per_token", lambda value: f"{value:.3g}"),
)
_MEMORY: tuple[Column, ...] = (
    ("GiB reserved", "peak_reserved_bytes", _in_gib),
    ("allocated", "peak_allocated_bytes", _in_gib),
    ("outside", "outside_allocator_bytes", _in_gib),
)


def _details(rows: Sequence[Row]) -> Table:
    table = _table("micro x accum.", "ckpt", "median s/step", "TFLOP/s", "MFU", "loss", "grad norm")
    for row in rows:
        found, strategy = row["measured"], row["strategy"]
        every = strategy["checkpoint_every"]
        numbers = [(found["step_seconds"], ".3g"), (found["tflops_per_gpu"], ".3g"), (found["mfu"], ".0%")]
        numbers += [(last_finite(found[curve]), ".4g") for curve in ("loss", "grad_norm")]
        table.add_row(
            Text(row["label"]),
            f"{strategy['micro_batch']} x {strategy['accumulation']}",
            {0: "none", 1: "all"}.get(every, f"1 in {every}"),
            *(ABSENT if value is None else format(value, style) for value, style in numbers),
        )
    return table


_SHORT = ("weight", "grad", "optim", "activ", "loss", "engine", "fragm", "CUDA")
_SHORT_TERMS = dict(zip(TERMS, _SHORT, strict=True))


def _terms(rows: Sequence[Row]) -> Table:
    table = _table(*_SHORT_TERMS.values(), "sum", "measured")
    for row in rows:
        if row["predicted"] is not None:
            memory = row["predicted"]["memory"]
            values = {**memory["terms"], "outside_allocator_bytes": memory["outside_allocator_bytes"]}
            sizes = [*(values[key] for key in TERMS), *pair(row, NEEDED)]
            table.add_row(Text(row["label"]), *(f"{round((size or 0) / GIB, 2):.3g}" for size in sizes))
    return table


def _remarks(bench: BenchRecord) -> list[Text]:
    """Noisy rows, failed rows, missing numbers and strategies that were not run, each with its reason."""
    lines = []
    for row in bench.rows:
        found = row["measured"]
        if found is None:
            reason = "\n      ".join(str(row["error"]).splitlines())
            lines.append(Text.assemble((f"  {row['label']}: {row['status']}", "red"), f", {reason}"))
        elif found["verdict"] != "valid":
            why = "; ".join(found["verdict_why"])
            lines.append(Text(f"  {row['label']}: {found['verdict']}, {why}", style="yellow"))
    rest = [f"{reason} ({labels})" for reason, labels in reasons(bench.rows).items()]
    rest += [f"not run: {left['strategy']}, {left['reason']}" for left in bench.head["left_out"]]
    if ran(bench.rows):
        rest.append("mean tok/s: all counted tokens by all counted seconds; loss: of the last step")
        rest.append("exposed comm.: the share of a step in which only communication runs")
    return lines + [Text(f"  {line}", style="dim") for line in rest]
