"""`shardwise train` as a user runs it: stopped, resumed, refused; and what is done with the run after."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_command import forked_shardwise
from harness import steps_of
from test_whole_runs import job

from shardwise.job.load import load_job
from shardwise.job.schema import Job

pytestmark = pytest.mark.slow


def shardwise(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "SHARDWISE_CACHE": str(cwd / "cache")},
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def write_job(folder: Path, **changes: Any) -> None:
    values = {**job(folder, "run", "zero2"), "output": "runs"}
    for key, value in changes.items():
        section, field = key.split("__")
        values[section] = {**values[section], field: value}
    (folder / "job.yaml").write_text(
        yaml.safe_dump(Job.model_validate(values).model_dump(mode="json", exclude_defaults=True))
    )


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 90
    while time.monotonic() < until and process.poll() is None:
        if (run_dir / "events.jsonl").exists() and len(steps_of(run_dir)) >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {process.poll()}")


def test_sigterm_saves_and_resume_goes_on(tmp_path: Path) -> None:
    write_job(tmp_path)
    run_dir = tmp_path / "runs" / "run"
    process = shardwise("train", "job.yaml", "--processes", "2", "--set", "train.steps=60", cwd=tmp_path)
    wait_for_step(run_dir, 3, process)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75
    assert err.count("stopped: on request after step") == 1
    assert "error:" not in err
    assert "fix: `shardwise train runs/run --resume` goes on from here" in err
    stopped_at = steps_of(run_dir)[-1]["step"]
    assert 3 <= stopped_at < 60
    assert (run_dir / "checkpoints" / f"step-{stopped_at:06d}" / "manifest.json").exists()

    code, out, err = forked_shardwise("train", "runs/run", "--resume", "--json", cwd=tmp_path)
    assert code == 0, err  # as advised: with the run's own job and on its 2 processes, both not repeated
    summary = json.loads(out)
    assert summary["status"] == "finished"
    assert [event["step"] for event in steps_of(run_dir)] == list(range(1, 61))


def test_a_run_is_complete_and_can_be_used(tmp_path: Path) -> None:
    write_job(tmp_path, train__steps=8, train__save_every=4)
    changes = ["strategy=zero2-offload", "tracking=[tensorboard]"]
    arguments = ["train", "job.yaml", "--processes", "1", "--set", changes[0], "--set", changes[1]]
    code, _, err = forked_shardwise(*arguments, cwd=tmp_path)
    assert code == 0, err
    run_dir = tmp_path / "runs" / "run"
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    picture = re.search(r"^runs/NAME/\n(.*?)```", readme, re.DOTALL | re.MULTILINE)
    assert picture is not None
    drawn = {name.rstrip("/") for name in re.findall(r"(?<=  )[.\w]+(?:/|\b)", picture[1])}
    assert {path.name for path in run_dir.iterdir()} <= drawn
    assert [path.name for path in (run_dir / "engine").iterdir()] == ["deepspeed.json"]
    command = json.loads((run_dir / "environment.json").read_text())["command"]
    assert command == ["shardwise", *arguments]
    kinds = [json.loads(line)["kind"] for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert kinds[:3] == ["run", "eval", "step"]
    assert kinds[-1] == "stop"

    wanted = load_job(tmp_path / "job.yaml", changes).job
    assert load_job(run_dir / "job.yaml").job == wanted  # can be trained again

    code, out, err = forked_shardwise("export", "runs/run", "--out", "exported", "--json", cwd=tmp_path)
    assert code == 0, err
    about = {"kind": "model", "dtype": "float32", "out": "exported", "step": 8, "best": False}
    assert json.loads(out) == about
    asked = ("--prompt", "What?", "--max-new-tokens", "8")
    code, out, err = forked_shardwise("generate", "runs/run", *asked, cwd=tmp_path)
    assert code == 0, err
    code, out, err = forked_shardwise("report", "runs/run", "--json", cwd=tmp_path)
    assert code == 0, err
    assert [run["steps"] for run in json.loads(out)["runs"]] == [8]

    newest = run_dir / "checkpoints" / "step-000008"
    (newest / "model" / "config.json").write_text("{}")  # nobody takes the older one unawares
    code, out, err = forked_shardwise("export", "runs/run", "--out", "older", cwd=tmp_path)
    assert code == 0, err
    assert "wrote the model of step 4, in float32, to older" in out
    assert f"warning: passed over {newest.relative_to(tmp_path)}: model/config.json" in err
    code, _, err = forked_shardwise("generate", "runs/run", *asked, cwd=tmp_path)
    assert code == 0, err
    assert "warning: passed over" in err


def test_bad_data_leaves_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"instruction": "a", "output": "b"}\n{"instruction": broken\n')
    write_job(tmp_path, data__train="bad.jsonl")
    code, _, err = forked_shardwise("train", "job.yaml", "--processes", "2", cwd=tmp_path)
    assert code == 2
    assert "bad.jsonl:2" in err
    assert err.count("error:") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_divergence_is_an_error_and_is_not_saved(tmp_path: Path) -> None:
    write_job(tmp_path, optimizer__learning_rate=1e30, optimizer__warmup_steps=0, train__eval_every=0)
    code, _, err = forked_shardwise("train", "job.yaml", "--processes", "2", cwd=tmp_path)
    assert code == 2
    assert "learning_rate" in err
    assert "Traceback" not in err
    saved = sorted(path.name for path in (tmp_path / "runs" / "run" / "checkpoints").glob("step-*"))
    assert saved in ([], ["step-000001"])


def test_a_changed_job_does_not_resume(tmp_path: Path) -> None:
    write_job(tmp_path, train__steps=6)
    arguments = ("train", "job.yaml", "--processes", "1", "--set", "strategy=single")
    assert forked_shardwise(*arguments, "--max-steps", "2", cwd=tmp_path)[0] == 0
    changed = ("--resume", "--set", "data.sequence_length=64")
    code, _, err = forked_shardwise(*arguments, *changed, cwd=tmp_path)
    assert code == 5
    assert "data.sequence_length is 64, in the run it is 96" in err
    assert "at:  --set data.sequence_length=64" in err
    assert "`shardwise train runs/run --resume` goes on" in err

    (tmp_path / "other.jsonl").write_text('{"instruction": "a", "output": "b"}\n' * 20)
    changed = ("--resume", "--set", "data.train=other.jsonl")
    code, _, err = forked_shardwise(*arguments, *changed, cwd=tmp_path)
    assert code == 5
    assert "the content of the data" in err
    assert "Traceback" not in err

    same = ("train", "runs/run", "--resume", "--set", "train.steps=7")
    assert forked_shardwise(*same, cwd=tmp_path)[0] == 0
    for more in ((), ("--max-steps", "5")):
        code, _, err = forked_shardwise(*same, "--set", "data.train=other.jsonl", *more, cwd=tmp_path)
        assert (code, "the content of the data" in err) == (5, True), "of a finished run, too"
