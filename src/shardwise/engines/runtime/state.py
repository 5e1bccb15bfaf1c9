"""An engine's state on disk: a safetensors file per rank, without pickle: reading one cannot run code.

The header of `rank-00000.safetensors` has the number of ranks and the global shapes of sharded tensors. Rows
are split as `torch.chunk` does, so each file's part follows from its rank (decision 0032).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from shardwise.engines.runtime.protocol import World
from shardwise.errors import CheckpointError


def save_state(
    directory: Path,
    world: World,
    tensors: Mapping[str, torch.Tensor],
    sharded: Mapping[str, torch.Size] | None = None,
) -> None:
    """Write this rank's tensors into an existing folder; `sharded` maps names to global shapes."""
    layout = {"ranks": world.size, "sharded": {name: list(shape) for name, shape in (sharded or {}).items()}}
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        _path(directory, world.rank),
        metadata={"layout": json.dumps(layout)},
    )


def load_state(directory: Path, world: World) -> dict[str, torch.Tensor]:
    """Read on the CPU what this rank saved. Raises CheckpointError."""
    path = _path(directory, world.rank)
    try:
        with safe_open(path, framework="pt") as file:
            ranks = int(json.loads(file.metadata()["layout"])["ranks"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CheckpointError(
            f"this rank's part of the checkpoint cannot be read: {error}",
            where=str(path),
            fix="resume from an older checkpoint, with the number of processes that wrote it",
        ) from error
    if ranks != world.size:
        raise CheckpointError(
            f"the checkpoint was written by {ranks} processes and this run has {world.size}",
            where=str(path),
            fix=f"resume with --processes {ranks}",
        )
    return tensors


def _path(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"
