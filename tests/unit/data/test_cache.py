"""The token cache: built once, by one process, and built again when it is not whole."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data.cache import COLUMNS, SMALL, Writer, load_or_build
from shardwise.errors import DataError, MachineError

SAMPLES = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([9, 9, 70_000], [1, 0, 1])]


def build(writer: Writer) -> dict[str, Any]:
    for group, (tokens, trained) in enumerate(SAMPLES):
        writer.add(np.array(tokens, dtype=np.uint32), np.array(trained, dtype=np.uint8), group=group)
    return {"said": "ü"}


def never(writer: Writer) -> dict[str, Any]:
    raise AssertionError("built again")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    dataset, note, _ = load_or_build(tmp_path / "deep" / "root", "key", build)
    assert [tuple(part.tolist() for part in dataset.sample(i)) for i in range(3)] == SAMPLES
    assert dataset.targets.tolist() == [2, 0, 1]  # a sample's first token is predicted by nothing
    assert dataset.lengths.tolist() == [3, 1, 3]
    assert note == {"said": "ü"}
    assert isinstance(dataset.tokens, np.memmap)
    part = dataset.subset(np.array([2, 0]))
    assert part.sample(0)[0].tolist() == [9, 9, 70_000]
    assert part.targets.tolist() == [1, 2]


def test_a_whole_entry_is_not_built_again(tmp_path: Path) -> None:
    load_or_build(tmp_path, "key", build)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "key").iterdir()}
    dataset, *_ = load_or_build(tmp_path, "key", never)
    assert len(dataset) == 3
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "key").iterdir()} == before


def test_the_hash_is_of_what_was_built_not_of_the_key(tmp_path: Path) -> None:
    def build_other(writer: Writer) -> dict[str, Any]:
        writer.add(np.array([5, 6, 7], dtype=np.uint32), np.array([0, 1, 0], dtype=np.uint8), group=0)
        return build(writer)

    first = load_or_build(tmp_path, "key", build).sha256
    assert load_or_build(tmp_path, "key", never).sha256 == first
    assert load_or_build(tmp_path / "cold", "key", build).sha256 == first
    assert load_or_build(tmp_path / "other", "key", build_other).sha256 != first


@pytest.mark.parametrize("name", [*(f"{column}.bin" for column in COLUMNS), "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "longer", "gone"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    load_or_build(tmp_path, "key", build)
    path = tmp_path / "key" / name
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else content + b"0")
    dataset, *_ = load_or_build(tmp_path, "key", build)
    assert [tuple(part.tolist() for part in dataset.sample(i)) for i in range(3)] == SAMPLES
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", [*SMALL, "meta.json"])
def test_one_changed_bit_of_a_small_file_is_built_again(tmp_path: Path, name: str) -> None:
    load_or_build(tmp_path, "key", build)
    path = tmp_path / "key" / (name if name == "meta.json" else f"{name}.bin")
    content = path.read_bytes()
    at = content.index(b'"sha256": "') + 11 if name == "meta.json" else 0
    flipped = b"x" if name == "meta.json" else bytes([content[at] ^ 1])
    path.write_bytes(content[:at] + flipped + content[at + 1 :])
    dataset, *_ = load_or_build(tmp_path, "key", build)
    assert [tuple(part.tolist() for part in dataset.sample(i)) for i in range(3)] == SAMPLES
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", ["tokens", "trained"])
def test_a_changed_token_is_found_when_its_block_is_read_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def build_longer(writer: Writer) -> dict[str, Any]:
        for group in range(3):
            writer.add(np.arange(8, dtype=np.uint32), np.ones(8, dtype=np.uint8), group=group)
        return {}

    monkeypatch.setattr("shardwise.data.cache.BLOCK_BYTES", 8)
    first = load_or_build(tmp_path, "key", build_longer).dataset
    path = tmp_path / "key" / f"{name}.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    dataset, *_ = load_or_build(tmp_path, "key", never)
    assert dataset.sample(0)[0].tolist() == first.sample(0)[0].tolist()
    with pytest.raises(MachineError, match=rf"block \d+ of {name}\.bin was changed") as caught:
        dataset.sample(2)
    assert str(tmp_path / "key") in caught.value.problems[0].fix
    with pytest.raises(MachineError):
        dataset.subset(np.array([2])).sample(0)


def test_a_failed_build_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail(writer: Writer) -> dict[str, Any]:
        build(writer)
        raise DataError("bad sample")

    with pytest.raises(DataError):
        load_or_build(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]
    assert len(load_or_build(tmp_path, "key", build)[0]) == 3


def test_the_rest_of_a_killed_build_is_swept_away(tmp_path: Path) -> None:
    partial = tmp_path / f"key.{platform.node()}.partial"
    partial.mkdir()
    (partial / "tokens.bin").write_bytes(b"half")
    assert len(load_or_build(tmp_path, "key", build)[0]) == 3
    assert not partial.exists()


def test_machines_that_share_no_lock_build_both_and_keep_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(writer: Writer) -> dict[str, Any]:
        """Another machine builds the same entry from beginning to end."""
        with monkeypatch.context() as there:
            there.setattr("platform.node", lambda: "there")
            assert len(load_or_build(tmp_path, "key", build)[0]) == 3
        return build(writer)

    monkeypatch.setattr("fcntl.flock", lambda *_: None)
    monkeypatch.setattr("platform.node", lambda: "here")
    dataset, *_ = load_or_build(tmp_path, "key", meanwhile)
    assert [tuple(part.tolist() for part in dataset.sample(i)) for i in range(3)] == SAMPLES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["key", "key.lock"]


def test_a_folder_that_cannot_be_locked_is_an_error_with_a_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.raises(MachineError, match="No locks available") as caught:
        load_or_build(tmp_path, "key", build)
    assert "SHARDWISE_CACHE" in caught.value.problems[0].fix


def test_a_killed_builder_releases_the_lock(tmp_path: Path) -> None:
    slow = BUILDER.replace("time.sleep(1)", "print('building', flush=True); time.sleep(600)")
    command = [sys.executable, "-c", slow, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdin is not None
        assert builder.stdout is not None
        print("go", file=builder.stdin, flush=True)
        assert builder.stdout.readline() == "building\n"
        builder.kill()
    assert len(load_or_build(tmp_path, "key", build)[0]) == 3


BUILDER = """
import os, sys, time
from pathlib import Path
import numpy as np
from shardwise.data.cache import SMALL, load_or_build

