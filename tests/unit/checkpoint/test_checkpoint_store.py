"""Checkpoints are saved all or nothing, found only when sound, and pruned without losing the last one."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError, DivergedError, MachineError, render
from shardwise.record.manifest import Origin, read_manifest, verify
from shardwise.training import checkpoint as store_module
from shardwise.training.checkpoint import CheckpointStore, FileSystem, Keep, newest_valid
from shardwise.training.full_disk import unwritten

ORIGIN = Origin(world_size=1, strategy={"name": "single"}, identity={"seed": 1}, versions={"torch": "2.13"})


def content(step: int, name: str) -> bytes:
    return random.Random(f"{step}{name}").randbytes(20_000)


def writer(step: int, rank: int = 0) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "engine").mkdir(exist_ok=True)
        for name in (f"engine/shard-{rank}.bin", f"rng-{rank}.json"):
            (folder / name).write_bytes(content(step, name))

    return write


class Free(FileSystem):
    """A disk that says that so much is free."""

    def __init__(self, free: int) -> None:
        self.free = free

    def free_bytes(self, path: Path) -> int:
        return self.free


def save(folder: Path, *steps: int, keep: int = 10, fs: FileSystem | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, keep=keep, fs=fs)
    for step in steps:
        store.save(step, writer(step), origin=ORIGIN)
    return store


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_saved_checkpoint_is_found_with_its_bytes_and_its_origin(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 5, 10)
    found = newest_valid(tmp_path / "checkpoints")
    assert found is not None
    assert found.step == 10
    assert (found.path / "engine/shard-0.bin").read_bytes() == content(10, "engine/shard-0.bin")
    assert found.manifest.origin == ORIGIN
    assert found.manifest.size_bytes == 40_000
    assert (tmp_path / "checkpoints").stat().st_mode & 0o077 == 0


def test_no_checkpoint_is_none_and_an_unfinished_first_save_is_none(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "absent") is None
    (tmp_path / "checkpoints" / ".tmp-step-000001").mkdir(parents=True)
    assert newest_valid(tmp_path / "checkpoints") is None


def test_leftovers_of_a_crash_are_gone_after_the_next_save(tmp_path: Path) -> None:
    leftover = tmp_path / ".tmp-step-000003" / "engine"
    leftover.mkdir(parents=True)
    (leftover / "shard-0.bin").write_bytes(b"half")
    outside = tmp_path.parent / "outside"
    outside.mkdir()
    (outside / "mine.bin").write_bytes(b"mine")
    (tmp_path / ".tmp-step-000004").symlink_to(outside)
    save(tmp_path, 5)
    assert steps_in(tmp_path) == ["step-000005"]
    assert (outside / "mine.bin").read_bytes() == b"mine"


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 1, 2, 3, 4, 5, keep=keep)
    assert steps_in(tmp_path) == [f"step-{step:06d}" for step in range(6 - keep, 6)]


def test_damaged_and_partial_folders_do_not_count_as_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3, 4)
    flip(tmp_path / "step-000003" / "rng-0.json", 77)  # same size: only the hash can tell
    (tmp_path / "step-000004" / "manifest.json").unlink()
    save(tmp_path, 5, keep=2)
    assert steps_in(tmp_path) == ["step-000002", "step-000005"]


def test_a_damaged_newer_one_never_pushes_out_the_one_just_saved(tmp_path: Path) -> None:
    save(tmp_path, 1, 9)
    flip(tmp_path / "step-000009" / "rng-0.json", 5)
    store = CheckpointStore(tmp_path, keep=1)
    resumed = store.latest()
    assert resumed is not None
    assert resumed.step == 1
    store.save(2, writer(2), origin=ORIGIN)
    assert newest_valid(tmp_path).step == 2  # type: ignore[union-attr]
    store.save(9, writer(9), origin=ORIGIN)
    assert verify(tmp_path / "step-000009") == []
    assert steps_in(tmp_path) == ["step-000009"]


def test_a_sound_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = save(tmp_path, 1)
    before = written(tmp_path / "step-000001")
    store.save(1, writer(2), origin=ORIGIN)
    assert written(tmp_path / "step-000001") == before
    assert verify(tmp_path / "step-000001") == []


def written(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Which file each name is and when it was last changed, ns. Reading changes only `st_atime`."""
    stats = {path.name: path.stat() for path in [folder, *folder.iterdir()]}
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats.items()}


