"""How far a search is, for who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Told = Callable[[int, int], None]
"""Is given the number of strategies that are decided, and of all there are."""

# Not an argument: between who waits and the search lie the tracer and the plans kept on disk, whose key is
# all they are given, and nobody's watching may be part of that.
_told: ContextVar[Told | None] = ContextVar("told", default=None)


@contextmanager
def telling(told: Told) -> Iterator[None]:
    """Searches that run within tell `told` how far they are."""
    token = _told.set(told)
    try:
        yield
    finally:
        _told.reset(token)


def tell(decided: int, strategies: int) -> None:
    """Called by a search."""
    told = _told.get()
    if told is not None:
        told(decided, strategies)
