"""Checkpoints of nodes with disks of their own: all or nothing over the nodes, whenever they are killed."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import CheckpointError, MachineError
from shardwise.record.manifest import Origin, read_manifest, verify
from shardwise.training.checkpoint import Checkpoint, CheckpointStore, Disk, FileSystem, newest_valid

ORIGIN = Origin(world_size=4, strategy={"name": "zero2"}, identity={}, versions={})
NODES, EACH = 2, 2


class KilledError(BaseException):
    """Ends a thread that stands for a process, as SIGKILL does: nothing catches it."""


class Power:
    """All ranks: threads that exchange values, until the power goes at the n-th file action of any."""

    def __init__(self, root: Path, *, at: int = 0) -> None:
        self.root, self.at, self.seen, self.off = root, at, 0, False
        self.barrier = threading.Barrier(NODES * EACH, timeout=20)
        self.slots: list[Any] = [None] * NODES * EACH
        self.lock = threading.Lock()

    def meet(self) -> None:
        with self.lock:
            self.seen += 1
            self.off = self.off or self.seen == self.at
        if self.off:
            self.barrier.abort()
            raise KilledError

    def store(self, rank: int, **options: Any) -> CheckpointStore:
        def agree(value: object) -> list[Any]:
            try:
                self.slots[rank] = value
                self.barrier.wait()
                values = list(self.slots)
                self.barrier.wait()
            except threading.BrokenBarrierError:
                raise KilledError from None
            return values

        disk = Disk(node=rank // EACH, rank=rank % EACH, size=EACH)
        folder = self.root / f"node{disk.node}"
        folder.mkdir(exist_ok=True)
        options = {"fs": Switched(self), "keep": 1, **options}
        return CheckpointStore(folder / "checkpoints", rank=rank, agree=agree, disk=disk, **options)

    def run(self, action: Callable[[int], Any]) -> list[Any]:
        results: list[Any] = [None] * NODES * EACH

        def work(rank: int) -> None:
            try:
                results[rank] = action(rank)
            except BaseException as error:  # noqa: BLE001 - it is the result
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(NODES * EACH)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        return results


class Switched(FileSystem):
    """Asks the power before every action."""

    def __init__(self, power: Power) -> None:
        for name in ("make_folder", "write", "sync", "rename", "unlink", "remove_folder"):
            setattr(self, name, self._before(power, getattr(super(), name)))

    @staticmethod
    def _before(power: Power, action: Callable[..., None]) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            power.meet()
            action(*arguments)

        return act


def save(power: Power, *steps: int, keep: int = 1, origin: Origin = ORIGIN) -> list[Any]:
    def work(rank: int) -> Checkpoint:
        store = power.store(rank, keep=keep)

        def write(into: Path, step: int) -> None:
            (into / f"rng-rank{rank}.json").write_text(f"{step} of {rank}")
            if rank % EACH == 0:
                (into / "state.json").write_text(str(step))

        for step in steps:
            saved = store.save(step, lambda into, step=step: write(into, step), origin=origin)  # type: ignore[misc]
        return saved

    return power.run(work)


def newest(root: Path) -> int:
    """The step that every rank finds, whose files are whole on every node; 0 where there is none."""
    power = Power(root)
    found = power.run(lambda rank: power.store(rank).latest())
    steps = {one.step if one else 0 for one in found}
    assert len(steps) == 1, steps
    for rank, one in enumerate(found):
        if one:
            assert (one.path / f"rng-rank{rank}.json").read_text() == f"{one.step} of {rank}"
            assert one.path.parent == root / f"node{rank // EACH}" / "checkpoints"
    return int(steps.pop())


def test_each_node_keeps_its_own_files_and_the_manifest_says_where(tmp_path: Path) -> None:
    save(Power(tmp_path), 1, 2)
    folders = [tmp_path / f"node{node}" / "checkpoints" for node in range(NODES)]
    for node, folder in enumerate(folders):
        assert [path.name for path in folder.iterdir()] == ["step-000002"]
        ranks = [f"rng-rank{rank}.json" for rank in range(node * EACH, (node + 1) * EACH)]
        names = {path.name for path in (folder / "step-000002").iterdir()}
        assert names == {"manifest.json", "state.json", *ranks}
        manifest = read_manifest(folder / "step-000002")
        assert sorted(manifest.of(node)) == sorted({*ranks, "state.json"})
        assert manifest.nodes == [0, 1]
        assert verify(folder / "step-000002", node=node) == []
    found = newest_valid(folders[0])  # what export and report read
    assert found is not None
    assert found.step == 2
    assert found.manifest.size_bytes == 4 * len("2 of 0") + 2


def test_brought_together_in_one_folder_it_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    save(Power(tmp_path), 1)
    first, second = (tmp_path / f"node{node}" / "checkpoints" / "step-000001" for node in range(NODES))
    assert verify(first) == ["rng-rank2.json is missing", "rng-rank3.json is missing"]
    shutil.copytree(second, first, dirs_exist_ok=True)
    assert verify(first) == []


def test_a_kill_at_every_file_action_leaves_the_same_step_on_all_nodes(tmp_path: Path) -> None:
    counting = Power(tmp_path / "count")
    counting.root.mkdir()
    save(counting, 1, 2)
    assert counting.seen > 40
    outcomes = []
    for at in range(1, counting.seen + 1):
        root = tmp_path / str(at)
        root.mkdir()
        results = save(Power(root, at=at), 1, 2)
        assert any(isinstance(result, KilledError) for result in results)
        outcomes.append(newest(root))
        saved = save(Power(root), *range(outcomes[-1] + 1, 3)) if outcomes[-1] < 2 else []
        assert all(isinstance(one, Checkpoint) for one in saved), saved
        assert newest(root) == 2
    assert set(outcomes) == {0, 1, 2}


@pytest.mark.parametrize("node", [0, 1])
def test_what_a_node_lacks_is_named_and_the_older_checkpoint_is_used(tmp_path: Path, node: int) -> None:
    save(Power(tmp_path), 1, 2, keep=2)
    (tmp_path / f"node{node}" / "checkpoints" / "step-000002" / f"rng-rank{node * EACH}.json").unlink()
    power = Power(tmp_path)
    for found in power.run(lambda rank: power.store(rank).latest()):
        assert found.step == 1
        (problem,) = found.damaged
        assert problem.what == f"on node {node}: rng-rank{node * EACH}.json is missing"


def test_a_node_without_its_disk_is_a_checkpoint_error_on_all(tmp_path: Path) -> None:
    save(Power(tmp_path), 1)
    shutil.rmtree(tmp_path / "node1")
    power = Power(tmp_path)
    for error in power.run(lambda rank: power.store(rank).latest()):
        assert isinstance(error, CheckpointError)
        assert error.problems[0].what.startswith("on node 1: there is no manifest.json")


def test_parts_of_two_runs_are_not_one_checkpoint(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save(Power(tmp_path / name), 1, origin=replace(ORIGIN, identity={"run": name}))
    shutil.rmtree(tmp_path / "a/node1")
    shutil.copytree(tmp_path / "b/node1", tmp_path / "a/node1")
    power = Power(tmp_path / "a")
    for error in power.run(lambda rank: power.store(rank).latest()):
        assert isinstance(error, CheckpointError)
        assert error.problems[0].what == "the nodes have different checkpoints of this step"


def test_a_full_disk_is_that_of_the_node_that_wrote(tmp_path: Path) -> None:
    class Full(FileSystem):
        def free_bytes(self, path: Path) -> int:
            return 7 if "node1" in str(path) else 1 << 40

    power = Power(tmp_path)

    def work(rank: int) -> Checkpoint:
        def write(into: Path) -> None:
            (into / f"rng-rank{rank}.json").write_text("x")
            if rank == 3:
                raise OSError(28, "No space left on device")

        return power.store(rank, fs=Full()).save(1, write, origin=ORIGIN)

    for error in power.run(work):
        assert isinstance(error, MachineError)
        assert "more than 0.0 KiB (7 bytes)" in error.problems[0].what
        assert "node1" in error.problems[0].where
    assert not list(tmp_path.rglob(".tmp-*"))