def flip(path: Path, bit: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[bit // 8] ^= 1 << (bit % 8)
    path.write_bytes(damaged)


def zero_page(path: Path, at: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[at : at + 4096] = bytes(len(damaged[at : at + 4096]))
    path.write_bytes(damaged)


def test_every_one_of_240_damages_is_found_and_the_older_checkpoint_used(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    files = [path for path in (tmp_path / "step-000002").rglob("*") if path.is_file()]
    assert len(files) == 3  # manifest.json among them
    rng = random.Random(0)
    for number in range(240):
        path = rng.choice(files)
        sound = path.read_bytes()
        match number % 3:
            case 0:
                flip(path, rng.randrange(len(sound) * 8))
            case 1:
                path.write_bytes(sound[: rng.randrange(len(sound))])
            case 2:
                zero_page(path, rng.randrange(0, len(sound), 4096))
        found = newest_valid(tmp_path)
        assert found is not None
        assert found.step == 1, f"damage {number} of {path.name} was not seen"
        assert [problem.where for problem in found.damaged] == [str(tmp_path / "step-000002")]
        path.write_bytes(sound)
    assert newest_valid(tmp_path).step == 2  # type: ignore[union-attr]


def test_swapped_missing_added_and_linked_files_are_named(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    shard, rng = folder / "engine/shard-0.bin", folder / "rng-0.json"
    a, b = shard.read_bytes(), rng.read_bytes()
    shard.write_bytes(b)
    rng.write_bytes(a)
    assert len(verify(folder)) == 2
    shard.write_bytes(a)
    rng.unlink()
    assert verify(folder) == ["rng-0.json is missing"]
    rng.symlink_to(shard)
    assert verify(folder) == ["rng-0.json is a link, not a file"]
    rng.unlink()
    rng.write_bytes(b)
    (folder / "engine/extra").write_bytes(b"")
    assert verify(folder) == ["engine/extra is not in the manifest"]


@pytest.mark.parametrize("key", ["step", "world_size", "strategy", "identity", "files", "schema"])
def test_an_edited_manifest_is_refused(tmp_path: Path, key: str) -> None:
    save(tmp_path, 1)
    path = tmp_path / "step-000001" / "manifest.json"
    body = json.loads(path.read_text())
    body[key] = {} if isinstance(body[key], dict) else body[key] + 1
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError):
        newest_valid(tmp_path)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000001").rename(tmp_path / "step-000007")
    assert "step 1" in verify(tmp_path / "step-000007")[0]


def test_when_none_is_sound_every_one_is_named_and_nothing_starts_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "step-000001" / "rng-0.json", 1)
    (tmp_path / "step-000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointError) as error:
        newest_valid(tmp_path)
    block = render(error.value)
    assert "step-000001" in block
    assert "rng-0.json is damaged" in block
    assert "no manifest.json" in block


class Failing(FileSystem):
    """Fails with `number` at the n-th action of the protocol."""

    def __init__(self, at: int, number: int) -> None:
        self.at, self.number, self.seen = at, number, 0

    def _count(self, path: Path) -> None:
        self.seen += 1
        if self.seen == self.at:
            raise OSError(self.number, os.strerror(self.number), str(path))

    def make_folder(self, path: Path) -> None:
        self._count(path)
        super().make_folder(path)

    def write(self, path: Path, content: bytes) -> None:
        self._count(path)
        super().write(path, content)

    def sync(self, path: Path) -> None:
        self._count(path)
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        self._count(source)
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._count(path)
        super().unlink(path)

    def remove_folder(self, path: Path) -> None:
        self._count(path)
        super().remove_folder(path)


def actions_of_a_save(folder: Path) -> int:
    save(folder, 1, 2)
    counting = Failing(0, 0)
    save(folder, 3, keep=2, fs=counting)
    return counting.seen


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT])
def test_an_error_at_any_action_leaves_a_sound_checkpoint_and_no_temporary_folder(
    tmp_path: Path, number: int
) -> None:
    count = actions_of_a_save(tmp_path / "count")
    assert count >= 12
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        save(folder, 1, 2)
        with pytest.raises(MachineError) as error:
            save(folder, 3, keep=2, fs=Failing(at, number))
        full = number in (errno.ENOSPC, errno.EDQUOT)
        assert ("a quota" in str(error.value)) == full, "for much is free here"
        assert not list(folder.glob(".tmp-*"))
        assert newest_valid(folder).step in (2, 3)  # type: ignore[union-attr]
        save(folder, 3, 4, keep=2)
        assert steps_in(folder) == ["step-000003", "step-000004"]


def test_a_full_disk_is_told_in_bytes_before_anything_is_written(tmp_path: Path) -> None:
    store = save(tmp_path, 1, fs=Free(39_999))  # the first one's size is not known beforehand
    written: list[Path] = []
    with pytest.raises(MachineError) as error:
        store.save(2, written.append, origin=ORIGIN)
    assert "40000 bytes" in str(error.value)
    assert "39999 bytes" in str(error.value)
    assert written == []
    assert steps_in(tmp_path) == ["step-000001"]


@pytest.mark.parametrize(
    "says",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "Error while serializing: I/O error: File too large (os error 27)",
        "[enforce fail at inline_container.cc:672] . unexpected pos 537920 vs 537808",
    ],
)
def test_a_library_that_hides_the_error_number_is_understood(says: str, tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "part").write_bytes(bytes(123))
        raise RuntimeError(says)

    with pytest.raises(MachineError, match=r"the disk is full.*123 bytes"):
        CheckpointStore(tmp_path, keep=1, fs=Free(1)).save(1, write, origin=ORIGIN)
    with pytest.raises(MachineError, match=r"100.0 GiB.*are free: RuntimeError: .*123 bytes"):
        CheckpointStore(tmp_path, keep=1, fs=Free(100 * 2**30)).save(1, write, origin=ORIGIN)
    assert steps_in(tmp_path) == []


MIB = 1024**2


@pytest.mark.parametrize(
    ("known", "written", "free", "what"),
    [
        (2 * MIB, 0, MIB, "a checkpoint needs 2.0 MiB (2097152 bytes), free are 1.0 MiB (1048576 bytes)"),
        (0, 2 * MIB, MIB, "needs more than 2.0 MiB (2097152 bytes), free are 1.0 MiB (1048576 bytes)"),
        (0, 6259921, 6266880, "needs more than 6.0 MiB (6266880 bytes), which is all that is free"),
        (5000 * MIB, 5000 * MIB, 5010 * MIB, "needs more than 4.9 GiB (5253365760 bytes), which is all"),
        (0, 4 * MIB, 60 * 1024 * MIB, "could not be written, and 60.0 GiB (64424509440 bytes) are free: why"),
    ],
)
def test_bytes_needed_are_never_fewer_than_those_that_are_free(
    known: int, written: int, free: int, what: str
) -> None:
    found = unwritten(Path("here"), 1, "why", known=known, written=written, free=free)
    assert what in found.what
    full = free < 1024**3 * 50
    assert found.what.startswith("the disk is full") == full
    assert ("ulimit -f" in found.fix, "make room" in found.fix) == (not full, full)
    assert " 0.0 " not in found.what


def test_a_bug_while_writing_keeps_its_own_type(tmp_path: Path) -> None:
    def write(_: Path) -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        CheckpointStore(tmp_path, keep=1).save(1, write, origin=ORIGIN)
    assert steps_in(tmp_path) == []


class Ranks:
    """Several ranks as threads, with the same all-gather as the real ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=10)
        self.slots: list[Any] = [None] * size

    def agree(self, rank: int) -> Callable[[object], list[Any]]:
        def gather(value: object) -> list[Any]:
            self.slots[rank] = value
            self.barrier.wait()
            values = list(self.slots)
            self.barrier.wait()
            return values

        return gather

    def run(self, action: Callable[[int], object]) -> list[object]:
        results: list[object] = [None] * self.size

        def work(rank: int) -> None:
            try:
                results[rank] = action(rank)
            except Exception as error:  # noqa: BLE001 - it is the result
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "a rank was left waiting"
        return results


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_write_hash_and_find_one_checkpoint_together(tmp_path: Path, size: int) -> None:
    ranks = Ranks(size)

    def work(rank: int) -> int:
        store = CheckpointStore(tmp_path, keep=1, rank=rank, agree=ranks.agree(rank))
        store.save(1, writer(1, rank), origin=ORIGIN)
        found = store.latest()
        assert found is not None
        return len(found.manifest.files)

    assert ranks.run(work) == [2 * size] * size
    assert verify(tmp_path / "step-000001") == []


def test_ranks_share_the_reading_and_all_hear_of_damage(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    for name in ("engine/shard-0.bin", "rng-0.json"):  # one is read by rank 0, the other by rank 1
        path = tmp_path / "step-000002" / name
        sound = path.read_bytes()
        flip(path, 9)
        ranks = Ranks(2)
        found = ranks.run(
            lambda rank, ranks=ranks: (
                CheckpointStore(  # type: ignore[misc]
                    tmp_path, keep=1, rank=rank, agree=ranks.agree(rank)
                )
                .latest()
                .step
            )
        )
        assert found == [1, 1], name
        path.write_bytes(sound)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_on_one_rank_is_an_error_on_all(tmp_path: Path, failing: int) -> None:
    save(tmp_path, 1)
    ranks = Ranks(2)

    def work(rank: int) -> object:
        def write(folder: Path) -> None:
            (folder / f"part-{rank}").write_bytes(b"part")
            if rank == failing:
                raise OSError(errno.EIO, "Input/output error")

        store = CheckpointStore(tmp_path, keep=1, rank=rank, agree=ranks.agree(rank))
        return store.save(2, write, origin=ORIGIN)

    errors = ranks.run(work)
    assert [type(error) for error in errors] == [MachineError, MachineError]
    assert all(f"rank {failing}" in render(error) for error in errors)  # type: ignore[arg-type]
    assert steps_in(tmp_path) == ["step-000001"]


def test_all_ranks_tell_of_a_run_that_diverged(tmp_path: Path) -> None:
    """Only the rank that writes the weights sees it; the user is shown the error of any."""
    ranks = Ranks(2)

    def diverges(_: Path) -> None:
        raise DivergedError("not finite", where="step 1", fix="lower it")

    def work(rank: int) -> object:
        store = CheckpointStore(tmp_path, keep=1, rank=rank, agree=ranks.agree(rank))
        with pytest.raises(DivergedError) as raised:
            store.save(1, diverges if rank == 0 else writer(1, rank), origin=ORIGIN)
        return raised.value.problems[0].fix

    assert ranks.run(work) == ["lower it", "lower it"]
    assert not steps_in(tmp_path)


def test_a_rank_that_failed_does_not_wait_for_ever_for_ranks_in_a_collective(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.2)
    ranks, released = Ranks(2), threading.Event()

    def work(rank: int) -> object:
        def write(folder: Path) -> None:
            if rank == 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            released.wait(10)  # as in an all-gather that rank 1 will never join

        try:
            store = CheckpointStore(tmp_path, keep=1, rank=rank, agree=ranks.agree(rank))
            return store.save(1, write, origin=ORIGIN)
        finally:
            ranks.barrier.abort()
            released.set()

    began = time.monotonic()
    errors = ranks.run(work)
    assert isinstance(errors[1], MachineError)
    assert "No space left on device" in str(errors[1])
    assert time.monotonic() - began < 5


def test_rank_0_failing_alone_at_any_action_leaves_no_rank_waiting(tmp_path: Path) -> None:
    for at in range(1, 11):
        ranks = Ranks(2)
        folder = tmp_path / str(at)

        def work(rank: int, at: int = at, ranks: Ranks = ranks, folder: Path = folder) -> object:
            fs = Failing(at, errno.EIO) if rank == 0 else FileSystem()
            store = CheckpointStore(folder, keep=1, rank=rank, agree=ranks.agree(rank), fs=fs)
            return store.save(1, writer(1, rank), origin=ORIGIN)

        results = ranks.run(work)
        assert [type(result) for result in results] == [MachineError] * 2, at


def test_the_manifest_lists_sizes_and_hashes_that_sha256sum_gives(tmp_path: Path) -> None:
    import hashlib

    save(tmp_path, 3)
    entry = read_manifest(tmp_path / "step-000003").files["engine/shard-0.bin"]
    assert entry.size_bytes == 20_000
    assert entry.sha256 == hashlib.sha256(content(3, "engine/shard-0.bin")).hexdigest()


def kept(folder: Path, keep: Keep, *steps: int, ranking: list[int] | None = None) -> list[int]:
    """The steps that are left after saves of these."""
    store = CheckpointStore(folder, keep=keep)
    store.ranking = lambda: ranking or []
    for step in steps:
        store.save(step, writer(step), origin=ORIGIN)
    return sorted(int(name.removeprefix("step-")) for name in steps_in(folder))


def test_each_rule_keeps_its_own(tmp_path: Path) -> None:
    assert kept(tmp_path / "1", Keep(last=2, every=4), *range(1, 11)) == [4, 8, 9, 10]
    assert kept(tmp_path / "2", Keep(best=2), *range(1, 7), ranking=[2, 9, 4, 1]) == [2, 4, 6]
    # of the three best only those that were saved count
    assert kept(tmp_path / "3", Keep(last=1, best=1), 1, 2, 3, ranking=[3, 1]) == [3]


def test_a_best_one_that_is_damaged_makes_room_for_the_next_best(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    flip(tmp_path / "step-000002" / "rng-0.json", 77)
    assert kept(tmp_path, Keep(best=1), 4, ranking=[2, 1, 3]) == [1, 4]


def test_those_of_the_last_days_stay(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for step, days in ((1, 3.0), (2, 1.9)):
        then = time.time() - 86_400 * days
        os.utime(tmp_path / f"step-{step:06d}" / "manifest.json", (then, then))
    assert kept(tmp_path, Keep(days=2.0), 4) == [2, 3, 4]


def test_the_source_of_a_resumed_run_stays_until_a_newer_one_is_sound(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    store = CheckpointStore(tmp_path, keep=Keep(last=1))
    assert store.latest(only=1).step == 1  # type: ignore[union-attr]
    store.set_aside(1)
    with pytest.raises(MachineError, match="gone"):
        store.save(3, lambda _: (_ for _ in ()).throw(OSError("gone")), origin=ORIGIN)
    assert steps_in(tmp_path) == ["aside-step-000002", "step-000001"]
    store.save(3, writer(3), origin=ORIGIN)
    assert steps_in(tmp_path) == ["aside-step-000002", "step-000003"]


def test_what_is_being_copied_stays(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, writer(1), origin=ORIGIN)
    store.pinned = 1
    store.save(2, writer(2), origin=ORIGIN)
    assert steps_in(tmp_path) == ["step-000001", "step-000002"]
