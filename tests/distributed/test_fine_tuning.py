"""LoRA's variants, LoRA+, modules trained in full, 8-bit moments: under every engine, in the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engine_worker import run_in_processes
from forks import handed_over
from harness import Run, run_all
from test_whole_runs import job

import shardwise
from shardwise.job.schema import Job
from shardwise.training.afterwards import export_run, newest_checkpoint

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_variants_of_lora_and_8_bit_moments_on_two_processes(tmp_path) -> None:
    results = run_in_processes("fine_tuning", processes=2, folder=tmp_path)
    assert len(results) == 13
    for name, found in results.items():
        exact = name.endswith("/dora")
        assert found["loss_error"] < (1e-5 if exact else 1e-3), (name, found)
        assert found["norm_error"] < (1e-5 if exact else 1e-2), (name, found)
        assert found["weight_error"] < (1e-3 if exact else 3e-3), (name, found)
        assert found["resumed"], name


def test_the_benchmark_measures_and_predicts_a_tiny_row(tmp_path: Path) -> None:
    folder, out = ROOT / "benchmarks" / "fine_tuning", tmp_path / "smoke.jsonl"
    command = [sys.executable, str(folder / "run.py"), "--rows", str(folder / "smoke.toml"), "--cpu", "1"]
    command += ["--steady-seconds", "0.1", "--steps", "3", "--out", str(out)]
    done = subprocess.run(
        command,
        env={**os.environ, **handed_over(), "SHARDWISE_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["error"] is None
    assert row["strategy"]["optimizer"] == "adamw8bit"
    assert row["row"]["variants"] == "dora+rslora"
    assert min(row["grad_norm"]) > 0
    assert row["predicted"]["optimizer_bytes"] > 0
    assert "step_seconds" in row["differences"]


def test_samples_are_the_same_however_weights_are_sharded_and_a_run_ends_early(tmp_path: Path) -> None:
    """Two processes; the rate is too high on purpose, so that the evaluation loss rises again."""
    runs = []
    for name in ("zero2", "zero3", "fsdp2"):
        settings = {"steps": 30, "eval_every": 2, "patience": 1, "keep": 1}
        values = job(tmp_path, name, name, **settings, sample_prompts=["What is", "Why"])
        values["optimizer"] |= {"learning_rate": 0.1, "schedule": "wsd", "warmup_steps": 1}
        values["data"] |= {"train": [values["data"]["train"]], "weights": [1.5], "chat_template": "chatml"}
        runs.append(Run(values))
    folders = run_all(runs, processes=2, folder=tmp_path)
    found = []
    for folder in folders:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        evals = [event for event in events if event["kind"] == "eval"]
        losses = {event["step"]: event["loss"] for event in evals if event["step"]}
        best = min(losses, key=losses.__getitem__)
        assert events[-1]["status"] == "finished"
        assert events[-1]["step"] == max(losses) == best + 2 < 30
        assert newest_checkpoint(folder)[1].step == best
        written = export_run(folder, tmp_path / f"best-{folder.name}")
        assert (written["step"], written["best"]) == (best, True)
        assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
            f"step-{step:06d}" for step in (best, best + 2)
        ]
        assert all([prompt for prompt, _ in event["samples"]] == ["What is", "Why"] for event in evals)
        assert any(text for event in evals for _, text in event["samples"])
        found.append([event["samples"] for event in evals[:2]])
    assert found[0] == found[1] == found[2]


def test_a_callback_gets_every_event_and_can_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in handed_over().items():
        monkeypatch.setenv(name, value)
    seen: list[tuple[str, int]] = []

    def on_event(event: dict[str, Any]) -> bool:
        seen.append((event["kind"], event.get("step", 0)))
        return event["kind"] != "step" or event["step"] < 3

    values = Job.model_validate(job(tmp_path, "seen", "single", steps=2000, eval_every=0))
    run = shardwise.train(values, processes=1, on_event=on_event)
    assert "train loss" in str(run)
    assert run.exit_code == 75
    kinds = [kind for kind, _ in seen]
    assert kinds[0] == "run"
    assert kinds[-2:] == ["save", "stop"]
    steps = [step for kind, step in seen if kind == "step"]
    assert steps == list(range(1, len(steps) + 1))
    assert 3 <= len(steps) < 2000
