"""What is exported is whole or not there."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from shardwise.errors import MachineError
from shardwise.training import afterwards


@pytest.fixture
def failure(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Exception | None:
    """What writing the second of two files ends with, of a run with a checkpoint of step 7."""
    error: Exception | None = request.param

    def export(model_dir: Path, out: Path, **_: Any) -> dict[str, Any]:
        (out / "config.json").write_text("{}")
        if error is not None:
            raise error
        return {"kind": "model", "out": str(out)}

    origin = SimpleNamespace(identity={})
    found = SimpleNamespace(path=Path("step-000007"), step=7, manifest=SimpleNamespace(origin=origin))
    job = SimpleNamespace(model=None, train=SimpleNamespace(patience=None))
    monkeypatch.setattr(afterwards, "export", export)
    monkeypatch.setattr(afterwards, "newest_checkpoint", lambda _: (job, found))
    monkeypatch.setattr(afterwards, "read_run", lambda _: SimpleNamespace(events=[]))
    monkeypatch.setattr(afterwards, "model_card", lambda *_, **__: "a card")
    return error


@pytest.mark.parametrize(
    "failure",
    [
        OSError(errno.EFBIG, "File too large"),
        shutil.Error([("from", "to", "File too large")]),
        SafetensorError("I/O error: File too large"),
    ],
    indirect=True,
)
def test_what_cannot_be_written_leaves_nothing(failure: Exception, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cannot be written.*File too large"):
        afterwards.export_run("run", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failure", [None], indirect=True)
def test_a_place_where_no_folder_can_be_is_the_machine_s(failure: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        afterwards.export_run("run", tmp_path / "file" / "out")


@pytest.mark.parametrize("failure", [None], indirect=True)
def test_what_is_whole_gets_its_name(failure: None, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may be there
    assert afterwards.export_run("run", out) == {
        "kind": "model",
        "out": str(out),
        "step": 7,
        "best": False,
    }
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "config.json").read_text() == "{}"
    assert (out / "README.md").read_text() == "a card"
