"""Whether a checkpoint belongs to this run: the same job, at the same strategy and number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import CheckpointError, Problem
from shardwise.record.manifest import Manifest, Origin

LAYOUT = (
    "engine",
    "stage",
    "offload_optimizer",
    "offload_parameters",
    "tensor_parallel",
    "data_parallel",
    "precision",
)
"""The parts of a strategy that decide how the state lies in the files."""


def check_origin(manifest: Manifest, expected: Origin, *, where: str) -> None:
    """Raises CheckpointError naming every field in which the checkpoint is not this run's."""
    saved = manifest.origin
    problems = [
        Problem(
            what=f"{key} is {_short(now)}, the checkpoint's is {_short(then)}",
            fix="set it back, or start a run under another name",
        )
        for key, then, now in _differences("", saved.identity, expected.identity)
    ]
    layout = [key for key in LAYOUT if saved.strategy.get(key) != expected.strategy.get(key)]
    if layout or saved.world_size != expected.world_size:
        problems.append(
            Problem(
                what=f"saved by {_place(saved)}, this run is {_place(expected)}; a checkpoint cannot be "
                f"loaded at another strategy yet ({', '.join(layout) or 'world_size'} differ)",
                fix=f"resume with --set strategy={saved.strategy.get('name')} --processes {saved.world_size}",
            )
        )
    if problems:
        raise CheckpointError(f"{where} belongs to another run", problems=problems)


def _differences(
    prefix: str, then: Mapping[str, Any], now: Mapping[str, Any]
) -> list[tuple[str, object, object]]:
    """(dotted key, saved value, present value) of everything that differs."""
    found: list[tuple[str, object, object]] = []
    for key in sorted({*then, *now}):
        old, new = then.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(f"{prefix}{key}.", old, new)
        elif _plain(old) != _plain(new):
            found.append((f"{prefix}{key}", old, new))
    return found


def _plain(value: object) -> object:
    """Tuples become lists in JSON; they are no difference."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _place(origin: Origin) -> str:
    return f"{origin.strategy.get('name')} on {origin.world_size} process(es)"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
