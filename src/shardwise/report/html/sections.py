"""The parts of a page, each from rows: what was predicted and measured of one strategy or run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.planner.why import TERMS
from shardwise.report import bench
from shardwise.report.html import numbers
from shardwise.report.html.charts import COLOURS, SMALL, Bar, Curve, Part, bars, layered, legend, plot
from shardwise.report.html.markup import Child, Html, h
from shardwise.units import GIB

Row = Mapping[str, Any]
Pair = Callable[[Row], tuple[float | None, float | None]]

EXPOSED = "Exposed comm., of the step"

COLOUR = {
    "weights_bytes": "weights",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "loss_bytes": "loss",
    "engine_buffers_bytes": "buffers",
    "fragmentation_bytes": "fragmentation",
    "outside_allocator_bytes": "outside",
}


def section(title: str, text: str | None, *children: Child) -> Html:
    """A titled part of the page."""
    return h("section", None, h("h2", None, title), None if text is None else h("p", None, text), children)


def card(*children: Child) -> Html:
    """A framed part."""
    return h("div", {"class": "card"}, children)


def ran(rows: Sequence[Row]) -> list[Row]:
    """The rows that have measurements."""
    return [row for row in rows if row["measured"] is not None]


def whose(rows: Sequence[Row]) -> str:
    """What memory and speed are told for: a `GPU`, or a `process` where there is none."""
    measured = ran(rows)
    on_gpus = not measured or any(row["measured"]["memory_of"] == "gpu" for row in measured)
    return "GPU" if on_gpus else "process"


def note(row: Row) -> str:
    """Micro-batch and checkpointing, where they are known."""
    return bench.batch(row) if row.get("strategy") else ""


def facts(entries: Sequence[tuple[str, str, str]]) -> Html:
    """(name, value, remark) as large figures."""
    cards = [
        h("div", {"class": "card"}, h("dt", None, name), h("dd", None, value, h("small", None, remark)))
        for name, value, remark in entries
    ]
    return h("dl", {"class": "facts"}, cards)


def table(rows: Sequence[Row], *, verdicts: bool) -> Html:
    """All rows in numbers; on a narrow page each is a list of its own."""
    each = whose(rows)
    names = [f"Memory per {each}", f"Tokens/s per {each}", "TFLOP/s"]
    names += [EXPOSED, "J/token", "Last loss", "Steps"]
    cells = [dict(zip(names, _cells(row, verdicts=verdicts), strict=True)) for row in rows]
    names = [name for name in names if any(line[name] != numbers.NONE for line in cells)]
    head = h("tr", None, h("th", {"scope": "col"}, ""), [h("th", {"scope": "col"}, name) for name in names])
    lines = []
    for row, line in zip(rows, cells, strict=True):
        title = h("th", {"scope": "row"}, row["label"], h("small", None, note(row)))
        lines.append(h("tr", None, title, [_cell(name, line[name]) for name in names]))
    whole = h("table", None, h("thead", None, head), h("tbody", None, lines))
    return h("div", {"class": "card beside"}, whole)


def _cell(name: str, value: Child) -> Html:
    absent = value == numbers.NONE
    return h("td", {"data-name": name, "class": "none" if absent else None}, value)


def _cells(row: Row, *, verdicts: bool) -> list[Child]:
    found = row["measured"]
    memory, speed, exposed, energy = (_both(read(row), text, off) for read, text, off in _QUANTITIES)
    if found is None:
        status = h("span", {"class": "tag failed"}, row["status"])
        return [memory, speed, numbers.NONE, exposed, energy, numbers.NONE, status]
    mark = found["verdict"] if verdicts else row["status"]
    tag = h("span", {"class": f"tag {mark}" if verdicts else "tag"}, mark)
    counted = f"{found['steps'] - found['warmup_steps']} counted"
    return [
        memory,
        speed,
        _with(numbers.plain(found["tflops_per_gpu"]), numbers.share(found["mfu"]), "{} MFU"),
        exposed,
        energy,
        _with(_last(found["loss"]), _last(found["grad_norm"]), "norm {}"),
        [tag, h("small", None, counted)],
    ]


def _last(values: Sequence[float | None]) -> str:
    return numbers.loss(next((value for value in reversed(values) if value is not None), None))


def _with(text: str, below: str, said: str) -> Child:
    """A number with a second one below it, where there is one."""
    return text if below == numbers.NONE else [text, h("small", None, said.format(below))]


Off = Callable[[float | None, float | None], str | None]

_QUANTITIES: tuple[tuple[Pair, Callable[[float | None], str], Off], ...] = (
    (bench.needed, numbers.gib, numbers.off),
    (bench.speed, numbers.plain, numbers.off),
    (bench.exposed, numbers.share, numbers.points_off),
    (bench.energy, numbers.plain, numbers.off),
)


def _both(
    pair: tuple[float | None, float | None], text: Callable[[float | None], str], off: Off = numbers.off
) -> Child:
    """Measured, and below it what was predicted and by how much that is off."""
    predicted, found = pair
    if predicted is None:
        return text(found)
    difference = off(predicted, found)
    said = [text(predicted), *([] if difference is None else [difference])]
    return [text(found), h("small", {"class": "guess"}, " · ".join(said))]


def memory(rows: Sequence[Row]) -> Html:
    """Stacked: what was predicted term by term, and what was measured."""
    lines, capacity = [], None
    for row in rows:
        drawn = []
        if row["predicted"]:
            foretold = row["predicted"]["memory"]
            capacity = foretold["capacity_bytes"]
            values = {**foretold["terms"], "outside_allocator_bytes": foretold["outside_allocator_bytes"]}
            parts = [Part(name=name, value=values[key], colour=COLOUR[key]) for key, name in TERMS.items()]
            total = bench.needed(row)[0]
            drawn.append(Bar(parts=parts, text=f"{numbers.gib(total)} predicted", guess=True))
        if bench.needed(row)[1] is not None:
            parts = _measured_parts(row["measured"])
            drawn.append(Bar(parts=parts, text=f"{numbers.gib(bench.needed(row)[1])} measured"))
        if drawn:
            lines.append((row["label"], note(row), drawn))
    limit = _worth_drawing(
        capacity, [sum(p.value for p in bar.parts) for *_, drawn in lines for bar in drawn]
    )
    entries = {"resident set of the fullest process": "f-measured"}
    if capacity is not None or any(row["measured"]["memory_of"] == "gpu" for row in ran(rows)):
        entries = {name: f"f-{COLOUR[key]}" for key, name in TERMS.items()}
        entries = {**entries, "measured: allocated at most": "f-measured"}
    if limit is not None:
        entries[f"what a process may use, {numbers.gib(limit)}"] = "l-limit limit"
    drawn_bars = card(legend(entries), bars(lines, limit=limit, text=numbers.gib))
    return h("div", None, drawn_bars, _memory_table(rows))


def _memory_table(rows: Sequence[Row]) -> Html | None:
    """Reserved, allocated and outside, each measured and predicted; None without a GPU."""
    shown = {"Reserved": bench.reserved, "Allocated": bench.allocated, "Outside": bench.outside}
    if all(bench.outside(row) == (None, None) for row in rows):
        return None
    head = h("tr", None, h("th", {"scope": "col"}, ""), [h("th", {"scope": "col"}, name) for name in shown])
    lines = []
    for row in rows:
        title = h("th", {"scope": "row"}, row["label"])
        cells = [_cell(name, _both(read(row), numbers.gib)) for name, read in shown.items()]
        lines.append(h("tr", None, title, cells))
    whole = h("table", None, h("thead", None, head), h("tbody", None, lines))
    return h("div", {"class": "card beside"}, whole)


def _measured_parts(found: Row) -> list[Part]:
    reserved = found["peak_reserved_bytes"]
    allocated = found["peak_allocated_bytes"] or reserved
    return [
        Part(name="allocated at most", value=allocated, colour="measured"),
        Part(name="reserved beyond it", value=reserved - allocated, colour="fragmentation"),
        Part(name="outside torch's allocator", value=found["outside_allocator_bytes"] or 0, colour="outside"),
    ]


def _worth_drawing(limit: float | None, values: Sequence[float]) -> float | None:
    """A limit far beyond all values would only make them short."""
    return limit if limit is not None and values and limit <= 2.5 * max(values) else None


def pairs(rows: Sequence[Row], read: Pair, text: Callable[[float | None], str], unit: str) -> Html | None:
    """Bars of predicted and measured; None where nothing was measured."""
    lines = []
    for row in ran(rows):
        predicted, found = read(row)
        drawn = []
        if predicted is not None:
            part = Part(name="predicted", value=predicted, colour="predicted")
            drawn.append(Bar(parts=[part], text=f"{text(predicted)} predicted", guess=True))
        if found is not None:
            part = Part(name="measured", value=found, colour="measured")
            drawn.append(Bar(parts=[part], text=f"{text(found)} {unit}"))
            lines.append((row["label"], note(row), drawn))
    if not lines:
        return None
    entries = {"measured": "f-measured"}
    if any(len(drawn) > 1 for *_, drawn in lines):
        entries = {"predicted": "f-predicted", **entries}
    return card(legend(entries), bars(lines, limit=None, text=text))


def overlay(
    rows: Sequence[Row],
    key: str,
    *,
    label: str,
    text: Callable[[float], str],
    zero: bool,
    alike: bool = True,
    held_out: bool = False,
) -> Html:
    """One curve a row over the steps; with `held_out` also, dashed, the losses of evaluations.

    `alike`: the curves may lie on each other, and are drawn so that each is seen.
    """
    curves, entries = [], {}
    for place, row in enumerate(ran(rows)):
        style = f"l-s{place % COLOURS}" + (" dashed" if place >= COLOURS else "")
        found = row["measured"]
        at = found.get("step_numbers") or range(1, len(found[key]) + 1)
        points = list(zip(at, found[key], strict=True))
        width = layered(place, len(ran(rows)) if alike else 1)
        curves.append(Curve(name=row["label"], points=points, style=style, width=width))
        entries[row["label"]] = style
        if held_out and found.get("evaluations"):
            curves.append(
                Curve(name=f"{row['label']}, held out", points=found["evaluations"], style=f"{style} dashed")
            )
            entries[f"{row['label']}, held out"] = f"{style} dashed"
    steps = [x for curve in curves for x, _ in curve.points]
    drawing = plot(curves, label=label, text=text, x_labels=step_labels(steps), zero=zero)
    return card(legend(entries), drawing)


def step_labels(steps: Sequence[float]) -> list[str]:
    """First, middle, last."""
    if not steps:
        return []
    first, last = min(steps), max(steps)
    middle = (first + last) / 2
    texts = [f"step {first:g}", f"{middle:g}" if middle % 1 == 0 else "", f"step {last:g}"]
    return texts if last > first else texts[:1]


def each_step(rows: Sequence[Row]) -> Html:
    """Seconds of each step, a small chart a row: what the verdict is taken from."""
    cards = []
    for row in ran(rows):
        found = row["measured"]
        values = found["step_seconds_all"]
        counted = values[found["warmup_steps"] :]
        most = 3 * max(counted)  # the first step compiles: it may take a hundred times as long
        points = [(n + 0.5, min(value, most)) for n, value in enumerate(values)]
        points.append((len(values) + 0.5, points[-1][1]))
        drawing = plot(
            [Curve(name=row["label"], points=points, style="l-measured", stairs=True)],
            label=f"seconds of each step, {row['label']}",
            text=numbers.seconds,
            x_labels=step_labels([1, len(values)]),
            height=SMALL,
            shade_to=float(found["warmup_steps"]) + 0.5,
        )
        tag = h("span", {"class": f"tag {found['verdict']}"}, found["verdict"])
        said = h("p", {"class": "caption"}, "; ".join(found["verdict_why"])) if found["verdict_why"] else None
        cards.append(card(h("h3", None, row["label"], " ", tag), drawing, said))
    return h("div", {"class": "many"}, cards)


def within_step(rows: Sequence[Row]) -> Html | None:
    """Memory over one step: rank 0's as profiled, and the predicted peak of each part of it."""
    cards = []
    for row in rows:
        found, predicted = row["measured"], row["predicted"]
        moments = (predicted or {}).get("memory", {}).get("timeline") or []
        profiled = (found or {}).get("memory_in_step") or []
        if not moments and not profiled:
            continue
        curves = []
        if profiled:
            reserved, allocated = ([(x, values[k] / GIB) for x, *values in profiled] for k in (1, 0))
            curves.append(Curve(name="reserved", points=reserved, style="l-reserved"))
            curves.append(Curve(name="allocated", points=allocated, style="l-measured"))
        if moments:
            count = len(moments)
            foretold = [((n + 0.5) / count, one["allocated_bytes"] / GIB) for n, one in enumerate(moments)]
            curves.append(Curve(name="predicted", points=foretold, style="l-predicted dashed", stairs=True))
        drawing = plot(
            curves,
            label=f"memory over one step, {row['label']}",
            text=numbers.of_gib,
            x_labels=["step begins", "ends"],
            height=SMALL + 30,
        )
        cards.append(card(h("h3", None, row["label"]), drawing))
    if not cards:
        return None
    entries = {
        "allocated, measured": "l-measured",
        "reserved, measured": "l-reserved",
        "allocated, predicted": "l-predicted dashed",
    }
    return h("div", None, legend(entries, alone=True), h("div", {"class": "many"}, cards))


