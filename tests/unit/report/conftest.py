"""A bench's folder with everything a page shows, and the helpers beside the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

GIB = 2**30
HOSTILE = "<script>document.title='owned'</script>"
IMAGE = '"><img src=http://127.0.0.1:9/x.png onerror=alert(1)>'


def prediction(reserved: float) -> dict[str, Any]:
    """Of a plan, GiB; weights take half of it."""
    terms = {
        "weights_bytes": int(reserved * GIB / 2),
        "gradients_bytes": int(reserved * GIB / 8),
        "optimizer_bytes": int(reserved * GIB / 8),
        "activations_bytes": int(reserved * GIB / 8),
        "loss_bytes": 0,
        "engine_buffers_bytes": 0,
        "fragmentation_bytes": int(reserved * GIB / 8),
    }
    return {
        "memory": {
            "peak_reserved_bytes": int(reserved * GIB),
            "peak_allocated_bytes": int(reserved * GIB * 7 / 8),
            "outside_allocator_bytes": GIB,
            "capacity_bytes": 24 * GIB,
            "terms": terms,
            "host_bytes": 0,
            "timeline": [{"where": f"block {n}", "allocated_bytes": n * GIB} for n in range(1, 5)],
        },
        "time": {"tokens_per_second_per_gpu": 1100.0, "exposed_communication_fraction": 0.2},
        "energy": {"joules_per_token": 0.5},
    }


def measurement(reserved: float, *, speed: float = 1000.0) -> dict[str, Any]:
    steps = 13
    return {
        "peak_allocated_bytes": int(reserved * GIB * 3 / 4),
        "peak_reserved_bytes": int(reserved * GIB),
        "outside_allocator_bytes": GIB,
        "memory_of": "gpu",
        "reserved_by_step_bytes": [int(reserved * GIB)] * steps,
        "allocated_by_step_bytes": [GIB] * steps,
        "steps": steps,
        "warmup_steps": 3,
        "step_seconds": 0.5,
        "step_seconds_all": [60.0, *[0.5] * (steps - 1)],
        "tokens_all": [1000] * steps,
        "tokens_per_second_per_gpu": speed,
        "tflops_per_gpu": 123.0,
        "mfu": 0.4,
        "mfu_unavailable": None,
        "joules_per_token": 0.4,
        "joules_unavailable": None,
        "loss": [5 - n / 10 for n in range(steps)],
        "grad_norm": [1.0] * steps,
        "verdict": "valid",
        "verdict_why": [],
        "exposed_communication_fraction": 0.25,
        "exposed_unavailable": None,
        "memory_in_step": [((n + 0.5) / 50, n * GIB // 10, int(reserved * GIB)) for n in range(50)],
        "parameters": 6_738_415_616,
    }


def row(label: str, **more: Any) -> dict[str, Any]:
    strategy = {"name": label, "micro_batch": 2, "accumulation": 4, "checkpoint_every": 0}
    common = {
        "key": label,
        "label": label,
        "strategy": strategy,
        "sweep": {},
        "date": "2026-01-02T03:04:05+00:00",
    }
    common |= {
        "run": f"runs/{label}",
        "predicted": None,
        "predicted_unavailable": None,
        "fit": None,
        "why": [],
    }
    return {**common, "status": "measured", "error": None, "measured": None, "trace": None, **more}


def failed(label: str, status: str, error: str) -> dict[str, Any]:
    return row(label, status=status, error=error, predicted=prediction(40.0), fit="no")


@pytest.fixture
def bench_folder(tmp_path: Path) -> Path:
    """Two rows that were measured and one that was not; names and logs try to be markup."""
    folder = tmp_path / "bb"
    folder.mkdir()
    rows = [
        row("zero2", measured=measurement(10.0), predicted=prediction(12.0), fit="fits", why=["the fastest"]),
        row(HOSTILE, measured=measurement(20.0, speed=800.0), predicted=prediction(20.0), fit="fits"),
        failed("zero0", "out of memory", f"after 0 of 13 steps\nerror: 40 GiB\n</pre>{HOSTILE}"),
    ]  # fmt: skip
    head = {
        "schema": 1,
        "name": f"a bench {HOSTILE}",
        "job": {
            "model": {"source": IMAGE},
            "data": {"sequence_length": 2048, "train": IMAGE},
            "train": {"global_batch": 16, "precision": "bf16"},
        },
        "processes": 2,
        "memory_cap_bytes": None,
        "warmup_steps": 3,
        "steps": 10,
        "environment": {
            "command": ["shardwise", "bench", f"job{HOSTILE}.yaml"],
            "gpus": [{"name": "NVIDIA H200", "memory_bytes": 141 * GIB}] * 2,
            "versions": {"torch": "2.13.0"},
            "host_memory_bytes": 512 * GIB,
            "cpu": "a processor",
            "cpu_cores": 16,
        },
        "left_out": [{"strategy": "single", "reason": f"one process only {HOSTILE}"}],
        "order": [one["key"] for one in rows],
    }
    (folder / "bench.json").write_text(json.dumps(head))
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return folder
