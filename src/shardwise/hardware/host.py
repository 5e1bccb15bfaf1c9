"""What a process may use of the machine it runs on: memory and CPU cores, within its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")


def host_memory_bytes(root: Path = ROOT) -> int | None:
    """Memory of the machine, or its control group's limit where that is smaller; None without /proc."""
    try:
        meminfo = (root / "proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    total = next(int(line.split()[1]) * 1024 for line in meminfo.splitlines() if line.startswith("MemTotal:"))
    limits = [
        int(text) for text in _settings(root, "memory.max", "memory/memory.limit_in_bytes") if text != "max"
    ]
    return min(total, *limits) if limits else total


def cpu_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on, or fewer where its control group has less CPU time."""
    shares = []
    for text in _settings(root, "cpu.max", None):
        quota, period = text.split()
        if quota != "max":
            shares.append(int(quota) / int(period))
    shares.extend(_quota_of_version_1(root))
    allowed = len(os.sched_getaffinity(0))
    return max(1, min(allowed, *(int(share) for share in shares))) if shares else allowed


def multiplies_bf16(root: Path = ROOT) -> bool:
    """Whether the processor has instructions for products in bf16; torch is many times slower without."""
    known = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
    return any(known & set(text.split()) for text in _content(root / "proc/cpuinfo"))


def _settings(root: Path, name: str, version_1: str | None) -> Iterator[str]:
    """`name` of this process's control group and of the groups above it, each of which limits it."""
    mounted = root / "sys/fs/cgroup"
    group = mounted / _group(root)
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mounted):
            break
        yield from _content(folder / name)
    if version_1 is not None:
        yield from _content(mounted / version_1)


def _group(root: Path) -> str:
    """The process's control group of version 2, relative to the mount point."""
    for text in _content(root / "proc/self/cgroup"):
        for line in text.splitlines():
            if line.startswith("0::/"):
                return line.removeprefix("0::/")
    return ""


def _quota_of_version_1(root: Path) -> Iterator[float]:
    folder = root / "sys/fs/cgroup/cpu"
    for quota in _content(folder / "cpu.cfs_quota_us"):
        for period in _content(folder / "cpu.cfs_period_us"):
            if int(quota) > 0:
                yield int(quota) / int(period)


def _content(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return
