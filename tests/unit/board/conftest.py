"""A board over a folder with runs, of which one is being written, and a bench."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from board_server import HOSTILE, PLAN, Folders, Server, begin, head, step, write
from shardwise.record.schema import EvalEvent, StopEvent

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Folders]:
    """Runs `runs/done`, `runs/hostile` and `runs/long`, a bench, and links out of the folder."""
    base = tmp_path_factory.mktemp("board")
    root, outside = base / "root", base / "outside"
    (root / "runs").mkdir(parents=True)
    done = begin(root / "runs" / "done", plan=PLAN)
    evals = [EvalEvent(step=n, loss=4.0, target_tokens=9, seconds=0.1) for n in (10, 20)]
    events = [head(20), *map(step, range(1, 21)), *evals, StopEvent(step=20, status="finished", seconds=20.0)]
    write(done, *events)
    named = {"name": HOSTILE, "model": {"source": HOSTILE}, "data": {"train": [f"{HOSTILE}.jsonl"]}}
    write(begin(root / "runs" / "hostile", named), head(), step(1))
    long = begin(root / "runs" / "long")
    line = json.dumps(
        {"kind": "step", "time": 1.0, "tokens": 10, "seconds": 0.1, "grad_norm": 1.0, "loss": 2.0}
    )
    with (long / "events.jsonl").open("w") as file:
        for number in range(1, 100_001):
            spiked = line.replace('"grad_norm": 1.0', '"grad_norm": 77.0') if number == 43_210 else line
            file.write(f'{spiked[:-1]}, "step": {number}}}\n')
    write(begin(outside / "secret"), head(), step(1, loss=1.2345))
    (root / "linked").symlink_to(outside / "secret")
    part = begin(root / "runs" / "part")
    (part / "events.jsonl").unlink()
    (part / "events.jsonl").symlink_to(outside / "secret" / "events.jsonl")
    shutil.copytree(ROOT / "docs" / "examples" / "bench-4xh200", root / "bench-4xh200")
    server = Server(root)
    yield Folders(server, root, outside)
    server.close()
