"""State by name: what ranks of one layout write, ranks of any other read."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.utils.tensor_fragment import fragment_address
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.engines.runtime import state
from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import (
    KINDS,
    Cut,
    Part,
    SavedState,
    check_pickles,
    consolidate,
    load_state,
    save_state,
)
from shardwise.errors import CheckpointError

WORLD = World(rank=1, size=2, local_rank=1, device=torch.device("cpu"), data_rank=1, data_size=2)
ALONE = replace(WORLD, rank=0, size=1)
SHAPE = (5, 6, 2)
FULL = {kind: torch.rand(SHAPE) for kind in KINDS}


def ranges(count: int, length: int) -> list[range]:
    """As ZeRO cuts: anywhere, the last shorter."""
    size = -(-length // count)
    return [range(min(r * size, length), min((r + 1) * size, length)) for r in range(count)]


def flat_parts(count: int, cut: Cut | None = None) -> list[tuple[Part, int]]:
    """Parts of equal length, and their lengths."""
    shape = list(SHAPE)
    if cut is not None:
        shape[cut.dim] = cut.end - cut.first
    return [(Part(SHAPE, part.start, cut), len(part)) for part in ranges(count, torch.Size(shape).numel())]


def cuts(dim: int, *ends: int) -> list[Cut]:
    return [Cut(dim, first, end) for first, end in zip((0, *ends), ends, strict=False)]


LAYOUTS = {
    "one": flat_parts(1),
    "three ranges": flat_parts(3),
    "rows": [(Part(SHAPE, 0), 36), (Part(SHAPE, 36), 24)],
    "replicas": [*flat_parts(2), *flat_parts(2)],
    "cut by rows": [part for cut in cuts(0, 2, 5) for part in flat_parts(1, cut)],
    "cut by columns": [part for cut in cuts(1, 4, 6) for part in flat_parts(1, cut)],
    "columns and ranges": [part for cut in cuts(1, 2, 4, 6) for part in flat_parts(2, cut)],
    "last dimension": [part for cut in cuts(2, 1, 2) for part in flat_parts(3, cut)],
}


def elements(part: Part, length: int, full: torch.Tensor) -> torch.Tensor:
    if part.cut is not None:
        full = full.narrow(part.cut.dim, part.cut.first, part.cut.end - part.cut.first)
    return full.flatten()[part.begin : part.begin + length]


def write(folder: Path, layout: list[tuple[Part, int]]) -> None:
    for rank, (part, length) in enumerate(layout):
        tensors = {f"{kind}/w": torch.zeros(length) for kind in KINDS}
        if part.cut is None or part.cut.dim >= 0:
            tensors = {f"{kind}/w": elements(part, length, FULL[kind]) for kind in KINDS}
        tensors |= {"step/w": torch.tensor(3.0), "guard/growth": torch.tensor(7, dtype=torch.int32)}
        tensors |= {"guard/stopped": torch.zeros(()), "guard/loss_scale": torch.ones(())}
        save_state(folder, replace(WORLD, rank=rank, size=len(layout)), tensors, {"w": part})


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote(tmp_path: Path, source: str, target: str, monkeypatch) -> None:
    monkeypatch.setattr(state, "CHUNK", 7)
    write(tmp_path, LAYOUTS[source])
    for rank, (part, length) in enumerate(LAYOUTS[target]):
        live = {f"{kind}/w": torch.full((length,), torch.nan) for kind in KINDS}
        live |= {"step/w": torch.zeros(()), "guard/growth": torch.zeros((), dtype=torch.int32)}
        load_state(tmp_path, replace(WORLD, rank=rank, size=len(LAYOUTS[target])), live, {"w": part})
        for kind in KINDS:
            assert live[f"{kind}/w"].equal(elements(part, length, FULL[kind])), kind
        assert (live["step/w"].item(), live["guard/growth"].item()) == (3.0, 7)


def test_a_file_is_safetensors_with_the_parts_in_its_header(tmp_path: Path) -> None:
    tensors = {"parameter/w": torch.randn(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)}
    save_state(tmp_path, WORLD, tensors, {"w": Part((5, 3), 6)})
    path = tmp_path / "rank-00001.safetensors"
    found = load_file(path)
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].equal(tensor)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["layout"]) == {"ranks": 2, "parts": {"w": [[5, 3], 6, None]}}


def test_only_the_same_layout_gets_what_is_the_engines_own(tmp_path: Path) -> None:
    tensors = {"parameter/w": torch.randn(6), "powersgd/iter/0": torch.tensor(12)}
    save_state(tmp_path, ALONE, tensors, {"w": Part((2, 3))})
    live = {"parameter/w": torch.zeros(2, 3)}
    assert load_state(tmp_path, ALONE, live, {"w": Part((2, 3))})["powersgd/iter/0"] == 12
    assert live["parameter/w"].flatten().equal(tensors["parameter/w"])
    two = replace(ALONE, size=2)
    assert load_state(tmp_path, two, {"parameter/w": torch.zeros(3)}, {"w": Part((2, 3))}) == {}


def test_a_tensor_that_is_not_contiguous_is_filled(tmp_path: Path) -> None:
    write(tmp_path, LAYOUTS["three ranges"])
    live = torch.zeros(2, 6, 5).transpose(0, 2)
    SavedState(tmp_path).copy("parameter/w", Part(SHAPE), live)
    assert live.equal(FULL["parameter"])


GAP = [flat_parts(3)[0], flat_parts(3)[2]]
REFUSED = {
    "elements": (GAP, Part(SHAPE), "no rank has saved element 20 of parameter/w"),
    "columns": (flat_parts(1, Cut(1, 0, 4)), Part(SHAPE), "cannot be joined"),
    "a cut of its own": ([(Part(SHAPE, 0, Cut(-1, 0, 1)), 60)], Part(SHAPE), "cannot be joined"),
    "a cut that was not saved": (flat_parts(1), Part(SHAPE, 0, Cut(-1, 0, 1)), "only where the same part"),
    "a shape": (flat_parts(1), Part((60,)), r"has the shape \(60,\) in this model, and is \(5, 6, 2\)"),
}


@pytest.mark.parametrize("missing", REFUSED)
def test_what_is_not_there_is_refused(tmp_path: Path, missing: str) -> None:
    saved, wanted, message = REFUSED[missing]
    write(tmp_path, saved)
    with pytest.raises(CheckpointError, match=message):
        load_state(tmp_path, replace(ALONE, size=4), {"parameter/w": torch.zeros(60)}, {"w": wanted})


@pytest.mark.parametrize("damage", ["missing", "truncated", "header"])
def test_a_damaged_part_is_a_checkpoint_error(tmp_path: Path, damage: str) -> None:
    write(tmp_path, LAYOUTS["rows"])
    path = tmp_path / "rank-00001.safetensors"
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        save_file({"parameter/w": torch.zeros(2)}, path)
    part, length = LAYOUTS["rows"][1]
    with pytest.raises(CheckpointError, match=r"cannot be read|files of 1 ranks, and 2 have saved"):
        load_state(tmp_path, WORLD, {"parameter/w": torch.zeros(length)}, {"w": part})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("touched"),)


def test_a_pickle_that_names_other_code_is_refused_and_not_loaded(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "state"
    place.mkdir()
    path = place / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    fine = {"tensor": torch.ones(3), "scaler": LossScaler(1.0), "at": fragment_address(numel=3, start=0)}
    torch.save(fine, path)
    check_pickles(tmp_path)
    torch.save({**fine, "evil": Evil()}, path)
    with pytest.raises(CheckpointError, match=r"it would call .*getattr"):
        check_pickles(tmp_path)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"no file that torch\.save has written"):
        check_pickles(tmp_path)
    assert not Path("touched").exists()


def test_a_file_of_its_own_is_what_a_single_process_would_have_saved(tmp_path: Path) -> None:
    state_of = tmp_path / "state"
    state_of.mkdir()
    write(state_of, LAYOUTS["columns and ranges"])
    out = tmp_path / "rank-00000.safetensors"
    assert consolidate(state_of, out) == 3
    found = load_file(out)
    assert all(found[f"{kind}/w"].equal(FULL[kind]) for kind in KINDS)
    live = {f"{kind}/w": torch.zeros(SHAPE) for kind in KINDS} | {"step/w": torch.zeros(())}
    load_state(tmp_path, ALONE, live, {"w": Part(SHAPE)})
    assert live["step/w"] == 3.0
