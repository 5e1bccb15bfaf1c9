"""The exposed share of a step, from traces small enough to add up by hand."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.trials.exposed import MOST_POINTS, read_trace


def event(name: str, start: float, end: float, cat: str = "kernel", tid: int = 7) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": start, "dur": end - start, "cat": cat, "tid": tid}


def allocation(at: float, allocated: int, *, device: int = 1) -> dict[str, Any]:
    args = {"Device Type": device, "Total Allocated": allocated, "Total Reserved": 2 * allocated}
    return {"ph": "i", "name": "[memory]", "ts": at, "cat": "cpu_instant_event", "tid": 1, "args": args}


def write(path: Path, *events: dict[str, Any]) -> Path:
    text = json.dumps({"traceEvents": events})
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


STEP = event("ProfilerStep#1", 0, 2_000_000, "user_annotation", 1)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_exposed_is_where_only_nccl_runs(tmp_path: Path, name: str) -> None:
    """Kernels from 1.0 to 1.9 s; NCCL alone from 1.3 to 1.5 and 1.8 to 1.9, overlapped from 1.2 to 1.3."""
    events = [
        STEP,
        event("sgemm", 1_000_000, 1_300_000),
        event("ncclDevKernel_AllGather_RING_LL", 1_200_000, 1_500_000),
        event("Memcpy DtoD", 1_500_000, 1_600_000, "gpu_memcpy"),
        event("sgemm", 1_600_000, 1_800_000),
        event("ncclDevKernel_ReduceScatter", 1_700_000, 1_900_000),
        event("aten::mm", 0, 1_900_000, "cpu_op", 1),  # issuing is no work of the GPU
    ]
    step = read_trace(write(tmp_path / name, *events))
    assert step.step_seconds == pytest.approx(0.9)
    assert step.communication_seconds == pytest.approx(0.5)
    assert step.exposed_communication_seconds == pytest.approx(0.3)
    assert step.exposed_communication_fraction == pytest.approx(1 / 3)


def test_idle_is_where_the_gpu_runs_nothing(tmp_path: Path) -> None:
    kernels = [
        event("sgemm", 0, 400_000),
        event("nccl", 500_000, 700_000),
        event("Memset", 900_000, 1_000_000),
    ]
    step = read_trace(write(tmp_path / "t.json", STEP, *kernels))
    assert step.idle_seconds == pytest.approx(0.3)
    assert step.idle_fraction == pytest.approx(0.3)


def test_one_gpu_exposes_nothing(tmp_path: Path) -> None:
    step = read_trace(write(tmp_path / "t.json", STEP, event("sgemm", 0, 10), event("sgemm", 5, 20)))
    assert step.exposed_communication_fraction == 0.0
    assert step.communication_seconds == 0.0


def test_without_a_gpu_gloo_counts_beside_torchs_operators(tmp_path: Path) -> None:
    """Operators on gloo's own thread are the collective's; wrappers and what is outside do not count."""
    events = [
        STEP,
        event("gloo:all_reduce", -500_000, -100_000, "user_annotation", 9),
        event("gloo:all_reduce", 500_000, 900_000, "user_annotation", 9),
        event("aten::add_", 500_000, 900_000, "cpu_op", 9),
        event("aten::mm", 0, 600_000, "cpu_op", 1),
        event("autograd::engine::evaluate_function: AddmmBackward0", 0, 2_000_000, "cpu_op", 1),
    ]
    step = read_trace(write(tmp_path / "t.json", *events))
    assert step.step_seconds == 2.0
    assert step.idle_fraction is None
    assert step.communication_seconds == pytest.approx(0.4)
    assert step.exposed_communication_seconds == pytest.approx(0.3)


def test_the_memory_curve_keeps_the_highest_and_stays_short(tmp_path: Path) -> None:
    points = [allocation(at, 1000 + at % 7) for at in range(0, 100_000, 10)]
    peak = allocation(50_001, 9999)
    host = allocation(50_002, 10**9, device=0)
    kernels = [event("sgemm", 0, 50_000), event("sgemm", 60_000, 100_000)]
    step = read_trace(write(tmp_path / "t.json", STEP, *kernels, *points, peak, host))
    assert len(step.memory) == MOST_POINTS
    assert max(step.memory, key=lambda point: point[1])[1:] == (9999, 2 * 9999)
    shares = [share for share, _, _ in step.memory]
    assert shares == sorted(shares)
    assert 0 < shares[0] < shares[-1] < 1


def test_a_trace_without_a_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no step"):
        read_trace(write(tmp_path / "t.json", event("sgemm", 0, 1)))
