"""The folder of a bench: what was asked in `bench.json`, a line a finished row in `rows.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.record.bench_schema import HEAD, ROW, wrong
from shardwise.record.read import read_events

BENCH = "bench.json"
ROWS = "rows.jsonl"
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class BenchRecord:
    """What a bench's folder says."""

    path: Path
    head: Mapping[str, Any]
    """The job, processes, steps, machine, and what was left out."""
    rows: list[dict[str, Any]]
    """In the order they were asked for first; of a row that was run again, the newest."""


def is_bench_folder(path: Path) -> bool:
    """Whether a bench was begun here."""
    return (path / BENCH).is_file()


def read_bench(path: Path, *, to_show: bool = False) -> BenchRecord:
    """All of it, while the bench goes on too. JobError where it is none, or is damaged.

    `to_show`: also where head or rows lack anything that a report reads. A bench that goes on needs less.
    """
    try:
        head = json.loads((path / BENCH).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise JobError(
            f"{BENCH} cannot be read ({type(error).__name__})", where=str(path), fix="name a bench's folder"
        ) from None
    if not isinstance(head, dict) or head.get("schema") != SCHEMA:
        raise JobError(
            f"{BENCH} is not of schema {SCHEMA}",
            where=str(path / BENCH),
            fix="read it with the version of shardwise that wrote it",
        )
    missing = list(wrong(head, HEAD if to_show else {"order": HEAD["order"]}))
    if missing:
        raise _damaged(path / BENCH, missing, "restore it from a copy, or measure in another folder: --out")
    newest: dict[str, dict[str, Any]] = {}
    for number, row in enumerate(read_events(path / ROWS) if (path / ROWS).exists() else [], start=1):
        missing = list(wrong(row, ROW if to_show else {"key": ROW["key"]}))
        if missing:
            fix = "remove the line; `shardwise bench` with this folder as --out then measures that row again"
            raise _damaged(f"{path / ROWS}:{number}", missing, fix)
        newest[row["key"]] = row
    order = {key: place for place, key in enumerate(head["order"])}
    rows = sorted(newest.values(), key=lambda row: order.get(row["key"], len(order)))
    return BenchRecord(path=path, head=head, rows=rows)


def _damaged(place: Path | str, missing: list[str], fix: str) -> JobError:
    more = f", and {len(missing) - 3} more" if len(missing) > 3 else ""
    return JobError(
        f"this is not what a bench has written: {', '.join(missing[:3])}{more}", where=str(place), fix=fix
    )
