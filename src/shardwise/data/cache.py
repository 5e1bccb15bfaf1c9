"""Tokenised data on disk: built once, memory-mapped by every process, found by a hash of its inputs.

An entry is a folder named by a hash of everything that decides its content. A chat template may write the
date, so the content has a hash of its own:

    tokens.bin    uint32 [tokens]    all samples, one after the other
    trained.bin   uint8 [tokens]     1 where the token is trained
    starts.bin    int64 [samples]    where a sample begins
    lengths.bin   int32 [samples]    tokens of a sample
    targets.bin   int32 [samples]    trained tokens of a sample without its first, which nothing predicts
    groups.bin    int64 [samples]    samples of one group come from one conversation
    meta.json     sizes of these, hashes of their blocks, and the builder's note (written last)

It is built under another name and renamed when it is complete. A lock makes the others wait for the process
that builds; the kernel releases it when that process ends, however it ends. Machines that share the folder
share the lock where the file system passes it on (NFS does); where it does not, each machine builds, under a
name of its own, and the first to be complete is used.

An entry whose files have other sizes than meta.json says, or whose small columns have other content, is built
again. Blocks of tokens are verified when they are first read, because there may be many gigabytes of them.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import platform
import shutil
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from shardwise.errors import MachineError
from shardwise.folders import replace_text, sync

FORMAT = 5  # part of every key; raised when the files or the way to them change
COLUMNS: dict[str, Any] = {"tokens": np.uint32, "trained": np.uint8}
SMALL: dict[str, Any] = {"starts": np.int64, "lengths": np.int32, "targets": np.int32, "groups": np.int64}
COLUMNS |= SMALL
BLOCK_BYTES = 4 << 20
"""Of a file that has one hash: SHA-256 takes 2 to 10 ms for them, and a step of training reads about one."""


class Blocks:
    """Verifies the blocks of one column's file, each when it is first read."""

    def __init__(self, path: Path, hashes: Sequence[str]) -> None:
        self._path, self._hashes = path, hashes
        self._verified = np.zeros(len(hashes), dtype=bool)

    def check(self, column: npt.NDArray[Any], start: int, end: int) -> None:
        """MachineError where elements `start` to `end` lie in a block that is not as it was written."""
        each = BLOCK_BYTES // column.itemsize
        for block in range(start // each, -(-end // each)):
            if not self._verified[block]:
                if _hash(column[block * each : (block + 1) * each].tobytes()) != self._hashes[block]:
                    what = f"the token cache is damaged: block {block} of {self._path.name} was changed"
                    fix = f"remove {self._path.parent}: the data is tokenised again"
                    raise MachineError(what, where=str(self._path), fix=fix)
                self._verified[block] = True


@dataclass(frozen=True)
class TokenDataset:
    """Tokenised samples. The arrays are memory-mapped and described above."""

    tokens: npt.NDArray[np.uint32]
    trained: npt.NDArray[np.uint8]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    groups: npt.NDArray[np.int64]
    weights: npt.NDArray[np.float64] | None = None  # How often an epoch takes each sample; None: once
    blocks: Mapping[str, Blocks] = field(default_factory=dict)  # Of tokens and of trained

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, index: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
        """Tokens of a sample, and 1 where they are trained."""
        start = int(self.starts[index])
        end = start + int(self.lengths[index])
        for name, blocks in self.blocks.items():
            blocks.check(getattr(self, name), start, end)
        return self.tokens[start:end], self.trained[start:end]

    def subset(self, indices: npt.NDArray[np.int64]) -> TokenDataset:
        """These samples, in this order; the tokens are shared."""
        names = ("starts", "lengths", "targets", "groups", *(["weights"] if self.weights is not None else []))
        chosen = {name: getattr(self, name)[indices] for name in names}
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
                sync(self._folder / f"{name}.bin")
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
            found = _open(entry) or _build(entry, build)
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


def _open(entry: Path) -> Entry | None:
    """None where it is missing or damaged."""
    try:
        meta: dict[str, Any] = json.loads((entry / "meta.json").read_text(encoding="utf-8"))
        if meta["bytes"] != _sizes(entry):
            return None
        columns = {name: _map(entry / f"{name}.bin", dtype) for name, dtype in COLUMNS.items()}
        blocks = {name: Blocks(entry / f"{name}.bin", meta["blocks"][name]) for name in COLUMNS}
        if meta["sha256"] != _content(meta["blocks"]):
            return None
        for name in SMALL:
            blocks[name].check(columns[name], 0, len(columns[name]))
        large = {name: blocks[name] for name in COLUMNS if name not in SMALL}
        return Entry(TokenDataset(**columns, blocks=large), meta["note"], meta["sha256"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError, MachineError):
        return None


def _seal(entry: Path, note: dict[str, Any]) -> None:
    """Write meta.json for the columns in the folder, durable and all or nothing."""
    blocks = {name: list(_hashes(entry / f"{name}.bin")) for name in COLUMNS}
    meta = {"bytes": _sizes(entry), "sha256": _content(blocks), "blocks": blocks, "note": note}
    replace_text(entry / "meta.json", json.dumps(meta))


def _hashes(path: Path) -> Iterator[str]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield _hash(block)


def _hash(block: bytes) -> str:
    return hashlib.sha256(block).hexdigest()


def _content(blocks: Mapping[str, Sequence[str]]) -> str:
    """The hash of an entry's content."""
    return _hash(json.dumps(blocks, sort_keys=True).encode())


def _sizes(entry: Path) -> dict[str, int]:
    return {name: (entry / f"{name}.bin").stat().st_size for name in COLUMNS}


def _map(path: Path, dtype: Any) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what = f"the token cache cannot be written: {error.strerror or error}"
        fix = "free space, or name another folder in the environment variable SHARDWISE_CACHE"
        raise MachineError(what, where=str(path), fix=fix) from error
