"""A process killed at any file action of a save never leaves a torn checkpoint that counts."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from shardwise.record.manifest import Origin, read_manifest, verify
from shardwise.training.checkpoint import CheckpointStore, FileSystem, newest_valid

ORIGIN = Origin(world_size=1, strategy={"name": "single"}, identity={}, versions={})


class Counted(FileSystem):
    """Dies before the n-th action, or in the middle of it where it writes."""

    def __init__(self, at: int, *, torn: bool) -> None:
        self.at, self.torn, self.seen = at, torn, 0

    def _meet(self, half: Callable[[], object] = lambda: None) -> None:
        self.seen += 1
        if self.seen == self.at:
            if self.torn:
                half()
            os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, path: Path) -> None:
        self._meet()
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        self._meet(lambda: path.write_bytes(content[: len(content) // 2]))
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self._meet()
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._meet()
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._meet()
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._meet()
        super().remove_folder(path)


def save(folder: Path, fs: FileSystem, *steps: int, keep: int) -> None:
    store = CheckpointStore(folder, keep=keep, fs=fs)
    for step in steps:

        def write(into: Path, step: int = step) -> None:
            (into / "engine").mkdir()
            fs.write(into / "engine" / "shard.bin", bytes([step]) * 5000)
            fs.write(into / "state.json", b"%d" % step)

        store.save(step, write, origin=ORIGIN)


def in_child(action: Callable[[], None]) -> int:
    """The signal that ended a forked child running `action`, 0 when it finished."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return os.waitpid(child, 0)[1] & 0x7F


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("torn", [False, True])
def test_a_kill_at_every_file_action_leaves_the_newest_finished_checkpoint(
    tmp_path: Path, keep: int, torn: bool
) -> None:
    counting = Counted(0, torn=False)
    save(tmp_path / "count", counting, 1, 2, 3, keep=keep)
    assert counting.seen > 20
    outcomes = []
    for at in range(1, counting.seen + 1):
        folder = tmp_path / f"{at}"
        folder.mkdir()

        def die(at: int = at, folder: Path = folder) -> None:
            save(folder / "checkpoints", Counted(at, torn=torn), 1, 2, 3, keep=keep)

        assert in_child(die) == signal.SIGKILL
        found = newest_valid(folder / "checkpoints")  # raises if there were only torn ones
        outcomes.append(found.step if found else 0)
        if found:
            assert verify(found.path) == []
            assert (found.path / "state.json").read_bytes() == b"%d" % found.step
        # The run that is started again gets to the end and leaves nothing behind.
        save(folder / "checkpoints", FileSystem(), *range(outcomes[-1] + 1, 4), keep=keep)
        assert newest_valid(folder / "checkpoints").step == 3  # type: ignore[union-attr]
    assert outcomes == sorted(outcomes)  # what was finished once stays
    assert set(outcomes) == {0, 1, 2, 3}


class Powerless(FileSystem):
    """Remembers what was flushed, as a model of a power failure: unflushed bytes and names are lost."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Path]] = []

    def write(self, path: Path, content: bytes) -> None:
        super().write(path, content)
        self.log.append(("sync", path))

    def sync(self, path: Path) -> None:
        super().sync(path)
        self.log.append(("sync", path))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self.log.append(("rename", source))


def test_every_file_and_folder_is_flushed_before_the_rename_and_the_parent_after_it(tmp_path: Path) -> None:
    fs = Powerless()
    store = CheckpointStore(tmp_path, keep=1, fs=fs)

    def write(into: Path) -> None:
        (into / "engine").mkdir()
        (into / "engine" / "a.bin").write_bytes(b"a")
        (into / "b.bin").write_bytes(b"b")

    store.save(1, write, origin=ORIGIN)
    temporary = tmp_path / ".tmp-step-000001"
    position = fs.log.index(("rename", temporary))
    before = [path for action, path in fs.log[:position] if action == "sync"]
    names = ("engine/a.bin", "b.bin", "engine", "manifest.json", ".")
    assert {temporary / name for name in names} <= set(before)
    # The manifest is the last file, and its name is on disk before the folder gets its own.
    assert before[-2:] == [temporary / "manifest.json", temporary]
    assert ("sync", tmp_path) in fs.log[position + 1 :]


def test_the_older_checkpoint_loses_its_manifest_first_and_only_after_the_newer_one_is_there(
    tmp_path: Path,
) -> None:
    removed: list[str] = []

    class Watching(FileSystem):
        def unlink(self, path: Path) -> None:
            newer = tmp_path / "step-000002"
            assert read_manifest(newer).step == 2
            removed.append(path.name)
            super().unlink(path)

        def sync(self, path: Path) -> None:
            if path == tmp_path / "step-000001":
                removed.append("(flushed)")
            super().sync(path)

    save(tmp_path, Watching(), 1, 2, keep=1)
    assert removed == ["manifest.json", "(flushed)", "shard.bin", "state.json"]
