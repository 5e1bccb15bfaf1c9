"""On GPUs: everything is tried out on them within 20 seconds, and what is measured reaches the planner."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.hardware.calibration import load
from shardwise.hardware.detect import detect_hardware, gpu_count

pytestmark = pytest.mark.gpu


def doctor(folder: Path, *flags: str, gpus: str | None = None) -> dict[str, Any]:
    environment = {**os.environ, "SHARDWISE_CACHE": str(folder / "cache")}
    if gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", "--json", *flags],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.parametrize("gpus", ["0", None], ids=["one GPU", "all GPUs"])
def test_everything_runs_within_20_seconds(tmp_path: Path, gpus: str | None) -> None:
    report = doctor(tmp_path, gpus=gpus)
    ranks = 1 if gpus == "0" else gpu_count()
    status = {one["name"]: one["status"] for one in report["checks"]}
    facts = {one["name"]: one["facts"] for one in report["checks"]}
    assert report["ready"]
    assert (facts["all-reduce"]["backend"], facts["all-reduce"]["ranks"]) == ("nccl", ranks)
    for name in ("kernel: loss", "kernel: attention", "kernel: Mamba"):
        assert status[name] == "ok"
        assert facts[name]["device"] == "cuda"
    assert status["bf16"] == "ok"
    assert status["kernels: Liger"] in ("ok", "skipped")
    assert facts["torch and driver"]["gpus"] == ranks
    assert report["hardware"]["gpus_per_node"] == ranks
    assert report["seconds"] <= 20


def test_a_calibration_is_what_the_planner_counts_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = detect_hardware()
    assert before is not None
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    report = doctor(tmp_path, "--calibrate")
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    kept = load(before.gpu.name, before.gpus_per_node, report["calibration"]["driver"])
    after = detect_hardware()
    assert kept is not None
    assert kept.host is not None
    assert after is not None
    assert after.host_link.measured
    assert after.host_link.bytes_per_second == kept.host.bytes_per_second
    assert 0.3 < kept.host.bytes_per_second / before.host_link.bytes_per_second < 3
    assert 0.3 < kept.memory_bytes_per_second / before.gpu.memory_bytes_per_second < 1.1
    best = max(product.flops_per_second for product in kept.products)
    assert 0.3 < best / before.gpu.flops["bf16"] < 1.1
    if before.gpus_per_node > 1:
        assert kept.between is not None
        assert after.intra.measured
        assert 0.2 < kept.between.bytes_per_second / before.intra.bytes_per_second < 3
