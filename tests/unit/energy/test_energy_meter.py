"""Joules and process memory as the driver reports them, and what is said where it does not."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest

from shardwise.device import NoDevice, Replay, Unavailable
from shardwise.energy import (
    FIRST,
    INTERRUPTED,
    SAMPLE_SECONDS,
    Gpu,
    StepJoules,
    _PowerIntegral,
    find_gpu,
)

UUID = "6e3a64d2-0000-1111-2222-333344445555"


def device(**readings: Any) -> tuple[Replay, dict[str, Any]]:
    """A device of one GPU, and its recorded values, which may be changed."""
    gpu: dict[str, Any] = {"uuid": f"GPU-{UUID}", "name": "NVIDIA H200", "readings": readings}
    return Replay({"driver": "580.95.05", "gpus": [gpu]}), gpu


def gpu(replay: Replay) -> Gpu:
    found = find_gpu(UUID, replay)
    assert isinstance(found, Gpu)
    return found


def sampled(meter: Gpu, before: float | Unavailable) -> float | Unavailable:
    """The next sample that differs from `before`; on a busy machine the thread may be late."""
    deadline = time.monotonic() + 10
    while meter.joules() == before and time.monotonic() < deadline:
        time.sleep(SAMPLE_SECONDS / 10)
    return meter.joules()


def test_the_counter_is_followed() -> None:
    replay, recorded = device(energy_joules=100.0)
    meter = gpu(replay)
    assert meter.energy_source == "counter"
    before = meter.joules()
    recorded["readings"]["energy_joules"] = 600.0
    after = sampled(meter, before)
    assert isinstance(before, float)
    assert isinstance(after, float)
    assert after - before == pytest.approx(500.0)


def test_without_a_counter_power_is_sampled_and_the_source_says_so() -> None:
    began = time.perf_counter()
    replay, recorded = device(power_watts=200.0)
    meter = gpu(replay)
    assert meter.energy_source == "power samples"
    time.sleep(0.65)
    joules, seconds = meter.joules(), time.perf_counter() - began
    assert isinstance(joules, float)
    assert 200.0 * (seconds - 0.25) < joules <= 200.0 * seconds
    del recorded["readings"]["power_watts"]
    deadline = time.monotonic() + 10
    while not isinstance(meter.joules(), Unavailable):
        assert time.monotonic() < deadline, "the last number stays"
        time.sleep(SAMPLE_SECONDS)


def test_a_change_of_power_counts_as_a_trapezoid(monkeypatch: pytest.MonkeyPatch) -> None:
    replay, recorded = device()
    power = _PowerIntegral(replay, f"GPU-{UUID}", 100.0)
    began = power._time
    recorded["readings"]["power_watts"] = 300.0
    monkeypatch.setattr(time, "perf_counter", lambda: began + 2.0)
    assert power() == pytest.approx(400.0)


def test_without_counter_and_power_there_are_no_joules_not_zero() -> None:
    joules = gpu(device()[0]).joules()
    assert isinstance(joules, Unavailable)
    assert "neither energy (not recorded) nor power (not recorded)" in joules.reason


def test_a_counter_that_fails_later_is_no_number() -> None:
    replay, recorded = device(energy_joules=1.0)
    meter = gpu(replay)
    del recorded["readings"]["energy_joules"]
    assert isinstance(sampled(meter, 1.0), Unavailable)


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (find_gpu(UUID, NoDevice("there is no NVIDIA driver")), "there is no NVIDIA driver"),
        (find_gpu("other", device()[0]), "the driver shows no such GPU (other)"),
    ],
)
def test_no_driver_and_no_such_gpu_are_reasons(found: Gpu | Unavailable, why: str) -> None:
    assert isinstance(found, Unavailable)
    assert why in found.reason


def test_only_this_process_counts() -> None:
    replay, recorded = device()
    meter = gpu(replay)
    assert isinstance(meter.process_bytes(), Unavailable)
    recorded["processes"] = {str(os.getpid() + 1): 5 << 30}
    assert isinstance(meter.process_bytes(), Unavailable), "the driver shows other processes: a container"
    recorded["processes"][str(os.getpid())] = 3 << 30
    assert meter.process_bytes() == 3 << 30
    recorded["processes"][str(os.getpid())] = None
    assert isinstance(meter.process_bytes(), Unavailable)


def reason(joules: float | Unavailable) -> str:
    assert isinstance(joules, Unavailable)
    return joules.reason


def test_a_step_has_the_energy_of_all_gpus_since_the_step_before() -> None:
    steps = StepJoules()
    assert reason(steps.of_step([1_000_000, 5_000_000])) == FIRST
    assert steps.of_step([1_250_000, 5_300_500]) == pytest.approx(550.5)
    assert steps.of_step([1_250_000, 5_300_500]) == 0.0, "the counters have not moved: a short step"


def test_an_evaluation_is_not_charged_to_the_next_step() -> None:
    steps = StepJoules()
    steps.of_step([0])
    steps.interrupt()
    assert reason(steps.of_step([900_000])) == INTERRUPTED
    assert steps.of_step([1_000_000]) == pytest.approx(100.0)


def test_a_gpu_without_a_reading_makes_the_sum_unknown() -> None:
    steps = StepJoules()
    steps.of_step([0, 0])
    assert reason(steps.of_step([1000, None])) == "rank 1 has no reading"
    assert "before" in reason(steps.of_step([2000, 2000]))
    assert steps.of_step([3000, 3000]) == pytest.approx(2.0)


def test_a_counter_that_goes_backwards_is_no_energy() -> None:
    steps = StepJoules()
    steps.of_step([5000])
    assert "backwards" in reason(steps.of_step([10]))
    assert steps.of_step([1010]) == pytest.approx(1.0)


def test_the_reason_known_beforehand_is_given() -> None:
    assert reason(StepJoules("no GPU").of_step([None])) == "no GPU"


def test_a_gpu_of_several_ranks_is_counted_once() -> None:
    steps = StepJoules(cards=["GPU-a", "GPU-a", "GPU-b"])
    steps.of_step([0, 0, 0])
    assert steps.of_step([1000, 1000, 5000]) == pytest.approx(6.0)


def test_readings_that_do_not_stand_one_step_apart_are_no_steps() -> None:
    """On a GPU: step 2 is issued at once after step 1, and step 3 when step 1 has ended."""
    steps = StepJoules(first=[0], lag=2)
    assert [reason(steps.of_step([now])) for now in (10_000, 10_500, 20_000)] == [FIRST] * 3
    assert steps.of_step([30_000]) == pytest.approx(10.0)
    steps.interrupt()
    assert [reason(steps.of_step([now])) for now in (90_000, 90_500, 100_000)] == [INTERRUPTED] * 3
    assert steps.of_step([110_000]) == pytest.approx(10.0)


def test_all_energy_is_charged_to_one_phase_and_steps_in_gaps_are_training() -> None:
    steps = StepJoules(first=[0])
    steps.of_step([7_000])
    for now in (17_000, 27_000, 37_000):
        steps.of_step([now])
    steps.interrupt("saving", 1.0)
    steps.interrupt("evaluation", 3.0)
    steps.of_step([87_000])  # a step of 10 J, and 40 J of both
    assert steps.joules == pytest.approx(87.0)
    steps.of_step([97_000])
    steps.interrupt("saving", 5.0)
    steps.finish([101_000], 1.0)
    saving, end = pytest.approx(10 + 4 * 5 / 6), pytest.approx(4 / 6)
    assert steps.phases == {
        "start": 0.0, "training": 57.0, "evaluation": 30.0, "saving": saving, "end": end
    }  # fmt: skip
    assert steps.joules == pytest.approx(101.0)


def test_waiting_at_the_start_and_at_the_end_are_phases() -> None:
    steps = StepJoules(first=[0], waited=30.0)
    steps.interrupt("evaluation", 10.0)
    steps.of_step([40_000])
    for now in (50_000, 60_000):
        steps.of_step([now])
    steps.finish([63_000], 2.0)
    assert steps.phases["start"] == pytest.approx(22.5), "30 of 40 s; the first step's 10 J are training"
    assert steps.phases["evaluation"] == pytest.approx(7.5)
    assert (steps.phases["training"], steps.phases["end"]) == (30.0, 3.0)
    assert sum(steps.phases.values()) == steps.joules == pytest.approx(63.0)


def test_an_evaluation_before_the_first_step_is_no_start() -> None:
    steps = StepJoules(first=[0])
    steps.interrupt("evaluation", 2.0)
    for now in (50_000, 60_000):
        steps.of_step([now])
    assert steps.phases == {"start": 0.0, "training": 20.0, "evaluation": 40.0, "saving": 0.0, "end": 0.0}


@pytest.mark.gpu
def test_reading_a_real_counter_is_cheap_and_it_counts() -> None:
    """Prints what a read costs: it is done once a step. An idle GPU takes 5 W at least, none takes 2 kW."""
    import torch

    torch.cuda.init()
    meter = find_gpu(str(torch.cuda.get_device_properties(0).uuid))
    assert isinstance(meter, Gpu), meter
    costs = []
    began, first = time.perf_counter(), meter.joules()
    while time.perf_counter() - began < 2.0:
        since = time.perf_counter()
        last = meter.joules()
        costs.append(time.perf_counter() - since)
        time.sleep(0.01)
    assert isinstance(first, float)
    assert isinstance(last, float)
    watts = (last - first) / (time.perf_counter() - began)
    used = meter.process_bytes()
    middle, worst = statistics.median(costs) * 1e6, max(costs) * 1e6
    print(f"{meter.energy_source}: {middle:.0f} us a read, {worst:.0f} us at most")
    print(f"{watts:.0f} W; this process's memory: {used}")
    assert 5 < watts < 2000
    assert statistics.median(costs) < 0.01
