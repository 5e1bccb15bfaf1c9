"""In which keys two sets of values differ: a job from the one a run was begun with, say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


def differences(
    then: Mapping[str, object], now: Mapping[str, object], above: str = ""
) -> Iterator[tuple[str, object, object]]:
    """(dotted key, value then, value now) of everything that differs; None for what is absent."""
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{above}{name}.")
        elif _plain(old) != _plain(new):
            yield f"{above}{name}", old, new


def _plain(value: object) -> object:
    """Tuples become lists in JSON; they are no difference."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
