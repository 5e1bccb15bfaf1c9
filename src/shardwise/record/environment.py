"""Where a run ran: versions, machine, command. Read without importing the libraries it names."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.record.redact import redact_tree

PACKAGES = (
    "shardwise",
    "torch",
    "transformers",
    "deepspeed",
    "peft",
    "datasets",
    "tokenizers",
    "safetensors",
    "numpy",
    "triton",
    "liger-kernel",
    "bitsandbytes",
)


def environment(
    *, gpus: Sequence[Mapping[str, Any]] = (), driver: str | None = None, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """The content of `environment.json`, without secrets.

    `gpus` (name, memory_bytes of each) and `driver` come from the caller, who can see the GPUs.
    `command` is what the user typed; unknown, it is this process's.
    """
    values = {
        "schema": 1,
        "command": list(sys.argv if command is None else command),
        "python": platform.python_version(),
        "versions": versions(),
        "os": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "host_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [dict(gpu) for gpu in gpus],
        "driver": driver,
        "git": _git(Path.cwd()),
    }
    redacted: dict[str, Any] = redact_tree(values)
    return redacted


def versions() -> dict[str, str]:
    """Installed versions of the packages that a run's numbers depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around `folder`, and whether there are changes; None outside of one."""
    commit = _run_git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _run_git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "changed": bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