def build(writer):
    time.sleep(1)
    writer.add(np.arange(3, dtype=np.uint32), np.ones(3, dtype=np.uint8), group=0)
    return {"builder": os.getpid()}

sys.stdin.readline()  # all have started
dataset, note, _ = load_or_build(Path(sys.argv[1]), "key", build)
print(len(dataset), note["builder"])
"""


def test_of_several_processes_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BUILDER, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    said = {process.communicate(timeout=60)[0] for process in processes}
    assert len(said) == 1
    assert said.pop().startswith("1 ")


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written") as caught:
        load_or_build(tmp_path / "file" / "root", "key", build)
    assert "SHARDWISE_CACHE" in caught.value.problems[0].fix


@pytest.mark.parametrize("finish", [True, False])
def test_a_full_disk_is_said_also_by_the_last_bytes(tmp_path: Path, finish: bool) -> None:
    (tmp_path / "tokens.bin").symlink_to("/dev/full")  # takes what fits the buffer, and no flush

    def write() -> None:
        with Writer(tmp_path) as writer:
            build(writer)
            if finish:
                writer.finish({})

    with pytest.raises(MachineError, match="No space left"):
        write()


def test_meta_names_all_columns(tmp_path: Path) -> None:
    load_or_build(tmp_path, "key", build)
    sizes = json.loads((tmp_path / "key" / "meta.json").read_text())["bytes"]
    assert sizes == {"tokens": 28, "trained": 7, "starts": 24, "lengths": 12, "targets": 12, "groups": 24}
