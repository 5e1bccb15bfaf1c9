"""A run chooses its power limit, on a scripted machine: energy and time follow the fake driver's limits."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from shardwise.device.fake import FakeNvml, create, draw_watts
from shardwise.device.find import find
from shardwise.job.schema import Energy
from shardwise.power.control import PowerRange
from shardwise.record.energy import Used, read_used, write_used
from shardwise.record.read import read_events
from shardwise.record.schema import RunEvent
from shardwise.record.write import RunFolder
from shardwise.training import meter, observe
from shardwise.training.loop import StepReport
from shardwise.training.observe import Recorder, Speed
from shardwise.training.power import PROFILE, PowerTuner, levels, objective_of
from shardwise.training.saving import Saved

SECONDS, LOAD = 0.5, 0.9
SET = "nvmlDeviceSetPowerManagementLimit"
HEADER = RunEvent(
    name="a",
    strategy="zero2",
    processes=2,
    total_steps=999,
    global_batch=2,
    sequence_length=8,
    parameters=1,
    trainable_parameters=1,
)


class Machine:
    """A run on fake cards, whose steps are arithmetic; its folder may be used by several launches."""

    def __init__(self, folder: Path, *, cards: int = 2, **changes: Any) -> None:
        self.path, self.run = create(folder / "gpus.json", cards, load=LOAD, **changes), folder / "run"
        self.fake = FakeNvml(self.path)
        self.uuids = [gpu["uuid"] for gpu in self.fake.state()["gpus"]]
        self.millijoules = [1000.0] * cards
        self.step, self.slower, self.stops = 0, 1.0, 0
        self.lagging = False
        self.ratio, self.gpus = 1.0, list[dict[str, Any]]()

    def recorder(self, *, resumed: bool = False, budget_kwh: float | None = None) -> Recorder:
        if resumed:
            folder = RunFolder.reopen(self.run)
        else:
            folder = RunFolder.create(self.run, job_yaml="name: a\n", plan={}, environment={})
        return Recorder(
            folder,
            job={"tracking": [], "energy": {"budget_kwh": budget_kwh}},
            header=HEADER,
            speed=Speed(gpus=2, flops_per_token=1.0, peak_flops=None, why_no_peak="no GPU"),
            resumed_step=self.step if resumed else None,
            cards=self.uuids,
            first=self.millijoules,
            stop=self.stop,
        )

    def stop(self) -> None:
        self.stops += 1

    def tuner(self, objective: str = "energy", *, resumed: bool = False, **energy: Any) -> PowerTuner:
        return PowerTuner(
            self.recorder(resumed=resumed),
            energy=Energy.model_validate({"objective": objective, **energy}),
            device=find(),
            cards=self.uuids,
            key={"job": "this one"},
            folder=self.run,
        )

    def train(self, observer: PowerTuner | Recorder, steps: int) -> None:
        for _ in range(steps):
            ratio, gpus = min(map(self.fake.clock_ratio, self.uuids)), self.fake.state()["gpus"]
            if self.lagging:  # as a GPU: the step is issued already, and the reading older than it
                ratio, self.ratio, gpus, self.gpus = self.ratio, ratio, self.gpus or gpus, gpus
            seconds = SECONDS * self.slower / ratio
            before = list(self.millijoules)
            for number, gpu in enumerate(gpus):
                self.millijoules[number] += 1000 * seconds * draw_watts(gpu)
            self.step += 1
            observer.on_step(self.report(seconds, before if self.lagging else self.millijoules))

    def report(self, seconds: float, millijoules: Sequence[float]) -> StepReport:
        unknown = dict.fromkeys(meter.MEMORY_FIELDS, [int(meter.UNKNOWN)] * 2)
        return StepReport(
            step=self.step,
            epoch=0,
            loss=2.0,
            grad_norm=1.0,
            learning_rate=1e-4,
            tokens=16,
            target_tokens=16,
            seconds=seconds,
            skipped=False,
            loss_scale=None,
            memory={**unknown, "energy_millijoules": [int(one) for one in millijoules]},
        )

    def limits(self) -> list[float]:
        return [gpu["power_limit_watts"] for gpu in self.fake.state()["gpus"]]

    def sets(self) -> list[tuple[str, float]]:
        """What was really changed, in order."""
        calls = self.fake.state()["calls"]
        return [(call["uuid"], call["value"]) for call in calls if call["value"] != call["before"]]

    def events(self, what: str) -> list[dict[str, Any]]:
        events = read_events(self.run / "events.jsonl")
        return [event for event in events if event["kind"] == "power" and event["what"] == what]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(observe, "why_no_energy", lambda: None)
    monkeypatch.setattr(observe, "sources", lambda: ("simulated", None))
    monkeypatch.setenv("SHARDWISE_DEVICE", f"fake:{tmp_path / 'gpus.json'}")
    monkeypatch.setenv("SHARDWISE_LEASES", str(tmp_path / "leases"))
    made = Machine(tmp_path)
    yield made
    if made.fake.state()["root"]:
        assert made.limits() == [700.0, 700.0], "put back"
    assert list((tmp_path / "leases").glob("*.json")) == []


def per_step(watts: float) -> tuple[float, float]:
    """Seconds and joules of a step on two cards at this limit, by the fake's formula."""
    demand = 75 + LOAD * (690 - 75)
    ratio = min(1.0, (max(0.0, watts - 75) / (demand - 75)) ** (1 / 3))
    return SECONDS / ratio, 2 * min(watts, demand) * SECONDS / ratio


