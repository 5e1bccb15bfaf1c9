"""Power limits and energy in a plan: the least energy within a bound on time, and what a run costs.

A limit changes no memory and no schedule. So each strategy is simulated once, at the card's own limit, and
what a limit makes of it is arithmetic (simulate/power.py).
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.errors import JobError
from shardwise.job.schema import Energy
from shardwise.planner.plan import AtLimit, Objective, Option, Plan, PowerChoice, in_words
from shardwise.planner.search import TIE_FACTOR, cost, rank
from shardwise.planner.why import reasons
from shardwise.simulate.power import energy_error, levels, under_limit
from shardwise.units import JOULES_PER_KWH, SECONDS_PER_HOUR

MOST_SHARE = 1.0
METRICS: tuple[Objective, ...] = ("throughput", "energy")


def share(text: str | float, flag: str, of: str) -> float:
    """`5%` or `0.05` as a share of what `of` says; JobError where it is neither, or not from 0 to 100 %."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(%?)\s*", str(text))
    found = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= found <= MOST_SHARE:
        fix = f"a share of {of} from 0 to 100 %, such as 5%"
        raise JobError(f"{text!r} is no share", where=flag, fix=fix)
    return found


def at_limit(plan: Plan, watts: int) -> Plan:
    """The plan with every strategy at one limit, that of the job; what fits and the choice stay."""

    def limited(option: Option) -> Option:
        prediction = under_limit(option.prediction, plan.hardware.gpu, watts)
        binds = prediction is not option.prediction
        return replace(option, prediction=prediction, power_limit_watts=watts if binds else None)

    chosen = None if plan.chosen is None else limited(plan.chosen)
    return replace(plan, chosen=chosen, alternatives=tuple(map(limited, plan.alternatives)))


def with_limits(plan: Plan, max_slowdown: float, fewer: Iterable[Plan] = ()) -> Plan:
    """The plan with the strategy and the power limit of least energy per token, for the objective `energy`.

    Among what fits as well as the plan's choice, and takes at most `1 + max_slowdown` times the time per
    token of the fastest at the card's own limit. Unchanged where nothing fits. `fewer`: plans for ever fewer
    GPUs, of which one is returned if it needs less energy; read up to the first that is too slow.
    """
    if plan.chosen is None:
        return plan
    same, all_gpus = _alike(plan), plan.hardware.world_size
    bound, default = (1 + max_slowdown) * min(map(_seconds, same)), rank(same, "throughput", plan.hardware)[0]
    best = _best(plan, bound)
    for other in fewer:
        found = _best(other, bound)
        if not found or other.chosen is None or other.chosen.fit != same[0].fit:
            break
        if min(map(_joules, found)) * TIE_FACTOR < min(map(_joules, best)):
            plan, best = other, found
    chosen, *rest = rank(best, "energy", plan.hardware)
    power = _compared(chosen, default, plan, max_slowdown)
    lora = plan.job.lora_rank is not None
    others, *why = reasons(
        chosen, rest, hardware=plan.hardware, objective="energy", margin=plan.margin, lora=lora
    )
    slower = f"take at most {max_slowdown:.1%} more time a token than the fastest"
    gpus = plan.hardware.world_size
    on = "" if gpus == all_gpus else f", on {gpus} of {all_gpus} GPUs; what the others draw is not counted"
    among = f"of the {len(best)} that fit and {slower}{on}"
    least = _joules(chosen) <= TIE_FACTOR * min(map(_joules, best))
    first = f"the least energy {among}" if least else f"{among}: {others}"
    tried = {option.strategy for option in best}
    return replace(
        plan,
        chosen=replace(chosen, why=(first, *_said(chosen, power, plan), *why)),
        alternatives=(*rest, *(option for option in plan.options if option.strategy not in tried)),
        power=power,
    )


def with_costs(plan: Plan, energy: Energy) -> Plan:
    """The plan with what all steps cost, and whether the budget lasts, where the job says so."""
    chosen, tokens = plan.chosen, plan.job.total_tokens
    if chosen is None or tokens is None:
        return plan
    kwh, said = tokens * _joules(chosen) / JOULES_PER_KWH, list[str]()
    hours = plan.hardware.world_size * chosen.seconds(tokens) / SECONDS_PER_HOUR
    if energy.price_per_kwh is not None or energy.price_per_gpu_hour is not None:
        price = kwh * (energy.price_per_kwh or 0.0) + hours * (energy.price_per_gpu_hour or 0.0)
        said.append(f"all steps cost {price:,.2f} at the job's prices: {kwh:.3g} kWh, {hours:.3g} GPU-hours")
    if energy.budget_kwh is not None and kwh > energy.budget_kwh:
        part = f"{energy.budget_kwh / kwh:.1%} of the steps: all of them take {kwh:.3g} kWh"
        said.append(f"energy.budget_kwh {energy.budget_kwh:g} ends the run after {part}")
    return replace(plan, chosen=replace(chosen, why=(*chosen.why, *said)))


