"""Recorded machines, which stand in for this one's GPUs."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.device import Replay
from shardwise.device.find import REPLAY

MACHINES = Path(__file__).parent / "machines"


def values(name: str, *, of: int | None = None) -> dict[str, Any]:
    """The recorded machine `name`, or its first `of` GPUs, as values that may be changed."""
    found: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_text())
    return {
        **found,
        "gpus": found["gpus"][:of],
        "paths": [" ".join(row.split()[:of]) for row in found["paths"][:of]],
    }


def device(name: str, *, of: int | None = None) -> Replay:
    return Replay(copy.deepcopy(values(name, of=of)))


def install(recorded: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes `recorded` the GPUs of this process and of those it starts; returns the file."""
    file = folder / "device.json"
    file.write_text(json.dumps(recorded))
    monkeypatch.setenv(REPLAY, str(file))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return file