def over_steps(rows: Sequence[Row]) -> Html:
    """Memory after each step, a small chart a row."""
    cards = []
    for row in ran(rows):
        found = row["measured"]
        at = found.get("step_numbers") or range(1, found["steps"] + 1)
        kinds = (("reserved_by_step_bytes", "l-reserved"), ("allocated_by_step_bytes", "l-measured"))
        curves = [
            Curve(
                name=key.partition("_")[0],
                points=[(x, None if y is None else y / GIB) for x, y in zip(at, found[key], strict=True)],
                style=style,
            )
            for key, style in kinds
        ]
        drawing = plot(
            curves,
            label=f"memory after each step, {row['label']}",
            text=numbers.of_gib,
            x_labels=step_labels(list(at)),
            height=SMALL + 30,
        )
        cards.append(card(h("h3", None, row["label"]), drawing))
    return h("div", {"class": "many"}, cards)


def listed(entries: Sequence[Child]) -> Html:
    """Sentences one below the other."""
    return h("ul", {"class": "reasons"}, [h("li", None, entry) for entry in entries])


def environment(values: Mapping[str, Any]) -> Html:
    """Machine and versions, as the record has them."""
    gpus = values.get("gpus") or []
    names = sorted({str(gpu.get("name")) for gpu in gpus})
    git = values.get("git") or {}
    entries = {
        "GPUs": f"{len(gpus)} × {', '.join(names)}" if gpus else "none",
        "Driver": values.get("driver"),
        "Processor": f"{values.get('cpu')}, {values.get('cpu_cores')} cores",
        "Host memory": numbers.gib(values["host_memory_bytes"]) if values.get("host_memory_bytes") else None,
        "System": values.get("os"),
        "Python": values.get("python"),
        "Versions": ", ".join(
            f"{name} {version}" for name, version in (values.get("versions") or {}).items()
        ),
        "Commit": f"{git['commit'][:12]}{', with changes' if git.get('changed') else ''}"
        if git.get("commit")
        else None,
    }
    pairs_ = [[h("dt", None, name), h("dd", None, str(value))] for name, value in entries.items() if value]
    return card(h("dl", {"class": "pairs"}, pairs_))
