"""A bench as a page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from statistics import fmean

from shardwise.record.bench import BenchRecord
from shardwise.report import bench as values
from shardwise.report.html import numbers, sections
from shardwise.report.html.markup import Child, h
from shardwise.report.html.page import page
from shardwise.report.html.sections import Row, ran, section
from shardwise.units import count, steps

ONE_STEP = (
    "Rank 0 while the profiler ran, over time. The prediction gives the most that each part of the model "
    "takes in turn: its peak compares, its course only roughly."
)


def bench_page(bench: BenchRecord) -> str:
    """The HTML document of a bench's folder."""
    head, rows = bench.head, bench.rows
    job, gpus = head["job"], values.device(head)
    measured = ran(rows)
    sizes = {row["measured"].get("parameters") for row in measured} - {None}
    size = f", {count(min(sizes))} parameters" if sizes else ""
    lead = (
        f"{job['model']['source']}{size} · {job['train']['global_batch']} rows of "
        f"{job['data']['sequence_length']} tokens a step, {job['train']['precision']} · "
        f"{head['processes']} × {gpus}"
    )
    dates = sorted(row["date"] for row in rows)
    return page(
        str(head["name"]),
        eyebrow="shardwise bench",
        lead=lead,
        made=f"measured {_when(dates[0])} to {_when(dates[-1])}" if dates else "nothing is measured yet",
        body=[_facts(measured), *_parts(bench)],
    )


def _when(date: str) -> str:
    """`2026-11-21 16:21 UTC` of a date as ISO 8601 writes it."""
    return f"{date[:10]} {date[11:16]} UTC"


def _facts(rows: Sequence[Row]) -> Child:
    """The best of each kind, and how far the predictions were off."""
    entries = []
    found = [(row, values.speed(row)[1]) for row in rows]
    fast = sorted(((row, speed) for row, speed in found if speed), key=lambda one: -one[1])
    if fast:
        best, speed = fast[0]
        ahead = f", {speed / fast[1][1]:.2f} times {fast[1][0]['label']}" if len(fast) > 1 else ""
        entries.append(
            (
                "Fastest",
                f"{numbers.plain(speed)} tok/s",
                f"per {sections.whose(rows)}, {best['label']}{ahead}",
            )
        )
    lean = sorted(((row, values.needed(row)[1] or 0) for row in rows), key=lambda one: one[1])
    if lean:
        entries.append(("Least memory", numbers.gib(lean[0][1]), lean[0][0]["label"]))
    frugal = [(row, joules) for row in rows if (joules := values.energy(row)[1]) is not None]
    if frugal:
        row, joules = min(frugal, key=lambda one: one[1])
        entries.append(("Least energy", f"{numbers.plain(joules)} J/token", row["label"]))
    errors = [_mean_error(rows, read) for read in (values.needed, values.speed)]
    if errors[0] is not None and errors[1] is not None:
        remark = f"in memory, {numbers.share(errors[1])} in speed, on average"
        entries.append(("Predictions off by", numbers.share(errors[0]), remark))
    return sections.facts(entries) if entries else None


def _mean_error(
    rows: Sequence[Row], read: Callable[[Row], tuple[float | None, float | None]]
) -> float | None:
    both = [read(row) for row in rows]
    errors = [abs(guess / found - 1) for guess, found in both if guess is not None and found]
    return fmean(errors) if errors else None


def _parts(bench: BenchRecord) -> list[Child]:
    head, rows = bench.head, bench.rows
    within = sections.within_step(rows)
    exposed = sections.pairs(rows, values.exposed, numbers.share, "measured")
    energy = sections.pairs(rows, values.energy, numbers.plain, "J/token")
    speed = sections.pairs(rows, values.speed, numbers.plain, "tok/s")
    return [
        section("Side by side", f"No row has a result yet; {_goes_on(bench)} goes on.")
        if not rows
        else section(
            "Side by side",
            f"{steps(head['warmup_steps'])} to warm up, then {head['steps']} that count, on the same data; "
            f"each strategy in processes of its own. {_below(rows)}",
            sections.table(rows, verdicts=True),
        ),
        section("Memory", _of_memory(rows), sections.memory(rows)) if ran(rows) else None,
        section("Speed", f"Tokens a second and {sections.whose(rows)}, over the steps that count.", speed)
        if speed
        else None,
        section(
            "Waiting for communication",
            "The share of a step in which only communication runs, from one more step under torch.profiler.",
            exposed,
        )
        if exposed
        else None,
        section("Energy", "Of all GPUs, as the driver counts it; the host is not in it.", energy)
        if energy
        else None,
        *_curves(rows),
        section("Memory over one step", ONE_STEP, within) if within else None,
        section(
            "Steps",
            "Seconds of each step, warm-up shaded. Noisy is where steps spread, drift, or are too few.",
            sections.each_step(rows),
        )
        if ran(rows)
        else None,
        section("Decision", None, sections.card(_decision(bench))),
        section("Environment", None, sections.environment(head["environment"])),
        _again(bench),
    ]


