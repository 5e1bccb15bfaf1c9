"""Tokenised data on disk: built once, memory-mapped by every process, found again by what it is made from.

An entry is a folder named by a hash of everything that decides its content, unless a chat template asks
for the date, say; so the content has a hash of its own:

    tokens.bin    uint32 [tokens]    all samples, one after the other
    trained.bin   uint8 [tokens]     1 where the token is trained
    starts.bin    int64 [samples]    where a sample begins
    lengths.bin   int32 [samples]    tokens of a sample
    targets.bin   int32 [samples]    trained tokens of a sample, without its first: nothing predicts that one
    groups.bin    int64 [samples]    samples of one group come from one conversation
    meta.json     sizes of these, a hash of their content, and what the builder had to say (written last)

It is built under another name and renamed when it is whole. A lock file makes the processes of a
machine wait for the one that builds. An entry whose files have other sizes than meta.json says is
built again; one without a hash, of an earlier version, is given its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardwise.errors import MachineError
from shardwise.record.manifest import hash_files

FORMAT = 1
"""Part of every key; raised when the files or the way to them change."""
COLUMNS: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.uint32),
    "trained": np.dtype(np.uint8),
    "starts": np.dtype(np.int64),
    "lengths": np.dtype(np.int32),
    "targets": np.dtype(np.int32),
    "groups": np.dtype(np.int64),
}


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
    """What the cache holds under one key."""

    dataset: TokenDataset
    note: dict[str, Any]
    """What the builder had to say."""
    sha256: str
    """Of the content of all columns."""


class Writer:
    """Appends samples to an entry that is being built. Memory: 12 bytes a sample."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokens: BinaryIO = (folder / "tokens.bin").open("wb")
        self._trained: BinaryIO = (folder / "trained.bin").open("wb")
        self._lengths = array("i")
        self._targets = array("i")
        self._groups = array("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error  # the first one is the one to tell
        for file in (self._tokens, self._trained):
            try:
                with _disk(self._folder):
                    file.close()
            except MachineError as unsaved:
                failure = failure or unsaved
        if failure is not error and failure is not None:
            raise failure

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
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if len(self) else np.zeros(0, np.int32)
        small: dict[str, npt.NDArray[Any]] = {
            "starts": np.cumsum(lengths, dtype=np.int64) - lengths,
            "lengths": lengths,
            "targets": np.array(self._targets, dtype=np.int32),
            "groups": np.array(self._groups, dtype=np.int64),
        }
        with _disk(self._folder):
            for name, column in small.items():
                column.astype(COLUMNS[name]).tofile(self._folder / f"{name}.bin")
            self._tokens.flush()
            self._trained.flush()
            for name in COLUMNS:
                _make_durable(self._folder / f"{name}.bin")
            _seal(self._folder, note)


def load_or_build(root: Path, key: str, build: Callable[[Writer], dict[str, Any]]) -> Entry:
    """The entry `key`; built first, by one process, where it is not there whole."""
    entry = root / key
    with _disk(root):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = _open(entry)
    if found is None:
        with _locked(root / f"{key}.lock"):
            found = _open(entry) or _open_older(entry) or _build(entry, build)
    return found


def _build(entry: Path, build: Callable[[Writer], dict[str, Any]]) -> Entry:
    partial = entry.with_name(f"{entry.name}.partial")
    with _disk(partial):
        for stale in (partial, entry):
            if stale.exists():
                shutil.rmtree(stale)
        partial.mkdir(mode=0o700)
    try:
        with Writer(partial) as writer:
            writer.finish(build(writer))
        with _disk(entry):
            partial.rename(entry)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    found = _open(entry)
    if found is None:
        raise MachineError(
            "the token cache was damaged while it was written",
            where=str(entry),
            fix="check the disk, run again",
        )
    return found


def _open(entry: Path) -> Entry | None:
    """None where the entry is missing, damaged, or without a hash."""
    try:
        meta = _read_seal(entry)
        columns = {name: _map(entry / f"{name}.bin", dtype) for name, dtype in COLUMNS.items()}
        return Entry(TokenDataset(**columns), meta["note"], meta["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _open_older(entry: Path) -> Entry | None:
    """A whole entry without a hash is given its own: built again, it might hold other tokens."""
    try:
        note = _read_seal(entry)["note"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    with _disk(entry):
        _seal(entry, note)
    return _open(entry)


def _read_seal(entry: Path) -> dict[str, Any]:
    """The content of meta.json. ValueError where the columns have other sizes than it says."""
    meta: dict[str, Any] = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
    if meta["bytes"] != _sizes(entry):
        raise ValueError("a column is cut")
    return meta


def _seal(entry: Path, note: dict[str, Any]) -> None:
    """Write meta.json for the columns that are there; durable, and whole or not at all."""
    hashes = hash_files(entry, [f"{name}.bin" for name in COLUMNS])
    content = json.dumps({name: file.sha256 for name, file in hashes.items()}, sort_keys=True)
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    partial = entry / "meta.json.partial"
    partial.write_text(json.dumps({"bytes": _sizes(entry), "sha256": sha256, "note": note}), encoding="utf-8")
    _make_durable(partial)
    partial.replace(entry / "meta.json")


def _sizes(entry: Path) -> dict[str, int]:
    return {name: (entry / f"{name}.bin").stat().st_size for name in COLUMNS}


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def _make_durable(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with _disk(path):
        file = path.open("a")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turns what the disk refuses into an error that says where and what to do."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"the token cache cannot be written: {error.strerror or error}",
            where=str(path),
            fix="free space, or name another folder in the environment variable SHARDWISE_CACHE",
        ) from error
