"""Time against energy of a plan, for its page."""

from shardwise.planner.limits import METRICS
from shardwise.planner.plan import Option, Plan
from shardwise.planner.search import cost
from shardwise.planner.table import batch, joules, limit
from shardwise.report.html import numbers
from shardwise.report.html.charts import COLOURS, Chart, Dot, scatter, ticks


def more(option: Option, plan: Plan) -> tuple[float, float]:
    """Time and energy of a token, per cent above those of the fastest."""
    time, energy = (100 * (cost(option, by) / cost(plan.pareto[0], by) - 1) for by in METRICS)
    return time, energy


def against_time(plan: Plan) -> Chart:
    """Joules of a token over the time that it takes more than with the fastest; `plan` has a `pareto`."""
    at = [(option, more(option, plan)[0], cost(option, "energy")) for option in plan.pareto]
    names = list(dict.fromkeys(option.strategy.name for option in plan.pareto))
    colours = {name: f"f-s{place % COLOURS}" for place, name in enumerate(names)}
    x_ticks = ticks(max(time for _, time, _ in at) or 1.0)
    y_ticks = ticks(max(used for *_, used in at), min(used for *_, used in at))
    dots = []
    for option in plan.options:
        time, used = more(option, plan)[0], cost(option, "energy")
        if option.fit == plan.pareto[0].fit and 0 <= time <= x_ticks[-1] and used <= y_ticks[-1]:
            dots.append(Dot(time, used, "f-faint", _title(option, plan, time), radius=3))
    before = ""
    for option, time, used in at:
        name = option.strategy.name
        text = f"{limit(option, plan)} W" if name != before or option is plan.pareto[-1] else ""
        dots.append(Dot(time, used, colours[name], _title(option, plan, time), text=text, radius=6))
        before = name
    label = f"joules a token over time, for {len(at)} choices; the table below has their numbers"
    return scatter(
        dots,
        label=label,
        x=lambda value: f"{value:+.0f}{numbers.THIN}% time",
        y=lambda value: f"{value:.3g}{numbers.THIN}J",
        ticks=(x_ticks, y_ticks),
        legend=colours,
    )


def _title(option: Option, plan: Plan, time: float) -> str:
    micro, checkpointed = batch(option.strategy)
    name = f"{option.strategy.name}, {micro}, checkpointing {checkpointed}, {limit(option, plan)} W"
    return f"{name}: {time:+.1f} % time, {joules(option)} J/token"
