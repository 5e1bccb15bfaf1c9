"""What is read of PyTorch's flight recorder: the newest collective, and no code of a file."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

from shardwise.launch import flight


def entry(number: int, **values: Any) -> dict[str, Any]:
    """As torch writes it."""
    known = {"collective_seq_id": number, "time_created_ns": number, "process_group": ("0", "default_pg")}
    return {**known, "profiling_name": "nccl:all_reduce", "retired": False, "state": "started", **values}


def write(folder: Path, *entries: dict[str, Any], kind: str = "nccl", rank: int = 0) -> None:
    record = {"version": "2.10", "entries": list(entries)}
    (folder / f"flight-{kind}-rank-{rank}").write_bytes(pickle.dumps(record))


def test_the_newest_that_is_not_over_comes_first(tmp_path: Path) -> None:
    write(tmp_path, entry(1), entry(2), entry(3, state="completed"))
    assert flight.last_collective(tmp_path, 0) == "nccl:all_reduce, number 2 of default_pg, is not finished"
    write(tmp_path, entry(9, retired=True), kind="gloo", rank=1)
    assert flight.last_collectives(tmp_path) == [
        "rank 0: nccl:all_reduce, number 2 of default_pg, is not finished",
        "rank 1: nccl:all_reduce, number 9 of default_pg, is finished",
    ]


def test_a_rank_may_wait_in_a_group_of_either_library(tmp_path: Path) -> None:
    write(tmp_path, entry(5, state="completed"))
    write(tmp_path, entry(4, profiling_name="gloo:barrier"), kind="gloo")
    assert flight.last_collective(tmp_path, 0) == "gloo:barrier, number 4 of default_pg, is not finished"


class Payload:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path(CANARY),))


CANARY = ""


def test_no_code_of_a_file_is_run_and_a_torn_one_says_nothing(tmp_path: Path) -> None:
    global CANARY  # noqa: PLW0603 - pickle calls without arguments of ours
    CANARY = str(tmp_path / "canary")
    file = tmp_path / "flight-nccl-rank-0"
    file.write_bytes(pickle.dumps({"entries": [Payload()]}))
    assert flight.last_collective(tmp_path, 0) == ""
    assert not Path(CANARY).exists()
    for content in (b"", pickle.dumps({"entries": [entry(1)]})[:-9], pickle.dumps({"entries": [{}]})):
        file.write_bytes(content)
        assert flight.last_collective(tmp_path, 0) == ""


def test_ranks_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    began = time.monotonic()
    flight.ask(tmp_path, [0, 1], seconds=9.0)
    assert time.monotonic() - began < 1
