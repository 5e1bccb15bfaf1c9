"""A base is known again by its content, wherever it lies, and is read only once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from shardwise.errors import MachineError
from shardwise.job.schema import Lora, Model
from shardwise.models import fingerprint as module
from shardwise.models.fingerprint import fingerprint, tokenizer_fingerprint
from shardwise.models.source import Source, find_source

PARTS = {"a.safetensors": b"first" * 1000, "b.safetensors": b"second" * 1000}


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model in two files."""
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "rope_theta": 1}')
    for name, content in PARTS.items():
        (folder / name).write_bytes(content)
    index = {"weight_map": dict(zip("xy", PARTS, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def lora(source: Path | str) -> Model:
    return Model(source=str(source), lora=Lora(rank=4))


def of(folder: Path) -> str:
    model = lora(folder)
    found = fingerprint(model, find_source(model))
    assert found is not None
    assert found["commit"] is None
    return str(found["sha256"])


def test_only_adapters_on_weights_of_files_have_a_base(base: Path) -> None:
    for model in (Model(source=str(base)), Model(source=str(base), lora=Lora(rank=4), weights="random")):
        assert fingerprint(model, find_source(model)) is None


def test_a_copy_is_the_same_and_every_change_is_noticed(base: Path, tmp_path: Path) -> None:
    first = of(base)
    assert of(shutil.copytree(base, tmp_path / "copy")) == first

    part = base / "b.safetensors"
    before = part.stat()
    part.write_bytes(PARTS["b.safetensors"][:-1] + b"D")
    os.utime(part, ns=(before.st_atime_ns, before.st_mtime_ns))  # as `cp -p` gives a file its old date
    assert part.stat().st_size == before.st_size
    assert of(base) != first
    part.write_bytes(PARTS["b.safetensors"])
    assert of(base) == first
    (base / "config.json").write_text('{"model_type": "llama", "rope_theta": 2}')
    assert of(base) != first
    (base / "config.json").write_text('{"rope_theta":1, "model_type":"llama"}\n')
    assert of(base) == first, "it is the values that count"


def test_unchanged_files_are_read_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = of(base)
    monkeypatch.setattr(module, "hash_files", None)  # would fail if it were called again
    assert of(base) == first


def test_files_of_the_hubs_cache_are_not_read_and_their_commit_is_told(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of(base)
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    shutil.copytree(base, snapshot)
    blobs.mkdir()
    for name, content in PARTS.items():
        blob = blobs / hashlib.sha256(content).hexdigest()
        (snapshot / name).replace(blob)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    config = json.loads((snapshot / "config.json").read_text())
    monkeypatch.setattr(module, "hash_files", None)
    found = fingerprint(lora("a/b"), Source(description="", config=config, folder=snapshot))
    assert found == {"sha256": first, "commit": "c0ffee"}


def test_where_the_hash_cannot_be_kept_is_said(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_CACHE", str(base / "config.json"))
    with pytest.raises(MachineError, match="cannot be computed and cached") as caught:
        of(base)
    assert "SHARDWISE_CACHE" in caught.value.problems[0].fix


def test_every_file_of_a_tokenizer_counts(tmp_path: Path) -> None:
    found = set()
    for name, text in (
        ("a", "{}"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{}"),
        ("merges.txt", "a b"),
    ):
        (tmp_path / name).write_text(text)
        found.add(tokenizer_fingerprint(Model(source=str(tmp_path))))
    (tmp_path / "tokenizer.json").write_text('{"a": 1}')
    assert len({*found, tokenizer_fingerprint(Model(source=str(tmp_path)))}) == 5
    assert tokenizer_fingerprint(Model(source=str(tmp_path), tokenizer="train")) is None
