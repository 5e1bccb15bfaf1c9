"""Writing a bench's folder: begun once, gone on with later, one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, MachineError
from shardwise.job.load import differences
from shardwise.record.bench import BENCH, ROWS, is_bench_folder, read_bench
from shardwise.record.redact import redact_tree

SAME = ("job", "processes", "memory_cap_bytes", "warmup_steps", "steps")
"""What every row of a folder has in common: without it they could not stand side by side."""


@contextmanager
def opened(path: Path, head: Mapping[str, Any]) -> Iterator[None]:
    """Holds the folder, made where it is absent, with `head` written into it.

    Raises JobError where it holds another bench or anything else, MachineError while another process
    writes to it.
    """
    if path.is_dir() and any(path.iterdir()) and not is_bench_folder(path):
        raise JobError("the folder holds something else", where=str(path), fix="--out names a new folder")
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        (path / "traces").mkdir(exist_ok=True)
    except OSError as error:
        raise JobError(
            f"the folder cannot be made: {error.strerror}", where=str(path), fix="--out names another"
        ) from None
    descriptor = os.open(path / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock(descriptor, path)
        _write_head(path, head)
        _cut_torn_line(path / ROWS)
        yield
    finally:
        os.close(descriptor)


def _cut_torn_line(rows: Path) -> None:
    """Drop a last line that a crash or a full disk cut off; its strategy is run again."""
    if rows.exists():
        content = rows.read_bytes()
        os.truncate(rows, content.rfind(b"\n") + 1)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a finished row; it is in the file when this returns."""
    with (path / ROWS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(redact_tree(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MachineError(
            f"another bench is writing to {path}",
            where=str(path),
            fix="wait for it, or name another folder with --out",
        ) from None


def _write_head(path: Path, head: Mapping[str, Any]) -> None:
    """Writes `bench.json`; rows of before keep their place before those that are asked for now."""
    content: dict[str, Any] = json.loads(json.dumps(redact_tree(head)))
    if is_bench_folder(path):
        before = read_bench(path).head
        for name in SAME:
            found = list(differences({name: before.get(name)}, {name: content[name]}))
            if found:
                key, then, now = found[0]
                raise JobError(
                    f"{key} is {json.dumps(now)}, in the bench it is {json.dumps(then)}",
                    where=str(path / BENCH),
                    fix="--out names another folder: rows of different benches do not stand side by side",
                )
        content["order"] = list(dict.fromkeys([*before["order"], *content["order"]]))
    temporary = path / f"{BENCH}.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path / BENCH)
