"""How many GPUs a job gets when the user does not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.hardware.detect import gpu_count, visible


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (None, 4),
        ("", 0),
        ("0", 1),
        ("2,0", 2),
        ("0,9,1", 1),
        ("-1", 0),
        ("GPU-abc,GPU-def", 2),
        (" 1 , 3", 2),
    ],
)
def test_cuda_visible_devices_narrows_the_gpus(setting: str | None, count: int) -> None:
    assert visible(4, setting) == count


def _nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin:/usr/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_gpus_are_counted_from_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-1)\\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\\nGPU 1: NVIDIA H200\\n"
    )
    _nvidia_smi(tmp_path, f"printf '{listing}'", monkeypatch)
    assert gpu_count() == 2


def test_a_broken_driver_means_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _nvidia_smi(tmp_path, "echo 'GPU 0: no'; exit 9", monkeypatch)
    assert gpu_count() == 0
