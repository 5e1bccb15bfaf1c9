"""Power limits in a plan: what is chosen within a bound on time, and what lies on the front."""

from __future__ import annotations

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from shardwise.board.plots import against_time, more
from shardwise.errors import JobError
from shardwise.job.schema import Energy
from shardwise.planner.explain import show_explanation
from shardwise.planner.limits import at_limits, front, share, with_costs, with_limits, with_pareto
from shardwise.planner.plan import Option, Plan
from shardwise.planner.search import TIE_FACTOR, cost
from shardwise.planner.table import show, show_pareto


def drawing(plan: Plan, share: float, *, seconds: float = 1.0) -> Plan:
    """The toy's plan with every step drawing `share` of the card's limit, all work on the clock.

    `seconds`: of each step, as a share of the toy's.
    """
    gpu = plan.hardware.gpu

    def at(option: Option) -> Option:
        time = option.prediction.time
        time = replace(time, step_seconds=seconds * time.step_seconds)
        each = time.step_seconds * time.world_size * gpu.power_watts
        energy = replace(option.prediction.energy, joules_per_step=share * each, idle_joules=0.21 * each)
        time = replace(time, clocked_seconds=time.step_seconds, compute_seconds=time.step_seconds)
        return replace(option, prediction=replace(option.prediction, time=time, energy=energy))

    chosen, *rest = map(at, plan.options)
    return replace(plan, chosen=chosen, alternatives=tuple(rest))


@pytest.fixture
def plan(toy) -> Plan:
    toy.host_memory_bytes = 256 << 30
    return drawing(toy.plan("4xRTX4090", objective="energy"), 0.98)


def everything(plan: Plan) -> list[Option]:
    assert plan.chosen is not None
    return [one for o in plan.options if o.fit == plan.chosen.fit for one in at_limits(o, plan)]


@pytest.mark.parametrize("bound", [0.0, 0.02, 0.05, 0.10, 0.30])
def test_the_choice_has_the_least_energy_within_the_bound(plan: Plan, bound: float) -> None:
    chosen = with_limits(plan, bound).chosen
    assert chosen is not None
    fastest = min(cost(one, "throughput") for one in everything(plan) if one.power_limit_watts is None)
    allowed = [one for one in everything(plan) if cost(one, "throughput") <= (1 + bound) * fastest]
    assert chosen in [replace(one, why=chosen.why) for one in allowed]
    assert cost(chosen, "energy") <= TIE_FACTOR * min(cost(one, "energy") for one in allowed)


@pytest.mark.parametrize(("bound", "gpus"), [(0.05, 4), (1.0, 2)])
def test_fewer_gpus_are_chosen_where_they_are_fast_enough_and_need_less(
    plan: Plan, toy, bound: float, gpus: int
) -> None:
    """Time is that of a token on all GPUs of a plan. Here two cards take 60 % of their usual time."""
    half = drawing(toy.plan("2xRTX4090", objective="energy"), 0.98, seconds=0.6)
    both = {4: plan, 2: half}
    seconds = {n: [(one, cost(one, "throughput") / n) for one in everything(p)] for n, p in both.items()}
    fastest = min(time for one, time in seconds[4] if one.power_limit_watts is None)
    allowed = [one for n in both for one, time in seconds[n] if time <= (1 + bound) * fastest]
    read = []
    limited = with_limits(plan, bound, (read.append(n) or both[n] for n in (2,)))
    assert read == [2]
    assert limited.hardware.world_size == gpus
    least = min(cost(one, "energy") for one in allowed)
    assert cost(limited.chosen, "energy") <= TIE_FACTOR**2 * least
    said = limited.chosen.why[0]
    assert said.endswith(", on 2 of 4 GPUs; what the others draw is not counted") == (gpus == 2), said
    full = next(option for option in plan.options if option.strategy == limited.power.default)
    slower = (cost(limited.chosen, "throughput") / gpus) / (cost(full, "throughput") / 4) - 1
    assert limited.power.slowdown_fraction == pytest.approx(slower)
    assert slower <= bound


def test_fewer_gpus_that_fit_less_well_are_not_taken(plan: Plan, toy) -> None:
    half = drawing(toy.plan("2xRTX4090", objective="energy"), 0.98, seconds=0.6)
    tight = replace(half, chosen=replace(half.chosen, fit="tight"), alternatives=())
    assert with_limits(plan, 1.0, [tight]).hardware.world_size == 4


def test_plans_for_fewer_gpus_are_made_until_one_is_too_slow(plan: Plan, toy) -> None:
    def ever_fewer():
        yield drawing(toy.plan("2xRTX4090", objective="energy"), 0.98)
        raise AssertionError("half is too slow, so a quarter is not tried")

    assert with_limits(plan, 0.0, ever_fewer()).hardware.world_size == 4


