"""The folder of a bench: its settings in `bench.json`, a line for each finished row in `rows.jsonl`."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, MachineError
from shardwise.job.load import differences
from shardwise.record.read import LOCK, read_events, text_of
from shardwise.record.write import locked, redact_tree, replace_json
from shardwise.simulate.prediction import MemoryTerms

BENCH = "bench.json"
ROWS = "rows.jsonl"
SCHEMA = 1

Kind = tuple[type, ...]
NONE = type(None)
NUMBER: Kind = (int, float)
TEXT, LIST, OBJECT, INTEGER = (str,), (list,), (dict,), (int,)
_WORDS = {int: "a number", float: "a number", str: "a text", list: "a list", dict: "an object", NONE: "null"}


def _keys(within: str, kind: Kind, names: str) -> dict[str, Kind]:
    return {f"{within}{name}": kind for name in names.split()}


HEAD: Mapping[str, Kind] = {
    **_keys("", OBJECT, "job job.model job.data job.train environment"),
    **_keys("", TEXT, "name job.model.source job.train.precision"),
    **_keys("", INTEGER, "job.data.sequence_length job.train.global_batch processes warmup_steps steps"),
    **_keys("", LIST, "left_out order"),
}
"""Keys of `bench.json` that a report reads; a key within another is written with a dot, after that one."""

ROW: Mapping[str, Kind] = {
    **_keys("", TEXT, "key label date status"),
    **_keys("", (str, NONE), "error predicted_unavailable"),
    **_keys("", LIST, "why"),
    **_keys("", OBJECT, "strategy"),
    **_keys("strategy.", INTEGER, "micro_batch accumulation checkpoint_every"),
    **_keys("", (dict, NONE), "predicted measured"),
    **_keys("predicted.", OBJECT, "memory memory.terms time energy"),
    **_keys("predicted.memory.", NUMBER, "peak_reserved_bytes peak_allocated_bytes outside_allocator_bytes"),
    **_keys("predicted.memory.", NUMBER, "capacity_bytes"),
    **_keys("predicted.memory.terms.", NUMBER, " ".join(field.name for field in fields(MemoryTerms))),
    **_keys("predicted.time.", NUMBER, "tokens_per_second_per_gpu exposed_communication_fraction"),
    **_keys("predicted.", NUMBER, "energy.joules_per_token"),
    **_keys("measured.", (*NUMBER, NONE), "peak_allocated_bytes peak_reserved_bytes outside_allocator_bytes"),
    **_keys("measured.", (*NUMBER, NONE), "tflops_per_gpu mfu joules_per_token"),
    **_keys("measured.", (*NUMBER, NONE), "exposed_communication_fraction"),
    **_keys("measured.", NUMBER, "step_seconds tokens_per_second_per_gpu"),
    **_keys("measured.", INTEGER, "steps warmup_steps"),
    **_keys("measured.", TEXT, "memory_of verdict"),
    **_keys("measured.", LIST, "loss grad_norm verdict_why step_seconds_all"),
    **_keys("measured.", LIST, "reserved_by_step_bytes allocated_by_step_bytes"),
    **_keys("measured.", (str, NONE), "mfu_unavailable joules_unavailable exposed_unavailable"),
}
"""Keys of a line of `rows.jsonl` that a report reads; within null nothing is expected."""


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


def read_bench(path: Path, *, to_show: bool = False) -> BenchRecord:
    """Read a bench's folder, also while the bench runs. JobError where it is none, or is damaged.

    `to_show`: require all keys that a report reads. Continuing a bench needs fewer.
    """
    try:
        head = json.loads(text_of(path / BENCH))
    except (OSError, ValueError) as error:
        what = f"{BENCH} cannot be read ({type(error).__name__})"
        raise JobError(what, where=str(path), fix="name a bench's folder") from None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        fix = "read it with the version of shardwise that wrote it"
        raise JobError(f"{BENCH} is not of schema {SCHEMA}", where=str(path / BENCH), fix=fix)
    fix = "restore it from a copy, or measure in another folder: --out"
    _check(head, HEAD if to_show else {"order": HEAD["order"]}, str(path / BENCH), fix)
    newest: dict[str, dict[str, Any]] = {}
    fix = "remove the line; `shardwise bench` with this folder as --out then measures that row again"
    for number, row in enumerate(read_events(path / ROWS) if (path / ROWS).exists() else [], start=1):
        _check(row, ROW if to_show else {"key": ROW["key"]}, f"{path / ROWS}:{number}", fix)
        newest[row["key"]] = row
    order = {key: place for place, key in enumerate(head["order"])}
    rows = sorted(newest.values(), key=lambda row: order.get(row["key"], len(order)))
    return BenchRecord(path=path, head=head, rows=rows)


def _check(values: Mapping[str, Any], expected: Mapping[str, Kind], where: str, fix: str) -> None:
    wrong = list(_wrong(values, expected))
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = f"this is not what a bench has written: {', '.join(wrong[:3])}{more}"
        raise JobError(what, where=where, fix=fix)


def _wrong(values: Mapping[str, Any], expected: Mapping[str, Kind]) -> Iterator[str]:
    """`measured.loss is missing`, `order is not a list`; nothing within a key that is itself wrong."""
    skipped: list[str] = []
    for path, kinds in expected.items():
        if any(path.startswith(f"{outer}.") for outer in skipped):
            continue
        *outer, name = path.split(".")
        place: Any = values
        for key in outer:
            place = place[key]
        if name not in place:
            yield f"{path} is missing"
        elif isinstance(place[name], bool) or not isinstance(place[name], kinds):
            yield f"{path} is not {' or '.join(dict.fromkeys(_WORDS[kind] for kind in kinds))}"
        elif place[name] is not None:
            continue
        skipped.append(path)


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
