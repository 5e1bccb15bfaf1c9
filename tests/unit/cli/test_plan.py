"""`shardwise plan` as a user meets it, with a stand-in for the tracer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.planner.plan import Nearest, Plan, Workload
from shardwise.planner.search import search
from shardwise.simulate.prediction import Energy, Memory, MemoryTerms, Prediction, Time
from shardwise.simulate.step_trace import StepTrace
from shardwise.strategy import Strategy

STRATEGY = Strategy(engine="deepspeed", stage=2, data_parallel=4, accumulation=16)
NEEDED = 10 << 30


def predicted(capacity_bytes: int) -> Prediction:
    terms = MemoryTerms(
        weights_bytes=NEEDED,
        gradients_bytes=0,
        optimizer_bytes=0,
        activations_bytes=0,
        loss_bytes=0,
        engine_buffers_bytes=0,
        fragmentation_bytes=0,
    )
    memory = Memory(
        peak_reserved_bytes=NEEDED,
        peak_allocated_bytes=NEEDED,
        outside_allocator_bytes=0,
        capacity_bytes=capacity_bytes,
        terms=terms,
        host_bytes=0,
    )
    time = Time(
        step_seconds=2,
        compute_seconds=2,
        communication_seconds=0,
        exposed_communication_seconds=0,
        copy_seconds=0,
        optimizer_seconds=0,
        launch_seconds=0,
        tokens_per_step=8000,
        world_size=4,
        full_clock_seconds=2,
        clocked_seconds=2,
        link="nvlink4",
        link_to_peers="nvlink4",
    )
    energy = Energy(joules_per_step=800, idle_joules=0, tokens_per_step=8000, at_power_limit=False)
    return Prediction(memory=memory, time=time, energy=energy)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the planner is asked, instead of a trace of the model; it says something on stdout."""
    calls: list[dict[str, Any]] = []

    def make_plan(
        job: Job, hardware: Hardware, *, objective: Any, memory_cap_bytes: int | None, making: Any, **_: Any
    ) -> Plan:
        with making():
            os.write(1, b"a library speaks\n")
            return planned(job, hardware, objective, memory_cap_bytes)

    def planned(job: Job, hardware: Hardware, objective: Any, memory_cap_bytes: int | None) -> Plan:
        calls.append({"job": job, "hardware": hardware, "objective": objective, "cap": memory_cap_bytes})
        capacity = memory_cap_bytes or hardware.gpu.memory_bytes
        larger = search_with(job, hardware, objective, NEEDED * 2).chosen
        change = Nearest(what="shorter rows", how="--sequence 1024", option=larger)
        return search_with(job, hardware, objective, capacity, change)

    def search_with(
        job: Job, hardware: Hardware, objective: Any, capacity: int, change: Nearest | None = None
    ) -> Plan:
        return search(
            [STRATEGY],
            hardware=hardware,
            workload=Workload.of(job, parameters=10**9, trainable_parameters=10**9),
            objective=objective,
            trace_for=lambda rows, every, _: StepTrace(
                parameters=(), buffers=(), units=(), events=(), ops=(), rows=rows, sequence_length=1,
                checkpoint_every=every, precision="bf16",
            ),
            simulate=lambda *_: predicted(capacity),
            nearest=lambda: change,
        )  # fmt: skip

    monkeypatch.setattr("shardwise.app.plan.make_plan", make_plan)
    return calls


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    path = Path("job.yaml")
    path.write_text("name: run\nmodel: {source: org/model, lora: {rank: 4}}\ndata: {train: qa.jsonl}\n")
    return path


