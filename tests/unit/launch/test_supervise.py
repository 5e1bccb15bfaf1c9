"""How a failure on any rank is located: its traceback under --debug, its log always."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from fake_launcher import FakeLauncher
from shardwise.launch.spec import LaunchSpec, write_report
from shardwise.launch.supervise import POST_MORTEM_MODULE, WORKER_MODULE, supervise
from shardwise.record.write import RunFolder

SOURCE = str(Path(shardwise.__file__).parents[1])

# The real worker, with a bug on one rank.
BUGGY = """
import os, sys, time
from shardwise.training import worker

def _work(spec):
    if os.environ["RANK"] == os.environ["BAD_RANK"]:
        print("printed by", os.environ["RANK"], flush=True)
        raise KeyError("deep bug")
    time.sleep(30)

worker._work = _work
code = worker.main()
sys.stdout.flush()
os._exit(code)
"""

LAUNCHER = """
import json, sys
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec
spec = LaunchSpec.from_json(json.loads(sys.argv[1]))
sys.exit(launch(spec, module="buggy", grace_seconds=0.0))
"""


def launched(folder: Path, *, bad_rank: int, **changes: Any) -> tuple[int, str]:
    (folder / "buggy.py").write_text(BUGGY)
    spec = LaunchSpec(job={"name": "x"}, run_dir=str(folder / "run"), processes=2, **changes)
    path = f"{SOURCE}{os.pathsep}{folder}"
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, json.dumps(spec.to_json())],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder), "BAD_RANK": str(bad_rank)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("bad_rank", "debug", "in_run_folder"),
    [(0, False, False), (0, True, True), (1, False, True), (1, True, False)],  # every two of them together
)
def test_a_bug_on_any_rank_is_located(
    tmp_path: Path, bad_rank: int, debug: bool, in_run_folder: bool
) -> None:
    if in_run_folder:
        RunFolder.create(tmp_path / "run", job_yaml="{}", plan={}, environment={}).close()
    code, err = launched(tmp_path, bad_rank=bad_rank, debug=debug)
    assert code == 1
    block = err[err.index("error: ") :].splitlines()
    assert block[:2] == ["error: KeyError: 'deep bug'", f"  at:  rank {bad_rank}"]
    assert block[-1].startswith("  log: ")
    log = Path(block[-1].removeprefix("  log: "))
    assert log.name == f"rank-{bad_rank}.log"
    assert (log.parent == tmp_path / "run" / "logs") == in_run_folder
    assert bool(list(tmp_path.glob("shardwise-*"))) != in_run_folder
    assert 'raise KeyError("deep bug")' in log.read_text()
    assert ("printed by 1\n" in log.read_text()) == (bad_rank == 1), "rank 0 prints to the terminal"
    assert ('raise KeyError("deep bug")' in err) == debug
    assert ("Traceback" in err) == debug


def fail(code: int) -> Any:
    """A fake worker whose rank 1 reports an error."""

    def work(rank: int, spec: Path, folder: Path) -> int | None:
        if rank == 0:
            return None  # runs on until it is ended
        problem = {"what": "row 7 is empty", "where": "data", "fix": ""}
        write_report(
            folder, rank, {"exit_code": code, "headline": "", "problems": [problem], "traceback": "a stack\n"}
        )
        return code

    return work


def run_fake(tmp_path: Path, work: Any, **changes: Any) -> tuple[int, FakeLauncher]:
    launcher = FakeLauncher({WORKER_MODULE: work, POST_MORTEM_MODULE: lambda *_: 1})
    spec = LaunchSpec(job={"name": "x"}, run_dir=str(tmp_path / "run"), processes=2, **changes)
    return supervise(spec, launcher=launcher, grace_seconds=0.0), launcher


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("code", [2, 3, 5])
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_of_the_users_leaves_a_log_only_in_a_run_folder_or_to_debug(
    temporary: Path, code: int, debug: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_fake(temporary, fail(code), debug=debug)[0] == code
    err = capsys.readouterr().err
    kept = list(temporary.glob("shardwise-*"))
    if debug:
        assert err == f"a stack\n\nerror: row 7 is empty\n  at:  data\n  log: {kept[0]}/rank-1.log\n"
    else:
        assert (err, kept) == ("error: row 7 is empty\n  at:  data\n", [])
    RunFolder.create(temporary / "run", job_yaml="{}", plan={}, environment={}).close()
    assert run_fake(temporary, fail(code))[0] == code
    assert capsys.readouterr().err.endswith(f"  log: {temporary}/run/logs/rank-1.log\n")
    assert (temporary / "run/logs/rank-1.log").read_text() == "a stack\n"


def test_all_well_keeps_nothing(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, launcher = run_fake(temporary, lambda *_: 0)
    assert (code, capsys.readouterr().err) == (0, "")
    assert launcher.started == [(WORKER_MODULE, 2)]
    assert list(temporary.iterdir()) == []


def test_a_dry_run_writes_nothing_into_a_run_folder(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(temporary / "run", job_yaml="{}", plan={}, environment={}).close()

    def work(rank: int, spec: Path, folder: Path) -> int:
        report = {"exit_code": 2, "headline": "", "problems": [{"what": "x"}], "traceback": "a stack"}
        write_report(folder, rank, report)
        return 2

    code, launcher = run_fake(temporary, work, dry_run=True)
    assert launcher.started == [(WORKER_MODULE, 1)]
    assert not (temporary / "run" / "logs").exists()
    assert code == 2
    assert "log:" not in capsys.readouterr().err


def test_where_the_run_folder_takes_no_log_the_temporary_one_is_kept(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    RunFolder.create(temporary / "run", job_yaml="{}", plan={}, environment={}).close()
    (temporary / "run" / "logs").touch()  # a file, where the folder would be
    assert run_fake(temporary, fail(5))[0] == 5
    [kept] = temporary.glob("shardwise-*")
    assert capsys.readouterr().err.endswith(f"  log: {kept}/rank-1.log\n")


def test_a_run_that_only_measures_is_not_explained(temporary: Path) -> None:
    def work(rank: int, spec: Path, folder: Path) -> int:
        report = {
            "exit_code": 3,
            "headline": "",
            "problems": [{"what": "full"}],
            "out_of_memory": {"rank": 0},
        }
        write_report(folder, rank, report)
        return 3

    code, launcher = run_fake(temporary, work, measure_steps=2)
    assert (code, launcher.started) == (3, [(WORKER_MODULE, 2)])
    assert run_fake(temporary, work)[1].started == [(WORKER_MODULE, 2), (POST_MORTEM_MODULE, 1)]


@pytest.mark.parametrize("resume", [False, True])
def test_a_retry_of_a_resumed_run_resumes_even_without_a_checkpoint(temporary: Path, resume: bool) -> None:
    """Started again it would meet the run folder, which is never removed."""
    seen: list[bool] = []

    def work(rank: int, spec: Path, folder: Path) -> int:
        seen.append(json.loads(spec.read_text())["resume"])
        if len(seen) > 1:
            return 0
        report = {
            "exit_code": 3,
            "headline": "",
            "problems": [{"what": "full"}],
            "out_of_memory": {"rank": 0},
        }
        write_report(folder, rank, report)
        return 3

    def answer(rank: int, request: Path, folder: Path) -> int:
        found = {
            "headline": "full",
            "facts": [],
            "changes": [],
            "next": {"strategy": {}},
            "next_in_words": "less",
        }
        Path(json.loads(request.read_text())["answer"]).write_text(json.dumps(found))
        return 0

    launcher = FakeLauncher({WORKER_MODULE: work, POST_MORTEM_MODULE: answer})
    spec = LaunchSpec(job={}, run_dir=str(temporary / "run"), processes=1, resume=resume, on_oom="retry")
    assert supervise(spec, launcher=launcher) == 0
    assert seen == [resume, resume]


def test_debug_asks_python_for_the_stack_of_a_native_crash(tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text("import os\ndef deep(): os.abort()\ndeep()\n")
    spec = LaunchSpec(job={"name": "x"}, run_dir=str(tmp_path / "run"), processes=1, debug=True)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER.replace('"buggy"', '"crash"'), json.dumps(spec.to_json())],
        env={**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{tmp_path}", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 4
    assert "rank 0 crashed with SIGABRT" in done.stderr
    assert ", line 2 in deep" in done.stderr


def test_a_post_mortem_that_fails_names_its_log(temporary: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its traceback on the terminal under --debug."""

    def out_of_memory(rank: int, spec: Path, folder: Path) -> int:
        report = {
            "exit_code": 3,
            "headline": "",
            "problems": [{"what": "full"}],
            "out_of_memory": {"rank": rank},
        }
        write_report(folder, rank, report)
        return 3

    def broken(rank: int, spec: Path, folder: Path) -> int:
        (folder / f"rank-{rank}.log").write_text("Traceback\nZeroDivisionError: a bug\n")
        return 1

    for debug in (False, True):
        launcher = FakeLauncher({WORKER_MODULE: out_of_memory, POST_MORTEM_MODULE: broken})
        spec = LaunchSpec(job={}, run_dir=str(temporary / "run"), processes=1, debug=debug)
        assert supervise(spec, launcher=launcher) == 3
        err = capsys.readouterr().err
        assert "warning: there is no post-mortem: it ended without an answer\n" in err
        assert ("Traceback" in err) == debug
        [log] = [line.removeprefix("  log: ") for line in err.splitlines() if line.startswith("  log: ")]
        assert "ZeroDivisionError: a bug" in err
        assert "ZeroDivisionError" in Path(log).read_text()
        assert err.endswith("error: full\n")
