"""Faults on a real GPU: a rank that waits for it, a micro-batch that is computed twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import steps_of
from test_out_of_memory import STEPS, write_job

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPUS = max(count for count in (1, 2, 4) if count <= max(1, torch.cuda.device_count()))
WITH_FAULTS = """
import sys
from functools import partial
import shardwise.launch.local as local
from shardwise.cli import main

local.launch = partial(local.launch, module="fault_worker")
sys.exit(main(sys.argv[1:]))
"""


def train(folder: Path, *, faults: list[dict[str, Any]], **variables: str) -> tuple[int, str]:
    helpers = str(Path(__file__).parents[1] / "distributed")
    done = subprocess.run(
        [sys.executable, "-c", WITH_FAULTS, "train", "job.yaml", "--processes", str(GPUS)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "SHARDWISE_CACHE": str(folder / "cache"),
            "FAULTS": json.dumps(faults),
            "FAULTS_IN": str(folder),
            **variables,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    print(done.stderr)
    return done.returncode, done.stderr


@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_the_collective_that_a_gpu_waits_in_is_named(tmp_path: Path, strategy: str) -> None:
    write_job(tmp_path, strategy, eval_every=0)
    faults = [{"rank": 0, "step": 5, "do": "wait_for_gpu"}]
    code, err = train(tmp_path, faults=faults, SHARDWISE_HANG_SECONDS="4")
    assert code == 4, err
    assert err.count("error: ") == 1
    assert "rank 0 hangs in step 5, training: no progress for " in err or GPUS > 1
    assert (tmp_path / "runs/run/logs/flight-nccl-rank-0").is_file()
    line = next(line for line in err.splitlines() if "- rank 0 " in line)
    assert "; nccl:all_reduce, number " in line
    assert line.endswith(" is not finished")


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2", "single" if GPUS == 1 else "ddp-zero1"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_forward_passes_computed_twice_have_equal_bits(tmp_path: Path, strategy: str, precision: str) -> None:
    write_job(tmp_path, strategy, eval_every=0, precision=precision)
    code, err = train(tmp_path, faults=[], SHARDWISE_REPLAY_EVERY="1")
    assert code == 0, err
    assert len(steps_of(tmp_path / "runs" / "run")) == STEPS


@pytest.mark.parametrize("strategy", ["zero2", "fsdp2"])
def test_a_flipped_bit_on_a_gpu_ends_the_run(tmp_path: Path, strategy: str) -> None:
    write_job(tmp_path, strategy, eval_every=0, precision="bf16", global_batch=4 * GPUS)
    module = "model.model.layers.1.mlp"
    faults = [{"rank": 0, "step": 5, "do": "flip", "with": {"module": module, "of": "output"}}]
    code, err = train(tmp_path, faults=faults, SHARDWISE_REPLAY_EVERY="3")
    assert code == 4, err
    assert "error: computed twice, what model.layers.1.mlp returns has other bits on rank 0\n" in err
