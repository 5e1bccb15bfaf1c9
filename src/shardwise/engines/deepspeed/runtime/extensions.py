"""The operators that DeepSpeed compiles when they are first needed, and the locks of those who compile them.

Whoever compiles creates a file `lock` in the operator's folder, holds it open and removes it in the end; all
others wait until it is gone (torch/utils/file_baton.py). Of a process that was killed the file stays, and
everybody would wait for ever.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from shardwise.errors import MachineError
from shardwise.strategy import Strategy
from shardwise.units import duration

LONGEST_BUILD_SECONDS = 20 * 60
"""Well beyond the one to two minutes that an operator takes on two cores."""

_POLL_SECONDS = 0.2
logger = logging.getLogger(__name__)


def needed_operators(strategy: Strategy) -> tuple[str, ...]:
    """Names of the compiled operators that a strategy loads."""
    places = {strategy.offload_optimizer, strategy.offload_parameters}
    adam = ("cpu_adam",) if strategy.offload_optimizer != "none" else ()
    return (*adam, "async_io") if "nvme" in places else adam


def pass_locks(operators: Iterable[str]) -> None:
    """Returns when nobody compiles these operators; locks that their processes left behind are removed.

    Raises:
        MachineError: a lock has been held for longer than compiling takes, and whether by anybody alive this
            machine's kernel cannot say (a network file system, another user's file).
    """
    for name in operators:
        _pass(extensions_root() / name / "lock")


def extensions_root() -> Path:
    """Where torch puts what it compiles (torch.utils.cpp_extension._get_build_directory)."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given:
        return Path(given)
    from torch.utils.cpp_extension import get_default_build_root

    build = "cpu" if torch.version.cuda is None else f"cu{torch.version.cuda.replace('.', '')}"
    flags = getattr(sys, "abiflags", "")
    return (
        Path(get_default_build_root()) / f"py{sys.version_info.major}{sys.version_info.minor}{flags}_{build}"
    )


def _pass(lock: Path) -> None:
    told = False
    while lock.exists():
        age = _remove_if_left_behind(lock)
        if age is None:
            return
        if age > LONGEST_BUILD_SECONDS:
            raise MachineError(
                f"{lock.parent.name} has been locked for {duration(age)}, as if it were being compiled",
                where=str(lock),
                fix="if no process on any machine compiles it, remove that file",
            )
        if not told:
            logger.warning("another process compiles %s: waiting for it (%s)", lock.parent.name, lock)
            told = True
        time.sleep(_POLL_SECONDS)


def _remove_if_left_behind(lock: Path) -> float | None:
    """Seconds since a lock was taken that may be held; None where there is none, or none any more.

    One process at a time does this, as the next lock of that name may be one that is held.
    """
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        try:
            file = os.open(lock, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            if not _is_open_here_alone(file):
                return time.time() - os.fstat(file).st_mtime
            lock.unlink()
        finally:
            os.close(file)
    finally:
        os.close(folder)
    logger.warning(
        "removed %s: the process that compiled %s was killed, and all others would wait for it",
        lock,
        lock.parent.name,
    )
    return None


def _is_open_here_alone(file: int) -> bool:
    """Whether the kernel says that no other process has the file open; False also where it cannot say.

    It grants a write lease on that condition only (fcntl(2), F_SETLEASE).
    """
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # if somebody opens it now; SIGIO would end us
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