@pytest.mark.parametrize(("objective", "slowdown"), [("energy", 9.0), ("max-slowdown", 0.05), ("time", 0.0)])
def test_the_choice_is_the_best_level_within_two_percent(
    machine: Machine, objective: str, slowdown: float
) -> None:
    with machine.tuner(objective) as tuner:
        machine.train(tuner, 150)
        (choice,) = machine.events("choice")
        assert machine.limits() == [choice["watts"]] * 2, "it is set"
        tuner.finish(step=machine.step, status="finished")
    full = per_step(700)[0]
    allowed = [watts for watts in range(200, 701, 25) if per_step(watts)[0] <= full * (1 + slowdown) * 1.0001]
    best = min(per_step(watts)[1] for watts in allowed)
    assert per_step(choice["watts"])[0] <= full * (1 + slowdown) * 1.005
    assert per_step(choice["watts"])[1] <= 1.02 * best
    assert choice["reasons"][0].startswith("Objective: ")


def test_cards_are_set_once_for_each_level_and_windows_are_exact(machine: Machine) -> None:
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 150)
        tuner.finish(step=machine.step, status="finished")
    levels_set = [event["watts"] for event in machine.events("level")]
    assert len(levels_set) >= 4
    assert levels_set[0] == 700, "the present limit, which is not set again"
    expected = [(uuid, float(watts)) for watts in levels_set[1:] for uuid in machine.uuids]
    assert machine.sets() == expected + [(uuid, 700.0) for uuid in machine.uuids]
    windows = machine.events("window")
    for event in windows:
        seconds, joules = per_step(event["watts"])
        assert event["seconds"] / event["steps"] == pytest.approx(seconds, rel=1e-6)
        assert event["joules"] / event["steps"] == pytest.approx(joules, rel=1e-4)
    assert all(event["simulated"] for event in windows)


def test_on_a_gpu_windows_have_no_step_of_the_limit_before(machine: Machine) -> None:
    machine.lagging = True
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 150)
        tuner.finish(step=machine.step, status="finished")
    assert len(machine.events("window")) >= 4
    for event in machine.events("window"):
        seconds, joules = per_step(event["watts"])
        assert event["seconds"] / event["steps"] == pytest.approx(seconds, rel=1e-6)
        assert event["joules"] / event["steps"] == pytest.approx(joules, rel=1e-4)


