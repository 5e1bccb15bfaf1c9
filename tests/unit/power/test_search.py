"""The search for a power limit: what it asks for, chooses, says and keeps."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardwise.errors import CheckpointError, JobError
from shardwise.power.curve import estimate
from shardwise.power.objective import Objective
from shardwise.power.search import (
    DRIFTED_WINDOWS,
    ENOUGH,
    MOST_AT_ONE_LIMIT,
    MOST_WINDOWS,
    Choice,
    Search,
    Window,
)

ENERGY = Objective(kind="energy")
LIMITS = list(range(200, 701, 25))


def window(watts: int, seconds: float, joules: float, held: bool | None = None) -> Window:
    return Window(watts=watts, steps=10, seconds=10 * seconds, joules=10 * joules, held=held)


def seconds_at(watts: float) -> float:
    """Compute-bound above 200 W of static draw, unlimited from 600 W on."""
    return float(1 / ((min(watts, 600) - 100) / 500) ** 0.4)


def joules_at(watts: float) -> float:
    return min(watts, 600) * seconds_at(watts)


def finished(search: Search, held: bool | None = None, scale: float = 1.0) -> Choice:
    for _ in range(MOST_WINDOWS + 1):
        request = search.ask()
        if request is None:
            return search.choice()
        watts = request.watts
        search.tell(window(watts, scale * seconds_at(watts), scale * joules_at(watts), held))
    raise AssertionError("the search does not end")


def gain(choice: Choice, what: str) -> tuple[float, float]:
    """The change against the highest limit in per cent, and its error, as the choice's reasons say."""
    found = re.search(rf"([+-][0-9.]+) % {what} \(± ([0-9.]+) %\)", "\n".join(choice.reasons))
    assert found is not None
    return float(found[1]), float(found[2])


# Objectives, by hand: three limits, 2 GPUs.
SECONDS, JOULES = np.array([2.0, 1.05, 1.0]), np.array([300.0, 210.0, 250.0])


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (Objective(kind="energy", gpus=2), [300 / 210 - 1, 0, 250 / 210 - 1]),
        (
            # 0.5 * 300 + 0.5 * 200 * 2 * 2 = 550; 0.5 * 210 + 0.5 * 200 * 2 * 1.05 = 315; 125 + 200 = 325
            Objective(kind="eta", gpus=2, eta=0.5),
            [550 / 315 - 1, 0, 325 / 315 - 1],
        ),
        (
            # per step, in a currency: 36 per kWh is 1e-5 a joule; 18 per GPU-hour is 0.01 a second of 2 GPUs
            Objective(kind="cost", gpus=2, price_per_kwh=36.0, price_per_gpu_hour=18.0),
            [0.023 / 0.0125 - 1, 0.0126 / 0.0125 - 1, 0],
        ),
        (
            # 1.05 is allowed, so 210 J is best; 2 s is 1 / 1.05 over what is allowed
            Objective(kind="max-slowdown", gpus=2, max_slowdown=0.05),
            [2 / 1.05 - 1, 0, 250 / 210 - 1],
        ),
        (Objective(kind="max-slowdown", gpus=2, max_slowdown=0.04), [2 / 1.04 - 1, 1.05 / 1.04 - 1, 0]),
    ],
)
def test_regrets_by_hand(objective: Objective, expected: list[float]) -> None:
    assert objective.regrets(SECONDS, JOULES, 200.0) == pytest.approx(expected)


def test_of_equally_fast_limits_time_takes_the_one_with_less_energy() -> None:
    regrets = Objective(kind="time").regrets(np.array([1.0, 1.0]), np.array([90.0, 100.0]), 200.0)
    assert regrets[0] == 0
    assert 0 < regrets[1] < 0.003
    regrets = Objective(kind="time").regrets(np.array([1.01, 1.0]), np.array([70.0, 100.0]), 200.0)
    assert regrets[1] == 0, "one percent of time is more than 30 % of energy"


