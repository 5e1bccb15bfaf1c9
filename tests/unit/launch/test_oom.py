"""After GPU memory ran out: one block, exit code 3, a record, retries. Real processes, made-up workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardwise
from fake_launcher import FakeLauncher
from shardwise.errors import DoesNotFitError
from shardwise.launch.oom import OomHandling
from shardwise.launch.spec import Ending, LaunchSpec
from shardwise.record.write import RunFolder

SOURCE = str(Path(shardwise.__file__).parents[1])

WORKER = """
import json, os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
spec = json.loads(Path(sys.argv[1]).read_text())
run, notes = Path(spec["run_dir"]), Path(spec["job"]["notes"])
rows = spec["chosen"]["strategy"]["micro_batch"] if spec["chosen"] else spec["job"]["rows"]
with (notes / f"tries-{rank}").open("a") as file:
    file.write(json.dumps([rows, spec["resume"], run.exists()]) + "\\n")

def begin():
    from shardwise.record.write import RunFolder
    if not spec["resume"] and rank == 0:
        RunFolder.create(run, job_yaml="{}", plan={}, environment={}).close()

def out_of_memory(step=3):
    evidence = {"rank": rank, "step": step, "strategy": {"micro_batch": rows}}
    report = {"exit_code": 3, "headline": "", "out_of_memory": evidence}
    report["problems"] = [{"what": f"rank {rank} is out of GPU memory", "where": "", "fix": "a bigger GPU"}]
    path = Path(os.environ["SHARDWISE_ERROR_DIR"]) / f"rank-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(report))
    path.with_suffix(".tmp").rename(path)
    os._exit(3)
"""

POST_MORTEM = """
import json, sys
from pathlib import Path
request = json.loads(Path(sys.argv[1]).read_text())
rows = request["failures"][-1]["strategy"]["micro_batch"] // 2
print("noise")
chosen = {"strategy": {"micro_batch": rows}, "why": ["less"]} if rows else None
answer = {"headline": "out of GPU memory", "next": chosen, "next_in_words": f"{rows} rows"}
answer["facts"] = [{"what": f"saved: {request['saved_step']}", "where": "rank 1", "fix": ""}]
answer["changes"] = [{"what": "fewer rows: 1 GiB less", "where": "", "fix": f"--rows {rows}"}]
answer |= {"why_no_next": "nothing needs less", "instead": "--gpus 8xH200"}
Path(request["answer"]).write_text(json.dumps(answer))
"""

LAUNCHER = """
import json, sys
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec
spec = LaunchSpec.from_json(json.loads(sys.argv[1]))
sys.exit(launch(spec, module="fake_worker", post_mortem=sys.argv[2], grace_seconds=30.0))
"""


def start(
    folder: Path, body: str, post_mortem: str = "fake_post_mortem", **changes: Any
) -> subprocess.Popen[str]:
    (folder / "fake_worker.py").write_text(WORKER + body)
    (folder / "fake_post_mortem.py").write_text(POST_MORTEM)
    (folder / "broken.py").write_text("raise ZeroDivisionError('a bug')")
    values: dict[str, Any] = {
        "job": {"name": "x", "rows": 4, "notes": str(folder)},
        "run_dir": str(folder / "run"),
        "processes": 2,
        **changes,
    }
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, json.dumps(LaunchSpec(**values).to_json()), post_mortem],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = process.communicate(timeout=60)
    assert out == ""
    return process.returncode, err.removeprefix("out of GPU memory: looking for what would fit\n")


def tries(folder: Path, rank: int = 0) -> list[list[Any]]:
    """Rows, whether it resumed, and whether there was a run folder, of each set of workers."""
    return [json.loads(line) for line in (folder / f"tries-{rank}").read_text().splitlines()]


def record(folder: Path) -> list[dict[str, Any]]:
    found = json.loads((folder / "run" / "out_of_memory.json").read_text())
    assert found["schema"] == 1
    failures: list[dict[str, Any]] = found["failures"]
    return failures


ONE_RANK = """
begin()
if rank == 1:
    time.sleep(0.5)
    out_of_memory()
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # in a collective, it hears nothing
time.sleep(60)
"""


def test_one_rank_is_enough_and_the_others_are_ended_soon(tmp_path: Path) -> None:
    began = time.monotonic()
    code, err = end(start(tmp_path, ONE_RANK))
    assert time.monotonic() - began < 15, "the others have 30 s for any other failure"
    assert code == 3
    assert err == (
        "error: out of GPU memory\n"
        "  - saved: None\n    at:  rank 1\n"
        "  - fewer rows: 1 GiB less\n    fix: --rows 2\n"
        f"  log: {tmp_path}/run/logs/rank-1.log\n"
    )
    [failure] = record(tmp_path)
    assert failure["evidence"]["ranks"] == [1]
    assert failure["retried_with"] is None
    assert failure["error"]["headline"] == "out of GPU memory"
    assert len(tries(tmp_path)) == 1


def test_all_ranks_that_run_out_are_named_the_first_first(tmp_path: Path) -> None:
    code, _ = end(start(tmp_path, "begin()\ntime.sleep(0 if rank else 0.7)\nout_of_memory()"))
    assert code == 3
    assert record(tmp_path)[0]["evidence"]["ranks"] == [1, 0]


def test_what_another_rank_met_because_of_it_does_not_hide_it(tmp_path: Path) -> None:
    body = """
begin()
if rank == 1:
    time.sleep(0.5)
    out_of_memory()
