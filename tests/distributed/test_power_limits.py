"""Power limits chosen by real runs: gloo processes on the CPU, each with a card of a fake driver."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from forked_command import forked_shardwise
from forks import run_set
from harness import Run, run_all, steps_of
from test_whole_runs import job as small_job

from shardwise.device.fake import FakeNvml, create
from shardwise.job.schema import Job
from shardwise.launch.spec import LaunchSpec
from shardwise.power.lease import leases
from shardwise.record.energy import read_used
from shardwise.record.read import read_events
from shardwise.report.compare import summary

SET = "nvmlDeviceSetPowerManagementLimit"
PRESENT = 650.0  # neither the default nor the highest limit, which are 700 W


class Fakes:
    """A folder with fake cards, leases and one run on them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, cards: int, **changes: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.cards = folder, cards
        path = create(folder / "gpus.json", cards, power_limit_watts=PRESENT, **changes)
        self.fake, self.leases = FakeNvml(path), folder / "leases"
        monkeypatch.setenv("SHARDWISE_DEVICE", f"fake:{path}")
        monkeypatch.setenv("SHARDWISE_LEASES", str(self.leases))
        self.run = folder / "runs" / "a"

    def train(self, objective: str = "energy", *, steps: int = 200) -> None:
        """AssertionError with what the ranks printed where one of them fails."""
        job = {**small_job(self.folder, "a", "zero2", steps=steps, eval_every=0, micro_batch=1), "energy": {}}
        job["energy"] = {"objective": objective}
        spec = LaunchSpec(job=job, run_dir=str(self.run), processes=self.cards)
        specs = self.folder / "specs.json"
        specs.write_text(json.dumps([spec.to_json()]))
        run_set("power_worker:main", str(specs), processes=self.cards, folder=self.folder, timeout=200.0)

    def kill(self) -> None:
        """SIGKILL to every worker process."""
        for rank in range(self.cards):
            with suppress(ProcessLookupError):
                os.kill(int((self.folder / f"pid-{rank}").read_text()), signal.SIGKILL)

    def limits(self) -> set[float]:
        return {gpu["power_limit_watts"] for gpu in self.fake.state()["gpus"]}

    def calls(self) -> list[dict[str, Any]]:
        return list(self.fake.state()["calls"])

    def events(self, what: str) -> list[dict[str, Any]]:
        events = read_events(self.run / "events.jsonl")
        return [event for event in events if event["kind"] == "power" and event["what"] == what]

    def put_back(self, *, seconds: float = 30.0) -> bool:
        """Whether all cards have their previous limit at last, and no lease of a card that was set is left.

        A run that is killed before it has a guardian leaves a lease without levels. The next run settles it.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            left = [card for lease in leases(self.leases)[0] for card in lease.cards.values()]
            if self.limits() == {PRESENT} and not any(card.levels_watts for card in left):
                return True
            time.sleep(0.05)
        return False


@pytest.mark.slow
def test_four_ranks_set_each_card_once_a_level_and_count_energy_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = Fakes(tmp_path, monkeypatch, cards=4)
    fakes.train(steps=150)
    levels = [event["watts"] for event in fakes.events("level")]
    assert len(levels) >= 4
    changed = [(call["uuid"], call["value"]) for call in fakes.calls() if call["value"] != call["before"]]
    uuids = [gpu["uuid"] for gpu in fakes.fake.state()["gpus"]]
    expected = [(uuid, float(watts)) for watts in levels[1:] for uuid in uuids]
    assert changed == expected + [(uuid, PRESENT) for uuid in uuids if levels[-1] != PRESENT]
    assert len({call["pid"] for call in fakes.calls()}) == 1, "one process sets"
    assert fakes.limits() == {PRESENT}
    assert {(tmp_path / f"progress-{rank}").read_text() for rank in range(4)} == {"150"}

    used = read_used(fakes.run)
    assert used is not None
    counted = [json.loads((tmp_path / f"counters-{rank}.json").read_text()) for rank in range(4)]
    least = sum(one["trained"][rank] - one["making"][rank] for rank, one in enumerate(counted))
    most = sum(counted[0]["finished"][rank] - one["ready"][rank] for rank, one in enumerate(counted))
    print(f"energy by the run's meter: {used.joules:.1f} J; by the cards: {least:.1f} to {most:.1f} J")
    assert least - 0.1 <= used.joules <= most + 0.1
    steps = steps_of(fakes.run)
    assert sum(step["joules"] or 0.0 for step in steps) <= used.joules * 1.001
    assert len(fakes.events("choice")) == 1, "the search has ended"
    assert summary(fakes.run)["energy"]["simulated"]


@pytest.mark.slow
def test_setting_limits_does_not_change_what_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = small_job(tmp_path / "plain", "a", "zero2", steps=40, eval_every=0, micro_batch=1)
    (run_dir,) = run_all([Run(plain)], processes=2, folder=tmp_path / "plain")
    fakes = Fakes(tmp_path / "tuned", monkeypatch, cards=2)
    fakes.train(steps=40)
    assert [step["loss"] for step in steps_of(fakes.run)] == [step["loss"] for step in steps_of(run_dir)]


def after_calls(number: int) -> Callable[[Fakes], bool]:
    """Two calls are the dry attempt; each level takes two."""
    return lambda fakes: len(fakes.calls()) >= number


MOMENTS: dict[str, Callable[[Fakes], bool]] = {
    "leased": lambda fakes: any(fakes.leases.glob("*.json")),
    **{f"after-call-{number}": after_calls(number) for number in (3, 4, 6, 9)},
    "first-window": lambda fakes: '"window"' in _text(fakes),
    "chosen": lambda fakes: '"choice"' in _text(fakes),
}


def _text(fakes: Fakes) -> str:
    path = fakes.run / "events.jsonl"
    return path.read_text() if path.exists() else ""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_workers_leave_the_previous_limits(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = Fakes(tmp_path, monkeypatch, cards=2)
    seen: list[float] = []

    def watch() -> None:
        until = time.monotonic() + 150
        while time.monotonic() < until and not MOMENTS[moment](fakes):
            time.sleep(0.003)
        fakes.kill()
        seen.extend(fakes.limits())

    watcher = Thread(target=watch)
    watcher.start()
    with pytest.raises(AssertionError, match="exit codes"):
        fakes.train(steps=5000)
    watcher.join()
    assert fakes.put_back(), (seen, fakes.limits())
    print(f"killed at {moment}: limits were {sorted(set(seen))} W, and are {sorted(fakes.limits())} W")


@pytest.mark.slow
@pytest.mark.parametrize("call", [1, 2, 3, 6])
def test_a_refused_call_leaves_a_run_that_finishes_and_measures(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fakes = Fakes(tmp_path, monkeypatch, cards=2)
    with fakes.fake.changing() as state:
        state["fails"] = {SET: {"from": call, "until": call, "error": 4}}  # no permission
    fakes.train(steps=60)
    log = (tmp_path / "rank-0.log").read_text()
    assert log.count("power limits are measured") == 1
    assert fakes.put_back()
    assert fakes.events("choice") == []
    assert len(steps_of(fakes.run)) == 60
    assert [step["step"] for step in steps_of(fakes.run) if step["joules"] is None] == [1]


@pytest.mark.slow
def test_a_budget_stops_the_run_with_its_state_and_counts_on(tmp_path: Path) -> None:
    job = small_job(tmp_path, "a", "zero2", steps=60, eval_every=0, micro_batch=1)
    job["energy"] = {"budget_kwh": 0.0003, "price_per_kwh": 0.25, "carbon_g_per_kwh": 400.0}
    values = Job.model_validate(job).model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(values))
    flags = ("--simulate-power", "--processes", "2", "--json")
    code, _, errors = forked_shardwise("train", "job.yaml", *flags, cwd=tmp_path)
    assert code == 75, errors
    assert "SIMULATED POWER" in errors
    assert "energy.budget_kwh 0.0003 is used up" in errors
    run = tmp_path / "runs" / "a"
    first = summary(run)
    assert first["status"] == "stopped"
    assert 0.0003 <= first["energy"]["kwh"] < 0.0006
    assert first["checkpoints"][0]["step"] == first["steps"]

    code, _, errors = forked_shardwise("train", str(run), "--resume", *flags[:1], cwd=tmp_path)
    assert code == 2
    assert "error: the run has used" in errors
    more = ("--set", "energy.budget_kwh=1", "--simulate-power", "--json")
    code, printed, errors = forked_shardwise("train", str(run), "--resume", *more, cwd=tmp_path)
    assert code == 0, errors
    found = json.loads(printed)["energy"]
    assert found["kwh"] > first["energy"]["kwh"] + 1e-5
    assert found["cost"] == pytest.approx(0.25 * found["kwh"])
    assert found["carbon_grams"] == pytest.approx(400 * found["kwh"])
    assert found["simulated"]
    assert read_events(run / "events.jsonl")[-1]["kwh"] == pytest.approx(found["kwh"])
