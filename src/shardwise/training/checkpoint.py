"""The folder of a run's checkpoints: saved all or nothing, found only when sound, removed last.

The commit protocol, in the order in which it survives a crash at any point:

1. rank 0 makes `.tmp-step-000100`; every rank writes its part into it, perhaps from a thread (saving.py);
2. the ranks share out the files, flush them to disk and hash them;
3. rank 0 writes `manifest.json` last, flushes the folders, renames to `step-000100`, flushes the parent;
4. older checkpoints are removed, their manifest first, so that a half removed one never counts.

After every phase the ranks exchange their results, so that a failure on one is an error on all, and none
is left waiting. There is no pointer file: the newest folder that verifies is used.

Nodes with disks of their own do the same, each in its own folder with the files of its ranks. All write the
same manifest, which says what lies on which node. Node 0 renames last, and only what it has counts: a crash
before leaves folders on other nodes that nobody asks for, and that the next save of that step replaces.
"""

import errno
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import CheckpointError, DivergedError, MachineError, Problem, what_of
from shardwise.folders import sync
from shardwise.job.schema import Train
from shardwise.record.manifest import (
    NAME,
    FileEntry,
    Manifest,
    Origin,
    folder_name,
    hash_files,
    list_files,
    read_manifest,
    step_folders,
    verify,
)
from shardwise.training.full_disk import is_full, unwritten

T = TypeVar("T")
_Failure = tuple[bool, str, DivergedError | None]
Agree = Callable[[object], list[Any]]
"""Gives every rank the values of all, by rank, and returns on none before all have called it."""

ANSWER_SECONDS = 60.0  # How long a rank that failed waits for the others to hear of it

_TEMPORARY = ".tmp-"


