"""One worker process as the launcher sees it: how it is started, and how it ended."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.hardware.detect import deepspeed_accelerator

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass
class Worker:
    """A process of the run. `failed_at` and `report` are filled in by `look`."""

    rank: int
    process: subprocess.Popen[bytes]
    folder: Path
    failed_at: float | None = None
    """Unix seconds, None while nothing is known to be wrong."""
    report: Mapping[str, Any] | None = None
    """The error it left: {"exit_code", "headline", "problems": [{"what", "where", "fix"}]}, and, where it ran
    out of GPU memory, "out_of_memory": `record.schema.OutOfMemory`."""
    _looked_at: float = field(default=0.0)

    @property
    def out_of_memory(self) -> Mapping[str, Any] | None:
        """What it left to explain that GPU memory ran out; None where that is not why it failed."""
        return None if self.report is None else self.report.get("out_of_memory")

    def look(self, now: float) -> bool:
        """Take note of an error report or an end; True when the process has ended."""
        code = self.process.poll()
        if self.report is None:
            self._read_report()
        if self.failed_at is None and code not in (None, 0):
            # It ended somewhere between the last look and now. Counting the earlier moment keeps
            # the errors of others, which follow from its end, behind it.
            self.failed_at = self._looked_at or now
        self._looked_at = now
        return code is not None

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the worker alone: what it started (a renderer, a compiler) it still needs."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the worker and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines it printed; empty for rank 0, which prints to the terminal."""
        try:
            text = log_path(self.folder, self.rank).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-lines:])

    def _read_report(self) -> None:
        path = self.folder / f"rank-{self.rank}.json"
        try:
            self.report = json.loads(path.read_text(encoding="utf-8"))
            self.failed_at = path.stat().st_mtime
        except (OSError, ValueError):
            return  # not there, or not yet complete


def log_path(folder: Path, rank: int) -> Path:
    """Where a worker other than rank 0 prints to."""
    return folder / f"rank-{rank}.log"


def start(
    rank: int,
    *,
    module: str,
    spec: Path,
    folder: Path,
    environment: Mapping[str, str],
    quiet: bool = False,
) -> Worker:
    """Start one worker in a process group of its own, so that Ctrl-C reaches it only through the launcher.

    Rank 0 shares the launcher's output unless it is `quiet`; the others write to a log in `folder`. A worker
    does not outlive the launcher: the kernel kills it when the launcher dies.
    """
    parent = os.getpid()
    log = None if rank == 0 and not quiet else log_path(folder, rank).open("wb")
    try:
        process = subprocess.Popen(
            # -P: a file of the user's folder must not stand in for a module of the same name.
            [sys.executable, "-P", "-m", module, str(spec)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=None if log is None else subprocess.STDOUT,
            process_group=0,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - the launcher has one thread
        )
    finally:
        if log is not None:
            log.close()
    return Worker(rank=rank, process=process, folder=folder)


def die_with(parent: int) -> None:
    """In a new process: the kernel kills it when the process `parent`, which has started it, ends."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def worker_environment(*, processes: int, folder: Path) -> dict[str, str]:
    """The environment that all workers share; what the user has set stays."""
    given = dict(os.environ)
    defaults = {
        # One thread per core in all: the default, one per core and process, makes them fight.
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // processes)),
        # Threads that wait must not keep a core busy that another process needs.
        "OMP_WAIT_POLICY": "PASSIVE",
        # On one machine the ranks meet on the loopback device, whatever the network looks like.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    accelerator = deepspeed_accelerator()
    if accelerator is not None:
        defaults["DS_ACCELERATOR"] = accelerator  # DeepSpeed would find out by itself, and print a warning
    if "PYTORCH_ALLOC_CONF" not in given:  # the newer name of the same variable
        defaults["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    fixed = {
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "SHARDWISE_ERROR_DIR": str(folder),
        # Tools of the virtual environment, such as ninja, even when it is not activated.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), given.get("PATH", os.defpath)]),
    }
    return {**defaults, **given, **fixed}


def free_port() -> int:
    """A TCP port that nothing on this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
