"""The energy section of a run's page: power and its limit, J/step, phases, the search for a limit."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.energy import PHASES
from shardwise.record.read import RunRecord
from shardwise.report.bench import Row
from shardwise.report.curves import over_time
from shardwise.report.energy import lines
from shardwise.report.html import numbers
from shardwise.report.html.charts import SMALL, Bar, Chart, Curve, Part, bars, plot
from shardwise.report.html.views import Panel, step_labels

Event = Mapping[str, Any]


class Energy(NamedTuple):
    """One run's part of the section."""

    label: str
    facts: Mapping[str, str]  # as on the terminal
    panels: Sequence[Panel]


def energies(both: Sequence[tuple[Row, RunRecord]]) -> list[Energy]:
    """Of the runs that have any energy."""
    found = []
    for row, record in both:
        power = [event for event in record.events if event.get("kind") == "power"]
        used, panels = row["summary"]["energy"], [*_over_steps(record.events, power), *_search(power)]
        if used["simulated"]:
            panels = [panel._replace(verdict="simulated") for panel in panels]
        if panels or used["kwh"] is not None:
            found.append(Energy(row["label"], lines(used), panels))
    return found


def phases(rows: Sequence[Row]) -> Chart | None:
    """Bars of kWh by phase; None where no run has them."""
    colours = {phase: f"s{place}" for place, phase in enumerate(PHASES)}
    drawn = []
    for row in rows:
        used = row["summary"]["energy"]
        parts = [Part(name, kwh, colours[name]) for name, kwh in (used["phases_kwh"] or {}).items()]
        if parts:
            note = "simulated" if used["simulated"] else ""
            drawn.append((row["label"], note, [Bar(parts, _kwh(sum(part.value for part in parts)))]))
    legend = {phase: f"f-{colour}" for phase, colour in colours.items()}
    return bars(drawn, text=_kwh, legend=legend) if drawn else None


def _over_steps(events: Sequence[Event], power: Sequence[Event]) -> list[Panel]:
    steps = (event for event in events if event.get("kind") == "step")
    points = list(over_time((one["step"], one["seconds"], one.get("joules")) for one in steps))
    if len(points) < 2:
        return []
    watts = [Curve("power", [(step, joules / seconds) for step, _, seconds, joules in points], "l-measured")]
    limits = [(one["step"], sum(one["limits_watts"].values())) for one in power if one.get("limits_watts")]
    if limits:
        limits.append((max(points[-1][0], limits[-1][0]), limits[-1][1]))
        watts.append(Curve("limit", limits, "limit", stairs=True))
    each = [Curve("J/step", [(step, joules / count) for step, count, _, joules in points], "l-measured")]
    return [
        _panel("Power, all GPUs", watts, "W"),
        _panel("Energy of a step, all GPUs", each, "J"),
    ]


def _search(power: Sequence[Event]) -> list[Panel]:
    """Time and energy of a step over the limit, against the highest one; the chosen limit is marked."""
    begun = max((place for place, one in enumerate(power) if one["what"] == "drift"), default=-1)
    windows = [one for one in power[begun + 1 :] if one["what"] == "window"]
    limits = sorted({one["watts"] for one in windows})
    if len(limits) < 2:
        return []
    chosen = next((one["watts"] for one in reversed(power) if one["what"] == "choice"), None)

    def curve(name: str, key: str, style: str) -> Curve:
        at = {watts: [one for one in windows if one["watts"] == watts] for watts in limits}
        each = {watts: sum(w[key] for w in of) / sum(w["steps"] for w in of) for watts, of in at.items()}
        return Curve(name, [(watts, 100 * each[watts] / each[limits[-1]]) for watts in limits], style)

    curves = [curve("energy of a step", "joules", "l-s0"), curve("time of a step", "seconds", "l-s1")]
    said = f"{chosen} W is chosen" if chosen is not None else "no limit is chosen yet"
    panel = _panel("Search for a power limit", curves, "%", zero=False, mark=chosen)
    ends = [f"{limits[0]} W", f"{limits[-1]} W each"]
    caption = f"{len(windows)} windows at {len(limits)} limits, against {limits[-1]} W; {said}."
    return [panel._replace(caption=caption, chart=panel.chart | {"x_labels": ends})]


def _panel(
    name: str, curves: Sequence[Curve], unit: str, *, zero: bool = True, mark: float | None = None
) -> Panel:
    chart = plot(
        curves,
        label=name,
        text=lambda value: f"{numbers.plain(value)}{numbers.THIN}{unit}",
        x_labels=step_labels([x for curve in curves for x, _ in curve.points]),
        height=SMALL + 30,
        zero=zero,
        mark=mark,
        legend={curve.name: curve.style for curve in curves} if len(curves) > 1 else None,
    )
    return Panel(name, chart)


def _kwh(value: float) -> str:
    return f"{numbers.plain(value)}{numbers.THIN}kWh"
