"""What a thread writes while training goes on, and where training has to wait instead."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardwise.engines.runtime import host_copy
from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import Cut, Part, parts_of
from shardwise.training import saving
from shardwise.training.process import Ranks
from shardwise.training.saving import reserve

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)


def test_a_copy_holds_the_state_when_it_was_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_copy, "BLOCK", 100)  # bytes: tensors lie across borders
    tensors = {
        "parameter/w": torch.randn(7, 9),
        "exp_avg/w": torch.randn(9, 7).t(),
        "step/w": torch.tensor(3.0),
        "guard/growth": torch.tensor(1, dtype=torch.int32),
        "state1/w": torch.arange(63, dtype=torch.uint8),
        "parameter/none": torch.empty(0),
    }
    copy, parts = HostCopy(WORLD), parts_of({"w": tensors["parameter/w"]})
    for number in range(2):  # the second save uses the memory of the first
        expected = {key: tensor.clone() for key, tensor in tensors.items()}
        copy.take(tensors, parts)
        for tensor in tensors.values():
            tensor.add_(1)
        folder = tmp_path / f"{number}"
        folder.mkdir()
        copy.write(folder)
        found = load_file(folder / "rank-00000.safetensors")
        assert found.keys() == expected.keys()
        assert all(found[key].equal(tensor) for key, tensor in expected.items())


WHOLE = {"parameter/w": torch.zeros(3)}, {"w": Part((3,))}
CUT = WHOLE[0], {"w": Part((3,), 0, Cut(-1, 0, 1))}


@pytest.mark.parametrize(
    ("state", "free", "why"),
    [
        (WHOLE, 1 << 40, None),
        (WHOLE, 1 << 26, "a copy of the state takes 64.0 MiB of host memory, of which 64.0 MiB are free"),
        (CUT, 1 << 40, "complete weights can be gathered on the GPUs alone"),
        (None, 1 << 40, "DeepSpeed writes the state on NVMe itself"),
    ],
)
def test_training_waits_where_there_is_no_copy(
    monkeypatch: pytest.MonkeyPatch, state: Any, free: int, why: str | None
) -> None:
    monkeypatch.setattr(saving.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    monkeypatch.setattr(saving, "host_memory_bytes", lambda: 1 << 50)
    engine: Any = SimpleNamespace(world=WORLD, named_state=lambda: state)
    assert reserve(HostCopy(WORLD), engine, Ranks(WORLD)) == why
