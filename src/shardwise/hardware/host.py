"""What a process may use of the machine it runs on: memory and CPU cores, within its control group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")


def host_memory_bytes(root: Path = ROOT) -> int:
    """Memory of the machine, or its control group's limit where that is smaller."""
    limits = [*_settings(root, "memory.max"), *_content(root / "sys/fs/cgroup/memory/memory.limit_in_bytes")]
    return min([int(psutil.virtual_memory().total), *(int(text) for text in limits if text != "max")])


def cpu_cores(root: Path = ROOT) -> int:
    """Cores that this process may run on, or fewer where its control group has less CPU time."""
    shares = [text.split() for text in _settings(root, "cpu.max")]
    version_1 = [_content(root / f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    shares += [[quota, period] for quota, period in zip(*version_1, strict=False)]
    limits = [int(quota) // int(period) for quota, period in shares if quota not in ("max", "-1")]
    return max(1, min([len(os.sched_getaffinity(0)), *limits]))


def multiplies_bf16(root: Path = ROOT) -> bool:
    """Whether the processor has instructions for products in bf16; torch is many times slower without."""
    known = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
    return any(known & set(text.split()) for text in _content(root / "proc/cpuinfo"))


def _settings(root: Path, name: str) -> Iterator[str]:
    """`name` of this process's control group and of the groups above it, each of which limits it."""
    mounted = root / "sys/fs/cgroup"
    lines = [line for text in _content(root / "proc/self/cgroup") for line in text.splitlines()]
    group = mounted / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mounted):
            break
        yield from _content(folder / name)


def _content(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return