def with_pareto(plan: Plan) -> Plan:
    """The plan with the strategies and limits that nothing else beats in time and energy per token.

    As in `rank`, of strategies that are as good by TIE_FACTOR one counts: without offloading, then with the
    least memory. Call it before `with_limits`, whose plan lacks predictions for the card's own limit.
    """
    if plan.chosen is None:
        return plan
    plain = sorted(
        _alike(plan), key=lambda option: (option.strategy.offloads, option.prediction.memory.needed_bytes)
    )
    kept: list[Option] = []
    for option in plain:
        bounds = [(by, TIE_FACTOR * cost(option, by)) for by in METRICS]
        if not any(all(cost(other, by) <= bound for by, bound in bounds) for other in kept):
            kept.append(option)
    return replace(plan, pareto=front(one for option in kept for one in at_limits(option, plan)))


def at_limits(option: Option, plan: Plan) -> list[Option]:
    """The strategy at the card's own limit, then at each lower one that binds, descending."""
    found, gpu = [option], plan.hardware.gpu
    for watts in levels(gpu):
        prediction = under_limit(option.prediction, gpu, watts)
        if prediction is not option.prediction:
            found.append(replace(option, prediction=prediction, power_limit_watts=watts))
    return found


def front(options: Iterable[Option]) -> tuple[Option, ...]:
    """What no other option beats or equals in both time and energy per token; fastest first."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda one: (cost(one, "throughput"), _joules(one))):
        if not kept or _joules(option) < _joules(kept[-1]):
            kept.append(option)
    return tuple(kept)


def _alike(plan: Plan) -> list[Option]:
    """What fits as well as the plan's choice."""
    return [option for option in plan.options if plan.chosen and option.fit == plan.chosen.fit]


def _best(plan: Plan, bound: float) -> list[Option]:
    """Each strategy at the limit with the least energy of those that are within the bound on `_seconds`."""
    limited = ([one for one in at_limits(option, plan) if _seconds(one) <= bound] for option in _alike(plan))
    return [min(fast, key=_joules) for fast in limited if fast]


def _seconds(option: Option) -> float:
    """Per token, of all GPUs."""
    return cost(option, "throughput") / option.prediction.time.world_size


def _joules(option: Option) -> float:
    return cost(option, "energy")


def _compared(chosen: Option, default: Option, plan: Plan, max_slowdown: float) -> PowerChoice:
    gpu = plan.hardware.gpu
    own = next(option for option in plan.options if option.strategy == chosen.strategy)
    curve = tuple(
        AtLimit(
            limit_watts=one.power_limit_watts or gpu.power_watts,
            time_ratio=cost(one, "throughput") / cost(own, "throughput"),
            energy_ratio=_joules(one) / _joules(own),
        )
        for one in at_limits(own, plan)
    )
    error, swept = energy_error(gpu)
    source = f"recorded sweeps of {gpu.name}" if swept else f"no sweep of {gpu.name} was measured"
    if chosen.power_limit_watts is None:
        error, source = 0.0, "no limit is changed"
    return PowerChoice(
        max_slowdown_fraction=max_slowdown,
        curve=curve,
        slowdown_fraction=_seconds(chosen) / _seconds(default) - 1,
        energy_saved_fraction=1 - _joules(chosen) / _joules(default),
        energy_error_fraction=error * _joules(chosen) / _joules(default),
        error_source=source,
        default=default.strategy,
    )


def _said(chosen: Option, power: PowerChoice, plan: Plan) -> Iterator[str]:
    """The limit, and what it is predicted to save, with the band of its error."""
    gpu = plan.hardware.gpu
    if gpu.power_range_watts is None:
        yield f"only {gpu.power_watts} W was tried: the range of power limits of {gpu.name} is not known"
        return
    watts = chosen.power_limit_watts
    limit = f"its own power limit of {gpu.power_watts} W" if watts is None else f"a power limit of {watts} W"
    slower, saved, error = power.slowdown_fraction, power.energy_saved_fraction, power.energy_error_fraction
    against = f"than {in_words(power.default)} at {gpu.power_watts} W, the choice for throughput"
    ends = f"{saved - error:.1%} to {saved + error:.1%}"
    band = f" ({ends}: {power.error_source})" if error else ""
    yield f"{limit}: {saved:.1%} less energy{band} and {slower:.1%} more time a token {against}"
