"""A killed worker: whether the kernel did it for want of host memory."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from shardwise.errors import render
from shardwise.launch.supervise import host_memory_kills, killed


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path / "proc"))
    (tmp_path / "proc").mkdir()
    others = ("MemFree", "MemAvailable", "Buffers", "Cached", "Shmem", "Active", "Inactive")
    meminfo = ["MemTotal: 65536000 kB", *(f"{name}: 1 kB" for name in others)]
    (tmp_path / "proc/meminfo").write_text("\n".join(meminfo))
    (tmp_path / "proc/vmstat").write_text("pgfault 12\noom_kill 3\noom_kill_other 9\n")
    return tmp_path


def test_the_kernels_count_is_read(root: Path, tmp_path: Path) -> None:
    assert host_memory_kills(root) == 3
    (root / "proc/vmstat").write_text("pgfault 12\n")
    assert host_memory_kills(root) is None
    assert host_memory_kills(tmp_path / "nowhere") is None


@pytest.mark.parametrize("before", [2, None])
def test_host_memory_is_named_with_its_size(root: Path, before: int | None) -> None:
    error = killed(rank=1, where="rank 1", before=before, root=root)
    assert error.exit_code == 4
    block = render(error)
    assert "rank 1 was killed, probably out of host memory of 62.5 GiB; the largest process held" in block
    assert "no offloading, fewer processes" in block


def test_where_the_kernel_counts_none_somebody_else_is_looked_for(root: Path) -> None:
    block = render(killed(rank=1, where="rank 1", before=3, root=root))
    assert "rank 1 was killed; the kernel counts no kill for memory since the run began" in block
    assert "batch system" in block
    assert "dmesg" not in block
