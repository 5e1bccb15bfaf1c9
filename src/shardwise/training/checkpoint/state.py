"""What a checkpoint holds next to the engine's state, as JSON: the trainer's position and the generators."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shardwise.errors import CheckpointError

NAME = "state.json"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that is the same on all ranks. The learning rate follows from `step` and `total_steps`."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps of the full run: the length of the schedule."""
    tokens: int
    """Tokens trained on so far, without padding."""
    target_tokens: int
    """Those among them that were predicted."""
    data: Mapping[str, Any]
    """The loader's own position."""


def save_state(folder: Path, state: TrainerState) -> None:
    """Write `state.json`."""
    (folder / NAME).write_text(json.dumps(asdict(state), indent=1) + "\n")


def load_state(folder: Path) -> TrainerState:
    """Read `state.json`; CheckpointError where it is missing or not one of this version."""
    try:
        return TrainerState(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the trainer's state cannot be read ({type(error).__name__}: {error})",
            where=str(folder / NAME),
            fix="resume with the version of shardwise that saved it",
        ) from None


def save_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Write this rank's random number generators (python, numpy, torch, the GPU's) to `rng-rank0.json`."""
    version, words, gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)  # type: ignore[assignment]
    state = {
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
    (folder / f"rng-rank{rank}.json").write_text(json.dumps(state))


def load_rng(folder: Path, *, rank: int, device: torch.device) -> None:
    """Restore the generators that `save_rng` wrote. CheckpointError where it cannot."""
    path = folder / f"rng-rank{rank}.json"
    try:
        _restore(json.loads(path.read_text()), device)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state of the random number generators cannot be restored ({type(error).__name__}: {error})",
            where=str(path),
            fix="resume on the same kind of device and with the same versions of torch and numpy",
        ) from None


def _restore(state: dict[str, Any], device: torch.device) -> None:
    if (state["cuda"] is not None) != (device.type == "cuda"):
        raise ValueError(f"saved {'with' if state['cuda'] else 'without'} a GPU, this is {device.type}")
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    generator = state["numpy"]
    position = {"key": np.array(generator["key"], dtype=np.uint32), "pos": generator["pos"]}
    gauss = {name: generator[name] for name in ("has_gauss", "gauss")}
    np.random.set_state({"bit_generator": generator["bit_generator"], "state": position, **gauss})
    torch.set_rng_state(_decode(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_decode(state["cuda"]), device)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
