"""An engine's state on disk: one safetensors file per rank, and a description of what lies where.

`rank-00000.safetensors` holds this rank's tensors (of a sharded one its part), `rank-00000.json` says of
each its global shape and the range of the first dimension that the file holds. Plain data, no pickle:
reading a checkpoint cannot run code, and another number of ranks can put the parts together.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shardwise.engines.runtime.protocol import World
from shardwise.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of a tensor a rank holds: rows `start` to `start + length` of the first dimension."""

    shape: tuple[int, ...]
    start: int
    length: int


def save_state(
    directory: Path,
    world: World,
    tensors: Mapping[str, torch.Tensor],
    parts: Mapping[str, Part] | None = None,
) -> None:
    """Writes this rank's tensors into an existing folder; `parts` names those that are sharded."""
    parts = parts or {}
    tensors_path, layout_path = _paths(directory, world.rank)
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, tensors_path)
    layout: dict[str, Any] = {
        "format": FORMAT,
        "rank": world.rank,
        "ranks": world.size,
        "tensors": {name: _describe(tensor, parts.get(name)) for name, tensor in tensors.items()},
    }
    layout_path.write_text(json.dumps(layout, indent=1) + "\n")


def load_state(directory: Path, world: World) -> dict[str, torch.Tensor]:
    """Reads back, on the CPU, what this rank saved. Raises CheckpointError."""
    tensors_path, layout_path = _paths(directory, world.rank)
    try:
        layout = json.loads(layout_path.read_text())
        ranks = int(layout["ranks"])
        tensors = load_file(tensors_path)
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"this rank's part of the checkpoint cannot be read: {error}",
            where=str(tensors_path),
            fix="resume from an older checkpoint, with the number of processes that wrote it",
        ) from error
    if ranks != world.size:
        raise CheckpointError(
            f"the checkpoint was written by {ranks} processes and this run has {world.size}",
            where=str(layout_path),
            fix=f"resume with --processes {ranks}",
        )
    return tensors


def _paths(directory: Path, rank: int) -> tuple[Path, Path]:
    return directory / f"rank-{rank:05d}.safetensors", directory / f"rank-{rank:05d}.json"


def _describe(tensor: torch.Tensor, part: Part | None) -> dict[str, Any]:
    shape = list(part.shape) if part else list(tensor.shape)
    rows = [part.start, part.start + part.length] if part else None
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape, "rows": rows}
