"""Copies of checkpoints in another folder, or at any URL that fsspec knows, laid out as the run folder is.

A file counts when it was read back with its hash, a copy when its manifest is there, which is written last.
A thread of rank 0 copies. It delays no save, never ends the run, and tries again after the next save.
"""

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import TypeGuard, TypeVar

from fsspec.core import url_to_fs

from shardwise.errors import CheckpointError, JobError, MachineError, Problem, ShardwiseError, what_of
from shardwise.job.schema import Job
from shardwise.launch.heartbeat import mark
from shardwise.record.manifest import NAME, FileEntry, Manifest, folder_name, hash_files, step_folders
from shardwise.record.read import ENVIRONMENT, EVENTS, JOB, PLAN, is_run_folder
from shardwise.record.write import redact
from shardwise.training.checkpoint import CheckpointStore, Keep

T = TypeVar("T")
_PIECE = 8 << 20  # Bytes that are copied at once
_RECORD = (EVENTS, ENVIRONMENT, PLAN, JOB)  # The last one makes it a run folder


class Mirror:
    """The copy of one run."""

    def __init__(self, url: str) -> None:
        """`url`: of the run's folder there. JobError where fsspec does not know its protocol."""
        self.shown = redact(url)
        try:
            self._fs, path = url_to_fs(url)
        except (ValueError, ImportError) as error:
            fix = "name a folder, or a URL whose protocol is installed (pip install s3fs, gcsfs, ...)"
            raise JobError(f"no copy can be there: {error}", where=self.shown, fix=fix) from None
        self._path = str(path).rstrip("/")
        self._folder = f"{self._path}/checkpoints"

    def steps(self) -> list[int]:
        """Of complete copies, the newest first."""
        self._fs.invalidate_cache()
        found = (Path(path).parent.name for path in self._fs.glob(f"{self._folder}/step-*/{NAME}"))
        return sorted((int(name.removeprefix("step-")) for name in found), reverse=True)

    def put(self, folder: Path) -> None:
        """Copy a checkpoint unless it is there. OSError where other bytes are read back."""
        text, there = (folder / NAME).read_bytes(), f"{self._folder}/{folder.name}"
        if self._fs.exists(f"{there}/{NAME}"):
            if self._fs.cat_file(f"{there}/{NAME}") == text:
                return
            self._fs.rm_file(f"{there}/{NAME}")  # of another state of this step
        for name, entry in Manifest.from_json(json.loads(text)).files.items():
            file = f"{there}/{name}"
            if not self._has(file, entry):
                self._fs.makedirs(file.rpartition("/")[0], exist_ok=True)
                with (folder / name).open("rb") as source, self._fs.open(file, "wb") as target:
                    shutil.copyfileobj(source, target, _PIECE)
                if not self._has(file, entry):
                    raise OSError(f"{name} was read back with other bytes than those it was saved with")
        self._fs.pipe_file(f"{there}/{NAME}", text)

    def _has(self, file: str, entry: FileEntry) -> bool:
        self._fs.invalidate_cache()
        if not self._fs.exists(file) or self._fs.size(file) != entry.size_bytes:
            return False
        with self._fs.open(file, "rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest() == entry.sha256

    def tidy(self, run_dir: Path, store: CheckpointStore) -> None:
        """Copy the run's record, and remove what neither a rule keeps nor the run has."""
        for name in _RECORD:
            self._fs.pipe_file(f"{self._path}/{name}", (run_dir / name).read_bytes())
        local, steps = dict(step_folders(store.folder)), self.steps()
        since = time.time() - 86_400 * store.keep.days
        for step in [one for one in steps if one > max(local, default=one)]:  # the run went back behind it
            aside = f"{self._folder}/aside-{time.time():.0f}-{folder_name(step)}"
            self._fs.mv(f"{self._folder}/{folder_name(step)}", aside, recursive=True)
            steps.remove(step)
        files = {step: f"{self._folder}/{folder_name(step)}/{NAME}" for step in steps if store.keep.days}
        young = [step for step, file in files.items() if self._fs.modified(file).timestamp() > since]
        stay = store.keep.chosen(steps, store.ranking(), young=young) | local.keys()
        for path in self._fs.glob(f"{self._folder}/step-*"):
            if Path(path).name not in map(folder_name, stay):
                if self._fs.exists(f"{path}/{NAME}"):
                    self._fs.rm_file(f"{path}/{NAME}")  # first: half of it is no copy
                self._fs.rm(path, recursive=True)

    def take(self, step: int, run_dir: Path) -> None:
        """Take a copy into the run folder, which is made where there is none. CheckpointError: not sound."""
        there = f"{self._folder}/{folder_name(step)}"
        try:
            manifest = Manifest.from_json(json.loads(self._fs.cat_file(f"{there}/{NAME}")))
        except ValueError as error:
            raise CheckpointError(f"its manifest cannot be used: {error}") from None
        if not is_run_folder(run_dir):
            run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in _RECORD:
                (run_dir / name).write_bytes(self._fs.cat_file(f"{self._path}/{name}"))

        def write(folder: Path) -> None:
            for name in manifest.files:
                file = folder / name
                if not file.resolve().is_relative_to(folder.resolve()):
                    raise CheckpointError(f"{name} lies outside of it")
                file.parent.mkdir(parents=True, exist_ok=True)
                with self._fs.open(f"{there}/{name}", "rb") as source, file.open("xb") as target:
                    shutil.copyfileobj(source, target, _PIECE)
            found = hash_files(folder, manifest.files)
            if damaged := [name for name, entry in manifest.files.items() if found[name] != entry]:
                raise CheckpointError(f"damaged: {', '.join(damaged[:5])}")

        all_stay = Keep(days=1e6)
        CheckpointStore(run_dir / "checkpoints", keep=all_stay).save(step, write, origin=manifest.origin)


class Mirroring:
    """Follows the checkpoints of a run, in a thread."""

    def __init__(self, url: str, run_dir: Path, store: CheckpointStore) -> None:
        self._mirror, self._run_dir, self._store = Mirror(url), run_dir, store
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mirror")
        self._pending: Future[None] | None = None
        self._step: int | None = None
        self._failed: str | None = None

    def saved(self) -> dict[str, object]:
        """A checkpoint is on disk, and will be copied. The state before that."""
        if self._pending is not None:
            self._pending.cancel()  # one that has not begun would do the same
        self._pending = self._thread.submit(self._follow)
        return self.state()

    def state(self, *, last: bool = False) -> dict[str, object]:
        """`step`: the newest complete copy that this process made or found; `failed`: what could not be done.

        `last`: once nothing is left to do.
        """
        while last and self._pending is not None and wait([self._pending], timeout=5.0).not_done:
            mark("ending")
        return {"step": self._step, "failed": self._failed}

    def _follow(self) -> None:
        """Copy what is missing, the newest first. Each protocol has errors of its own."""
        failed, store = list[str](), self._store
        for step, folder in step_folders(store.folder):
            store.pinned = step
            try:
                self._mirror.put(folder)
                self._step = max(self._step or 0, step)
            except Exception as error:  # noqa: BLE001
                if (folder / NAME).is_file():  # otherwise it was removed meanwhile
                    failed.append(f"step {step}: {type(error).__name__}: {what_of(error)}")
        store.pinned = None
        try:
            self._mirror.tidy(self._run_dir, store)
        except Exception as error:  # noqa: BLE001
            failed.append(f"{type(error).__name__}: {what_of(error)}")
        if failed and self._failed is None:
            what = f"warning: {self._mirror.shown} has no copy of {redact(failed[0])}; each save tries again"
            print(what, file=sys.stderr, flush=True)
        self._failed = redact("; ".join(failed)) or None


def is_place(text: str | None) -> TypeGuard[str]:
    """Whether it names a folder or a URL, and no step."""
    return text is not None and ("://" in text or Path(text).is_dir())


def take_missing(job: Job, run_dir: Path, resume_from: str | None, *, begins: bool) -> str | None:
    """Take a checkpoint from the place that `resume_from` names, or from the mirror one that is not here.

    What to resume from then. JobError where a run `begins` whose mirror has another one.
    """
    mirror, name = Keep.of(job.train).mirror, (resume_from or "").removeprefix("step-")
    here, step = dict(step_folders(run_dir / "checkpoints")), int(name) if name.isdecimal() else None
    if is_place(resume_from):
        if (taken := take(resume_from, run_dir)) is None:
            raise CheckpointError("no copy of a checkpoint is there", where=redact(resume_from))
        return str(taken)
    if mirror is not None and begins and _reading(url := f"{mirror}/{job.name}", Mirror(url).steps):
        fix = "--resume-or-start goes on with it; or --set name=NAME"
        raise JobError("the mirror has a run of this name already", where=redact(url), fix=fix)
    if mirror is not None and (not here or step not in {None, *here}):
        take(f"{mirror}/{job.name}", run_dir, step)
    return resume_from


def take(url: str, run_dir: Path, step: int | None = None) -> int | None:
    """Take the newest sound copy, or that of `step`, into the run folder. Its step; None without copies.

    Raises CheckpointError where none is sound, MachineError where the place cannot be read.
    """
    problems, mirror = list[Problem](), Mirror(url)
    for found in _reading(url, mirror.steps):
        if step not in (None, found):
            continue
        try:
            _reading(url, partial(mirror.take, found, run_dir))
        except CheckpointError as error:
            problems.append(Problem(what=what_of(error), where=f"{mirror.shown}, step {found}"))
            print(f"warning: passed over the copy of step {found}: {what_of(error)}", file=sys.stderr)
        else:
            print(f"step {found} was taken from {mirror.shown}", file=sys.stderr, flush=True)
            return found
    if problems:
        raise CheckpointError("no copy of a checkpoint is sound", problems=problems)
    return None


def _reading(url: str, action: Callable[[], T]) -> T:
    """Do it; whatever a protocol raises is a MachineError."""
    try:
        return action()
    except ShardwiseError:
        raise
    except Exception as error:  # noqa: BLE001
        what = redact(f"copies cannot be read: {type(error).__name__}: {error}")
        raise MachineError(what, where=redact(url), fix="look at its credentials and the network") from None
