"""What the NVIDIA driver answers, by nvidia-smi: no CUDA context, no library, no wait for one that hangs."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

LIMIT_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Reply:
    """`text` is None where there is no answer; `failure` then says why."""

    text: str | None
    failure: str = ""


def ask(*arguments: str) -> Reply:
    """What `nvidia-smi` prints; no answer without a driver, or where it does not know the question."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Reply(text=None, failure="there is no nvidia-smi on PATH")
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Reply(text=None, failure=f"nvidia-smi did not answer within {LIMIT_SECONDS:.0f} s")
    except OSError as error:
        return Reply(text=None, failure=f"nvidia-smi cannot be started: {error.strerror}")
    if done.returncode != 0:
        said = " ".join((done.stdout or done.stderr).split())[:300]
        return Reply(text=None, failure=f"nvidia-smi failed with exit code {done.returncode}: {said}")
    return Reply(text=done.stdout)


def driver_version() -> str | None:
    """As `580.65.06`; None without a driver."""
    text = ask("--query-gpu=driver_version", "--format=csv,noheader").text
    return text.splitlines()[0].strip() if text and text.strip() else None
