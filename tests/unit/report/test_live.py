"""The live view: numbers of a run while it runs, samples of a machine, rows, frames."""

from __future__ import annotations

import copy
import io
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from rich.console import Console

from shardwise.device import NoDevice, Reading, Replay, Unavailable
from shardwise.record.schema import EvalEvent, Event, ResumeEvent, RunEvent, StepEvent, StopEvent
from shardwise.record.write import RunFolder, to_line
from shardwise.report.compare import summary
from shardwise.report.live.frame import frame, line
from shardwise.report.live.machine import Machine
from shardwise.report.live.run import LiveRun
from shardwise.units import GIB

ROOT = Path(__file__).parents[3]
TWO_GPUS: dict[str, Any] = json.loads((ROOT / "docs/examples/two-h200.json").read_text())
HEAD = RunEvent(
    name="a",
    strategy="zero2",
    processes=2,
    total_steps=100,
    global_batch=4,
    sequence_length=64,
    parameters=1,
    trainable_parameters=1,
)
STEP = StepEvent(
    step=1,
    epoch=0,
    loss=2.5,
    learning_rate=1e-4,
    grad_norm=1.0,
    skipped=False,
    tokens=1000,
    target_tokens=1000,
    seconds=2.0,
    tokens_per_second=500.0,
    tokens_per_second_per_gpu=250.0,
    mfu=0.4,
    peak_memory_reserved_bytes=[3 * GIB, 4 * GIB],
    joules=800.0,
)
T0 = 1_795_000_000.0


def steps(first: int, last: int, **changes: Any) -> list[StepEvent]:
    return [replace(STEP, step=number, **changes) for number in range(first, last + 1)]


def run_of(path: Path, events: Sequence[Event], *, plan: Any = None) -> RunFolder:
    """A run that still runs; each event is written two seconds after the one before, from T0 on."""
    run = RunFolder.create(path, job_yaml="name: a\n", plan=plan or {"schema": 1}, environment={})
    run.events.write_text("".join(to_line(event, now=T0 + 2 * i) for i, event in enumerate(events)))
    return run


def look(run: RunFolder, now: float) -> dict[str, Any]:
    return LiveRun(run.path).look(now)


def test_speed_and_energy_are_of_the_newest_thirty_seconds_without_the_warm_up(tmp_path: Path) -> None:
    slow = steps(1, 5, seconds=60.0, joules=60_000.0)
    run = run_of(tmp_path / "a", [HEAD, *slow, *steps(6, 20, tokens=500), *steps(21, 35)])
    seen = look(run, T0 + 71)
    assert (seen["status"], seen["step"], seen["total_steps"]) == ("running", 35, 100)
    assert seen["tokens"] == 5 * 1000 + 15 * 500 + 15 * 1000
    assert (seen["tokens_per_second"], seen["tokens_per_second_per_gpu"]) == (500.0, 250.0)
    assert (seen["joules_per_token"], seen["run_watts"], seen["step_seconds"]) == (0.8, 400.0, 2.0)
    assert seen["joules_in_steps"] == 5 * 60_000 + 30 * 800
    assert seen["peak_memory_reserved_bytes"] == 4 * GIB
    assert seen["problems"] == []


def test_steps_of_the_warm_up_count_where_there_are_no_others(tmp_path: Path) -> None:
    seen = look(run_of(tmp_path / "a", [HEAD, *steps(1, 2)]), T0 + 4)
    assert (seen["tokens_per_second"], seen["joules_per_token"]) == (500.0, 0.8)


def test_the_end_is_predicted_at_the_pace_of_the_launch_with_its_evaluations(tmp_path: Path) -> None:
    evaluation = EvalEvent(step=8, loss=2.0, target_tokens=10, seconds=2.0)
    run = run_of(tmp_path / "a", [HEAD, *steps(1, 8), evaluation, *steps(9, 10)])
    # steps 6 to 10 took 12 s with the evaluation between them, 2.4 s each; step 10 was written 1 s ago
    seen = look(run, T0 + 23)
    assert seen["eta_seconds"] == pytest.approx(90 * 2.4 - 1)
    assert (seen["eval_loss"], seen["eval_step"]) == (2.0, 8)
    quiet = look(run, T0 + 22 + 61)
    assert (quiet["eta_seconds"], quiet["quiet_seconds"]) == (None, 61.0)
    assert quiet["unavailable"]["eta_seconds"] == "no event for 1 min 1 s"


