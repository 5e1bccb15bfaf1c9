"""The values that a page's templates show: tables and charts of what was predicted and measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.planner.why import TERMS
from shardwise.report.bench import NEEDED, Pair, Row, batch, last_finite, pair, ran
from shardwise.report.curves import SMOOTHING, smoothed
from shardwise.report.html import numbers
from shardwise.report.html.charts import COLOURS, SMALL, Bar, Chart, Curve, Part, bars, layered, plot
from shardwise.units import GIB

Text = Callable[[float | None], str]

COLOUR = {term: term.removesuffix("_bytes") for term in TERMS}  # classes of the style sheet
COLOUR |= {"engine_buffers_bytes": "buffers", "outside_allocator_bytes": "outside"}


class Cell(NamedTuple):
    """A cell of a table: a number, and below it a smaller remark."""

    text: str
    below: str = ""
    guess: bool = False  # `below` is a prediction
    tag: str = ""  # class of the mark that `text` is shown as; empty where it is not one


class Table(NamedTuple):
    """Names of the columns, and (label, note, a cell for each column)."""

    names: list[str]
    rows: Sequence[tuple[str, str | None, list[Cell]]]


class Panel(NamedTuple):
    """A small chart of one row."""

    label: str
    chart: Chart
    verdict: str = ""
    caption: str = ""


def per(rows: Sequence[Row]) -> str:
    """What memory and speed are counted by: a `GPU`, or a `process` where there is none."""
    measured = ran(rows)
    on_gpus = not measured or any(row["measured"]["memory_of"] == "gpu" for row in measured)
    return "GPU" if on_gpus else "process"


def note(row: Row) -> str:
    """What tells the row from others: model and data, micro-batch and checkpointing, where they are known."""
    return "; ".join(filter(None, [row.get("remark"), batch(row) if row.get("strategy") else ""]))


def title(row: Row) -> str:
    """Its label, without what the note below it says."""
    noted = {"train.checkpointing", "train.micro_batch"} >= (row.get("sweep") or {}).keys()
    return str(row["label"]).split(" ")[0] if row.get("sweep") and noted else str(row["label"])


def table(rows: Sequence[Row], *, verdicts: bool) -> Table:
    """All rows in numbers; columns without any number are left out."""
    names = [f"Memory per {per(rows)}", f"Tokens/s per {per(rows)}", "TFLOP/s"]
    names += ["Exposed comm., of the step", "J/token", "Last loss", "Held-out loss", "Steps"]
    cells = [_cells(row, verdicts=verdicts) for row in rows]
    kept = [place for place in range(len(names)) if any(line[place] != Cell(numbers.NONE) for line in cells)]
    pairs_of = zip(rows, cells, strict=True)
    lines = [(title(row), note(row), [line[place] for place in kept]) for row, line in pairs_of]
    return Table([names[place] for place in kept], lines)


def _cells(row: Row, *, verdicts: bool) -> list[Cell]:
    memory = _both(pair(row, NEEDED), numbers.gib)
    speed = _both(pair(row, "tokens_per_second_per_gpu"), numbers.plain)
    exposed = _both(pair(row, "exposed_communication_fraction"), numbers.share, numbers.points_off)
    energy = _both(pair(row, "joules_per_token"), numbers.plain)
    none, found = Cell(numbers.NONE), row["measured"]
    if found is None:
        return [memory, speed, none, exposed, energy, none, none, Cell(row["status"], tag="tag failed")]
    mark = found["verdict"] if verdicts else row["status"]
    held_out = found.get("evaluations")
    counted = f"{found['steps'] - found['warmup_steps']} counted"
    mfu, norm = numbers.share(found["mfu"]), numbers.loss(last_finite(found["grad_norm"]))
    return [
        memory,
        speed,
        Cell(numbers.plain(found["tflops_per_gpu"]), "" if mfu == numbers.NONE else f"{mfu} MFU"),
        exposed,
        energy,
        Cell(numbers.loss(last_finite(found["loss"])), "" if norm == numbers.NONE else f"norm {norm}"),
        Cell(numbers.loss(held_out[-1][1])) if held_out else none,
        Cell(mark, counted, tag=f"tag {mark}" if verdicts else "tag"),
    ]


def _both(
    values: Pair, text: Text, off: Callable[[float | None, float | None], str | None] = numbers.off
) -> Cell:
    """The measured value, and below it the prediction with its error."""
    predicted, found = values
    if predicted is None:
        return Cell(text(found))
    below = [text(predicted), off(predicted, found)]
    return Cell(text(found), " · ".join(part for part in below if part is not None), guess=True)


def memory(rows: Sequence[Row]) -> Chart:
    """Stacked bars: predicted memory term by term, and measured memory."""
    lines, capacity = [], None
    for row in rows:
        drawn = []
        guess, found = pair(row, NEEDED)
        if row["predicted"]:
            predicted = row["predicted"]["memory"]
            capacity = predicted["capacity_bytes"]
            values = {**predicted["terms"], "outside_allocator_bytes": predicted["outside_allocator_bytes"]}
            parts = [Part(name, values[key], COLOUR[key]) for key, name in TERMS.items()]
            drawn.append(Bar(parts, f"{numbers.gib(guess)} predicted", guess=True))
        if found is not None:
            drawn.append(Bar(_measured_parts(row["measured"]), f"{numbers.gib(found)} measured"))
        if drawn:
            lines.append((title(row), note(row), drawn))
    longest = max((sum(part.value for part in bar.parts) for *_, drawn in lines for bar in drawn), default=0)
    # A limit far beyond all bars would only make them short.
    limit = capacity if capacity is not None and lines and capacity <= 1.5 * longest else None
    legend = {"resident set of the fullest process": "f-measured"}
    if capacity is not None or any(row["measured"]["memory_of"] == "gpu" for row in ran(rows)):
        legend = {name: f"f-{COLOUR[key]}" for key, name in TERMS.items()}
        legend["measured: allocated at most"] = "f-measured"
    if limit is not None:
        legend[f"what a process may use, {numbers.gib(limit)}"] = "l-limit limit"
    return bars(lines, text=numbers.gib, limit=limit, legend=legend)


def memory_table(rows: Sequence[Row]) -> Table | None:
    """Reserved, allocated and outside, each measured and predicted; None without a GPU."""
    if all(pair(row, "outside_allocator_bytes") == (None, None) for row in rows):
        return None
    shown = ("peak_reserved_bytes", "peak_allocated_bytes", "outside_allocator_bytes")
    lines = [(title(row), note(row), [_both(pair(row, name), numbers.gib) for name in shown]) for row in rows]
    return Table(["Reserved", "Allocated", "Outside"], lines)


def _measured_parts(found: Row) -> list[Part]:
    reserved = found["peak_reserved_bytes"]
    allocated = found["peak_allocated_bytes"] or reserved
    return [
        Part("allocated at most", allocated, "measured"),
        Part("reserved beyond it", reserved - allocated, "fragmentation"),
        Part("outside torch's allocator", found["outside_allocator_bytes"] or 0, "outside"),
    ]


def pairs(rows: Sequence[Row], quantity: str, text: Text, unit: str) -> Chart | None:
    """Bars of predicted and measured; None where nothing was measured."""
    lines, compared = [], False
    for row in ran(rows):
        predicted, found = pair(row, quantity)
        if found is None:
            continue
        drawn = [Bar([Part("measured", found, "measured")], f"{text(found)} {unit}")]
        if predicted is not None:
            parts, compared = [Part("predicted", predicted, "predicted")], True
            drawn.insert(0, Bar(parts, f"{text(predicted)} predicted", guess=True))
        lines.append((title(row), note(row), drawn))
    legend = {"predicted": "f-predicted"} if compared else {}
    return bars(lines, text=text, legend={**legend, "measured": "f-measured"}) if lines else None


def overlay(
    rows: Sequence[Row],
    key: str,
    *,
    label: str,
    text: Callable[[float], str],
    zero: bool,
    alike: bool = True,
    held_out: bool = False,
) -> Chart:
    """One curve a row over the steps; with `held_out` smoothed, and dashed the losses of evaluations.

    `alike`: the curves may lie on each other, and are drawn so that each is seen.
    """
    curves = []
    for place, row in enumerate(ran(rows)):
        style = f"l-s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")
        found = row["measured"]
        points: Any = list(zip(_step_numbers(found), found[key], strict=True))
        width = layered(place, len(ran(rows)) if alike else 1)
        if held_out:
            curves.append(Curve(row["label"], points, f"{style} raw", width=1))
            points = smoothed(points)
        name = f"{row['label']}, smoothed ({SMOOTHING})" if held_out else row["label"]
        curves.append(Curve(name, points, style, width=width))
        if held_out and found.get("evaluations"):
            curves.append(Curve(f"{row['label']}, held out", found["evaluations"], f"{style} dashed"))
    x_labels = step_labels([x for curve in curves for x, _ in curve.points])
    legend = {curve.name: curve.style for curve in curves}
    return plot(curves, label=label, text=text, x_labels=x_labels, zero=zero, legend=legend)


def rates(rows: Sequence[Row]) -> Sequence[Row]:
    """The measured rows with tokens a second by step, as `rates`."""
    found = []
    for row in ran(rows):
        m = row["measured"]
        by_step = [tokens / s for tokens, s in zip(m["tokens_all"], m["step_seconds_all"], strict=True)]
        found.append({**row, "measured": {**m, "rates": by_step}})
    return found


def _step_numbers(found: Row) -> Sequence[int]:
    return found.get("step_numbers") or range(1, found["steps"] + 1)


def step_labels(steps: Sequence[float]) -> list[str]:
    """First, middle, last."""
    if not steps:
        return []
    first, last = min(steps), max(steps)
    middle = (first + last) / 2
    texts = [f"step {first:g}", f"{middle:g}" if middle % 1 == 0 else "", f"step {last:g}"]
    return texts if last > first else texts[:1]


def each_step(rows: Sequence[Row]) -> list[Panel]:
    """Seconds of each step: the verdict follows from them."""
    panels = []
    for row in ran(rows):
        found = row["measured"]
        values = found["step_seconds_all"]
        counted = values[found["warmup_steps"] :]
        most = 3 * max(counted)  # the first step compiles: it may take a hundred times as long
        points = [(n + 0.5, min(value, most)) for n, value in enumerate(values)]
        points.append((len(values) + 0.5, points[-1][1]))
        chart = plot(
            [Curve(row["label"], points, "l-measured", stairs=True)],
            label=f"seconds of each step, {row['label']}",
            text=numbers.seconds,
            x_labels=step_labels([1, len(values)]),
            height=SMALL,
            shade_to=float(found["warmup_steps"]) + 0.5,
        )
        panels.append(Panel(row["label"], chart, found["verdict"], "; ".join(found["verdict_why"])))
    return panels


def within_step(rows: Sequence[Row]) -> list[Panel]:
    """Memory over one step: rank 0's as profiled, and the predicted peak of each part of the model."""
    panels = []
    for row in rows:
        moments = (row["predicted"] or {}).get("memory", {}).get("timeline") or []
        profiled = (row["measured"] or {}).get("memory_in_step") or []
        curves = []
        if profiled:
            reserved, allocated = ([(x, values[k] / GIB) for x, *values in profiled] for k in (1, 0))
            curves += [Curve("reserved", reserved, "l-reserved"), Curve("allocated", allocated, "l-measured")]
        if moments:
            count = len(moments)
            points = [((n + 0.5) / count, one["allocated_bytes"] / GIB) for n, one in enumerate(moments)]
            curves.append(Curve("predicted", points, "l-predicted dashed", stairs=True))
        if curves:
            panels.append(_memory_panel(row, curves, "over one step", ["step begins", "ends"]))
    return panels