def test_what_was_saved_is_against_all_steps_at_the_present_limit(machine: Machine) -> None:
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 150)
        tuner.finish(step=machine.step, status="finished")
    (end,) = machine.events("end")
    seconds, joules = per_step(700)
    used = (machine.millijoules[0] + machine.millijoules[1] - 2000.0) / 1000.0
    first = used - end["joules"]  # of step 1, which has no reading before it
    assert first == pytest.approx(joules, rel=1e-3)
    assert end["steps"] == 149
    assert end["saved_joules"] == pytest.approx(149 * joules - end["joules"], rel=1e-4)
    assert end["saved_joules"] > 0.2 * 149 * joules
    assert end["saved_seconds"] == pytest.approx(149 * seconds - end["seconds"], rel=1e-4)
    (choice,) = machine.events("choice")
    assert choice["steps"] < end["steps"]
    assert any("search included" in reason for reason in end["reasons"])


@pytest.mark.parametrize("what", ["evaluation", "save"])
def test_evaluations_and_saves_do_not_count(machine: Machine, what: str) -> None:
    with machine.tuner("energy") as tuner:
        for _ in range(30):
            machine.train(tuner, 12)
            machine.millijoules = [one + 5e6 for one in machine.millijoules]
            if what == "save":
                tuner.on_save(Saved(step=machine.step, size_bytes=1, seconds=60.0))
            else:
                tuner.on_eval(step=machine.step, loss=1.0, target_tokens=1, seconds=60.0)
        tuner.finish(step=machine.step, status="finished")
    windows = machine.events("window")
    assert len(windows) >= 4
    for event in windows:
        assert event["joules"] / event["steps"] == pytest.approx(per_step(event["watts"])[1], rel=1e-4)


def test_without_permission_one_block_and_nothing_is_changed(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    with machine.fake.changing() as state:
        state["root"] = False
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 40)
        tuner.finish(step=40, status="finished")
    said = capsys.readouterr().err
    assert said.count("power limits are measured, not set") == 1
    assert "--cap-add SYS_ADMIN" in said
    assert machine.sets() == []
    assert [event["what"] for event in read_events(machine.run / "events.jsonl") if "what" in event] == [
        "measure"
    ]
    assert len([one for one in read_events(machine.run / "events.jsonl") if one["kind"] == "step"]) == 40


@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("until", [None, 1])
def test_a_set_that_fails_at_any_call_leaves_a_run_that_measures(
    machine: Machine, number: int, until: int | None
) -> None:
    """The first two calls are the dry attempt; a driver that refuses from then on cannot put back either."""
    last = {} if until is None else {"until": number}
    if until is None and number > 2:
        last = {"until": number + 1}
    with machine.fake.changing() as state:
        state["fails"] = {SET: {"from": number, "error": 4, **last}}
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 60)
        tuner.finish(step=60, status="finished")
    if until is None and number > 2:  # putting back failed once: the guardian does it
        deadline = 40
        while machine.limits() != [700.0, 700.0] and deadline:
            deadline -= 1
            time.sleep(0.5)
    assert len(machine.events("measure")) == 1
    assert machine.events("choice") == []


def test_energy_that_is_not_known_ends_the_search_before_it_begins(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(observe, "why_no_energy", lambda: "no counter")
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 10)
        tuner.finish(step=10, status="finished")
    assert "their energy is not known: no counter" in capsys.readouterr().err
    assert machine.fake.state()["calls"] == []


def test_another_run_on_the_cards_keeps_its_control(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Machine.__new__(Machine)
    other.__dict__ |= {**machine.__dict__, "run": tmp_path / "other", "millijoules": [0.0, 0.0]}
    with machine.tuner("energy") as first:
        machine.train(first, 20)
        before = machine.sets()
        with other.tuner("energy") as second:
            other.train(second, 20)
            second.finish(step=20, status="finished")
        assert "controls these GPUs" in capsys.readouterr().err
        assert machine.sets() == before
        first.finish(step=20, status="finished")


def test_a_search_goes_on_where_the_last_launch_was_stopped(machine: Machine) -> None:
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 25)
        tuner.finish(step=25, status="stopped")
    done = len(machine.events("window"))
    assert done >= 1
    assert any("kept for the next launch" in one for one in machine.events("end")[0]["reasons"])
    with machine.tuner("energy", resumed=True) as tuner:
        machine.train(tuner, 120)
        tuner.finish(step=machine.step, status="finished")
    begun = machine.events("begin")[1]["reasons"]
    assert begun[-1] == f"{done} windows of earlier launches count"
    resumed = len(json.loads(json.loads((machine.run / PROFILE).read_text())["search"])["windows"])
    assert resumed == len(machine.events("window"))
    assert len(machine.events("choice")) == 1
    with machine.tuner("energy", resumed=True) as tuner:
        assert len(machine.events("choice")) == 2, "it is set before the first step"
        tuner.finish(step=machine.step, status="finished")


