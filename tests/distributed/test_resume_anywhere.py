"""A run goes on under another strategy and number of processes, with the losses of a run that never stopped.

benchmarks/resume/pairs.py has the table of all pairs; here are the layouts whose code differs most.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from forked_command import forked_shardwise
from forks import run_set
from harness import ROOT, steps_of
from test_whole_runs import CONFIG, SAMPLES

sys.path.append(str(ROOT / "benchmarks" / "resume"))
from pairs import table

pytestmark = pytest.mark.slow

_NO_FP16 = not torch.ops.mkldnn._is_mkldnn_fp16_supported()  # what DeepSpeed asks on CPUs
FP16 = pytest.param("fp16", marks=pytest.mark.skipif(_NO_FP16, reason="this processor computes no fp16"))


def test_every_pair_has_the_same_state_and_losses(tmp_path: Path) -> None:
    layouts = {1: ("single", "zero2"), 2: ("zero1", "zero3-offload", "fsdp2", "pp2-zero1", "ddp-zero1")}
    rows = list(table("full", layouts, steps=4, folder=tmp_path))
    assert len(rows) == 49
    assert [row for row in rows if row["differs"]] == []
    assert [row for row in rows if row["loss_error"] > 1e-6] == []
    assert [row for row in rows if row["saved"] == row["resumed"] and not row["same_bits"]] == []


@pytest.mark.parametrize("kind", ["mamba", FP16])
def test_parameters_in_fp32_and_the_loss_scale_go_along(tmp_path: Path, kind: str) -> None:
    """Losses differ by rounding to 16 bits, the state does not."""
    layouts = {1: ("single",), 2: ("zero2", "zero3")}
    rows = list(table(kind, layouts, steps=1, folder=tmp_path))
    assert len(rows) == 9
    assert [row for row in rows if row["differs"]] == []
    assert [row for row in rows if row["loss_error"] > 2e-2] == []


@pytest.mark.parametrize("kind", ["full", FP16])
def test_deepspeeds_own_files_of_older_checkpoints_are_loaded(tmp_path: Path, kind: str) -> None:
    names = ["zero0", "zero2", "zero3"]
    asked = json.dumps({"phase": "pickled", "kind": kind, "names": names, "count": 2})
    run_set("resume_worker:main", str(tmp_path), asked, processes=1, folder=tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == {name: [] for name in names}


KEPT = [
    ("aside-step", 9),
    ("aside-step", 14),
    ("step", 1),
    ("step", 3),
    ("step", 5),
    ("step", 6),
    ("step", 8),
]


def write_job(folder: Path, name: str, *, steps: int) -> str:
    values = {
        "name": name,
        "output": "runs",
        "model": {
            "source": "HuggingFaceTB/SmolLM2-135M",
            "weights": "random",
            "config": CONFIG,
            "tokenizer": "train",
            "tokenizer_vocab": 512,
        },
        "data": {"train": str(SAMPLES / "qa.jsonl"), "sequence_length": 96, "eval_fraction": 0.0},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1, "schedule": "constant"},
        "train": {"steps": steps, "global_batch": 4, "precision": "fp32", "keep": 9},
        "strategy": "single",
        "tracking": [],
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(values))
    return f"{name}.yaml"


def test_a_run_moves_between_strategies_grows_and_goes_back(tmp_path: Path) -> None:
    """Single to ZeRO-2 on two processes, to FSDP2 on one, longer; then back to a checkpoint in the middle."""

    def shardwise(*arguments: str) -> str:
        code, out, err = forked_shardwise(*arguments, cwd=tmp_path)
        assert code == 0, err
        return out + err

    shardwise("train", write_job(tmp_path, "whole", steps=14))
    expected = [event["loss"] for event in steps_of(tmp_path / "runs" / "whole")]
    run_dir = tmp_path / "runs" / "moved"
    resume = ("train", "runs/moved", "--resume")
    shardwise("train", write_job(tmp_path, "moved", steps=9), "--max-steps", "3")
    shardwise(*resume, "--set", "strategy=zero2", "--processes", "2", "--max-steps", "5")
    shardwise(*resume, "--max-steps", "6")  # as the run printed: with ZeRO-2 on two processes
    kept = json.loads((run_dir / "plan.json").read_text())["chosen"]["strategy"]
    assert (kept["name"], kept["data_parallel"]) == ("zero2", 2)
    shardwise(*resume, "--set", "strategy=fsdp2", "--processes", "1")
    assert len(steps_of(run_dir)) == 9
    grown = shardwise(*resume, "--set", "train.steps=14", "--set", "strategy=zero3", "--processes", "2")
    assert "the run was 9 steps long, and is now 14" in grown
    found = [event["loss"] for event in steps_of(run_dir)]
    assert found == pytest.approx(expected, rel=1e-6)
    assert yaml.safe_load((run_dir / "job.yaml").read_text())["train"]["steps"] == 14
    assert "14 of 14 steps" in shardwise("report", "runs/moved")

    back = ("--resume-from", "step-000006", "--set", "strategy=single", "--processes", "1")
    shardwise("train", "runs/moved", *back, "--max-steps", "8")
    again = [event["loss"] for event in steps_of(run_dir)]
    assert again == pytest.approx(expected[:8], rel=1e-6)
    names = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    assert names == [f"{kind}-{step:06d}" for kind, step in KEPT]
