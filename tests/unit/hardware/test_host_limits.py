"""Host memory and cores that a process may really use."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from shardwise.hardware.detect import cpu_cores, host_memory_bytes, multiplies_bf16

GIB = 2**30
MEMINFO = "MemTotal:       131896320 kB\n" + "\n".join(
    f"{name}: 1 kB"
    for name in ("MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
)


@pytest.fixture(autouse=True)
def _proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))


def machine(root: Path, files: Mapping[str, str]) -> Path:
    for name, content in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 131896320 * 1024),
        ({"sys/fs/cgroup/memory.max": "max"}, 131896320 * 1024),
        ({"sys/fs/cgroup/memory.max": str(64 * GIB)}, 64 * GIB),
        ({"sys/fs/cgroup/memory.max": str(640 * GIB)}, 131896320 * 1024),
        (
            {
                "proc/self/cgroup": "0::/slurm/job_7/step_0",
                "sys/fs/cgroup/slurm/job_7/step_0/memory.max": "max",
                "sys/fs/cgroup/slurm/job_7/memory.max": str(32 * GIB),
                "sys/fs/cgroup/slurm/memory.max": str(96 * GIB),
            },
            32 * GIB,
        ),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": str(16 * GIB)}, 16 * GIB),
        ({"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}, 131896320 * 1024),
    ],
)
def test_memory(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert host_memory_bytes(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 48),
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, 48),
        ({"sys/fs/cgroup/cpu.max": "1600000 100000"}, 16),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 1),
        ({"sys/fs/cgroup/cpu.max": "9600000 100000"}, 48),
        ({"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "200000 100000"}, 2),
        (
            {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"},
            4,
        ),
        ({"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"}, 48),
    ],
)
def test_cores(files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(48)))
    assert cpu_cores(machine(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu avx2 avx512_bf16 amx_tile", True),
        ("Features\t: fp asimd i8mm bf16 dgh", True),
        ("flags\t\t: fpu avx2 avx512f", False),
    ],
)
def test_whether_products_in_bf16_have_instructions(line: str, expected: bool, tmp_path: Path) -> None:
    assert multiplies_bf16(machine(tmp_path, {"proc/cpuinfo": f"processor: 0\n{line}"})) is expected
    assert not multiplies_bf16(tmp_path / "nowhere")
