"""`emit`'s callback in a real Trainer of two processes: energy counted once, without evaluations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from forks import run_set

from shardwise.device.fake import FakeNvml, create
from shardwise.emit.files import CALLBACK, Emitted, with_energy

WATTS = 690.0  # of each fake card at full load


@pytest.mark.slow
def test_two_processes_count_each_gpu_once_and_no_evaluation(tmp_path: Path) -> None:
    file = create(tmp_path / "gpus.json", 2, load=1.0)
    (tmp_path / CALLBACK).write_text(with_energy(Emitted(files={})).files[CALLBACK])
    run_set("energy_callback_worker:main", str(tmp_path), processes=2, folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "energy.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4, 6, 8, 9, 11], "at 4 and 8; at evaluations; at the end"
    assert sum(line["steps"] for line in lines) == 11
    joules, seconds = (sum(line[key] for line in lines) for key in ("joules", "seconds"))
    print(f"{joules / seconds:.0f} W in {seconds:.1f} s")
    assert joules / seconds == pytest.approx(2 * WATTS, rel=0.1), "two GPUs, each once"
    assert seconds < 11 * 0.2 + 2.0, "three evaluations of a second each are not in it"
    assert FakeNvml(file).state()["calls"] == [], "nothing is set"