def test_a_model_and_gpus_are_enough(asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpus", "4xRTX4080", "--model", "EleutherAI/gpt-neo-2.7B"]) == 0
    job, hardware = asked[0]["job"], asked[0]["hardware"]
    assert (job.model.source, job.model.lora, job.strategy) == ("EleutherAI/gpt-neo-2.7B", None, "auto")
    assert (job.data.sequence_length, job.train.global_batch) == (2048, 64)
    assert (hardware.world_size, hardware.gpu.name) == (4, "RTX 4080")
    assert (asked[0]["objective"], asked[0]["cap"]) == ("throughput", None)
    out, err = capfd.readouterr()
    assert out.startswith("EleutherAI/gpt-neo-2.7B · 1B parameters, all trained, bf16\n")
    assert "\nassumed: --sequence 2048, --global-batch 64, --full, --gpus 4xRTX4080@pcie4x16\n" in out
    assert "▶ zero2 with micro-batch 1, accumulation 16, no checkpointing" in out
    assert "with more memory" not in out
    assert "\x1b[" not in out, "no colour where nobody sees it"
    assert err == "planning: building the model, without its weights\na library speaks\n"


def test_flags_change_the_job(
    job_file: Path, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--gpus",
        "2xH200",
        "--model",
        "org/other",
        "--lora",
        "8",
        "--sequence",
        "512",
        "--global-batch",
        "6",
    ]
    more = ["--set", "train.precision=fp16", "--objective", "energy", "--memory-cap", "16GiB"]
    assert main(["plan", str(job_file), *flags, *more]) == 0
    job = asked[0]["job"]
    assert (job.model.source, job.model.lora.rank) == ("org/other", 8)
    assert (job.data.sequence_length, job.train.global_batch, job.train.precision) == (512, 6, "fp16")
    assert (asked[0]["objective"], asked[0]["cap"]) == ("energy", 16 << 30)
    assert "assumed" not in capsys.readouterr().out, "the job file says it all"


def test_full_takes_the_adapters_out(job_file: Path, asked: list[dict[str, Any]]) -> None:
    assert main(["plan", str(job_file), "--gpus", "2xH200"]) == 0
    assert main(["plan", str(job_file), "--gpus", "2xH200", "--full"]) == 0
    assert [call["job"].model.lora is None for call in asked] == [False, True]


def test_json_is_one_object_alone_on_stdout_and_in_the_file(
    asked: list[dict[str, Any]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "plan.json"
    arguments = ["plan", "--gpus", "4xRTX4080", "--model", "gpt2", "--json", "--out", str(file)]
    assert main(arguments) == 0
    out, err = capfd.readouterr()
    plan = json.loads(out)
    assert plan["chosen"]["strategy"]["name"] == "zero2"
    assert plan["chosen"]["prediction"]["time"]["tokens_per_second_per_gpu"] == 1000
    assert plan["job"]["assumed"][1] == "--global-batch 64"
    assert json.loads(file.read_text()) == plan
    assert "a library speaks" in err


def test_explain_adds_where_memory_goes(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "4xRTX4080", "--model", "gpt2", "--explain"]) == 0
    out = capsys.readouterr().out
    assert out.index("▶ zero2") < out.index("memory where it is largest") < out.index("with more memory")


def test_what_does_not_fit_ends_with_3_and_the_nearest_change(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--gpus", "4xRTX4080", "--model", "gpt2", "--memory-cap", "8GiB"]
    assert main(arguments) == 3
    out, err = capsys.readouterr()
    assert " no " in out, "the table shows by how much"
    assert "error: nothing fits: zero2 with micro-batch 1" in err
    assert "needs 10.0 GiB of a GPU, 2.0 GiB more than it has" in err
    assert "fix: --sequence 1024 (shorter rows): zero2 with" in err
    assert main([*arguments, "--json"]) == 3
    plan = json.loads(capsys.readouterr().out)
    assert plan["chosen"] is None
    assert plan["nearest"]["how"] == "--sequence 1024"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpus", "4xRTX4080"], 2, "there is nothing to plan"),
        (["--gpus", "4xRTX4080", "--model", "gpt2", "--lora", "8", "--full"], 2, "say opposite things"),
        (["--gpus", "4xRTX9999", "--model", "gpt2"], 2, "no GPU is called"),
        (["--gpus", "4xRTX4080", "--model", "gpt2", "--memory-cap", "much"], 2, "'much' is not a size"),
        (["--gpus", "4xRTX4080", "--model", "gpt2", "--margin", "100%"], 2, "leaves none"),
        (["--gpus", "4xRTX4080", "--model", "gpt2", "--documents", "0"], 2, "documents have 0 tokens"),
        (["--gpus", "4xRTX4080", "--model", "gpt2", "--objective", "beauty"], 2, "beauty"),
        (["absent.yaml", "--gpus", "4xRTX4080"], 2, "there is no job file absent.yaml"),
        (["--model", "gpt2"], 4, "no GPU is visible here to plan for"),
    ],
)
def test_mistakes(
    arguments: list[str],
    code: int,
    words: str,
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("shardwise.hardware.detect.detect_hardware", lambda: None)
    assert main(["plan", *arguments]) == code
    out, err = capsys.readouterr()
    assert words in err
    assert out == ""
    assert asked == []


def test_without_gpus_named_the_machine_is_asked(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwise.hardware.parse import parse_hardware

    own = parse_hardware("2xL40S")
    monkeypatch.setattr("shardwise.hardware.detect.detect_hardware", lambda: own)
    assert main(["plan", "--model", "gpt2"]) == 0
    assert asked[0]["hardware"] == own


def test_the_slots_and_the_hosts_are_assumed_until_they_are_said(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "4xRTX4080@pcie4x8+128GiB", "--model", "gpt2"]) == 0
    assert asked[0]["hardware"].host_memory_bytes == 128 << 30
    assert "@pcie" not in capsys.readouterr().out
    assert main(["plan", "--gpus", "1xRTX4080", "--model", "gpt2"]) == 0
    assert "@pcie" not in capsys.readouterr().out, "it neither offloads nor has others"
    assert main(["plan", "--gpus", "8xH100", "--model", "gpt2"]) == 0
    assert "@pcie" not in capsys.readouterr().out


def read_or_end(terminal: int) -> bytes:
    try:
        return os.read(terminal, 10_000)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_a_terminal_is_told_how_far_the_plan_is_and_a_file_that_it_began(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--gpus", "4xRTX4080", "--model", "gpt2", "--json"]
    assert main(arguments) == 0
    assert capsys.readouterr().err.count("planning") == 1
    monkeypatch.setenv("TERM", "xterm")
    terminal, stderr = os.openpty()
    with os.fdopen(stderr, "w") as screen:
        monkeypatch.setattr(sys, "stderr", screen)
        assert main(arguments) == 0
    seen = b"".join(iter(partial(read_or_end, terminal), b"")).decode()  # a read gives a part of it
    os.close(terminal)
    assert "planning: 0 of 1 strategies" in seen
    assert json.loads(capsys.readouterr().out)["schema"] == 1


def test_a_plan_s_process_ends_with_all_it_has_to_say(tmp_path: Path) -> None:
    """It leaves out the end of Python (cli.run)."""
    told = []
    for gpus in ("2x24GB", "1x1GiB"):
        command = [sys.executable, "-m", "shardwise", "plan", "--model", "gpt2", "--gpus", gpus, "--json"]
        command += ["--set", "train.micro_batch=1", "--set", "train.checkpointing=full"]  # one trace
        environment = {**os.environ, "SHARDWISE_CACHE": str(tmp_path / "cache")}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        told.append(
            (done.returncode, json.loads(done.stdout)["chosen"] is None, "nothing fits" in done.stderr)
        )
    assert told == [(0, False, False), (3, True, True)]


def test_a_slowdown_without_the_objective_energy_is_an_error(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--gpus", "4xH200", "--model", "gpt2", "--max-slowdown", "5%"]) == 2
    err = capsys.readouterr().err
    assert "--max-slowdown bounds the time of the least energy, and the objective is throughput" in err
    assert "fix: add --objective energy, or leave --max-slowdown out" in err
    assert asked == [], "before anything is traced"


def test_power_limits_reach_the_table_and_json(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "plan",
        "--gpus",
        "4xH200",
        "--model",
        "gpt2",
        "--objective",
        "energy",
        "--max-slowdown",
        "5%",
    ]
    assert main([*arguments, "--pareto"]) == 0
    out = capsys.readouterr().out
    assert "least energy first, at most 5% slower" in out
    assert "its own power limit of 700 W" in out, "a step of 100 W is not held up by any limit"
    assert "time against energy: what nothing else beats in both" in out
    assert main([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["power"]["max_slowdown_fraction"] == 0.05
    assert plan["chosen"]["power_limit_watts"] is None
    assert plan["pareto"] == []


def test_a_plan_as_a_page_that_loads_nothing(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "plan.html"
    arguments = ["plan", "--gpus", "4xH200", "--model", "gpt2", "--html", str(page)]
    assert main(arguments) == 0
    assert "Time against energy" not in page.read_text(encoding="utf-8")
    assert main([*arguments, "--pareto"]) == 0
    text = page.read_text(encoding="utf-8")
    assert "Time against energy" in text
    assert text.count('r="6"') == 1, "no limit binds a step of 100 W"
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")
    assert f"wrote {page}" in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--html", "--out"])
def test_only_an_earlier_result_is_replaced(
    flag: str, asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plan = ["plan", "--gpus", "4xH200", "--model", "gpt2"]
    mine, result = tmp_path / "job.yaml", tmp_path / "result"
    for text in ("name: mine\n", "<!doctype html>\n<title>mine</title>", '{"a": 1}'):
        mine.write_text(text)
        assert main([*plan, flag, str(mine)]) == 2
        assert f"{mine} is there, and is no earlier result" in capsys.readouterr().err
        assert mine.read_text() == text
    assert main([*plan, flag, str(result)]) == main([*plan, flag, str(result)]) == 0
    other = {"--html": "--out", "--out": "--html"}[flag]
    assert main([*plan, other, str(result)]) == 2
    assert main([*plan, "--html", str(mine.with_name("both")), "--out", str(mine.with_name("both"))]) == 2


def test_scale_is_one_json_object_with_a_row_for_each_size(
    asked: list[dict[str, Any]], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "scale.json"
    flags = ["--gpus", "8xH100", "--scale", "4,16", "--json", "--out", str(out)]
    assert main(["plan", "--model", "gpt2", "--straggler", "5%", *flags]) == 0
    printed = capfd.readouterr().out
    assert json.loads(printed) == json.loads(out.read_text(encoding="utf-8"))
    assert [size["gpus"] for size in json.loads(printed)["rows"]] == ["4xH100", "2x8xH100"]
    assert [one["hardware"].world_size for one in asked] == [4, 16]
    assert {one["hardware"].straggler_fraction for one in asked} == {0.05}


@pytest.mark.parametrize("flag", ["--pareto", "--explain", "--all", "--html=x.html"])
def test_scale_shows_no_alternatives(flag: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "gpt2", "--gpus", "8xH100", "--scale", "1,2", flag]) == 2
    assert "--scale shows the choice for each number of GPUs" in capfd.readouterr().err
