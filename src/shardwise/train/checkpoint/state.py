"""Where the training stood, beside the engine's state: one small JSON file, written by rank 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError

NAME = "state.json"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Everything that is the same on all ranks. The learning rate follows from `step` and `total_steps`."""

    step: int
    """Optimizer steps done."""
    total_steps: int
    """Optimizer steps of the whole run: the length of the schedule."""
    tokens: int
    """Tokens trained on so far, padding left out."""
    target_tokens: int
    """Of these, the ones that were predicted."""
    data: Mapping[str, Any]
    """The loader's own position."""


def save_state(folder: Path, state: TrainerState) -> None:
    """Write `state.json`."""
    (folder / NAME).write_text(json.dumps(asdict(state), indent=1) + "\n")


def load_state(folder: Path) -> TrainerState:
    """Raises CheckpointError where the file is missing or is not one of this version."""
    try:
        return TrainerState(**json.loads((folder / NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the trainer's state cannot be read ({type(error).__name__}: {error})",
            where=str(folder / NAME),
            fix="resume with the version of shardwise that saved it",
        ) from None
