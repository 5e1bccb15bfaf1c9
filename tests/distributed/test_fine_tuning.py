"""LoRA's variants, LoRA+, modules trained in full, 8-bit moments: under every engine, in the benchmark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_worker import run_in_processes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_variants_of_lora_and_8_bit_moments_on_two_processes(tmp_path) -> None:
    results = run_in_processes("fine_tuning", processes=2, folder=tmp_path)
    assert len(results) == 10
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
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "SHARDWISE_CACHE": str(tmp_path / "cache")},
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
