"""Starting and watching the worker processes of a run."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

_LIBC = ctypes.CDLL(None)


def die_with(parent: int) -> None:
    """In a new process: have the kernel kill it when `parent`, the process that started it, ends."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG in linux/prctl.h
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


@contextmanager
def handled(
    numbers: Iterable[signal.Signals], handler: Callable[[int, FrameType | None], object]
) -> Iterator[None]:
    """Within, `handler` gets these signals. One that was ignored (nohup) stays ignored. Main thread only."""
    before = {number: signal.getsignal(number) for number in numbers}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
