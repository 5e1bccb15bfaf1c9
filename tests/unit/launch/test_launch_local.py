"""The launcher against real processes: exit codes, one error block, signals, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import shardwise
from shardwise.launch.spec import LaunchSpec

SOURCE = str(Path(shardwise.__file__).parents[1])

# What fake workers need of the real one; `run` is the test's own part.
PRELUDE = """
import contextlib, json, os, signal, sys, time
from pathlib import Path
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
spec = json.loads(Path(sys.argv[1]).read_text())
here = Path(spec["run_dir"])
started = here / f".pid-{rank}"
started.write_text(str(os.getpid()))
started.rename(here / f"pid-{rank}")  # whole from the moment it can be seen

def report(code, what):
    problem = {"what": what, "where": "data", "fix": "mend it"}
    error = {"exit_code": code, "headline": "", "problems": [problem]}
    path = Path(os.environ["SHARDWISE_ERROR_DIR"]) / f"rank-{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(error))
    path.with_suffix(".tmp").rename(path)
    sys.exit(code)

def all_started():
    while len(list(here.glob("pid-*"))) < size:
        time.sleep(0.01)
"""

LAUNCHER = """
import json, signal, sys
for number in (signal.SIGINT, signal.SIGHUP):  # ignored under nohup, which the launcher respects
    signal.signal(number, signal.SIG_DFL)
from shardwise.launch.local import launch
from shardwise.launch.spec import LaunchSpec
spec = LaunchSpec.from_json(json.loads(sys.argv[1]))
code = launch(spec, module="fake_worker", grace_seconds=float(sys.argv[2]))
assert not any(name.split(".")[0] in ("torch", "transformers", "numpy") for name in sys.modules)
sys.exit(code)
"""


class Launched:
    """A launcher process with fake workers, whose pids it knows."""

    def __init__(self, folder: Path, body: str, *, processes: int = 2, grace: float = 0.5, **changes: object):
        self.folder = folder
        (folder / "fake_worker.py").write_text(PRELUDE + textwrap.dedent(body))
        values: dict[str, object] = {"job": {"name": "x"}, "run_dir": str(folder), "processes": processes}
        spec = LaunchSpec(**{**values, **changes})  # type: ignore[arg-type]
        self.size = 1 if spec.dry_run else processes
        environment = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
        environment |= {"PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "TMPDIR": str(folder)}
        environment.pop("OMP_NUM_THREADS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, json.dumps(spec.to_json()), str(grace)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def pids(self) -> list[int]:
        """Process ids of the workers, once all have started."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            texts = [path.read_text() for path in self.folder.glob("pid-*")]
            if len(texts) == self.size and all(texts):
                return [int(text) for text in texts]
            time.sleep(0.01)
        raise AssertionError("the workers did not start")

    def end(self, seconds: float = 20) -> tuple[int, str, str]:
        """Exit code, stdout and stderr. Every worker must be gone, and no folder left but a named log's."""
        out, err = self.process.communicate(timeout=seconds)
        assert not [pid for pid in self.pids() if alive(pid)]
        named = [Path(log).parent for log in re.findall(r"^  log: (.*)$", err, re.MULTILINE)]
        assert list(self.folder.glob("shardwise-*")) == named
        return self.process.returncode, out, err


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_all_well_is_0_and_only_rank_0_is_heard(tmp_path: Path) -> None:
    code, out, err = Launched(tmp_path, "print('rank', rank, 'of', size)", processes=3).end()
    assert (code, out, err) == (0, "rank 0 of 3\n", "")


def test_workers_get_the_environment_of_one_machine(tmp_path: Path) -> None:
    body = """
    folder = Path(os.environ["SHARDWISE_ERROR_DIR"])
    keys = ["LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME"]
    seen = {key: os.environ[key] for key in [*keys, "PYTORCH_CUDA_ALLOC_CONF"]}
    seen |= {"mode": oct(folder.stat().st_mode & 0o777), "port": int(os.environ["MASTER_PORT"]) > 0}
    seen |= {"bin": os.environ["PATH"].split(":")[0]}
    (here / f"seen-{rank}").write_text(json.dumps(seen))
    """
    assert Launched(tmp_path, body).end()[0] == 0
    assert json.loads((tmp_path / "seen-1").read_text()) == {
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // 2)),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "GLOO_SOCKET_IFNAME": "lo",
        "mode": "0o700",
        "port": True,
        "bin": str(Path(sys.executable).parent),
    }


def test_what_the_user_has_set_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardwise.launch.local import worker_environment

    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    environment = worker_environment(processes=2, folder=tmp_path)
    assert environment["OMP_NUM_THREADS"] == "7"
    assert environment["NCCL_SOCKET_IFNAME"] == "eth0"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment


def test_an_architecture_that_deepspeed_cannot_read_is_written_plainly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: its image sets 9.0a, and DeepSpeed 0.19.8 ends with `int('0a')` when it compiles."""
    from shardwise.launch.local import worker_environment

    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0 9.0a;10.0f 12.0+PTX")
    environment = worker_environment(processes=1, folder=tmp_path)
    assert environment["TORCH_CUDA_ARCH_LIST"] == "8.0 9.0;10.0 12.0+PTX"


def test_a_torch_for_gpus_that_cannot_be_counted_is_named_and_not_sent_to_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWISE_DEVICE", "none")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    info = tmp_path / "torch-9.9.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 9.9+rocm7.1\n")
    code, out, err = Launched(tmp_path, "print(os.environ.get('DS_ACCELERATOR'))", processes=1).end()
    assert (code, out) == (0, "None\n")
    assert err.startswith("warning: torch is built for AMD GPUs (rocm)")
    assert "--processes" in err


@pytest.mark.parametrize("code", [2, 3, 5])
def test_an_error_on_one_rank_is_its_code_and_exactly_one_block(tmp_path: Path, code: int) -> None:
    body = f"""
    all_started()
    if rank == 1:
        report({code}, "row 7 is empty")
    time.sleep(0.1)
    print("noise", file=sys.stderr) if rank else None
    report(1, "a consequence")
    """
    ended, out, err = Launched(tmp_path, body, processes=3).end()
    assert ended == code
    assert err == "error: row 7 is empty\n  at:  data\n  fix: mend it\n"
    assert out == ""


def test_several_problems_come_as_one_block_with_their_headline(tmp_path: Path) -> None:
    body = """
    error = {"exit_code": 2, "headline": "2 problems", "problems": [
        {"what": "a", "where": "", "fix": ""}, {"what": "b", "where": "", "fix": ""}]}
    (Path(os.environ["SHARDWISE_ERROR_DIR"]) / f"rank-{rank}.json").write_text(json.dumps(error))
    sys.exit(2)
    """
    assert Launched(tmp_path, body).end()[::2] == (2, "error: 2 problems\n  - a\n  - b\n")


def test_a_rank_that_hangs_after_its_report_does_not_hang_the_run(tmp_path: Path) -> None:
    body = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        report(4, "no driver")
    finally:
        time.sleep(60)
    """
    began = time.monotonic()
    code, _, err = Launched(tmp_path, body, grace=0.2).end()
    assert code == 4
    assert err.count("error:") == 1
    assert time.monotonic() - began < 12


