"""`shardwise checkpoint`: what is listed, what is found damaged, and the file that convert writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardwise.cli import main
from shardwise.engines.runtime.protocol import World
from shardwise.engines.runtime.state import GUARD, KINDS, Part, save_state
from shardwise.record.manifest import Origin
from shardwise.strategy import Strategy
from shardwise.training.checkpoint import CheckpointStore

STRATEGY = Strategy(engine="deepspeed", stage=2, data_parallel=2)
ORIGIN = Origin(world_size=2, strategy=STRATEGY.to_json(), identity={}, versions={})
FULL = {kind: torch.rand(7, 3) for kind in KINDS}


def write(folder: Path) -> None:
    """As two ranks would, each a range of the only parameter."""
    (folder / "engine").mkdir()
    for rank, (begin, end) in enumerate(((0, 10), (10, 21))):
        world = World(
            rank=rank, size=2, local_rank=rank, device=torch.device("cpu"), data_rank=rank, data_size=2
        )
        tensors = {f"{kind}/w": full.flatten()[begin:end] for kind, full in FULL.items()}
        tensors |= {"step/w": torch.tensor(4.0), **{key: torch.zeros(()) for key in GUARD}}
        save_state(folder / "engine", world, tensors, {"w": Part((7, 3), begin)})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    for step in (2, 4):
        store.save(step, write, origin=ORIGIN)
    return tmp_path


def test_checkpoints_are_listed_and_verified(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    both = "step 4: sound, 1.4 KiB, zero2 on 2 processes\nstep 2: sound, 1.4 KiB, zero2 on 2 processes\n"
    assert capsys.readouterr().out == both
    part = run / "checkpoints" / "step-000002" / "engine" / "rank-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert main(["checkpoint", "list", str(run), "--step", "2"]) == 0
    assert "step 2: complete" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(run), "--json"]) == 5
    sound, damaged = json.loads(capsys.readouterr().out)
    assert (sound["step"], sound["complete"]) == (4, True)
    assert "rank-00001.safetensors is damaged" in damaged["problems"][0]
    assert main(["checkpoint", "convert", str(run), "--step", "2", "--out", "two.safetensors"]) == 5
    assert "rank-00001.safetensors is damaged" in capsys.readouterr().err


def test_convert_joins_the_parts(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "convert", str(run), "--out", "all.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == 3
    found = load_file(run / "all.safetensors")
    assert all(found[f"{kind}/w"].equal(FULL[kind]) for kind in KINDS)
    assert found["step/w"] == 4.0
    assert main(["checkpoint", "convert", str(run), "--out", "all.safetensors"]) == 2
    assert "all.safetensors exists" in capsys.readouterr().err
    assert not list(run.glob(".*partial"))
    assert main(["checkpoint", "convert", str(run), "--out", "no/where/all.safetensors"]) == 2
    assert "there is no folder no/where" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "."], "--out FILE is for convert"),
        (["list", ".", "--out", "x"], "--out FILE is for convert"),
        (["convert", "."], "fix: shardwise checkpoint convert . --out state.safetensors"),
        (["verify", ".", "--step", "3"], "there is no checkpoint of step 3"),
        (["verify", ".", "--step", "3"], "fix: --step 4 or 2"),
        (["list", "elsewhere"], "error: there is no folder elsewhere"),
        (["list", "nowhere/x"], "name a run folder"),
        (["verify", "runs/mine/job.yaml"], "error: runs/mine/job.yaml is a file, not a run folder"),
        (["list", "runs/elsewhere"], "fix: name one of these: runs/mine"),
        (["list", "runs/mine/logs"], "fix: name the run folder: runs/mine"),
        (["list", "runs/mine"], "the run has saved none"),
    ],
)
def test_what_cannot_be_done_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (run / "runs" / "mine" / "logs").mkdir(parents=True)
    for name in ("job.yaml", "plan.json"):
        (run / "runs" / "mine" / name).write_text("{}", encoding="utf-8")
    assert main(["checkpoint", *arguments]) == 2
    assert message in capsys.readouterr().err