report = {"exit_code": 4, "headline": "", "problems": [{"what": "rank 1 could not write"}]}
(Path(os.environ["SHARDWISE_ERROR_DIR"]) / "rank-0.json").write_text(json.dumps(report))
sys.exit(4)
"""
    code, err = end(start(tmp_path, body))
    assert code == 3
    assert err.startswith("error: out of GPU memory\n")
    assert "could not write" not in err


SMALL_ENOUGH = """
begin()
if rows > 1:
    out_of_memory()
"""


def test_retries_go_on_until_it_fits(tmp_path: Path) -> None:
    code, err = end(start(tmp_path, SMALL_ENOUGH, on_oom="retry"))
    assert code == 0
    assert [line for line in err.splitlines() if "going on:" in line or "  - going" in line] == [
        "out of memory, going on: out of GPU memory",
        "  - going on from the start, as nothing was saved yet, with 2 rows",
        "out of memory, going on: out of GPU memory",
        "  - going on from the start, as nothing was saved yet, with 1 rows",
    ]
    assert "error:" not in err
    assert "fix:" not in err, "there is nothing to do"
    assert tries(tmp_path) == [[4, False, False], [2, False, False], [1, False, False]]
    assert tries(tmp_path, rank=1)[-1][:2] == [1, False]
    assert [(f["retried_with"], f["from_step"]) for f in record(tmp_path)] == [
        ({"micro_batch": 2}, 0),
        ({"micro_batch": 1}, 0),
    ]


def test_a_retry_goes_on_from_what_was_saved(tmp_path: Path) -> None:
    body = """
begin()
if rank == 0 and rows > 1:
    (run / "checkpoints" / "step-000007").mkdir(parents=True, exist_ok=True)
if rows > 1:
    time.sleep(0.3)
    out_of_memory()
"""
    code, err = end(start(tmp_path, body, on_oom="retry"))
    assert code == 0
    assert "going on from the state after step 7, with 2 rows" in err
    assert tries(tmp_path) == [[4, False, False], [2, True, True], [1, True, True]]
    assert [f["from_step"] for f in record(tmp_path)] == [7, 7]
    assert (tmp_path / "run" / "checkpoints" / "step-000007").is_dir()


def test_where_nothing_needs_less_it_is_3_with_what_would_help(tmp_path: Path) -> None:
    code, err = end(
        start(
            tmp_path,
            "begin()\nout_of_memory()",
            on_oom="retry",
            job={"name": "x", "rows": 1, "notes": str(tmp_path)},
        )
    )
    assert code == 3
    assert err.partition("  log: ")[0].endswith("  - nothing needs less\n    fix: --gpus 8xH200\n")
    assert err.count("error:") == 1


def test_after_three_retries_it_is_given_up(tmp_path: Path) -> None:
    job = {"name": "x", "rows": 64, "notes": str(tmp_path)}
    code, err = end(start(tmp_path, "begin()\nout_of_memory()", on_oom="retry", job=job))
    assert code == 3
    assert [rows for rows, _, _ in tries(tmp_path)] == [64, 32, 16, 8]
    assert err.count("going on:") == 3
    assert err.count("error:") == 1
    said = err.partition("  log: ")[0]  # of rank 1, if it was the first
    assert said.endswith("  - 3 retries have not helped: this was the last\n")
    assert [f["retried_with"] is None for f in record(tmp_path)] == [False, False, False, True]


def test_another_error_of_a_retry_is_told_as_ever(tmp_path: Path) -> None:
    body = "begin()\nout_of_memory() if rows > 2 else os.kill(os.getpid(), signal.SIGABRT)"
    code, err = end(start(tmp_path, body, on_oom="retry"))
    assert code == 4
    assert "crashed with SIGABRT" in err
    assert len(record(tmp_path)) == 1


def test_a_run_that_is_asked_to_stop_is_not_retried(tmp_path: Path) -> None:
    body = """
begin()
signal.signal(signal.SIGTERM, lambda *_: out_of_memory())
(run.parent / f"ready-{rank}").touch()
time.sleep(60)
"""
    process = start(tmp_path, body, on_oom="retry")
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    code, err = end(process)
    assert (code, len(tries(tmp_path))) == (3, 1)
    assert "going on" not in err


def test_without_a_post_mortem_the_worker_speaks_for_itself(tmp_path: Path) -> None:
    code, err = end(start(tmp_path, ONE_RANK, post_mortem="broken", on_oom="retry"))
    assert code == 3
    assert "ZeroDivisionError: a bug" in err
    log = f"  log: {tmp_path}/run/logs/rank-1.log\n"
    assert err.endswith(f"error: rank 1 is out of GPU memory\n  fix: a bigger GPU\n{log}")


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_was_there_before_is_never_removed(tmp_path: Path, resume: bool) -> None:
    """Out of memory before the worker could look whether it may write there."""
    run = tmp_path / "run"
    RunFolder.create(run, job_yaml="{}", plan={}, environment={}).close()
    (run / "precious").touch()
    spec = LaunchSpec(job={"name": "x"}, run_dir=str(run), processes=1, resume=resume, on_oom="retry")
    handling = OomHandling(spec, FakeLauncher({"broken": lambda *_: 1}), module="broken")
    handling.make_room(spec)
    assert (run / "precious").exists()
    ending = Ending(code=3, error=DoesNotFitError("x"), out_of_memory={"rank": 0})
    assert handling.handle(spec, ending) == (ending.error, None)
