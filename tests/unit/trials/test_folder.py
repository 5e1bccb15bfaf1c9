"""A bench's folder survives what may happen to it."""

from __future__ import annotations

import json
from pathlib import Path

from shardwise.record.bench import NEEDED, append, opened, read_bench

HEAD = {"schema": 1, "job": {}, "processes": 1, "memory_cap_bytes": None, "warmup_steps": 1, "steps": 2}


def test_a_row_that_was_cut_off_goes_and_the_next_is_whole(tmp_path: Path) -> None:
    head = {**HEAD, "order": ["a", "b", "c"]}
    with opened(tmp_path, head):
        append(tmp_path, {**dict.fromkeys(NEEDED), "key": "a", "status": "measured"})
        append(tmp_path, {**dict.fromkeys(NEEDED), "key": "b", "status": "measured"})
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(rows.read_bytes()[:-10])
    with opened(tmp_path, head):
        append(tmp_path, {**dict.fromkeys(NEEDED), "key": "c", "status": "measured"})
    assert [row["key"] for row in read_bench(tmp_path).rows] == ["a", "c"]
    assert [json.loads(line)["key"] for line in rows.read_text().splitlines()] == ["a", "c"]
