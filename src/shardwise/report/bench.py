"""A bench on the terminal and as JSON: predicted beside measured, row by row."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.planner.why import TERMS
from shardwise.record.bench import SCHEMA, BenchRecord
from shardwise.units import GIB, count, steps

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
            f"{head['processes']} {device(head)}; {steps(head['warmup_steps'])} to warm up, "
            f"{head['steps']} counted",
        ),
        soft_wrap=True,
    )
    if rows:
        foretold = any(row["predicted"] for row in rows)
        console.print()
        if foretold:
            console.print(Text("predicted > measured", style="dim"))
        console.print(_beside(rows, _HEADLINE, verdicts=True))
        console.print()
        console.print(_beside(rows, _MEMORY))
        console.print()
        console.print(_more(rows))
        if foretold:
            console.print(Text("\npredicted memory by term, GiB", style="dim"))
            console.print(_terms(rows))
        console.print()
    if not bench.rows:
        console.print(
            f"no row has a result yet; `shardwise bench JOB --out {shlex.quote(str(bench.path))}` goes on",
            soft_wrap=True,
        )
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
    if found is None or found["peak_reserved_bytes"] is None:
        return foretold, None
    return foretold, found["peak_reserved_bytes"] + (found["outside_allocator_bytes"] or 0)


def reserved(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) bytes that torch's allocator takes at most."""
    return _pair(row, ("memory", "peak_reserved_bytes"), "peak_reserved_bytes")


def allocated(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) bytes in tensors at most."""
    return _pair(row, ("memory", "peak_allocated_bytes"), "peak_allocated_bytes")


def outside(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) bytes of CUDA, its kernels and NCCL."""
    return _pair(row, ("memory", "outside_allocator_bytes"), "outside_allocator_bytes")


def speed(row: Row) -> tuple[float | None, float | None]:
    """(predicted, measured) tokens a second and GPU."""
    return _pair(row, ("time", "tokens_per_second_per_gpu"), "tokens_per_second_per_gpu")


def flushes(row: Row) -> int:
    """Times a step that the allocator was predicted to give its cache back, which takes time it was not."""
    return int(((row["predicted"] or {}).get("memory") or {}).get("cache_flushes", 0))


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


Column = tuple[str, Callable[[Row], tuple[float | None, float | None]], Callable[[float], str]]


def _beside(rows: Sequence[Row], columns: Sequence[Column], *, verdicts: bool = False) -> Table:
    """Each quantity as predicted and as measured."""
    foretold = any(row["predicted"] for row in rows)
    table = _table()
    for name, _, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        cells = [_cell(read(row), text, both=foretold) for _, read, text in columns]
        verdict = Text(row["measured"]["verdict"] if verdicts else "")
        verdict.stylize("yellow" if verdict.plain == "noisy" else "")
        table.add_row(Text(row["label"]), *cells, verdict)
    return table


def _in_gib(value: float) -> str:
    return f"{value / GIB:.3g}"


_HEADLINE: tuple[Column, ...] = (
    ("GiB", needed, _in_gib),
    ("tok/s/GPU", speed, count),
    ("exposed, of step", exposed, lambda value: f"{value:.0%}"),
    ("J/token", energy, lambda value: f"{value:.3g}"),
)
_MEMORY: tuple[Column, ...] = (
    ("GiB reserved", reserved, _in_gib),
    ("allocated", allocated, _in_gib),
    ("outside", outside, _in_gib),
)


def _cell(values: tuple[float | None, float | None], text: Callable[[float], str], *, both: bool) -> Text:
    foretold, found = values
    value = ABSENT if found is None else text(found)
    if not both:
        return Text(value)
    guess = ABSENT if foretold is None else text(foretold)
    return Text.assemble((f"{guess} > ", "dim"), value)


def _more(rows: Sequence[Row]) -> Table:
    table = _table()
    for name in ("batch", "recomputed", "s/step", "TFLOP/s", "MFU", "loss", "norm"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found, strategy = row["measured"], row["strategy"]
        flops, mfu, every = found["tflops_per_gpu"], found["mfu"], strategy["checkpoint_every"]
        table.add_row(
            Text(row["label"]),
            f"{strategy['micro_batch']} x {strategy['accumulation']}",
            {0: "none", 1: "all"}.get(every, f"1 in {every}"),
            f"{found['step_seconds']:.3g}",
            ABSENT if flops is None else f"{flops:.3g}",
            ABSENT if mfu is None else f"{mfu:.0%}",
            _last(found["loss"]),
            _last(found["grad_norm"]),
        )
    return table


def _terms(rows: Sequence[Row]) -> Table:
    """What is predicted, term by term; then its sum, and what was measured."""
    table = _table()
    for name in TERMS:
        table.add_column(_SHORT.get(name, TERMS[name]), justify="right", no_wrap=True)
    table.add_column("sum", justify="right", no_wrap=True)
    table.add_column("real", justify="right", no_wrap=True)
    for row in rows:
        if row["predicted"] is None:
            continue
        memory = row["predicted"]["memory"]
        values = {**memory["terms"], "outside_allocator_bytes": memory["outside_allocator_bytes"]}
        cells = [f"{round(values[key] / GIB, 2):.3g}" for key in TERMS]
        table.add_row(Text(row["label"]), *cells, *(f"{round((v or 0) / GIB, 2):.3g}" for v in needed(row)))
    return table


_SHORT = {
    "weights_bytes": "weight",
    "gradients_bytes": "grad",
    "optimizer_bytes": "optim",
    "activations_bytes": "activ",
    "loss_bytes": "loss",
    "engine_buffers_bytes": "engine",
    "fragmentation_bytes": "fragm",
    "outside_allocator_bytes": "CUDA",
}
"""Names of the terms of memory in a narrow table."""


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


SLOWED = 1.1
"""A profiled step longer than the others by this factor waited for other things than they do."""

IDLE = 0.1
"""Share of the profiled step from which on it is worth saying that the GPU ran nothing."""


def reasons(rows: Sequence[Row]) -> dict[str, str]:
    """Why numbers are missing or doubtful, and the rows: `no MFU: no GPU` to `all` or their labels."""
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
        profiled = values.get("profiled_step_seconds")
        if profiled and profiled > SLOWED * values["step_seconds"]:
            longer = f"the profiled step, {profiled / values['step_seconds']:.1f} times as long as the others"
            found.setdefault(f"exposed communication is that of {longer}", []).append(row["label"])
        idle = values.get("gpu_idle_fraction")
        if idle and idle >= IDLE:
            waited = f"the GPU ran nothing for {idle:.0%} of the profiled step: it waited for the host"
            found.setdefault(f"{waited}, which the profiler slows", []).append(row["label"])
    return {
        reason: "all" if len(labels) == len(measured) else ", ".join(labels)
        for reason, labels in found.items()
    }


def _table() -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", max_width=22)
    return table


def _last(values: Sequence[float | None]) -> str:
    """The last that is finite."""
    return next((f"{value:.4g}" for value in reversed(values) if value is not None), ABSENT)