def test_what_needs_more_energy_is_not_called_the_least(toy) -> None:
    """Nobody has stated the hosts' memory: what needs none of it is chosen, within the error."""
    drawn = drawing(toy.plan("4xRTX4090", objective="energy"), 0.98)
    assert drawn.chosen is not None
    own = drawn.chosen.prediction
    less = replace(own.energy, joules_per_step=0.95 * own.energy.joules_per_step)
    strategy = replace(drawn.chosen.strategy, stage=2, offload_optimizer="cpu")
    offloading = replace(drawn.chosen, strategy=strategy, prediction=replace(own, energy=less))
    plan = with_limits(replace(drawn, alternatives=(offloading, *drawn.alternatives)), 0.3)
    assert plan.chosen is not None
    assert not plan.chosen.strategy.offloads
    assert plan.chosen.why[0].startswith("of the ")
    assert "more time a token than the fastest: the least energy that needs no host" in plan.chosen.why[0]


def test_the_budget_and_the_prices_of_a_job_are_compared_with_its_steps(plan: Plan) -> None:
    tokens, chosen = 1_000_000_000, plan.chosen
    assert chosen is not None
    known = replace(plan, job=replace(plan.job, total_tokens=tokens))
    kwh = tokens * chosen.prediction.energy.joules_per_token / 3.6e6
    hours = 4 * chosen.seconds(tokens) / 3600
    energy = Energy(budget_kwh=kwh / 4, price_per_kwh=0.5, price_per_gpu_hour=2)
    found = with_costs(known, energy).chosen
    assert found is not None
    assert found.why[:-2] == chosen.why
    assert found.why[-2].startswith(f"all steps cost {0.5 * kwh + 2 * hours:,.2f} at the job's prices")
    assert "ends the run after 25.0% of the steps" in found.why[-1]
    for enough in (Energy(), Energy(budget_kwh=1.01 * kwh)):
        assert with_costs(known, enough) == known
    assert with_costs(replace(plan, job=replace(plan.job, total_tokens=None)), energy).chosen == chosen


def test_a_wider_bound_lowers_the_limit(plan: Plan) -> None:
    limits = [with_limits(plan, bound).chosen.power_limit_watts for bound in (0.0, 0.05, 0.10, 0.20)]
    assert limits[0] is None
    assert 450 > limits[1] > limits[2] > limits[3] >= 225


def test_no_other_fit_than_the_plans_choice_is_taken(plan: Plan) -> None:
    limited = with_limits(plan, 1.0)
    assert limited.chosen.fit == "fits"
    assert {o.strategy for o in limited.options} == {o.strategy for o in plan.options}
    assert all(o.power_limit_watts is None for o in limited.options if o.fit == "no")


def test_where_nothing_fits_nothing_changes(toy) -> None:
    none = toy.plan("4xRTX4080", "zero0")
    assert none.chosen is None
    assert with_limits(none, 0.05) is none
    assert with_pareto(none) is none


def test_the_saving_is_against_the_choice_for_throughput(plan: Plan, toy) -> None:
    limited = with_limits(plan, 0.05)
    power, chosen = limited.power, limited.chosen
    default = next(o for o in plan.options if o.strategy == power.default)
    assert power.energy_saved_fraction == pytest.approx(1 - cost(chosen, "energy") / cost(default, "energy"))
    slower = cost(chosen, "throughput") / cost(default, "throughput") - 1
    assert power.slowdown_fraction == pytest.approx(slower)
    assert 0.01 < slower <= 0.05
    assert power.energy_error_fraction == pytest.approx(0.14 * (1 - power.energy_saved_fraction))
    assert power.error_source == "no sweep of RTX 4090 was measured"
    said = next(
        line for line in chosen.why if line.startswith(f"a power limit of {chosen.power_limit_watts} W")
    )
    assert f"{power.energy_saved_fraction:.1%} less energy" in said
    assert "no sweep of RTX 4090 was measured" in said
    assert chosen.why[0].startswith("the least energy of the ")


def test_a_card_with_a_recorded_sweep_has_a_narrower_band(toy) -> None:
    power = with_limits(drawing(toy.plan("4xA40", objective="energy"), 0.98), 0.05).power
    assert power.error_source == "recorded sweeps of A40"
    assert power.energy_error_fraction == pytest.approx(0.06 * (1 - power.energy_saved_fraction))


def test_a_card_without_a_known_range_keeps_its_limit_and_says_so(toy) -> None:
    limited = with_limits(drawing(toy.plan("4xRTX4080", objective="energy"), 0.98), 0.10)
    assert all(option.power_limit_watts is None for option in limited.options)
    assert "only 320 W was tried: the range of power limits of RTX 4080 is not known" in limited.chosen.why
    assert [point.limit_watts for point in limited.power.curve] == [320]


def test_a_limit_that_does_not_bind_is_never_chosen(toy) -> None:
    """At 40 % of the limit no level of the model binds."""
    limited = with_limits(drawing(toy.plan("4xRTX4090", objective="energy"), 0.4), 1.0)
    assert all(option.power_limit_watts is None for option in limited.options)
    assert limited.power.energy_error_fraction == 0.0


