"""`shardwise export` and `shardwise generate` as a user meets them; what they do is tested elsewhere."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main

MERGED = {
    "kind": "merged",
    "dtype": "bfloat16",
    "out": "mine",
    "max_logit_difference": 0.0625,
    "max_logit": 14.25,
    "step": 300,
}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run's export returns."""
    written: dict[str, Any] = dict(MERGED)
    afterwards = types.SimpleNamespace(export_run=lambda *_, **__: written)
    monkeypatch.setitem(sys.modules, "shardwise.training.afterwards", afterwards)
    return written


def test_a_person_is_told_one_thing(exported: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/run", "--merge", "--out", "mine"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "wrote the model with the adapter merged in of step 300, in bfloat16, to mine",
        "  merging moved logits by at most 0.062; the largest is 14.2",
        "  load it with AutoModelForCausalLM.from_pretrained; `shardwise generate` takes the run",
    ]
    assert told.err == ""


def test_a_program_is_told_one_object(exported: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/run", "--merge", "--out", "mine", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == MERGED
    assert told.err == ""


@pytest.mark.parametrize(
    ("name", "says", "loader"),
    [
        ("config.json", "is a Hugging Face model, not a run folder", "transformers.AutoModelForCausalLM"),
        ("adapter_config.json", "is an exported adapter, not a run folder", "peft.AutoPeftModelForCausalLM"),
    ],
)
def test_weights_that_were_exported_do_not_speak_by_themselves(
    name: str,
    says: str,
    loader: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my runs/one/export")
    folder.mkdir(parents=True)
    (folder / name).write_text("{}")
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert loader in error
    assert "`shardwise generate RUN --prompt ...`" in error
    for file in ("job.yaml", "plan.json"):
        (folder.parent / file).write_text("")
    assert main(["generate", str(folder), "--prompt", "a"]) == 2
    assert "`shardwise generate 'my runs/one' --prompt ...`" in capsys.readouterr().err


def test_a_working_directory_does_not_become_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from shardwise.training import afterwards

    monkeypatch.setattr(afterwards, "_newest", lambda _: (None, None))
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        assert main(["export", "run", "--out", out]) == 2
        assert "fix: name a new folder" in capsys.readouterr().err