def test_the_curve_goes_through_exact_windows_and_is_unsure_elsewhere() -> None:
    positions = np.log(np.array([200.0, 300.0, 450.0, 700.0]))
    values = np.log(np.array([3.0, 1.5, 1.0]))
    normal = np.random.default_rng(0).standard_normal((2000, 4))
    curve = estimate(positions, [0, 1, 3], values, normal)
    assert curve.mean[[0, 1, 3]] == pytest.approx(values, abs=0.02)
    assert np.log(1.0) < curve.mean[2] < np.log(1.5)
    assert curve.variance[2] > 4 * curve.variance[1]
    assert curve.ratio(1, 3)[0] == pytest.approx(1.5, rel=0.02)


@pytest.mark.parametrize("spread", [0.01, 0.05])
def test_the_spread_is_that_of_repeated_windows(spread: float) -> None:
    generator = np.random.default_rng(0)
    measured = [0, 1, 2, 3] * 6
    values = np.log([1.4, 1.2, 1.1, 1.0] * 6) + spread * generator.standard_normal(24)
    positions = np.log(np.array([200.0, 300.0, 450.0, 700.0]))
    curve = estimate(positions, measured, values, generator.standard_normal((1000, 4)))
    assert spread / 1.6 < curve.spread < 1.6 * spread
    error = math.sqrt(2 / 6) * spread  # of a difference between two means of six
    assert error / 2 < curve.ratio(0, 3)[1] < 2 * error


def test_the_search_needs_far_fewer_windows_than_limits() -> None:
    search = Search(list(range(200, 701, 10)), ENERGY)
    choice = finished(search)
    assert len(search.windows) <= 12, "there are 51 limits"
    best = min(search.limits, key=joules_at)
    assert joules_at(choice.watts) <= 1.01 * joules_at(best)


def test_only_limits_of_the_list_are_asked_for() -> None:
    limits = [410, 230, 650, 555, 300]
    search = Search(limits, ENERGY)
    asked = set()
    while (request := search.ask()) is not None:
        asked.add(request.watts)
        search.tell(window(request.watts, seconds_at(request.watts), joules_at(request.watts)))
    assert asked <= set(limits)
    assert search.choice().watts in limits


def test_windows_are_repeated_while_they_differ_and_not_without_end() -> None:
    calm, rough = Search(LIMITS, ENERGY), Search(LIMITS, ENERGY)
    generator = np.random.default_rng(3)
    finished(calm)
    while (request := rough.ask()) is not None:
        error = math.exp(0.08 * generator.standard_normal())
        rough.tell(window(request.watts, seconds_at(request.watts), error * joules_at(request.watts)))
    assert len(calm.windows) < len(rough.windows) <= MOST_WINDOWS
    assert gain(rough.choice(), "energy")[1] > 3 * gain(calm.choice(), "energy")[1]


def test_limits_that_cannot_be_separated_are_left_after_a_few_windows_each() -> None:
    errors = [0.06, -0.06, 0.06, -0.06, 0.0]
    rough = [window(watts, 1.0, 1.0 + error) for error in errors for watts in (300, 400)]
    search = Search([300, 400], ENERGY, windows=rough[: 2 * MOST_AT_ONE_LIMIT])
    assert search.ask() is None
    assert "measured 5 times each" in search.choice().reasons[-1]
    assert search.choice().expected_regret > ENOUGH
    assert Search([300, 400], ENERGY, windows=rough[:-2]).ask() is not None


def test_a_repeated_window_is_longer_and_says_why() -> None:
    search = Search(LIMITS, ENERGY)
    seen: dict[int, float] = {}
    while (request := search.ask()) is not None:
        assert request.why
        assert (request.steps, request.warmup_steps) == (4, 2)
        assert request.seconds == (2.0 if request.watts in seen else 1.0)
        seen[request.watts] = request.seconds
        search.tell(window(request.watts, seconds_at(request.watts), joules_at(request.watts)))
    assert len(search.windows) > len(seen), "the spread is measured at least once"


def test_limits_that_do_not_act_are_one_level() -> None:
    """From 325 W on nothing changes, and the device says so: none of those is measured for its own sake."""
    search = Search(LIMITS, ENERGY)
    while (request := search.ask()) is not None:
        watts, acts = request.watts, request.watts < 325
        clock = min(watts, 325) / 325
        search.tell(window(watts, 1 / clock, 325 * clock**0.2, held=acts))
    unheld = [one.watts for one in search.windows if not one.held]
    assert len(unheld) <= 5
    assert search._free_watts() == min(unheld)


