"""What this machine has, asked without torch."""

from __future__ import annotations

import os
import shutil
import subprocess


def gpu_count() -> int:
    """NVIDIA GPUs a process started here would see; 0 without a driver.

    CUDA_VISIBLE_DEVICES narrows them as CUDA does: entries after the first invalid one do not count.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    try:
        listing = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return 0
    if listing.returncode != 0:
        return 0
    present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    return visible(present, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(present: int, setting: str | None) -> int:
    """How many of `present` GPUs CUDA_VISIBLE_DEVICES=`setting` leaves."""
    if setting is None:
        return present
    count = 0
    for entry in (entry.strip() for entry in setting.split(",")):
        named = entry.startswith(("GPU-", "MIG-"))
        if not named and not (entry.isdigit() and int(entry) < present):
            break
        count += 1
    return count
