"""Versions, machine and command of a run, read without importing the libraries."""

import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.record.write import redact_tree

_PACKAGES = ["shardwise", "torch", "transformers", "deepspeed", "peft", "datasets", "tokenizers"]
_PACKAGES += ["safetensors", "numpy", "triton", "liger-kernel", "bitsandbytes", "flash-attn-4"]


def environment(
    *, gpus: Sequence[Mapping[str, Any]] = (), driver: str | None = None, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Content of `environment.json`, without secrets.

    `gpus` (name, memory_bytes of each) and `driver` come from the caller, which can read them.
    `command` is what the user typed, by default this process's.
    """
    values: dict[str, Any] = {
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
    return {key: redact_tree(value) for key, value in values.items()}


def versions() -> dict[str, str]:
    """Installed versions of the packages that a run's numbers depend on."""
    found = {}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
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

    def run(*arguments: str) -> str | None:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=5, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip()

    commit, changes = run("rev-parse", "HEAD"), run("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "changed": bool(changes)}