class FileSystem:
    """The file actions of the commit protocol; tests make any of them fail, as a crash could.

    The engine's own writing is not among them: what it wrote is flushed (`sync`) and hashed before it counts.
    """

    def make_folder(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def write(self, path: Path, content: bytes) -> None:
        """Write a new file; it is on disk when this returns."""
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Bring a file, or a folder's entries, to the disk."""
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        source.rename(target)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        path.rmdir()

    def free_bytes(self, path: Path) -> int:
        return shutil.disk_usage(path).free


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    step: int
    path: Path
    manifest: Manifest
    damaged: tuple[Problem, ...] = ()  # Newer ones that were skipped, and why

    def warn_of_damaged(self) -> None:
        """Name on stderr what was skipped."""
        for problem in self.damaged:
            print(f"warning: passed over {problem.where}: {problem.what}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Which checkpoints stay: each rule keeps its own, and the newest sound one always does."""

    last: int = 1  # The newest
    best: int = 0  # Those with the lowest evaluation losses
    every: int = 0  # Those of steps that it divides
    days: float = 0.0  # Those that are not older
    mirror: str | None = None  # Where copies are: training/mirror.py

    @staticmethod
    def of(train: Train) -> "Keep":
        """`train.keep`; `train.patience` keeps the best one, too."""
        keep = Keep(**train.keep) if isinstance(train.keep, dict) else Keep(last=train.keep)  # type: ignore[arg-type]
        return keep if train.patience is None else replace(keep, best=max(1, keep.best))

    def chosen(
        self,
        steps: Sequence[int],
        ranking: Iterable[int],
        sound: Callable[[int], bool] = lambda _: True,
        young: Container[int] = (),
    ) -> set[int]:
        """Of `steps`, newest first, those that stay. Only what has to be known is asked to be `sound`."""
        best = (step for step in ranking if step in steps and sound(step))
        kept = {*islice(filter(sound, steps), max(1, int(self.last))), *islice(best, int(self.best))}
        return kept | {step for step in steps if step in young or (self.every and step % self.every == 0)}


@dataclass(frozen=True)
class Disk:
    """The disk of one node's ranks, where the nodes share none; and this rank's number among them."""

    node: int
    rank: int
    size: int


class CheckpointStore:
    """Saves and finds the checkpoints in one folder. `save` and `latest` are collective."""

    def __init__(
        self,
        folder: Path,
        *,
        keep: int | Keep,
        rank: int = 0,
        agree: Agree = lambda value: [value],
        disk: Disk | None = None,
        fs: FileSystem | None = None,
    ) -> None:
        """`keep`: what stays; a number of the newest. All ranks share `folder`, or those of `disk`."""
        self.folder, self.keep = Path(folder), Keep(last=keep) if isinstance(keep, int) else keep
        self.rank, self.agree, self.fs = rank, agree, fs or FileSystem()
        self.disk, self.node = disk, None if disk is None else disk.node
        self._leads = rank == 0 if disk is None else disk.rank == 0  # One rank for each folder
        self._sound: set[int] = set()  # steps that this process has verified
        self.ranking: Callable[[], Iterable[int]] = tuple  # Evaluated steps, the best first
        self.pinned: int | None = None  # A step that is being copied
        self._last_bytes = 0  # size of the newest one known, the forecast for the next

    def save(self, step: int, *writes: Callable[[Path], None], origin: Origin) -> Checkpoint:
        """Save one checkpoint; on return it is on disk, and too old ones are gone. Collective.

        `writes` put a rank's files into the folder that they are given, each when all ranks have done the one
        before. A sound checkpoint of the same step is left as it is. Raises MachineError on every rank when
        any could not write; what was written so far is then removed, and the older ones are untouched.
        """
        temporary = self.folder / f"{_TEMPORARY}{folder_name(step)}"
        final = self.folder / folder_name(step)
        if all(self._on_leads(lambda: self._is_saved(final))):
            manifest = read_manifest(final)
        else:
            self._on_leads(lambda: self._prepare(temporary))
            *_, size = [len(self._together(partial(write, temporary))) for write in writes]
            manifest = self._manifest(step, origin, self._together(lambda: self._hash(temporary, size)))
            for first in (False, True):  # node 0 last: what it has counts
                self._on_leads(lambda: self._commit(temporary, final, manifest), first=first)
        self._sound.add(step)
        self._last_bytes = sum(entry.size_bytes for entry in manifest.of(self.node).values())
        self._on_leads(lambda: self._prune(step))
        return Checkpoint(step=step, path=final, manifest=manifest)

    def latest(self, first: int | None = None, *, only: int | None = None) -> Checkpoint | None:
        """The newest checkpoint that verifies; that of step `first` before it; or only that of step `only`.

        Collective. Damaged ones are skipped and named in `Checkpoint.damaged`. Raises CheckpointError when
        there are checkpoints and none is sound: starting again from step 0 is never silent.
        """
        damaged: list[Problem] = []
        seen = self.agree(step_folders(self.folder))
        for step, _ in sorted(seen[0], key=lambda found: found[0] != first):
            if only not in (None, step):
                continue
            path = self.folder / folder_name(step)
            by_rank = self.agree(self._verify(path, len(seen)))
            problems = sorted({problem for problems, _ in by_rank for problem in problems})
            if not problems and len({text for _, text in by_rank}) > 1:
                problems = ["the nodes have different checkpoints of this step"]
            if not problems:
                self._sound.add(step)
                manifest = read_manifest(path)
                self._last_bytes = sum(entry.size_bytes for entry in manifest.of(self.node).values())
                return Checkpoint(step=step, path=path, manifest=manifest, damaged=tuple(damaged))
            damaged.append(Problem(what="; ".join(problems[:5]), where=str(path)))
        if damaged:
            what = "no checkpoint of this run is sound; "
            what += "restore one from a copy, or start again under another name"
            raise CheckpointError(what, problems=damaged)
        return None

    def set_aside(self, step: int) -> None:
        """Rename checkpoints after `step`, which the run will not pass as it did then. Collective."""

        def rename() -> None:
            for _, path in (one for one in step_folders(self.folder) if one[0] > step):
                names = (path.with_name(f"aside{n or ''}-{path.name}") for n in count())
                self.fs.rename(path, next(name for name in names if not name.exists()))
            self.fs.sync(self.folder)

        self._on_leads(rename)

    def _verify(self, path: Path, size: int) -> tuple[list[str], str]:
        """What is wrong with this rank's share of a checkpoint, and the manifest."""
        disk = self.disk or Disk(0, self.rank, size)
        problems = verify(path, node=self.node, rank=disk.rank, size=disk.size)
        if problems:
            prefix = "" if self.disk is None else f"on node {disk.node}: "
            return [f"{prefix}{problem}" for problem in problems], ""
        return [], read_manifest(path).to_text()

    def _is_saved(self, final: Path) -> bool:
        """Clear what a crash left behind; True if this checkpoint is there already."""
        if not self.folder.exists():
            self.fs.make_folder(self.folder)
            self.fs.sync(self.folder.parent)
        for leftover in self.folder.glob(f"{_TEMPORARY}*"):
            self._remove(leftover)
        return final.exists() and not verify(final, node=self.node)

    def _prepare(self, temporary: Path) -> None:
        if self.fs.free_bytes(self.folder) < self._last_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.folder))
        self.fs.make_folder(temporary)

    def _hash(self, folder: Path, size: int) -> tuple[int, dict[str, FileEntry]]:
        """The node, and this rank's share of the files, flushed. All are written: any rank can take any."""
        disk = self.disk or Disk(0, self.rank, size)
        names = list_files(folder)[disk.rank :: disk.size]
        for name in names:
            self.fs.sync(folder / name)
        return disk.node, hash_files(folder, names)

    def _manifest(
        self, step: int, origin: Origin, shares: Sequence[tuple[int, dict[str, FileEntry]]]
    ) -> Manifest:
        files: dict[int, dict[str, FileEntry]] = {0: {}}
        for node, share in shares:
            files.setdefault(node, {}).update(share)
        elsewhere = {str(node): of_node for node, of_node in files.items() if node}
        return Manifest(step=step, origin=origin, files=files[0], elsewhere=elsewhere)

    def _commit(self, temporary: Path, final: Path, manifest: Manifest) -> None:
        if list_files(temporary) != sorted(manifest.of(self.node)):
            raise OSError(errno.EIO, "the ranks do not see the same files", str(temporary))
        for path in temporary.rglob("*"):
            if path.is_dir():
                self.fs.sync(path)
        self.fs.write(temporary / NAME, manifest.to_text().encode())
        self.fs.sync(temporary)
        if final.exists():  # damaged, or `_prepare` would have kept it
            self._remove(final)
        self.fs.rename(temporary, final)
        self.fs.sync(self.folder)

    def _prune(self, saved: int) -> None:
        """Remove what no rule keeps of those up to the one just saved."""
        # Newer folders were damaged when the run resumed behind them, and are replaced when it passes them.
        found = {step: path for step, path in step_folders(self.folder) if step <= saved}
        since = time.time() - 86_400 * self.keep.days
        files = {step: path / NAME for step, path in found.items() if self.keep.days}
        young = [step for step, file in files.items() if file.is_file() and file.stat().st_mtime > since]
        sound = partial(self._is_sound, found)
        for step in found.keys() - self.keep.chosen([*found], self.ranking(), sound, young) - {self.pinned}:
            self._remove(found[step])

    def _is_sound(self, found: Mapping[int, Path], step: int) -> bool:
        """Whether every byte is as it was saved; what this process has seen so is not read again."""
        if step not in self._sound and not verify(found[step], node=self.node):
            self._sound.add(step)
        return step in self._sound

    def _remove(self, path: Path) -> None:
        """Remove a checkpoint or a leftover, its manifest first; links are removed, never followed."""
        if path.is_symlink() or not path.is_dir():
            self.fs.unlink(path)
            return
        if (path / NAME).is_file():
            self.fs.unlink(path / NAME)
            self.fs.sync(path)
        for child in sorted(path.iterdir()):
            self._remove(child)
        self.fs.remove_folder(path)

    def _on_leads(self, action: Callable[[], T], *, first: bool | None = None) -> list[T]:
        """Results of `action` by one rank for each folder; raises on every rank if one failed. Collective.

        `first`: only rank 0, or only the others.
        """
        does = self._leads and first in (None, self.rank == 0)
        results = self._together(lambda: (action(),) if does else ())
        return [value for result in results for value in result]

    def _together(self, action: Callable[[], T]) -> list[T]:
        """Every rank's result of `action`; raises on every rank if it failed on any. Collective."""
        result, failure = None, None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of any
            failure = error
        outcomes = self.agree((None, result)) if failure is None else self._admit(failure)
        failures = [(rank, what) for rank, (what, _) in enumerate(outcomes) if what is not None]
        if not failures:
            return [result for _, result in outcomes]
        found: list[Problem | None] = self.agree(self._give_up(failures) if self._leads else None)
        problem = next(one for one in found[failures[0][0] :: -1] if one)  # of the node that failed
        failure = failure or failures[0][1][2]
        if failure is not None and not isinstance(failure, OSError) and not is_full(failure):
            raise failure
        raise MachineError(problem.what, where=problem.where, fix=problem.fix) from failure

    def _admit(self, failure: Exception) -> list[Any]:
        """Report a failure here to the other ranks. Raises it where they do not answer.

        The engine writes with collectives: a rank that left them early would wait here for ranks that wait
        there. It ends instead, and the launcher ends the others.
        """
        answers: list[list[Any]] = []

        def report() -> None:
            with suppress(Exception):  # a lost connection is no answer either
                answers.append(self.agree((_describe(failure), None)))

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        if answers:
            return answers[0]
        problem = self._give_up([(self.rank, _describe(failure))])
        raise MachineError(problem.what, where=problem.where, fix=problem.fix) from failure

    def _give_up(self, failures: list[tuple[int, _Failure]]) -> Problem:
        """Remove the temporary folder; say what went wrong, with the bytes where the disk is full."""
        written = 0
        for leftover in list(self.folder.glob(f"{_TEMPORARY}*")):
            written += sum((leftover / name).lstat().st_size for name in list_files(leftover))
            with suppress(OSError):  # the next save tries again; the first failure is the one to report
                self._remove(leftover)
        rank, (_, text, _) = failures[0]
        if not any(full for _, (full, *_) in failures):
            what, where = f"a checkpoint could not be written: {text}", f"rank {rank}, {self.folder}"
            fix = "remove the cause and go on with --resume: the checkpoints before it are untouched"
            return Problem(what=what, where=where, fix=fix)
        free = self.fs.free_bytes(self.folder)
        return unwritten(self.folder, rank, text, known=self._last_bytes, written=written, free=free)


def newest_valid(folder: Path, first: int | None = None) -> Checkpoint | None:
    """`CheckpointStore.latest` for a single process that only reads what lies here."""
    store = CheckpointStore(folder, keep=1)
    store.node = 0
    return store.latest(first)


def _describe(error: Exception) -> _Failure:
    """A failure for the other ranks: whether the disk is full, what happened, what they raise as well."""
    shown = error if isinstance(error, DivergedError) else None
    return is_full(error), f"{type(error).__name__}: {what_of(error)}", shown
