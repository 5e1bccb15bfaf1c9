"""`shardwise export` as a user meets it; what it does is tested elsewhere."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from shardwise.app import publish
from shardwise.cli import main
from shardwise.errors import MachineError

MERGED = {
    "kind": "merged",
    "dtype": "bfloat16",
    "out": "mine",
    "max_logit_difference": 0.0625,
    "max_logit": 14.25,
    "step": 300,
    "best": False,
}


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run's export returns."""
    written: dict[str, Any] = dict(MERGED)
    afterwards = types.SimpleNamespace(export_run=lambda *_, **__: written)
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/run"), lora=True)
    monkeypatch.setitem(sys.modules, "shardwise.training.afterwards", afterwards)
    return written


def test_a_person_is_told_one_thing(exported: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/run", "--merge", "--out", "mine"]) == 0
    told = capsys.readouterr()
    assert told.out.splitlines() == [
        "wrote the model with the adapter merged in of step 300, in bfloat16, to mine",
        "  merging moved logits by at most 0.062; the largest is 14.2",
        "  load it with AutoModelForCausalLM.from_pretrained; `shardwise chat mine` talks to it",
    ]
    assert told.err == "export: starting\n"
    exported["best"] = True
    assert main(["export", "runs/run", "--merge", "--out", "mine"]) == 0
    assert " of step 300, which has the lowest evaluation loss, in bfloat16" in capsys.readouterr().out


def test_a_program_is_told_one_object(exported: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "runs/run", "--merge", "--out", "mine", "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == MERGED
    assert told.err == "export: starting\n"


def test_a_working_directory_does_not_become_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path)):
        assert main(["export", "run", "--out", out]) == 2
        assert "fix: name a new folder" in capsys.readouterr().err


def write_run(folder: Path, *, lora: bool) -> None:
    """A run folder of which only the job matters."""
    adapter = ", lora: {rank: 4, alpha: 8}" if lora else ""
    folder.mkdir(parents=True)
    (folder / "job.yaml").write_text(
        f"name: run\nmodel: {{source: org/model{adapter}}}\ndata: {{train: a.txt}}\n"
    )
    (folder / "plan.json").write_text("{}")
    (folder / "environment.json").write_text("{}")


@pytest.mark.parametrize(
    ("lora", "flags", "code", "says"),
    [
        (False, ["--merge"], 2, "there is no adapter to merge: the run trained all weights"),
        (True, ["--gguf"], 2, "a GGUF file holds an entire model, and the run trained an adapter"),
        (False, ["--gguf"], 4, "there is no convert_hf_to_gguf.py in nowhere"),
        (False, ["--push", "me/my model"], 2, "Repo id must"),
        (False, ["--push", "me/model"], 4, "there is no token for the hub"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    lora: bool,
    flags: list[str],
    code: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LLAMA_CPP", "nowhere")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setitem(sys.modules, "shardwise.training.afterwards", None)  # importing it would fail
    write_run(Path("run"), lora=lora)
    assert main(["export", "run", *flags]) == code
    error = capsys.readouterr().err
    assert error.startswith("export: starting\nerror: ")
    assert says in error


def test_a_gguf_file_is_written_by_the_converter_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script in llama.cpp's place: it gets the folder and writes what --outfile names, or fails."""
    script = tmp_path / "llama.cpp" / "convert_hf_to_gguf.py"
    script.parent.mkdir()
    script.write_text(
        "import sys, pathlib\nfolder, flag, file = sys.argv[1:]\n"
        "if not pathlib.Path(folder, 'config.json').exists(): sys.exit('error: unknown architecture')\n"
        "assert flag == '--outfile'\npathlib.Path(file).write_bytes(b'GGUF')\n"
    )
    monkeypatch.setenv("LLAMA_CPP", str(script.parent))
    converter = publish.gguf_converter()
    said: list[str] = []
    with pytest.raises(MachineError, match="converter failed: error: unknown architecture"):
        publish.write_gguf(converter, tmp_path, "mine.gguf", said.append)
    (tmp_path / "config.json").write_text("{}")
    publish.write_gguf(converter, tmp_path, "mine.gguf", said.append)
    assert (tmp_path / "mine.gguf").read_bytes() == b"GGUF"
    assert said == ["converting to GGUF with convert_hf_to_gguf.py"] * 2
