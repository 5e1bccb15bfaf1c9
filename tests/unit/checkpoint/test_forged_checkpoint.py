"""Checkpoints whose files were changed and signed again: what no run can have saved is refused, by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from shardwise.engines.runtime import state as named
from shardwise.engines.runtime.host_copy import HostCopy
from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import KINDS, Part, SavedState
from shardwise.errors import CheckpointError, render
from shardwise.record.manifest import Origin, verify
from shardwise.strategy import Strategy
from shardwise.training.checkpoint import CheckpointStore
from shardwise.training.saving import Progress
from shardwise.training.snapshot import Snapshots, rng_state

ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), data_rank=0, data_size=1)
SHAPE, DEEP = (4, 5), "[" * 200_000
Tensors = dict[str, torch.Tensor]


def live() -> Tensors:
    tensors = {f"{kind}/w": torch.ones(SHAPE) for kind in KINDS}
    tensors |= {"step/w": torch.tensor(6.0), "guard/growth": torch.tensor(7, dtype=torch.int32)}
    return tensors | {"guard/stopped": torch.zeros(()), "guard/loss_scale": torch.ones(())}


class Engine:
    world = ALONE

    def save(self, folder: Path) -> None:
        named.save_state(folder, ALONE, live(), {"w": Part(SHAPE)})

    def weights(self) -> Iterator[Any]:
        return iter(())

    def load(self, folder: Path) -> None:
        named.load_state(folder, ALONE, live(), {"w": Part(SHAPE)})


def run(folder: Path) -> Snapshots:
    """A run of epochs of 20 rows, 8 of them a step."""
    stream = SimpleNamespace(
        global_batch=8,
        rows_per_epoch=lambda epoch: 20,
        state_dict=lambda: {"epoch": 2, "row": 8},
        load_state_dict=lambda state: None,
    )
    identity = {"seed": 1, "model": {"source": "a"}}
    strategy = Strategy(engine="ddp").to_json()
    return Snapshots(
        store=CheckpointStore(folder, keep=1),
        origin=Origin(world_size=1, strategy=strategy, identity=identity, versions={}),
        engine=Engine(),  # type: ignore[arg-type]
        stream=stream,  # type: ignore[arg-type]
        write_weights=lambda *_: None,
        weight_dtypes={},
        copy=HostCopy(ALONE),
        total_steps=12,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    run(tmp_path / "checkpoints").save(Progress(step=6, tokens=9, target_tokens=9))
    return tmp_path / "checkpoints" / "step-000006"


def sign(folder: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    for name in manifest["files"]:
        content = (folder / name).read_bytes()
        entry = {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        manifest["files"][name] = entry
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps({**manifest, "manifest_sha256": digest}))


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        run(folder.parent).restore()
    assert caught.value.exit_code == 5
    block = render(caught.value)
    assert "fix:" in block or "restore one from a copy" in block
    return block


def engine_file(folder: Path) -> Path:
    return folder / "engine" / "rank-00000.safetensors"


def filled(key: str, value: float) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[key].view(-1)[-1:].fill_(value)


def cast(key: str, dtype: torch.dtype) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({key: tensors[key].to(dtype)})


TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "weight I64": (cast("parameter/w", torch.int64), "parameter/w is stored as I64"),
    "weight F16": (cast("parameter/w", torch.float16), "parameter/w is stored as F16"),
    "moment BF16": (cast("exp_avg/w", torch.bfloat16), "exp_avg/w is stored as BF16"),
    "step F16": (cast("step/w", torch.float16), "step/w is stored as F16"),
    "short moment": (lambda t: t.update({"exp_avg_sq/w": torch.ones(7)}), "exp_avg_sq/w has 7 elements"),
    "long moment": (lambda t: t.update({"exp_avg_sq/w": torch.ones(40)}), "exp_avg_sq/w has 40 elements"),
    "long all": (lambda t: t.update({f"{k}/w": torch.ones(40) for k in KINDS}), "w has 40 elements"),
    "no moment": (lambda t: t.pop("exp_avg_sq/w"), "exp_avg_sq/w cannot be read"),
    "no weight": (lambda t: t.pop("parameter/w"), "does not contain tensor parameter/w"),
    "step of three": (lambda t: t.update({"step/w": torch.ones(3)}), r"step/w has the shape [3]"),
    "NaN weight": (filled("parameter/w", torch.nan), "parameter/w has a value that is not finite"),
    "inf moment": (filled("exp_avg/w", torch.inf), "exp_avg/w has a value that is not finite"),
    "negative square": (filled("exp_avg_sq/w", -1), "exp_avg_sq/w has a value below 0"),
    "negative step": (filled("step/w", -5), "step/w has a value below 0"),
    "NaN step": (filled("step/w", torch.nan), "step/w has a value that is not finite"),
}


@pytest.mark.parametrize("case", TENSORS)
@pytest.mark.parametrize("own", [True, False], ids=["same layout", "other layout"])
def test_a_forged_tensor_is_refused(saved: Path, case: str, own: bool) -> None:
    change, message = TENSORS[case]
    path = engine_file(saved)
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    change(tensors)
    save_file(tensors, path, metadata=metadata)
    sign(saved)
    if own:
        block = refused(saved)
    else:
        with pytest.raises(CheckpointError) as caught:
            named.load_state(path.parent, replace(ALONE, size=2), live(), {"w": Part(SHAPE)})
        block = render(caught.value)
    assert message in block
    assert str(path) in block


def part(*values: object) -> str:
    return json.dumps({"ranks": 1, "parts": {"w": values}})


LAYOUTS = {
    "deep": DEEP,
    "ranks": '{"ranks": Infinity, "parts": {}}',
    "list of parts": '{"ranks": 1, "parts": [1]}',
    "list": "[1]",
    "begin": part(SHAPE, "x", None),
    "negative begin": part(SHAPE, -4, None),
    "shape": part(["a"], 0, None),
    "small shape": part([2, 2], 0, None),
    "cut": part(SHAPE, 0, [7, 0, 1]),
    "cut of words": part(SHAPE, 0, ["x", 0, 1]),
    "negative cut": part(SHAPE, 0, [0, -1, 4]),
    "name": '{"ranks": 1, "parts": {"other": [[4, 5], 0, null]}}',
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_forged_header_is_refused(saved: Path, case: str) -> None:
    path = engine_file(saved)
    save_file(load_file(path), path, metadata={"layout": LAYOUTS[case]})
    sign(saved)
    assert str(path) in refused(saved)
    with pytest.raises(CheckpointError):
        SavedState(path.parent)


STATES: dict[str, object] = {
    "deep": DEEP,
    "list": [1],
    "no row": {"data": {"epoch": 2, "row": None}},
    "a float": {"data": {"epoch": 2, "row": 8.0}},
    "other row": {"data": {"epoch": 2, "row": 7}},
    "other epoch": {"data": {"epoch": 1, "row": 8}},
    "negative row": {"data": {"epoch": 2, "row": -4}},
    "huge row": {"data": {"epoch": 2, "row": 10**9}},
    "list of data": {"data": [1]},
    "word": {"total_steps": "x"},
    "path": {"best": "../x"},
    "other step": {"step": 5},
}


@pytest.mark.parametrize("case", STATES)
def test_a_forged_position_is_refused(saved: Path, case: str) -> None:
    path, change = saved / "state.json", STATES[case]
    now = {**json.loads(path.read_text()), **change} if isinstance(change, dict) else change
    path.write_text(now if isinstance(now, str) else json.dumps(now))
    sign(saved)
    assert str(saved) in refused(saved)


MANIFESTS: dict[str, Callable[[dict[str, Any]], object]] = {
    "no strategy": lambda m: m.update(strategy={}),
    "strategy of words": lambda m: m["strategy"].update(data_parallel="x"),
    "list of strategies": lambda m: m.update(strategy=[]),
    "model": lambda m: m["identity"].update(model={"x": 1}),
    "list of identities": lambda m: m.update(identity=[]),
    "world": lambda m: m.update(world_size="x"),
    "step": lambda m: m.update(step=[6]),
    "node": lambda m: m.update(elsewhere={"x": {}}),
    "file": lambda m: m.update(files={"a": {"size_bytes": 1}}),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_forged_manifest_is_refused(saved: Path, case: str) -> None:
    sign(saved, MANIFESTS[case])
    assert str(saved) in refused(saved)


@pytest.mark.parametrize("content", [DEEP, "[1]", '{"manifest_sha256": ' + DEEP], ids=["deep", "list", "in"])
def test_a_manifest_that_is_none_is_refused(saved: Path, content: str) -> None:
    (saved / "manifest.json").write_text(content)
    assert "manifest.json: " in refused(saved)
    assert len(verify(saved)) == 1


def test_json_above_the_limit_is_not_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.record.manifest.LIMIT", 100)
    assert "more than 100 bytes" in refused(saved)


def test_deep_generators_are_refused_and_what_was_saved_is_loaded(saved: Path) -> None:
    assert run(saved.parent).restore().step == 6
    (saved / "rng-rank0.json").write_text(DEEP)
    sign(saved)
    assert "rng-rank0.json" in refused(saved)
    (saved / "rng-rank0.json").write_text(rng_state(ALONE.device))
    sign(saved)
    assert run(saved.parent).restore().step == 6
