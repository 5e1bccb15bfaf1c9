"""Rows as results: measured, out of memory, crashed, hanging; kept in the folder, and not run twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import JobError, MachineError
from shardwise.job.load import load_job
from shardwise.record.bench import NEEDED, append, opened, read_bench
from shardwise.report.bench import recommended, show_bench
from shardwise.trials import process
from shardwise.trials.rows import Row, make_rows
from shardwise.trials.run import Settings, run_rows
from shardwise.trials.sweep import points

HEAD: dict[str, Any] = {
    "schema": 1,
    "name": "small",
    "job": {
        "model": {"source": "llama-3.2-1b"},
        "train": {"steps": 5, "global_batch": 4, "precision": "bf16"},
        "data": {"sequence_length": 8},
    },
    "processes": 2,
    "memory_cap_bytes": None,
    "warmup_steps": 1,
    "steps": 5,
    "environment": {"gpus": []},
    "left_out": [],
    "order": [],
}

WRITES_STEPS = """
import json, sys, time
from pathlib import Path
spec = json.loads(Path(sys.argv[1]).read_text())
folder = Path(spec["run_dir"])
folder.mkdir(parents=True)
step = {"kind": "step", "seconds": 1.0, "tokens": 100, "tokens_per_second_per_gpu": 50.0, "loss": 2.0,
        "grad_norm": 1.0, "joules_unavailable": "no GPU", "peak_memory_allocated_bytes": [1, 2],
        "peak_memory_reserved_bytes": [3, 4], "host_memory_bytes": [5, 6]}
lines = [json.dumps({**step, "step": number + 1}) for number in range(spec["measure_steps"])]
(folder / "events.jsonl").write_text("\\n".join(lines) + "\\n")
"""


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Row:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("some text")
    Path("job.yaml").write_text(
        "name: small\nmodel: {source: llama-3.2-1b, weights: random}\n"
        "data: {train: text.txt}\ntrain: {global_batch: 4}\n"
    )
    rows, _ = make_rows(
        points(lambda more: load_job("job.yaml", more).job, []), ["zero2"], processes=2, plan_for=None
    )
    return rows[0]


def settings(**changes: Any) -> Settings:
    values: dict[str, Any] = {"processes": 2, "warmup": 1, "steps": 5, "timeout_seconds": 30.0, **changes}
    return Settings(folder=Path("bb"), **values)


def result(row: Row, code: str, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> dict[str, Any]:
    """What a row gives whose launcher is `code`."""
    monkeypatch.setattr(process, "LAUNCHER", ("-c", code))
    with opened(Path("bb"), {**HEAD, "order": [row.key]}):
        (found,) = run_rows([row], settings(**changes))
        append(Path("bb"), found)
    assert read_bench(Path("bb")).rows == [json.loads(json.dumps(found))]
    return found


def test_without_memory(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('step 1'); print('error: out of GPU memory: 9 GiB\\n  fix: less'); raise SystemExit(3)"
    found = result(row, code, monkeypatch)
    assert found["status"] == "out of memory"
    assert found["error"] == "after 0 of 6 steps\nerror: out of GPU memory: 9 GiB\n  fix: less"
    assert found["measured"] is None


def test_crashed(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(row, "print('x\\n' * 999); raise ValueError('boom')", monkeypatch)
    assert found["status"] == "failed"
    assert found["error"].startswith("with exit code 1 after 0 of 6 steps\n")
    assert found["error"].endswith("ValueError: boom")
    assert len(found["error"]) < 5000


def test_hanging(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(row, "import time; time.sleep(600)", monkeypatch, timeout_seconds=1.0)
    assert found["status"] == "timed out"
    assert found["error"].startswith("after 1")


def test_only_the_profiled_step_hangs_and_the_rest_counts(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(row, WRITES_STEPS + "time.sleep(600)", monkeypatch, timeout_seconds=3.0)
    assert found["status"] == "measured"
    numbers = found["measured"]
    assert (numbers["tokens_per_second_per_gpu"], numbers["verdict"]) == (50.0, "valid")
    assert numbers["exposed_communication_fraction"] is None
    assert numbers["exposed_unavailable"].startswith("the profiled step was not done after 3")
    assert found["trace"] is None


def test_a_row_on_a_fake_driver_is_simulated_and_has_no_joules(
    row: Row, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its steps are slowed down on purpose: neither speed nor energy is that of a machine."""
    head = '{"kind": "run", "energy_source": "simulated"}'
    code = WRITES_STEPS.replace('"joules_unavailable": "no GPU"', '"joules": 50.0')
    code = code.replace("lines = [", f"lines = ['{head}'] + [")
    found = result(row, code, monkeypatch)
    numbers = found["measured"]
    assert (numbers["verdict"], numbers["joules_per_token"]) == ("simulated", None)
    assert numbers["joules_unavailable"] == "simulated, not measured"
    assert recommended(read_bench(Path("bb")).rows) is None
    show_bench(read_bench(Path("bb")))
    assert "zero2: simulated, a fake driver's GPUs" in " ".join(capsys.readouterr().out.split())


def test_a_torn_trace_costs_only_what_it_would_have_said(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    code = WRITES_STEPS + "Path(spec['profile']).write_bytes(b'\\x1f\\x8b\\x08\\x00torn')"
    found = result(row, code, monkeypatch)
    assert found["status"] == "measured"
    assert "the trace cannot be read" in found["measured"]["exposed_unavailable"]


def test_a_row_run_again_replaces_what_it_was(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    assert result(row, "raise SystemExit(1)", monkeypatch)["status"] == "failed"
    assert result(row, WRITES_STEPS, monkeypatch)["status"] == "measured"
    assert len((Path("bb") / "rows.jsonl").read_text().splitlines()) == 2


def test_a_folder_is_of_one_bench_and_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "bb"
    with (
        opened(folder, {**HEAD, "order": ["a", "b"]}),
        pytest.raises(MachineError, match="another bench"),
        opened(folder, HEAD),
    ):
        pass
    with opened(folder, {**HEAD, "order": ["c", "a"]}):
        assert read_bench(folder).head["order"] == ["a", "b", "c"]
    other = {**HEAD, "job": {**HEAD["job"], "train": {**HEAD["job"]["train"], "steps": 9}}}
    with pytest.raises(JobError, match=r"job.train.steps is 9, in the bench it is 5"), opened(folder, other):
        pass
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(JobError, match="something else"), opened(tmp_path / "mine", HEAD):
        pass


def test_a_line_torn_by_a_crash_is_left_out(tmp_path: Path) -> None:
    with opened(tmp_path, HEAD):
        append(tmp_path, {**dict.fromkeys(NEEDED), "key": "a"})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"key": "b"')
    assert [row["key"] for row in read_bench(tmp_path).rows] == ["a"]