@pytest.mark.parametrize("change", ["key", "damaged", "limits"])
def test_a_search_of_another_run_is_not_trusted(machine: Machine, change: str) -> None:
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 25)
        tuner.finish(step=25, status="stopped")
    path = machine.run / PROFILE
    more: dict[str, Any] = {}
    if change == "key":
        values = json.loads(path.read_text())
        values["key"]["driver"] = "1.2.3"
        path.write_text(json.dumps(values))
    elif change == "damaged":
        path.write_text(path.read_text()[:-40])
    else:
        more = {"power_limits": [500, 300]}
    with machine.tuner("energy", resumed=True, **more) as tuner:
        tuner.finish(step=25, status="finished")
    said = machine.events("begin")[1]["reasons"][-1]
    assert said.startswith("the search begins again")
    assert {"key": "driver changed", "damaged": "damaged", "limits": "limits_watts changed"}[change] in said


def test_a_curve_that_moves_is_searched_once_more(machine: Machine) -> None:
    with machine.tuner("energy") as tuner:
        machine.train(tuner, 200)
        assert len(machine.events("choice")) == 1
        machine.train(tuner, 100)
        assert machine.events("drift") == [], "nothing has changed"
        machine.slower = 1.5
        machine.train(tuner, 300)
        assert len(machine.events("drift")) == 1
        first, second = machine.events("choice")
        assert second["steps"] > first["steps"], "both searches have a cost"
        machine.slower = 3.0
        machine.train(tuner, 200)
        tuner.finish(step=machine.step, status="finished")
    assert len(machine.events("drift")) == 1, "once"


def test_an_error_puts_everything_back(machine: Machine) -> None:
    def fail() -> None:
        with machine.tuner("energy") as tuner:
            machine.train(tuner, 40)
            assert machine.limits() != [700.0, 700.0]
            raise RuntimeError("from the loop")

    with pytest.raises(RuntimeError, match="from the loop"):
        fail()
    assert machine.limits() == [700.0, 700.0]
    events = read_events(machine.run / "events.jsonl")
    assert [event["kind"] for event in events[-2:]] == ["power", "stop"]
    assert events[-1]["status"] == "failed"


def test_the_budget_asks_to_stop_once_and_counts_over_launches(machine: Machine) -> None:
    joules = per_step(700)[1]
    budget_kwh = 10.5 * joules / 3.6e6
    with machine.recorder(budget_kwh=budget_kwh) as recorder:
        machine.train(recorder, 8)
        assert machine.stops == 0
        recorder.finish(step=8, status="paused", millijoules=machine.millijoules)
    used = read_used(machine.run)
    assert used is not None
    assert used.joules == pytest.approx(8 * joules, rel=1e-3)
    assert sum((used.phases or {}).values()) == pytest.approx(used.joules)
    assert used.simulated
    with machine.recorder(resumed=True, budget_kwh=budget_kwh) as recorder:
        machine.train(recorder, 2)
        assert recorder.stopping is None
        machine.train(recorder, 3)
        assert machine.stops == 1
        assert recorder.stopping == f"energy.budget_kwh {budget_kwh:g} is used up"
        recorder.finish(step=13, status="stopped", millijoules=machine.millijoules)
    stop = read_events(machine.run / "events.jsonl")[-1]
    assert stop["kwh"] == pytest.approx(13 * joules / 3.6e6, rel=1e-3)


