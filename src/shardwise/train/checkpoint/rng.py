"""The state of every random number generator of a rank, as JSON: exact, and no code when read."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError


def save_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's generators to `rng-rank0.json` (python, numpy, torch, the GPU's)."""
    _path(folder, rank).write_text(json.dumps(capture(device)))


def load_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Put this rank's generators where `save_rng` found them. CheckpointError where it cannot."""
    path = _path(folder, rank)
    try:
        restore(json.loads(path.read_text()), device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the random number generators cannot be restored ({type(error).__name__}: {error})",
            where=str(path),
            fix="resume on the same kind of device and with the same versions of torch and numpy",
        ) from None


def capture(device: torch.device) -> dict[str, Any]:
    """The generators' states as JSON values."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    return {
        "python": [version, list(words), gauss],
        "numpy": {
            "bit_generator": numpy_state["bit_generator"],
            "key": numpy_state["state"]["key"].tolist(),
            "pos": numpy_state["state"]["pos"],
            "has_gauss": numpy_state["has_gauss"],
            "gauss": numpy_state["gauss"],
        },
        "torch": _encode(torch.get_rng_state()),
        "cuda": _encode(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore(state: dict[str, Any], device: torch.device) -> None:
    """The inverse of `capture`. Raises ValueError where one side has a GPU and the other has none."""
    if (state["cuda"] is not None) != (device.type == "cuda"):
        raise ValueError(f"saved {'with' if state['cuda'] else 'without'} a GPU, this is {device.type}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    generator = state["numpy"]
    np.random.set_state(
        {
            "bit_generator": generator["bit_generator"],
            "state": {"key": np.array(generator["key"], dtype=np.uint32), "pos": generator["pos"]},
            "has_gauss": generator["has_gauss"],
            "gauss": generator["gauss"],
        }
    )
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rng-rank{rank}.json"


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
