"""The operators that DeepSpeed compiles on first use, and their lock files.

The process that compiles holds the file `lock` in the operator's folder (torch/utils/file_baton.py). All
others wait until it is removed: forever, if that process was killed.
"""

import logging
import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

from shardwise.strategy import Strategy

STALE_SECONDS = 10 * 60  # Well beyond the one to two minutes that an operator takes to compile on two cores

logger = logging.getLogger(__name__)


def needed_operators(strategy: Strategy) -> tuple[str, ...]:
    """Names of the compiled operators that a strategy loads."""
    places = {strategy.offload_optimizer, strategy.offload_parameters}
    adam = ("cpu_adam",) if strategy.offload_optimizer != "none" else ()
    return (*adam, "async_io") if "nvme" in places else adam


def extensions_root() -> Path:
    """Where torch puts what it compiles."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("", verbose=False))


def wait_for_locks(operators: Iterable[str]) -> None:
    """Wait until no process compiles these operators; remove locks too old to belong to one."""
    for lock in [extensions_root() / name / "lock" for name in operators]:
        message = "another process compiles %s. Waiting; if there is none, remove %s"
        while lock.exists():
            try:
                if time.time() - lock.stat().st_mtime > STALE_SECONDS:
                    lock.unlink()
                    message = "compiling %s was interrupted: removed %s"
            except FileNotFoundError:
                continue
            if message:
                logger.warning(message, lock.parent.name, lock)
                message = ""
            time.sleep(0.2)


@contextmanager
def compiling() -> Iterator[None]:
    """Within, SIGTERM ends this process and its compilers, which take minutes: nothing is there to save."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, _end_compilers)
        yield
    except KeyboardInterrupt:  # of which DeepSpeed makes no other; torch has removed its lock
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_compilers(*_: object) -> NoReturn:
    """Those that ninja has started are in process groups of their own, which the launcher does not know."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    raise KeyboardInterrupt
