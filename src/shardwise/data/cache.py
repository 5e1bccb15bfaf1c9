"""Tokenised data on disk: built once, memory-mapped by every process, found by a hash of its inputs.

An entry is a folder named by a hash of everything that decides its content. A chat template may write the
date, so the content has a hash of its own:

    tokens.bin    uint32 [tokens]    all samples, one after the other
    trained.bin   uint8 [tokens]     1 where the token is trained
    starts.bin    int64 [samples]    where a sample begins
    lengths.bin   int32 [samples]    tokens of a sample
    targets.bin   int32 [samples]    trained tokens of a sample without its first, which nothing predicts
    groups.bin    int64 [samples]    samples of one group come from one conversation
    meta.json     sizes of these, a hash of their content, and the builder's note (written last)

It is built under another name and renamed when it is complete. A lock makes the others wait for the process
that builds; the kernel releases it when that process ends, however it ends. Machines that share the folder
share the lock where the file system passes it on (NFS does); where it does not, each machine builds, under a
name of its own, and the first to be complete is used. An entry whose files have other sizes than meta.json
says is built again; one without a hash, of an earlier version, gets its hash.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardwise.errors import MachineError
from shardwise.record.manifest import hash_files

FORMAT = 2  # part of every key; raised when the files or the way to them change
COLUMNS: dict[str, Any] = {"tokens": np.uint32, "trained": np.uint8}
COLUMNS |= {"starts": np.int64, "lengths": np.int32, "targets": np.int32, "groups": np.int64}


@dataclass(frozen=True)
class TokenDataset:
    """Tokenised samples. The arrays are memory-mapped and described above."""

    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    groups: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Tokens of a sample, and 1 where they are trained."""
        start = int(self.starts[index])
        end = start + int(self.lengths[index])
        return self.tokens[start:end], self.trained[start:end]

    def subset(self, indices: npt.NDArray[np.int64]) -> TokenDataset:
        """These samples, in this order; the tokens are shared."""
        chosen = {name: getattr(self, name)[indices] for name in ("starts", "lengths", "targets", "groups")}
        return replace(self, **chosen)


class Entry(NamedTuple):
    """Content of the cache under one key."""

    dataset: TokenDataset
    note: dict[str, Any]  # the builder's return value
    sha256: str  # hash of the content of all columns


class Writer:
    """Appends samples to an entry that is being built. Memory: 16 bytes a sample."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens: BinaryIO = (folder / "tokens.bin").open("wb")
        self._trained: BinaryIO = (folder / "trained.bin").open("wb")
        self._lengths, self._targets, self._groups = array("i"), array("i"), array("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        only_close = nullcontext() if error is None else suppress(MachineError)  # the first error is reported
        with only_close, _disk(self._folder), self._trained, self._tokens:
            pass

    def add(self, tokens: npt.NDArray[np.uint32], trained: npt.NDArray[np.uint8], *, group: int) -> None:
        with _disk(self._folder):
            self._tokens.write(tokens.astype(np.uint32, copy=False).tobytes())
            self._trained.write(trained.astype(np.uint8, copy=False).tobytes())
        self._lengths.append(len(tokens))
        self._targets.append(int(np.count_nonzero(trained[1:])))
        self._groups.append(group)

    def __len__(self) -> int:
        return len(self._lengths)

    def finish(self, note: dict[str, Any]) -> None:
        """Write the small columns, make all files durable, and seal the entry with meta.json."""
        lengths = np.array(self._lengths, dtype=np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        small = {"starts": starts, "lengths": lengths, "targets": self._targets, "groups": self._groups}
        with _disk(self._folder):
            for name, column in small.items():
                np.array(column, dtype=COLUMNS[name]).tofile(self._folder / f"{name}.bin")
            self._tokens.flush()
            self._trained.flush()
            for name in COLUMNS:
                _make_durable(self._folder / f"{name}.bin")
            _seal(self._folder, note)


def load_or_build(root: Path, key: str, build: Callable[[Writer], dict[str, Any]]) -> Entry:
    """Open the entry `key`. Where it is missing or damaged, one process builds it first."""
    entry = root / key
    with _disk(root):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = _open(entry)
    if found is None:
        with _disk(root / f"{key}.lock"):
            lock = (root / f"{key}.lock").open("a")
        with lock:
            with _disk(root / f"{key}.lock"):  # some file systems of clusters know no locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            found = _open(entry) or _open(entry, without_hash=True) or _build(entry, build)
    return found


def _build(entry: Path, build: Callable[[Writer], dict[str, Any]]) -> Entry:
    partial = entry.with_name(f"{entry.name}.{platform.node()}.partial")
    with _disk(partial):
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(mode=0o700)
    try:
        with Writer(partial) as writer:
            writer.finish(build(writer))
        with _disk(entry):
            _put(partial, entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    found = _open(entry)
    if found is None:
        what = "the token cache was damaged while it was written"
        raise MachineError(what, where=str(entry), fix="check the disk, run again")
    return found


def _put(partial: Path, entry: Path) -> None:
    """Rename a complete entry; one that another machine has completed meanwhile stays."""
    if entry.exists() and _open(entry) is None:
        shutil.rmtree(entry)
    try:
        partial.rename(entry)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        shutil.rmtree(partial)


def _open(entry: Path, *, without_hash: bool = False) -> Entry | None:
    """None where it is missing or damaged, or has no hash; `without_hash` gives it one and builds nothing."""
    try:
        meta: dict[str, Any] = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if meta["bytes"] != _sizes(entry):
            return None
        if without_hash:
            with _disk(entry):
                meta = _seal(entry, meta["note"])
        columns = {name: _map(entry / f"{name}.bin", dtype) for name, dtype in COLUMNS.items()}
        return Entry(TokenDataset(**columns), meta["note"], meta["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _seal(entry: Path, note: dict[str, Any]) -> dict[str, Any]:
    """Write meta.json for the columns in the folder, durable and all or nothing; return its content."""
    hashes = hash_files(entry, [f"{name}.bin" for name in COLUMNS])
    content = json.dumps({name: file.sha256 for name, file in hashes.items()}, sort_keys=True)
    meta = {"bytes": _sizes(entry), "sha256": hashlib.sha256(content.encode()).hexdigest(), "note": note}
    partial = entry / "meta.json.partial"
    partial.write_text(json.dumps(meta), encoding="utf-8")
    _make_durable(partial)
    partial.replace(entry / "meta.json")
    return meta


def _sizes(entry: Path) -> dict[str, int]:
    return {name: (entry / f"{name}.bin").stat().st_size for name in COLUMNS}


def _map(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the token cache cannot be written: {error.strerror or error}"
        fix = "free space, or name another folder in the environment variable SHARDWISE_CACHE"
        raise MachineError(what, where=str(path), fix=fix) from error
