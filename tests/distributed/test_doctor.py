"""The real probes on this machine's CPU: gloo over two processes, kernels, DeepSpeed's operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from forked_command import forked_shardwise
from forks import handed_over

from shardwise.diagnosis import calibrate
from shardwise.diagnosis.child import children
from shardwise.diagnosis.doctor import _ranks
from shardwise.diagnosis.gpus import Gpus, look
from shardwise.hardware.calibration import load

pytestmark = pytest.mark.skipif(look().cards != (), reason="for a machine without a GPU")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `shardwise doctor --json` prints."""
    folder = tmp_path_factory.mktemp("doctor")
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "doctor", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={**os.environ, **handed_over(), "SHARDWISE_CACHE": str(folder / "cache")},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == "doctor: this takes about half a minute\n"
    assert list(folder.iterdir()) == []  # it leaves nothing
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(report: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in report["checks"] if one["name"] == name)
    return found


def test_two_processes_sum_over_gloo(report: dict[str, Any]) -> None:
    found = check(report, "all-reduce")
    assert found["status"] == "ok"
    facts = found["facts"]
    assert (facts["backend"], facts["ranks"], facts["right"], facts["bytes"]) == ("gloo", 2, True, 2**20)
    assert facts["seconds"] > 0


@pytest.mark.parametrize("name", ["kernel: loss", "kernel: attention", "kernel: Mamba"])
def test_the_cpus_kernels_run_and_are_right(report: dict[str, Any], name: str) -> None:
    found = check(report, name)
    assert found["status"] == "ok"
    assert 0 < found["facts"]["error"] < 1e-5
    assert found["facts"]["device"] == "cpu"


def test_the_rest_of_a_machine_without_a_gpu(report: dict[str, Any]) -> None:
    assert (report["schema"], report["ready"], report["hardware"]) == (1, True, None)
    status = {one["name"]: one["status"] for one in report["checks"]}
    assert status["GPUs"] == "warning"
    assert status["torch and driver"] == status["bf16"] == "ok"
    assert status["fp8"] == status["hub"] == "skipped"  # tests set HF_HUB_OFFLINE
    if find_spec("deepspeed"):
        assert status["DeepSpeed"] == "ok"
        assert set(check(report, "op: cpu_adam")["facts"]) >= {"compatible", "built"}


def test_a_gpu_that_torch_was_not_built_for_is_a_problem(tmp_path: Path) -> None:
    """A machine whose driver shows a GPU, and this torch without CUDA."""
    import torch

    if torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA")
    gpu = {"uuid": "GPU-1", "name": "NVIDIA H200", "memory_bytes": 143771 << 20}
    (tmp_path / "device.json").write_text(json.dumps({"driver": "580.95.05", "gpus": [gpu]}))
    device = str(tmp_path / "device.json")
    code, out, err = forked_shardwise("doctor", "--json", cwd=tmp_path, SHARDWISE_DEVICE=device)
    assert code == 4, err
    report = json.loads(out)
    found = check(report, "torch and driver")
    assert not report["ready"]
    assert found["status"] == "problem"
    assert "built without CUDA, so 1 GPUs would stand idle" in found["finding"]


@pytest.mark.slow
def test_a_cpu_is_measured_as_far_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**handed_over(), "SHARDWISE_CACHE": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    gpus = Gpus()
    with children() as family:
        ranks = _ranks(family, gpus, "measure", limit=120.0)
        family.wait()
    found, check = calibrate.measured(gpus, [child.answers["measure"] for child in ranks])
    assert check.status == "ok", check.finding
    assert found is not None
    assert load("CPU", 2, None) == found
    assert (found.between, found.host, found.link) == (None, None, None)
    assert found.skipped[0] == "copies between host and GPU: there is no GPU"
    assert 1e8 < found.memory_bytes_per_second < 1e12
    assert 1e-7 < found.host_call_seconds < 1e-3
    kinds = {sample.what for sample in found.samples}
    assert {"all_reduce", "all_gather", "send_to_neighbour"} <= kinds
    assert all(0 < sample.seconds < 10 for sample in found.samples)
    assert [product.side for product in found.products] == [128, 256, 512]