def test_a_crash_without_a_report_shows_the_end_of_its_log(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        print("\\n".join(f"line {number}" for number in range(100)))
        os._exit(1)
    """
    code, _, err = Launched(tmp_path, body).end()
    assert code == 1
    assert "line 99\n---\nerror: rank 1 ended with exit code 1" in err
    assert "line 59\n" not in err
    assert err.count("error:") == 1


STOPPABLE = """
signal.signal(signal.SIGTERM, lambda *_: (here / f"term-{rank}").open("a").write("x") and None)
(here / f"ready-{rank}").touch()
while not (here / f"term-{rank}").exists():
    time.sleep(0.01)
time.sleep(0.3)  # saving
"""


def wait_for(folder: Path, pattern: str, number: int) -> None:
    deadline = time.monotonic() + 20
    while len(list(folder.glob(pattern))) < number:
        assert time.monotonic() < deadline, pattern
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_request_reaches_every_worker_once_and_ends_with_75(tmp_path: Path, number: int) -> None:
    run = Launched(tmp_path, STOPPABLE + "sys.exit(75)")
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(number)
    wait_for(tmp_path, "term-*", 2)
    if number == signal.SIGTERM:
        run.process.send_signal(number)  # one request sent twice, as `timeout` does, still lets it save
    assert run.end() == (75, "", "")
    assert [(tmp_path / f"term-{rank}").read_text() for rank in (0, 1)] == ["x", "x"]


def test_a_stop_request_leaves_a_worker_its_helpers(tmp_path: Path) -> None:
    """A chat template's renderer or a compiler that ended now would look like an error."""
    helper = """
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    """
    ending = "(here / f'helper-{rank}').write_text(f'{child.pid} {child.poll()}')\nsys.exit(75)"
    run = Launched(tmp_path, textwrap.dedent(helper) + STOPPABLE + ending)
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == (75, "", "")
    for rank in (0, 1):
        pid, code = (tmp_path / f"helper-{rank}").read_text().split()
        assert code == "None"
        assert not alive(int(pid))  # the launcher ended it with its worker


def test_the_message_of_a_stopped_run_is_shown_once(tmp_path: Path) -> None:
    run = Launched(tmp_path, STOPPABLE + "report(75, 'on request')")
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert (code, err) == (75, "stopped: on request\n  at:  data\n  fix: mend it\n")


def test_a_failure_while_stopping_is_not_hidden_by_75(tmp_path: Path) -> None:
    run = Launched(tmp_path, STOPPABLE + "report(75, 'saved') if rank else report(4, 'disk full')")
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 4
    assert "disk full" in err


@pytest.mark.parametrize(
    ("number", "after", "expected"), [(signal.SIGINT, 0.0, 130), (signal.SIGTERM, 1.2, 143)]
)
def test_the_second_request_kills(tmp_path: Path, number: int, after: float, expected: int) -> None:
    """In a step that takes minutes nobody has to find out how to kill the run."""
    run = Launched(tmp_path, STOPPABLE + "time.sleep(60)")
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(number)
    wait_for(tmp_path, "term-*", 2)
    time.sleep(after)
    run.process.send_signal(number)
    code, _, err = run.end(seconds=3)
    assert code == expected
    assert ("stopping: the current step is finished first" in err) == (after > 1)
    assert err.count("error:") == 1
    assert "before the state could be saved" in err


@pytest.mark.parametrize("measure_steps", [None, 3])
def test_a_wait_for_the_state_is_explained_once(tmp_path: Path, measure_steps: int | None) -> None:
    run = Launched(tmp_path, STOPPABLE + "time.sleep(1.5)\nsys.exit(75)", measure_steps=measure_steps)
    wait_for(tmp_path, "ready-*", 2)
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end()
    assert code == 75
    told = "SIGTERM again ends the run at once and loses what came after the last checkpoint"
    assert err.count(told) == (measure_steps is None), "a bench's row saves nothing"


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_before_the_workers_can_save_is_that_of_the_signal(
    tmp_path: Path, number: int, expected: int
) -> None:
    run = Launched(tmp_path, "time.sleep(60)")
    run.pids()
    run.process.send_signal(number)
    code, _, err = run.end(seconds=5)
    assert code == expected
    assert "before the state could be saved\n  fix: start it again: nothing was written yet" in err


def test_a_dry_run_that_is_stopped_does_not_talk_of_a_state(tmp_path: Path) -> None:
    run = Launched(tmp_path, "time.sleep(60)", processes=1, dry_run=True)
    run.pids()
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.end(seconds=5)
    assert code == 143
    assert "error: stopped before the dry run was done\n  fix: start it again" in err


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_4_and_the_others_are_gone_within_the_grace(tmp_path: Path, victim: int) -> None:
    body = f"""
    if rank == {victim}:
        all_started()
        os.kill(os.getpid(), signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)
    """
    run = Launched(tmp_path, body, processes=3, grace=0.3)
    run.pids()
    began = time.monotonic()
    code, _, err = run.end()
    assert code == 4
    assert f"rank {victim} was killed" in err
    assert err.count("error:") == 1
    assert time.monotonic() - began < 0.3 + 3.0 + 1.5


def test_the_killed_rank_is_named_not_the_one_that_noticed(tmp_path: Path) -> None:
    body = """
    all_started()
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    peer = Path(f"/proc/{int((here / 'pid-1').read_text())}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the launcher has taken note already
        while peer.read_text().split()[2] != "Z":
            pass
    report(4, "connection closed by peer")
    """
    code, _, err = Launched(tmp_path, body).end()
    assert code == 4
    assert "rank 1 was killed" in err


def test_a_crash_in_native_code_names_its_signal(tmp_path: Path) -> None:
    body = """
    if rank == 1:
        print("native words", flush=True)
        os.abort()
    """
    code, _, err = Launched(tmp_path, body).end()
    assert code == 4
    assert "native words" in err
    assert "rank 1 crashed with SIGABRT" in err


def test_workers_die_with_the_launcher(tmp_path: Path) -> None:
    run = Launched(tmp_path, "signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)")
    pids = run.pids()
    run.process.kill()
    run.process.communicate(timeout=5)
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_worker_started_does_not_outlive_the_run(tmp_path: Path) -> None:
    body = """
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (here / f"child-{rank}").write_text(str(child.pid))
    os._exit(0)
    """
    assert Launched(tmp_path, body).end()[0] == 0
    children = [int(path.read_text()) for path in tmp_path.glob("child-*")]
    assert len(children) == 2
    deadline = time.monotonic() + 3
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_dry_run_needs_one_process(tmp_path: Path) -> None:
    code, out, _ = Launched(tmp_path, "print(size, spec['processes'])", processes=8, dry_run=True).end()
    assert (code, out) == (0, "1 8\n")


def test_a_file_in_the_current_folder_does_not_replace_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "cwd"
    elsewhere.mkdir()
    (elsewhere / "colorsys.py").write_text("raise SystemExit(9)")
    monkeypatch.chdir(elsewhere)
    assert Launched(tmp_path, "import colorsys; del os.environ['RANK']").end()[0] == 0


def test_the_spec_survives_its_way_through_json() -> None:
    spec = LaunchSpec(job={"name": "a"}, run_dir="runs/a", processes=2, max_steps=3, memory_cap_bytes=1 << 34)
    assert LaunchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