def test_between_limits_that_are_equal_nothing_is_measured() -> None:
    """Nothing changes from 160 W on, and the device does not say that its limits do not act."""
    search = Search(list(range(100, 401, 5)), Objective(kind="time"))
    while (request := search.ask()) is not None:
        clock = min(request.watts, 160) / 160
        search.tell(window(request.watts, 1 / clock, 160 * clock**0.2))
    assert len(search.windows) <= 10
    assert search.choice().expected_regret <= ENOUGH


def test_where_no_limit_acts_the_highest_stays_and_one_sentence_says_so() -> None:
    search = Search(LIMITS, ENERGY)
    while (request := search.ask()) is not None:
        search.tell(window(request.watts, 1.0, 150.0, held=False))
    choice = search.choice()
    assert choice.watts == 700
    assert any("do not act" in reason for reason in choice.reasons)
    assert len(search.windows) <= 5


def test_a_limit_that_acted_once_counts_as_acting() -> None:
    windows = [window(500, 1.0, 300.0, held=False), window(550, 1.0, 300.0, held=True)]
    assert Search(LIMITS, ENERGY, windows=windows)._free_watts() == 700
    assert Search(LIMITS, ENERGY, windows=windows[:1])._free_watts() == 500


def test_max_slowdown_takes_the_least_energy_and_not_the_lowest_limit() -> None:
    """Zeus' A40/BERT record: at most 10 % slower, 250 W is the lowest limit, but 275 W needs less energy."""
    seconds = {
        100: 4.28,
        125: 2.47,
        150: 1.65,
        175: 1.37,
        200: 1.185,
        225: 1.101,
        250: 1.066,
        275: 0.977,
        300: 1.0,
    }
    joules = {100: 154, 125: 111, 150: 89, 175: 86, 200: 84.8, 225: 88.9, 250: 95.1, 275: 94.3, 300: 100.0}
    search = Search(list(seconds), Objective(kind="max-slowdown", max_slowdown=0.10))
    while (request := search.ask()) is not None:
        search.tell(window(request.watts, seconds[request.watts], joules[request.watts]))
    assert search.choice().watts in (225, 275), "225 W is 0.1 % too slow"
    assert search.choice().watts != 250


def test_the_border_of_max_slowdown_is_closed() -> None:
    """Time falls again at 200 W, next to limits that are too slow: only measuring it shows that."""
    seconds = {250: 1.0, 225: 1.09, 200: 1.076, 175: 1.28, 150: 1.3, 125: 1.45, 100: 2.0}
    joules = {250: 100.0, 225: 102.0, 200: 90.0, 175: 95.5, 150: 79.5, 125: 79.5, 100: 87.0}
    search = Search(list(seconds), Objective(kind="max-slowdown", max_slowdown=0.10))
    while (request := search.ask()) is not None:
        search.tell(window(request.watts, seconds[request.watts], joules[request.watts]))
    assert search.choice().watts == 200


def test_limits_far_below_one_that_is_too_slow_are_not_tried() -> None:
    search = Search(LIMITS, Objective(kind="max-slowdown", max_slowdown=0.05))
    finished(search)
    slow = max(watts for watts in LIMITS if seconds_at(watts) > 1.05 * 1.15 * seconds_at(700))
    assert sum(one.watts < slow for one in search.windows) <= 1


def test_the_choice_says_what_it_gains_how_sure_it_is_and_what_it_cost() -> None:
    search = Search(LIMITS, ENERGY)
    choice = finished(search)
    (energy, error), (time, _) = gain(choice, "energy"), gain(choice, "time")
    assert energy == pytest.approx(100 * (joules_at(choice.watts) / joules_at(700) - 1), abs=1)
    assert time == pytest.approx(100 * (seconds_at(choice.watts) / seconds_at(700) - 1), abs=1)
    assert 0 < error < 2
    assert choice.expected_regret <= ENOUGH
    text = "\n".join(choice.reasons)
    assert f"{choice.watts} W, compared with 700 W: {energy:+.1f} % energy (±" in text
    assert f"of 21 limits in {len(search.windows)} windows, {10 * len(search.windows)} steps" in text
    assert "The search ended: no other limit is expected to be more than 1 % better." in text