def _goes_on(bench: BenchRecord) -> str:
    return f"shardwise bench JOB --out {shlex.quote(str(bench.path))}"


def _below(rows: Sequence[Row]) -> str:
    """What the small numbers of the table are."""
    if any(row["predicted"] for row in rows):
        return "Small below what was measured: what was predicted, and by how much that is off."
    return ""


def _of_memory(rows: Sequence[Row]) -> str:
    if any(row["predicted"] for row in rows):
        return (
            "What the fullest GPU needs: predicted term by term, and measured. Point at a part for its size."
        )
    return "What the fullest process needs."


def _curves(rows: Sequence[Row]) -> list[Child]:
    if not ran(rows):
        return []
    last = [row["measured"]["loss"][-1] for row in ran(rows) if row["measured"]["loss"][-1] is not None]
    text = "The same job under each strategy."
    if len(last) > 1:
        text += f" At the last step that counts they are {numbers.share(max(last) / min(last) - 1)} apart."
    loss = sections.overlay(rows, "loss", label="training loss by step", text=numbers.loss, zero=False)
    norm = sections.overlay(rows, "grad_norm", label="gradient norm by step", text=numbers.loss, zero=True)
    return [
        section("Loss", text, loss),
        section("Gradient norm", "Before clipping.", norm),
    ]


def _decision(bench: BenchRecord) -> Child:
    """What was predicted to be best, what was, and why rows failed or were left out."""
    said: list[Child] = []
    each = sections.whose(bench.rows)
    guesses = [
        (row, values.speed(row)[0])
        for row in bench.rows
        if row.get("fit") in ("fits", "tight") and not values.flushes(row)
    ]
    best_guess = max(((row, rate) for row, rate in guesses if rate), key=lambda one: one[1], default=None)
    found = [(row, values.speed(row)[1]) for row in ran(bench.rows)]
    best = max(((row, rate) for row, rate in found if rate), key=lambda one: one[1], default=None)
    if best_guess is not None:
        guessed, rate = best_guess
        said.append(
            [
                h("b", None, guessed["label"]),
                f" was predicted to be the fastest that fits, {numbers.plain(rate)} tok/s a {each}",
            ]
        )
        said += [f"{guessed['label']}: {reason}" for reason in guessed["why"]]
    if best is not None:
        row, rate = best
        said.append(
            [
                h("b", None, row["label"]),
                f" was measured to be the fastest, {numbers.plain(rate)} tok/s a {each}",
            ]
        )
    said += [f"{reason} ({labels})" for reason, labels in values.reasons(bench.rows).items()]
    said += [_failure(row) for row in bench.rows if row["measured"] is None]
    said += [
        [h("b", None, left["strategy"]), f" was not run: {left['reason']}"] for left in bench.head["left_out"]
    ]
    return sections.listed(said)


def _failure(row: Row) -> Child:
    """What became of a row without measurements; the end of its log can be unfolded."""
    first, _, rest = str(row["error"]).partition("\n")
    what = rest.partition("\n")[0].removeprefix("error: ") if rest.startswith("error: ") else ""
    log = h("details", None, h("summary", None, "the end of its log"), h("pre", None, rest)) if rest else None
    said = f": {row['status']}, {first}{f': {what}' if what else ''}"
    return [h("b", None, row["label"]), said, log]


def _again(bench: BenchRecord) -> Child:
    """The bench as it was typed, and each row's own job."""
    command = shlex.join(bench.head["environment"].get("command") or ["shardwise", "bench"])
    lines = [
        f"shardwise train {shlex.quote(str(bench.path / row['run'] / 'job.yaml'))} --processes "
        f"{bench.head['processes']} --set output=runs"
        for row in ran(bench.rows)
    ]
    return section(
        "Do it again",
        "The whole bench; and each strategy as a run of its own, from the job that it was measured with.",
        h("pre", None, command),
        h("pre", None, "\n".join(lines)) if lines else None,
    )
