"""Windows hold steps at one limit and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.device.fake import FakeNvml, create
from shardwise.device.nvml import open_nvml
from shardwise.training.windows import FIRST_STEPS, HELD_SAMPLES, Held, Measured, Windows


class Run:
    """Steps of half a second and 50 J each, on each of two cards."""

    def __init__(self) -> None:
        self.windows, self.counter, self.found = Windows(), 0, list[Measured]()

    def step(self, count: int = 1, seconds: float = 0.5, millijoules: int = 50_000) -> None:
        for _ in range(count):
            self.counter += millijoules
            found = self.windows.add(seconds, [self.counter, 7 + self.counter])
            self.found += [] if found is None else [found]


def begun() -> Run:
    """A run whose first window begins with the next step."""
    run = Run()
    run.windows.begin(steps=4, seconds=1.0)
    run.step(FIRST_STEPS + 1)
    assert run.windows.measuring
    assert not run.found
    return run


def test_a_window_has_the_steps_and_the_joules_of_all_cards_between_two_readings() -> None:
    run = begun()
    run.step(3)
    assert not run.found
    run.step(1, seconds=0.7)
    assert run.found == [Measured(steps=4, seconds=pytest.approx(2.2), joules=pytest.approx(400.0))]
    run.step(4)
    assert run.found[1] == Measured(steps=4, seconds=2.0, joules=400.0), "it follows the first without a gap"


def test_a_window_waits_for_its_seconds() -> None:
    run = begun()
    run.step(7, seconds=0.125)
    assert not run.found
    run.step(2, seconds=0.125)
    assert [one.steps for one in run.found] == [8]


def test_after_a_change_of_limit_steps_and_seconds_pass_first() -> None:
    """The reading of the step after the warm-up is the first that holds nothing of the earlier limit."""
    run = begun()
    run.windows.begin(steps=4, seconds=0.0, warmup_steps=2, warmup_seconds=0.3)
    run.step(2, millijoules=900_000)
    assert not run.windows.measuring
    run.step(1, millijoules=900_000)
    assert run.windows.measuring
    run.step(4)
    assert [one.joules for one in run.found] == [400.0]
    run.windows.begin(steps=1, seconds=0.0, warmup_steps=2, warmup_seconds=1.0)
    run.step(8, seconds=0.125)
    assert not run.windows.measuring, "eight steps are one second"
    run.step(1, seconds=0.125)
    assert run.windows.measuring


def test_an_evaluation_begins_the_window_again() -> None:
    run = begun()
    run.step(3)
    run.windows.interrupt()
    assert run.windows.interrupted == 1
    run.step(1, millijoules=9_000_000)
    run.step(2)
    assert not run.found
    run.step(4)
    assert run.found == [Measured(steps=4, seconds=2.0, joules=400.0)]


def test_a_change_during_a_pause_does_not_shorten_it() -> None:
    run = Run()
    run.windows.begin(steps=1, seconds=0.0, warmup_steps=2)
    run.step(FIRST_STEPS)
    assert not run.windows.measuring
    run.step()
    assert run.windows.measuring


def test_a_stall_begins_the_window_again_wherever_it_is() -> None:
    for place in range(4):
        run = begun()
        for number in range(4):
            run.step(seconds=2.0 if number == place else 0.5)
        assert not run.found, place


def test_a_counter_that_is_missing_or_goes_backwards_is_no_energy() -> None:
    run = begun()
    run.step(2)
    run.windows.add(0.5, None)
    run.step(2)
    assert not run.windows.measuring
    run.step(1)
    run.counter = 0
    run.step(3)
    assert not run.found
    run.step(7)
    assert [one.joules for one in run.found] == [400.0]


def test_whether_a_limit_holds_clocks_down_is_known_after_some_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardwise.training.windows.HELD_SECONDS", 3600.0)
    fake = FakeNvml(create(tmp_path / "gpus.json", cards=2, load=1.0))
    held = Held(open_nvml(fake), ["GPU-fake-0", "GPU-fake-1"])

    def sample(times: int) -> None:
        waits = iter([False] * times + [True])
        monkeypatch.setattr(held._ended, "wait", lambda _: next(waits))
        held._sample()

    sample(HELD_SAMPLES - 1)
    assert held.value is None
    sample(1)
    assert held.value is False
    fake.change("GPU-fake-1", power_limit_watts=400.0)
    sample(1)
    assert held.value is True
    held.clear()
    assert held.value is None
    fake.change("GPU-fake-0", lost=True)
    fake.change("GPU-fake-1", lost=True)
    sample(9)
    assert held.value is None