def test_each_node_is_counted_once_and_a_part_that_one_node_lacks_has_no_sum(machine: Machine) -> None:
    """Two processes, each the first one of its node; the second node cannot read its DRAM."""
    with machine.recorder() as recorder:
        for joules in (10, 40):
            report = machine.report(1.0, machine.millijoules)
            report.memory["cpu_millijoules"] = [joules * 1000, 2 * joules * 1000]
            report.memory["dram_millijoules"] = [joules * 1000, int(meter.UNKNOWN)]
            recorder.on_step(report)
        host = [[50_000.0, 100_000.0], [9_000.0, meter.UNKNOWN]]
        recorder.finish(step=2, status="paused", millijoules=machine.millijoules, host=host)
    used = read_used(machine.run)
    assert used is not None
    assert used.host == {"cpu": 150.0}
    with machine.recorder(resumed=True) as recorder:
        host = [[1_000.0, 0.0], [2_000.0, 0.0]]
        recorder.finish(step=2, status="paused", millijoules=machine.millijoules, host=host)
    used = read_used(machine.run)
    assert used is not None
    assert used.host == {"cpu": 151.0}, "of both launches; DRAM was not read in the first"


def test_processes_but_the_first_of_a_node_leave_its_cpu_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert meter.host_millijoules() == [0.0, 0.0]


def test_simulated_energy_is_never_added_to_measured_energy(machine: Machine) -> None:
    machine.recorder().__exit__()
    write_used(machine.run, Used(joules=1.0, simulated=False))
    with pytest.raises(Exception, match="was measured so far") as caught:
        machine.recorder(resumed=True)
    assert caught.value.problems[0].fix == "resume without --simulate-power"  # type: ignore[attr-defined]
    (machine.run / ".lock").unlink()


def test_a_cost_has_all_gpus_of_the_job() -> None:
    assert objective_of(Energy(objective="eta", eta=0.5), 4).gpus == 4
    found = objective_of(Energy(objective="cost", price_per_kwh=1.0, price_per_gpu_hour=2.0, eta=None), 8)
    assert (found.gpus, found.price_per_kwh, found.price_per_gpu_hour) == (8, 1.0, 2.0)
    assert objective_of(Energy(objective="energy", price_per_kwh=1.0), 1).price_per_kwh is None


def spans(*watts: tuple[float, float, float]) -> dict[str, PowerRange]:
    keys = ("least_watts", "most_watts", "present_watts")
    return {f"GPU-{i}": PowerRange(**dict(zip(keys, one, strict=True))) for i, one in enumerate(watts)}


def test_levels_are_about_25_watts_apart_and_end_at_the_present_limit() -> None:
    found, notes = levels("auto", spans((200, 700, 650)))
    assert (found[0], found[-1], len(found)) == (200, 650, 19)
    assert {b - a for a, b in pairwise(found)} == {25}
    assert notes == []
    assert levels("auto", spans((100, 320, 320)))[0][:3] == [100, 124, 149]
    assert levels("auto", spans((300, 300, 300)))[0] == [300]


def test_mixed_cards_get_what_all_accept_and_none_gets_more_than_now() -> None:
    assert levels("auto", spans((200, 700, 700), (100, 300, 300)))[0][::10] == [200, 450, 700]
    found, notes = levels("auto", spans((200, 700, 700), (100, 300, 250)))
    assert found[-1] == 700
    assert "from 250 to 700 W now: none gets more than it has" in notes[0]


def test_listed_limits_outside_the_range_are_left_out_and_said() -> None:
    found, notes = levels([800, 500, 150, 500], spans((200, 700, 650)))
    assert found == [500, 650]
    assert notes == ["left out, as they are not within 200 W and the present 650 W: 150, 800 W"]


def test_a_limit_of_the_job_is_set_once_and_put_back(machine: Machine) -> None:
    with machine.tuner("measure", power_limit=400) as tuner:
        machine.train(tuner, 30)
        assert machine.limits() == [400.0, 400.0]
        tuner.finish(step=machine.step, status="finished")
    assert machine.limits() == [700.0, 700.0]
    assert len(machine.sets()) == 4, "each card once, and back once"
    assert machine.events("window") == []


def test_a_limit_outside_the_range_is_not_set(machine: Machine) -> None:
    with machine.tuner("measure", power_limit=100) as tuner:
        machine.train(tuner, 3)
    assert machine.sets() == []
    (event,) = machine.events("measure")
    assert "100 W" in " ".join(event["reasons"])
