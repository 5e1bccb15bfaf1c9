"""Starting and watching the worker processes of a run."""

import ctypes
import os
import signal

_LIBC = ctypes.CDLL(None)


def die_with(parent: int) -> None:
    """In a new process: have the kernel kill it when `parent`, the process that started it, ends."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG in linux/prctl.h
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
