"""Whole runs on the GPUs present: evaluated, saved, resumed, exported, in half precision, with adapters."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import Run, run_all, steps_of
from test_whole_runs import CONFIG, evaluations, job, losses
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.job.schema import Job

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

GPUS = max(count for count in (1, 2, 4) if count <= max(1, torch.cuda.device_count()))
HALF = {"steps": 12, "micro_batch": 1, "eval_every": 4, "precision": "bf16"}


NAMES = ["single", "zero2", "zero3", "fsdp2", "zero2-offload", "zero3-offload"]
REPLICAS = ["ddp-zero1"] * (GPUS > 1)


@pytest.mark.parametrize("strategy", [*NAMES, *REPLICAS])
def test_a_resumed_run_goes_on_where_it_stopped(tmp_path: Path, strategy: str) -> None:
    """The step after resuming is the same number: forward passes add up in one order. Later ones may round
    differently, because the backward pass of attention does not."""
    whole = job(tmp_path, "whole", strategy, **HALF)
    part = job(tmp_path, "part", strategy, **HALF)
    runs = [Run(whole), Run(part, max_steps=5), Run(part, resume=True)]
    processes = 1 if strategy == "single" else GPUS
    expected, _, resumed = run_all(runs, processes=processes, folder=tmp_path)
    assert [event["step"] for event in steps_of(resumed)] == list(range(1, 13))
    print(
        f"{strategy} on {processes} GPU(s): largest relative difference of a loss, whole and resumed: "
        f"{max(abs(a / b - 1) for a, b in zip(losses(resumed), losses(expected), strict=True)):.1e}"
    )
    assert losses(resumed) == pytest.approx(losses(expected), rel=2e-3)
    assert evaluations(resumed)[-1] == pytest.approx(evaluations(expected)[-1], rel=2e-3)
    assert evaluations(resumed)[-1] < evaluations(resumed)[0] - 0.3


def test_strategies_agree(tmp_path: Path) -> None:
    """50 fp32 losses; on GPUs matrices are multiplied by kernels chosen by shape, hence the bound."""
    names = ["zero0", "zero1", "zero2", "zero3", "fsdp2", *REPLICAS]
    reference, *others = run_all(
        [Run(job(tmp_path, name, name)) for name in names], processes=GPUS, folder=tmp_path
    )
    for other in others:
        assert losses(other) == pytest.approx(losses(reference), rel=1e-4)


@pytest.mark.parametrize("stage", [1, 2, 3, None])
def test_mamba_trains_the_same_with_its_optimizer_in_host_memory(tmp_path: Path, stage: int | None) -> None:
    """Its fp32 parameters stay on the GPU, with their share of the norm by which both are clipped."""
    runs = []
    for place in ("none", "cpu"):
        strategy = {"engine": "deepspeed", "stage": stage, "offload_optimizer": place}
        if stage is None:
            strategy = {"engine": "fsdp2", "offload_parameters": place}
        runs.append(Run(job(tmp_path, place, strategy, **HALF)))
        runs[-1].job["model"] |= {"source": "tiny-mamba", "config": {}}
    kept, offloaded = run_all(runs, processes=GPUS, folder=tmp_path)
    norms = [[event["grad_norm"] for event in steps_of(found)] for found in (kept, offloaded)]
    assert losses(offloaded) == pytest.approx(losses(kept), rel=2e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)
    assert evaluations(offloaded)[-1] < evaluations(offloaded)[0] - 0.3


@pytest.mark.parametrize("strategy", ["single", "zero2", "fsdp2", *REPLICAS])
def test_fp16_trains_with_a_loss_scale(tmp_path: Path, strategy: str) -> None:
    changes = {**HALF, "precision": "fp16", "steps": 24}
    processes = 1 if strategy == "single" else GPUS
    (run_dir,) = run_all(
        [Run(job(tmp_path, "fp16", strategy, **changes))], processes=processes, folder=tmp_path
    )
    events = steps_of(run_dir)
    assert all(event["loss_scale"] >= 1 for event in events)
    assert sum(event["skipped"] for event in events) < 12
    assert evaluations(run_dir)[-1] < evaluations(run_dir)[0] - 0.2


@pytest.mark.parametrize("strategy", ["zero2", "zero3", "fsdp2", {"engine": "ddp"}])
def test_an_adapter_is_trained_resumed_merged_and_asked(tmp_path: Path, strategy: Any) -> None:
    if strategy == {"engine": "ddp"} and GPUS == 1:
        pytest.skip("ddp needs two GPUs")
    torch.manual_seed(0)
    values = job(tmp_path, "run", strategy, **{**HALF, "steps": 30})
    base = tmp_path / "base"
    _save_base(base, tmp_path, values)
    values["model"] = {"source": str(base), "lora": {"rank": 8, "targets": "all-linear"}}
    values["optimizer"]["learning_rate"] = 3e-3
    written = Job.model_validate(values).model_dump(mode="json", exclude_defaults=True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(written))
    train = ["train", "job.yaml", "--processes", str(GPUS)]
    _shardwise(tmp_path, *train, "--max-steps", "7")
    _shardwise(tmp_path, *train, "--resume")
    run_dir = tmp_path / "runs" / "run"
    assert len(steps_of(run_dir)) == 30
    assert evaluations(run_dir)[-1] < evaluations(run_dir)[0] - 0.02
    exported = json.loads(_shardwise(tmp_path, "export", "runs/run", "--merge", "--out", "merged", "--json"))
    assert exported["kind"] == "merged"
    assert exported["max_logit_difference"] < 0.05 * exported["max_logit"]
    _shardwise(tmp_path, "generate", "runs/run", "--prompt", "What?", "--max-new-tokens", "8")


@pytest.mark.parametrize("strategy", ["single", "zero2", "fsdp2"])
def test_a_steps_seconds_are_its_own(tmp_path: Path, strategy: str) -> None:
    """ZeRO waits for the GPU within a step, and the last step is read as soon as it is issued."""
    processes = 1 if strategy == "single" else GPUS
    (run,) = run_all([Run(job(tmp_path, "run", strategy, **HALF))], processes=processes, folder=tmp_path)
    seconds = [event["seconds"] for event in steps_of(run)]
    print([f"{s:.4f}" for s in seconds])
    assert seconds[-1] > 0.3 * statistics.median(seconds)


def _save_base(base: Path, folder: Path, values: dict[str, Any]) -> None:
    """A pretrained model of the size of the other tests, with the tokenizer those train."""
    (source,) = run_all([Run({**values, "name": "source"}, max_steps=1)], processes=GPUS, folder=folder)
    step = next((source / "checkpoints").iterdir())
    LlamaForCausalLM(LlamaConfig(**CONFIG, vocab_size=512)).save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_bytes((step / "model" / name).read_bytes())


def _shardwise(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", *arguments],
        cwd=folder,
        env={**os.environ, "SHARDWISE_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
