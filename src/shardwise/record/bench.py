"""The folder of a bench: its settings in `bench.json`, a line for each finished row in `rows.jsonl`."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, MachineError
from shardwise.folders import replace_json
from shardwise.job.load import differences
from shardwise.record.read import LOCK, read_events, text_of
from shardwise.record.write import locked, redact_tree

BENCH = "bench.json"
ROWS = "rows.jsonl"
SCHEMA = 1
NEEDED = {"key", "label", "status", "strategy", "measured", "predicted"}
"""Keys that every reader needs of a row."""


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """Content of a bench's folder."""

    path: Path
    head: Mapping[str, Any]  # The job, processes, steps, machine, and the strategies that were left out
    rows: list[dict[str, Any]]
    """In the order of the head's `order`; of a row that was measured again, the newest."""


def is_bench_folder(path: Path) -> bool:
    """Whether a bench was begun here."""
    return (path / BENCH).is_file()


def read_bench(path: Path) -> BenchRecord:
    """Read a bench's folder, also while the bench runs. JobError where it is none, or is damaged."""
    try:
        head = json.loads(text_of(path / BENCH))
    except (OSError, ValueError) as error:
        what = f"{BENCH} cannot be read ({type(error).__name__})"
        raise JobError(what, where=str(path), fix="name a bench's folder") from None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        fix = "read it with the version of shardwise that wrote it"
        raise JobError(f"{BENCH} is not of schema {SCHEMA}", where=str(path / BENCH), fix=fix)
    if not isinstance(head.get("order"), list):
        fix = "restore it from a copy, or measure in another folder: --out"
        raise JobError(
            "this is not what a bench has written: it lacks the list `order`",
            where=str(path / BENCH),
            fix=fix,
        )
    newest: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(read_events(path / ROWS) if (path / ROWS).exists() else [], start=1):
        if missing := NEEDED - row.keys():
            what = f"this is not what a bench has written: it lacks {', '.join(sorted(missing))}"
            fix = "remove the line; `shardwise bench` with this folder as --out then measures that row again"
            raise JobError(what, where=f"{path / ROWS}:{number}", fix=fix)
        newest[row["key"]] = row
    order = {key: place for place, key in enumerate(head["order"])}
    rows = sorted(newest.values(), key=lambda row: order.get(row["key"], len(order)))
    return BenchRecord(path=path, head=head, rows=rows)


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
        what = f"the folder cannot be made: {error.strerror}"
        raise JobError(what, where=str(path), fix="--out names another") from None
    descriptor = locked(path / LOCK)
    if descriptor is None:
        fix = "wait for it, or name another folder with --out"
        raise MachineError(f"another bench is writing to {path}", where=str(path), fix=fix)
    try:
        _write_head(path, head)
        rows = path / ROWS
        if rows.exists():  # a crash or a full disk may have cut off the last line: that row is run again
            os.truncate(rows, rows.read_bytes().rfind(b"\n") + 1)
        yield
    finally:
        os.close(descriptor)


def append(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a finished row; it is in the file when this returns."""
    with (path / ROWS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(redact_tree(row)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _write_head(path: Path, head: Mapping[str, Any]) -> None:
    """Writes `bench.json`; rows of before keep their place before those that are asked for now."""
    content: dict[str, Any] = json.loads(json.dumps(redact_tree(head)))
    if is_bench_folder(path):
        before = read_bench(path).head
        for name in SAME:
            found = list(differences({name: before.get(name)}, {name: content[name]}))
            if found:
                key, then, now = found[0]
                what = f"{key} is {json.dumps(now)}, in the bench it is {json.dumps(then)}"
                fix = "--out names another folder: rows of different benches do not stand side by side"
                raise JobError(what, where=str(path / BENCH), fix=fix)
        content["order"] = list(dict.fromkeys([*before["order"], *content["order"]]))
    replace_json(path / BENCH, content)
