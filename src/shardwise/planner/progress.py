"""How far a search is, for a terminal that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Report = Callable[[int, int], None]
"""Called with the number of strategies that are decided, and of all."""

# Not an argument: the tracer and the cache of plans lie between the terminal and the search, and the key of
# a cached plan must not depend on who watches.
_report: ContextVar[Report | None] = ContextVar("report", default=None)


@contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Searches that run within call `report`."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def progress(decided: int, strategies: int) -> None:
    """Called by a search."""
    report = _report.get()
    if report is not None:
        report(decided, strategies)