def test_a_value_that_is_missing_has_its_reason(tmp_path: Path) -> None:
    seen = look(run_of(tmp_path / "a", [HEAD]), T0)
    missing = {key for key, value in seen.items() if value is None}
    assert {"loss", "tokens_per_second", "joules_per_token", "mfu", "eta_seconds"} <= missing
    assert missing == set(seen["unavailable"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"joules": None, "joules_unavailable": "no counter"}, "no counter"),
        ({"seconds": 0.1}, "0.9 s of steps are too short for the counter"),
    ],
)
def test_energy_that_is_not_measured_says_why(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    seen = look(run_of(tmp_path / "a", [HEAD, *steps(1, 14, **changes)]), T0 + 28)
    assert (seen["joules_per_token"], seen["run_watts"]) == (None, None)
    assert seen["unavailable"]["joules_per_token"] == seen["unavailable"]["run_watts"] == reason


def test_a_run_before_its_start_and_after_its_end(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "a", job_yaml="name: a\n", plan={}, environment={})
    live = LiveRun(run.path)
    assert live.look(T0)["status"] == "starting"
    run.close()
    assert live.look(T0 + 1)["status"] == "not started"
    run = RunFolder.reopen(run.path)
    run.events.write_text("".join(to_line(event, now=T0) for event in [HEAD, *steps(1, 3)]))
    assert live.look(T0 + 2)["status"] == "running"
    run.close()
    assert live.look(T0 + 3)["status"] == "interrupted"
    with run.events.open("a") as file:
        file.write(to_line(StopEvent(step=3, status="paused", seconds=6.0), now=T0 + 3))
    seen = live.look(T0 + 4)
    assert (seen["status"], seen["in_use"], seen["eta_seconds"]) == ("paused", False, None)
    assert seen["unavailable"]["eta_seconds"] == "the run is paused"


def test_a_resumed_run_counts_no_step_twice_and_warms_up_again(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", [HEAD, *steps(1, 20)])
    live = LiveRun(run.path)
    assert live.look(T0 + 41)["tokens"] == 20_000
    kept = "".join(run.events.read_text().splitlines(keepends=True)[:11])  # up to step 10
    new = [ResumeEvent(step=10), *steps(11, 15, seconds=50.0), *steps(16, 17)]
    (tmp_path / "new").write_text(
        kept + "".join(to_line(e, now=T0 + 1000 + 2 * i) for i, e in enumerate(new))
    )
    (tmp_path / "new").replace(run.events)
    seen = live.look(T0 + 1014)
    assert (seen["resumed_step"], seen["step"], seen["tokens"]) == (10, 17, 17_000)
    assert (seen["tokens_per_second"], seen["eta_seconds"]) == (500.0, 83 * 2.0)


def test_a_loss_that_is_not_finite_and_damaged_events_are_shown(tmp_path: Path) -> None:
    run = run_of(tmp_path / "a", [HEAD, *steps(1, 3), replace(STEP, step=4, loss=float("nan"))])
    with run.events.open("a") as file:
        for bad in (
            '"step": "x", "loss": 1',
            '"step": 9, "loss": "x"',
            '"step": 9, "loss": 1, "mfu": []',
            '"step": 1e999',
        ):
            file.write(f'{{"kind": "step", "time": 1, "tokens": 1, "seconds": 1, {bad}}}\n')
        file.write('{"kind": "run", "time": 1, "processes": 2, "total_steps": {}}\n???\n')
        file.write(to_line(replace(STEP, step=5, loss=float("nan")), now=T0 + 10)[:40])
    seen = look(run, T0 + 10)
    assert (seen["step"], seen["loss"], seen["loss_not_finite"]) == (4, None, "nan")
    assert seen["recent_losses"] == [2.5] * 3
    assert seen["problems"][0] == "events.jsonl:11 is not an event and was skipped"
    assert "no number" in seen["problems"][1]
    text = shown({"time": T0, **Machine(NoDevice("none")).sample(), "run": seen}, 80)
    assert "loss      nan" in text
    assert "warning: events.jsonl:11" in text


def test_the_numbers_of_a_run_that_has_ended_say_of_what_they_are(tmp_path: Path) -> None:
    """`report` has other ones, of all steady steps."""
    stop = StopEvent(step=9, status="finished", seconds=20.0)
    events = [HEAD, *steps(1, 9)]
    for folder, found in (("a", events), ("b", [*events, stop])):
        run = look(run_of(tmp_path / folder, found), T0 + 18)
        text = shown({"time": T0, **Machine(NoDevice("none")).sample(), "run": run}, 120)
        for name in ("speed", "energy"):
            assert (f"{name}, last 30 s" in text) == (run["status"] not in ("running", "starting")), text


def test_what_the_plan_predicted_stands_next_to_it(tmp_path: Path) -> None:
    prediction = {
        "time": {"tokens_per_second_per_gpu": 260.0},
        "energy": {"joules_per_token": 0.75},
        "memory": {"peak_reserved_bytes": 5 * GIB},
    }
    run = run_of(tmp_path / "a", [HEAD, *steps(1, 9)], plan={"chosen": {"prediction": prediction}})
    text = shown({"time": T0, **Machine(NoDevice("none")).sample(), "run": look(run, T0 + 18)}, 120)
    for part in ("250 each (predicted 260)", "0.8 J/token (predicted 0.75)", "4.0 GiB (predicted 5.0 GiB)"):
        assert part in text


WRITER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from shardwise.record.schema import RunEvent, StepEvent, StopEvent
from shardwise.record.write import EventWriter, RunFolder
run = RunFolder.create(Path(sys.argv[1]), job_yaml="name: a", plan={}, environment={})
print("made", flush=True)
sys.stdin.readline()
writer = EventWriter(run.events)
writer.write(RunEvent(name="a", strategy="single", processes=1, total_steps=200, global_batch=1,
                      sequence_length=8, parameters=1, trainable_parameters=1))
step = StepEvent(step=1, epoch=0, loss=2.0, learning_rate=1.0, grad_norm=1.0, skipped=False, tokens=10,
                 target_tokens=10, seconds=0.005, tokens_per_second=1.0, tokens_per_second_per_gpu=1.0)
for number in range(1, 201):
    writer.write(replace(step, step=number))
    time.sleep(0.005)
writer.write(StopEvent(step=200, status="finished", seconds=1.0))
writer.close()
"""


def test_a_run_that_another_process_writes_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    with writer:
        assert writer.stdout.readline() == "made\n"
        live = LiveRun(path)
        seen = [live.look(time.time())]
        assert seen[0]["status"] == "starting"
        writer.stdin.write("go\n")
        writer.stdin.flush()
        while seen[-1]["status"] in ("starting", "running"):
            time.sleep(0.002)
            seen.append(live.look(time.time()))
    counts = [one["step"] for one in seen]
    assert counts == sorted(counts)
    assert len(set(counts)) > 20, "it was read while it grew"
    assert {one["status"] for one in seen} == {"starting", "running", "finished"}
    assert not any(one["problems"] for one in seen)
    assert all(one["tokens"] == 10 * one["step"] for one in seen)
    assert (seen[-1]["tokens"], counts[-1]) == (summary(path)["tokens"], 200)


def machine(**changes: Any) -> Machine:
    """The two GPUs; `changes` are readings of GPU 0."""
    values = copy.deepcopy(TWO_GPUS)
    values["gpus"][0]["readings"] |= changes
    return Machine(Replay(values))


def test_a_sample_has_every_reading_with_its_unit_and_follows_its_changes() -> None:
    two = machine(power_watts=[100.5, 200.25])
    first, second = (two.sample()["gpus"][0] for _ in range(2))
    assert set(get_args(Reading)) - {"clock_reasons"} <= set(first)
    assert (first["power_watts"], second["power_watts"]) == (100.5, 200.25)
    assert (first["temperature_celsius"], first["sm_clock_max_mhz"], first["memory_clock_mhz"]) == (
        58,
        1980,
        3201,
    )
    assert first["unavailable"] == {}


@pytest.mark.parametrize(
    ("bits", "words", "trouble"),
    [
        (0, [], []),
        (0x1, ["idle"], []),
        (0x4 | 0x40, ["heat (hardware slowdown)", "power limit"], ["heat (hardware slowdown)"]),
        (0x400, ["reason 0x400, not known here"], []),
    ],
)
def test_reasons_for_clocks_are_words(bits: int, words: list[str], trouble: list[str]) -> None:
    gpu = machine(clock_reasons=bits).sample()["gpus"][0]
    assert (gpu["clocks_held_by"], gpu["clock_trouble"]) == (words, trouble)


def test_a_reading_that_fails_is_null_with_its_reason_never_zero() -> None:
    gpu = machine(power_watts=None, clock_reasons=None).sample()["gpus"][0]
    assert (gpu["power_watts"], gpu["clocks_held_by"]) == (None, None)
    assert gpu["unavailable"] == dict.fromkeys(
        ("power_watts", "clocks_held_by", "clock_trouble"), "not recorded"
    )


def test_processes_have_names_where_they_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    values = copy.deepcopy(TWO_GPUS)
    values["gpus"][0]["processes"] = {str(os.getpid()): 5 * GIB, "5000101": None}
    mine, other = Machine(Replay(values)).sample()["gpus"][0]["processes"]
    assert mine["name"].startswith(("python", "pytest"))
    assert (mine["pid"], mine["memory_bytes"], mine["unavailable"]) == (os.getpid(), 5 * GIB, {})
    assert (other["name"], other["memory_bytes"]) == (None, None)
    assert set(other["unavailable"]) == {"name", "memory_bytes"}


def test_constants_are_asked_for_once_and_the_rest_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    read = Replay.read

    def counted(self: Replay, uuid: str, what: Reading) -> float | Unavailable:
        if threading.current_thread() is threading.main_thread():  # meters of other tests may still read
            asked.append(what)
        return read(self, uuid, what)

    monkeypatch.setattr(Replay, "read", counted)
    two = machine()
    for _ in range(3):
        two.sample()
    assert (asked.count("power_max_watts"), asked.count("power_limit_watts")) == (2, 6)
    assert len(asked) == 2 * (4 + 3 * (len(get_args(Reading)) - 4)), "each question to the driver takes time"


def test_without_a_gpu_the_host_is_sampled() -> None:
    sample = Machine(NoDevice("there is no driver")).sample()
    assert (sample["gpus"], sample["gpus_unavailable"]) == ([], "there is no driver")
    host = sample["host"]
    assert 0.0 <= host["cpu_fraction"] <= 1.0
    assert 0 < host["memory_used_bytes"] < host["memory_bytes"]


def sample_of(two: Machine, run: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"schema": 1, "time": T0, **two.sample(), "run": run, "run_unavailable": "none is running"}


def shown(sample: dict[str, Any], width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    console.print(frame(sample, width=width))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_fits_the_terminal_and_shows_limits_and_reasons(width: int, tmp_path: Path) -> None:
    run = look(run_of(tmp_path / "a", [HEAD, *steps(1, 40)]), T0 + 81)
    two = machine(clock_reasons=0x44, temperature_celsius=None)
    text = shown(sample_of(two, run), width)
    assert max(map(len, text.splitlines())) <= width
    assert "2 × NVIDIA H200, driver 580.95.05, 1247 / 1300 W" in text
    for part in ("88.2 / 140.4", "heat (hardware", "1755 / 1980", "power limit", "99%"):
        assert part in text
    assert "GPU 1: power limit 600 W; the default is 700 W" in text
    assert "GPU 0: no temperature: not recorded" in text
    assert "step 40/100 (40%), ETA 1 min 59 s" in text
    assert ("200 to 700" in text) is (width == 120)


def test_gpus_that_differ_are_named_and_hidden_processes_are_said() -> None:
    values = copy.deepcopy(TWO_GPUS)
    values["gpus"][0] |= {"name": "NVIDIA L40S", "processes": {}}
    text = shown(sample_of(Machine(Replay(values))), 80)
    assert "0: L40S, 1: H200" in text
    assert "GPU 0: the driver lists no process here, as in a container" in text


def test_a_line_has_the_same_numbers(tmp_path: Path) -> None:
    run = look(run_of(tmp_path / "a", [HEAD, *steps(1, 40)]), T0 + 81)
    text = line(sample_of(machine(clock_reasons=0x40), run)).partition(" | ")[2]
    assert text == (
        "2 GPUs 1247 / 1300 W | 88 88 GiB | 58 64 °C | busy 99 98% | GPU 0: heat (hardware slowdown) | "
        "a running | step 40/100 | loss 2.5000 | 500 tokens/s | 0.8 J/token | ETA 1 min 59 s"
    )
    assert "no GPU, CPU " in line(sample_of(Machine(NoDevice("none"))))


def test_markup_in_names_is_shown_as_it_is(tmp_path: Path) -> None:
    run = look(run_of(tmp_path / "a", [HEAD]), T0)
    assert "[bold]x[/] " in shown(sample_of(machine(), {**run, "name": "[bold]x[/]"}), 80)


def test_the_page_shows_the_frame_that_its_command_prints() -> None:
    done = subprocess.run(
        [sys.executable, "docs/monitor_frame.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    frame_shown = "\n".join(text.rstrip() for text in done.stdout.splitlines())
    page = (ROOT / "docs/monitor.md").read_text(encoding="utf-8")
    assert f"```\n{frame_shown}\n```" in page, "python docs/monitor_frame.py"
    assert "python docs/monitor_frame.py" in page
