"""Real GPU memory that runs out, under a cap: explained with real numbers, and retried."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import steps_of
from test_whole_runs import job, losses

from shardwise.job.schema import Job

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPUS = max(count for count in (1, 2) if count <= max(1, torch.cuda.device_count()))
GIB = 2**30
WIDE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
"""16 rows of 2048 tokens take more than 10 GiB, mostly of activations; a row, about 1 GiB."""
CAP = "9GiB"


def write_job(folder: Path, strategy: str) -> None:
    values = job(folder, "run", strategy, steps=6, global_batch=16 * GPUS, micro_batch=16, precision="bf16")
    values["model"] |= {"config": WIDE}
    values["data"] |= {"sequence_length": 2048, "packing": True, "eval_fraction": 0.0}
    values["optimizer"] |= {"learning_rate": 3e-4}
    values["train"] |= {"checkpointing": "none", "eval_every": 0}
    values["output"] = "runs"
    written = Job.model_validate(values).model_dump(mode="json", exclude_defaults=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(written))


def train(folder: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "shardwise", "train", "job.yaml", "--processes", str(GPUS), *arguments]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "SHARDWISE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    return done.returncode, done.stderr


def failures(folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / "runs/run/out_of_memory.json").read_text())["failures"]
    return found


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_a_capped_run_is_retried_and_gives_the_losses_of_one_without_a_cap(
    tmp_path: Path, strategy: str
) -> None:
    for name in ("free", "capped"):
        (tmp_path / name).mkdir()
        write_job(tmp_path / name, strategy)
    code, err = train(tmp_path / "free")
    assert code == 0, err
    code, err = train(tmp_path / "capped", "--memory-cap", CAP, "--on-oom", "retry")
    print(err)
    assert code == 0, err
    assert "out of memory, going on: out of GPU memory in the " in err
    evidence = failures(tmp_path / "capped")[0]["evidence"]
    assert evidence["phase"] in ("forward", "backward")
    assert evidence["module"] is None or evidence["module"].startswith("model.")
    assert evidence["allocated_bytes"] + evidence["asked_bytes"] > 0.8 * evidence["allowed_bytes"]
    # 134 million parameters, of which a rank holds at least a share with their AdamW; not the activations
    assert 0 < evidence["resident_bytes"] < 0.35 * evidence["allocated_bytes"]
    assert evidence["allocated_bytes"] <= evidence["reserved_bytes"]
    # torch compares what a tensor takes with the limit, and then maps pages of 20 MiB.
    assert evidence["reserved_bytes"] < evidence["allowed_bytes"] + 20 * 2**20
    assert evidence["allowed_bytes"] < 9 * GIB
    run = tmp_path / "capped" / "runs" / "run"
    events = steps_of(run)
    assert [event["step"] for event in events] == list(range(1, 7))
    for event in events:
        reserved = max(event["peak_memory_reserved_bytes"]) + max(event["outside_allocator_bytes"] or [0])
        assert reserved <= 9.2 * GIB
    free = tmp_path / "free" / "runs" / "run"
    assert [event["tokens"] for event in events] == [event["tokens"] for event in steps_of(free)]
    assert losses(run) == pytest.approx(losses(free), rel=5e-3)


def test_stopped_it_names_what_saves_how_much(tmp_path: Path) -> None:
    write_job(tmp_path, "zero2")
    code, err = train(tmp_path, "--memory-cap", CAP)
    print(err)
    assert code == 3
    assert err.count("error:") == 1
    assert "the plan predicts" in err
    assert "less, " in err
    assert "x the time of a step (predicted)" in err
    assert "--set train.micro_batch=" in err