def over_steps(rows: Sequence[Row]) -> list[Panel]:
    """Memory after each step."""
    panels = []
    for row in ran(rows):
        found = row["measured"]
        at = _step_numbers(found)
        curves = []
        for name, style in (("reserved", "l-reserved"), ("allocated", "l-measured")):
            sizes = [None if size is None else size / GIB for size in found[f"{name}_by_step_bytes"]]
            curves.append(Curve(name, list(zip(at, sizes, strict=True)), style))
        panels.append(_memory_panel(row, curves, "after each step", step_labels(at)))
    return panels


def _memory_panel(row: Row, curves: Sequence[Curve], when: str, x_labels: Sequence[str]) -> Panel:
    label = f"memory {when}, {row['label']}"
    chart = plot(curves, label=label, text=numbers.of_gib, x_labels=x_labels, height=SMALL + 30)
    return Panel(row["label"], chart)


def environment(values: Mapping[str, Any]) -> dict[str, str]:
    """Machine and versions, as the record has them; what it lacks is left out."""
    gpus, git = values.get("gpus") or [], values.get("git") or {}
    names = ", ".join(sorted({str(gpu.get("name")) for gpu in gpus}))
    memory = values.get("host_memory_bytes")
    changes = ", with changes" if git.get("changed") else ""
    entries = {
        "GPUs": f"{len(gpus)} × {names}" if gpus else "none",
        "Driver": values.get("driver"),
        "Processor": f"{values.get('cpu')}, {values.get('cpu_cores')} cores",
        "Host memory": numbers.gib(memory) if memory else None,
        "System": values.get("os"),
        "Python": values.get("python"),
        "Versions": ", ".join(f"{name} {one}" for name, one in (values.get("versions") or {}).items()),
        "Commit": f"{git['commit'][:12]}{changes}" if git.get("commit") else None,
    }
    return {name: str(value) for name, value in entries.items() if value}