def test_there_is_a_choice_before_the_end_and_before_the_beginning() -> None:
    search = Search(LIMITS, ENERGY)
    assert (search.choice().watts, search.choice().expected_regret) == (700, math.inf)
    for watts in (700, 450, 300):
        search.tell(window(watts, seconds_at(watts), joules_at(watts)))
    assert search.choice().watts == min((700, 450, 300), key=joules_at), "of the measured ones"
    assert "The search goes on" in search.choice().reasons[-1]


def test_a_resumed_search_goes_on_where_it_was() -> None:
    straight, first = Search(LIMITS, ENERGY), Search(LIMITS, ENERGY)
    expected = finished(straight)
    for _ in range(4):
        request = first.ask()
        assert request is not None
        first.tell(window(request.watts, seconds_at(request.watts), joules_at(request.watts)))
    resumed = Search.from_json(first.to_json(), ENERGY)
    assert resumed.ask() == first.ask()
    assert finished(resumed) == expected
    assert resumed.windows == straight.windows


def test_saved_windows_serve_another_objective() -> None:
    search = Search(LIMITS, ENERGY)
    finished(search)
    other = Search.from_json(search.to_json(), Objective(kind="time"))
    assert other.windows == search.windows
    assert finished(other).watts >= 600


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: saved | {"schema": 2},
        lambda saved: saved | {"limits": []},
        lambda saved: saved | {"windows": [saved["windows"][0] | {"watts": 123}]},
        lambda saved: saved | {"windows": [saved["windows"][0] | {"joules": -1.0}]},
        lambda saved: {"schema": 1},
    ],
)
def test_a_damaged_search_is_refused(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    search = Search(LIMITS, ENERGY, windows=[window(700, 1.0, 600.0)])
    damaged = json.dumps(change(json.loads(search.to_json())))
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        Search.from_json(damaged, ENERGY)
    assert error.value.problems[0].fix
    with pytest.raises(CheckpointError):
        Search.from_json(search.to_json()[:40], ENERGY)


def test_drift_is_seen_once_it_lasts_and_rechecked_once() -> None:
    search = Search(LIMITS, ENERGY)
    chosen = finished(search).watts
    same = window(chosen, seconds_at(chosen), joules_at(chosen))
    moved = window(chosen, 1.15 * seconds_at(chosen), 1.1 * joules_at(chosen))
    assert not any(search.drifted(same) for _ in range(10))
    assert not any(search.drifted(one) for one in (moved, moved, same, moved, moved)), (
        "an outlier is no drift"
    )
    assert not any(search.drifted(window(700, 9.0, 9.0)) for _ in range(5)), "not at the chosen limit"
    search.drifted(same)
    assert [search.drifted(moved) for _ in range(DRIFTED_WINDOWS)] == [False] * (DRIFTED_WINDOWS - 1) + [True]
    again = search.recheck()
    assert again.windows == []
    finished(again, scale=1.15)
    assert not any(again.drifted(same) for _ in range(10)), "only one re-check"
    assert Search.from_json(again.to_json(), ENERGY).rechecked


def test_one_limit_needs_no_window_and_wrong_limits_are_refused() -> None:
    assert Search([300], ENERGY).ask() is None
    assert Search([300], ENERGY).choice().watts == 300
    for limits in ([], [0, 300]):
        with pytest.raises(JobError, match="no usable power limits"):
            Search(limits, ENERGY)
    with pytest.raises(ValueError, match="123 W is none"):
        Search(LIMITS, ENERGY).tell(window(123, 1.0, 1.0))
    with pytest.raises(ValueError, match="above 0"):
        window(300, 0.0, 1.0)


def test_an_answer_takes_milliseconds() -> None:
    """The loop waits for it between two windows: 60 limits and 24 windows are the most there is."""
    limits = list(range(200, 790, 10))
    windows = [window(watts, seconds_at(watts), joules_at(watts)) for watts in limits[:24]]
    begin = time.process_time()
    Search(limits, ENERGY, windows=windows)
    assert time.process_time() - begin < 0.5
