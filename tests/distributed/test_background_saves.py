"""A checkpoint written while training goes on has the bytes of one for which training waited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import Run, run_all
from test_whole_runs import job, losses

from shardwise.training.saving import SWITCH

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("processes", [1, 2])
def test_it_makes_no_difference_who_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    found: dict[str, list[Path]] = {}
    for switch in ("0", "1"):
        monkeypatch.setenv(SWITCH, switch)
        train = {"steps": 6, "save_every": 2, "keep": 9, "precision": "bf16"}
        names = ("zero0", "zero1", "zero3", "fsdp2")
        runs = [Run(job(tmp_path / switch, name, name, **train)) for name in names]
        found[switch] = run_all(runs, processes=processes, folder=tmp_path / switch)
    for waited, background in zip(*found.values(), strict=True):
        assert losses(waited) == losses(background)
        assert contents(waited) == contents(background)
        events = [json.loads(line) for line in (background / "events.jsonl").read_text().splitlines()]
        saves = {event["step"]: event["background_seconds"] for event in events if event["kind"] == "save"}
        assert [step for step, seconds in saves.items() if seconds is None] == [6], (
            "the last one is waited for"
        )
        assert list(saves) == [1, 2, 4, 6]


def test_weights_that_diverged_before_their_first_checkpoint_are_no_damage(tmp_path: Path) -> None:
    """No older checkpoint can help: there is none. Steps are long, so that the writer finds it first."""
    made = job(tmp_path, "diverged", "single", steps=6, save_every=9, global_batch=384)
    made["optimizer"] |= {"learning_rate": 1e38, "warmup_steps": 1, "clip_norm": 1e30}
    with pytest.raises(AssertionError) as raised:
        run_all([Run(made)], processes=1, folder=tmp_path / "set")
    assert "DivergedError" in str(raised.value)
    assert "weight has a value that is not finite" in str(raised.value)
    assert "resume from an older checkpoint" not in str(raised.value)
    assert not list((tmp_path / "runs/diverged/checkpoints").iterdir())


def contents(run: Path) -> dict[str, bytes]:
    """Of all files of all checkpoints, the manifests apart."""
    folder = run / "checkpoints"
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
