from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from shardwise.engines.runtime.base import load_state, save_state
from shardwise.engines.runtime.protocol import World
from shardwise.errors import CheckpointError

WORLD = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"), data_rank=1, data_size=2)
TENSORS = {
    "parameter/w": torch.arange(6.0).reshape(2, 3),
    "step/w": torch.tensor(3.0),
    "guard/growth": torch.tensor(7, dtype=torch.int32),
    "parameter/half": torch.ones(2, dtype=torch.bfloat16),
}


def test_what_is_saved_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    save_state(tmp_path, WORLD, TENSORS, {"parameter/w": torch.Size((5, 3))})
    found = load_state(tmp_path, WORLD)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_the_header_has_the_ranks_and_the_shapes_of_sharded_tensors(tmp_path: Path) -> None:
    save_state(tmp_path, WORLD, TENSORS, {"parameter/w": torch.Size((5, 3))})
    with safe_open(tmp_path / "rank-00001.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["layout"]) == {"ranks": 2, "sharded": {"parameter/w": [5, 3]}}


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path, WORLD, TENSORS)
    with pytest.raises(CheckpointError, match="written by 2 processes and this run has 4"):
        load_state(tmp_path, replace(WORLD, size=4))


@pytest.mark.parametrize("damage", ["missing", "truncated", "header"])
def test_a_damaged_part_is_a_checkpoint_error(tmp_path: Path, damage: str) -> None:
    save_state(tmp_path, WORLD, TENSORS)
    tensors = tmp_path / "rank-00001.safetensors"
    if damage == "missing":
        tensors.unlink()
    elif damage == "truncated":
        tensors.write_bytes(tensors.read_bytes()[:-8])
    else:
        save_file(TENSORS, tensors)
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(tmp_path, WORLD)