def test_nothing_on_the_front_is_beaten_and_all_else_is(plan: Plan) -> None:
    points = with_pareto(plan).pareto
    times, joules = ([cost(one, by) for one in points] for by in ("throughput", "energy"))
    assert times == sorted(times)
    assert joules == sorted(joules, reverse=True)
    assert len(points) > 5
    for one in everything(plan):  # ties: strategies that are as good
        assert any(
            cost(p, "throughput") <= TIE_FACTOR * cost(one, "throughput")
            and cost(p, "energy") <= TIE_FACTOR * cost(one, "energy")
            for p in points
        )


def test_of_equal_points_the_front_keeps_one(plan: Plan) -> None:
    first = plan.chosen
    assert front([first, first]) == (first,)


def test_json_names_the_limit_of_every_option(plan: Plan) -> None:
    limited = with_limits(with_pareto(plan), 0.05)
    values = json.loads(json.dumps(limited.to_json()))
    assert values["chosen"]["power_limit_watts"] == limited.chosen.power_limit_watts
    assert values["power"]["default"]["name"] == limited.power.default.name
    assert values["power"]["max_slowdown_fraction"] == 0.05
    assert values["power"]["curve"][0] == {"limit_watts": 450, "time_ratio": 1.0, "energy_ratio": 1.0}
    assert values["pareto"][0]["power_limit_watts"] is None
    assert {o["power_limit_watts"] for o in plan.to_json()["alternatives"]} == {None}
    assert (plan.to_json()["power"], plan.to_json()["pareto"]) == (None, [])


def printed(call, plan: Plan, width: int = 80) -> list[str]:
    console = Console(file=StringIO(), width=width)
    call(plan, console=console)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    return lines


def test_the_table_has_the_limits_at_80_columns(plan: Plan) -> None:
    limited = with_limits(plan, 0.05)
    lines = printed(show, limited)
    assert any(line.endswith("J per limit") for line in lines)
    chosen = next(line for line in lines if line.startswith("▶"))
    assert chosen.endswith(f" {limited.chosen.power_limit_watts}")
    assert "1B tok." not in "".join(lines)
    assert "1B tok." in "".join(printed(show, limited, 120))
    assert not any("limit\nW" in line or line.endswith("limit") for line in printed(show, plan)[:6])


def test_the_front_as_a_table_at_80_columns(plan: Plan) -> None:
    lines = printed(show_pareto, with_pareto(plan))
    rows = [line.split() for line in lines if " 450 " in line or line.split()[5:6] == ["425"]]
    assert rows[0][-4:-2] == [rows[0][-4], "+0.0"]
    assert lines[-1].strip() == "energy under a lower limit ±14%: no sweep of this card was measured"


def test_the_front_as_a_plot(plan: Plan) -> None:
    """Each choice of the front once, where its time and energy are; the ends say their limits."""
    plan = with_pareto(plan)
    chart = against_time(plan)
    marked = [(dot, down) for dot, _, down, _ in chart["dots"] if dot.radius == 6]
    assert [dot.x for dot, _ in marked] == pytest.approx([more(one, plan)[0] for one in plan.pareto])
    assert [dot.y for dot, _ in marked] == [cost(one, "energy") for one in plan.pareto]
    heights = [float(down.rstrip("%")) for _, down in marked]
    assert heights == sorted(heights), "ever less energy: ever lower"
    assert 0 <= heights[0] <= heights[-1] <= 100
    assert (marked[0][0].x, marked[0][0].text) == (0, "450 W")
    assert marked[-1][0].text == f"{plan.pareto[-1].power_limit_watts} W"
    alone = against_time(replace(plan, pareto=plan.pareto[:1]))
    assert [across for dot, across, *_ in alone["dots"] if dot.radius == 6] == ["0.000%"]


def test_the_explanation_shows_the_choice_at_each_limit(plan: Plan) -> None:
    lines = printed(show_explanation, with_limits(plan, 0.05))
    start = lines.index("energy of the choice by power limit")
    assert lines[start + 1].split()[0] == "450"
    assert "+0.0%" in lines[start + 1]
    assert "energy of the choice by power limit" not in printed(show_explanation, plan)


@pytest.mark.parametrize(
    ("text", "expected"), [("5%", 0.05), (" 2.5 % ", 0.025), ("0.1", 0.1), (0.05, 0.05), ("0", 0)]
)
def test_a_slowdown_is_a_share_or_a_percentage(text: str | float, expected: float) -> None:
    assert share(text, "--max-slowdown", "the time") == pytest.approx(expected)


@pytest.mark.parametrize("text", ["five", "-5%", "150%", "5", "5%%", ""])
def test_other_slowdowns_are_refused(text: str) -> None:
    with pytest.raises(JobError, match="is no share") as caught:
        share(text, "--max-slowdown", "the time")
    assert "5%" in str(caught.value.problems[0].fix)
