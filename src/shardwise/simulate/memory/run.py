"""A stretch of a trace in which no engine acts: allocations and frees alone."""

from __future__ import annotations

from dataclasses import dataclass

NEVER = -(1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Allocations and frees that follow each other; bytes."""

    moves: tuple[tuple[int, int, bool], ...]
    """A tensor; if it is allocated its rounded size, if it is freed 0; whether it is of the small pool."""
    allocated: int
    """What they add to what is allocated, in rounded sizes."""
    requested: int
    """The same as it was asked for."""
    most: int
    """The most that they add to it on the way; NEVER where nothing is allocated."""
    accounts: tuple[tuple[int, int], ...]
    """What they add to each account, as it was asked for: pairs of account and bytes."""
    accounts_at_most: tuple[tuple[int, int], ...]
    """The same up to the first moment of the most."""
