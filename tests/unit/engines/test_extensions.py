"""Locks on the operators that DeepSpeed compiles."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch.utils import file_baton

from shardwise.engines.deepspeed.runtime.extensions import (
    STALE_SECONDS,
    extensions_root,
    needed_operators,
    wait_for_locks,
)
from shardwise.strategy import Strategy

COMPILING = """
import importlib.util, sys, time
spec = importlib.util.spec_from_file_location("file_baton", sys.argv[1])
torch_utils_file_baton = importlib.util.module_from_spec(spec)
spec.loader.exec_module(torch_utils_file_baton)
assert torch_utils_file_baton.FileBaton(sys.argv[2]).try_acquire()
print("compiling", flush=True)
time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    return tmp_path / "cpu_adam" / "lock"


@contextmanager
def compiling(lock: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds torch's own lock; it is killed and so never removes it."""
    command = [sys.executable, "-c", COMPILING, file_baton.__file__, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        try:
            yield process
        finally:
            process.kill()


def age(lock: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(lock, (then, then))


def test_an_old_lock_is_removed_with_a_warning(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with compiling(lock):
        pass
    assert lock.exists(), "torch would wait forever"
    age(lock, STALE_SECONDS + 1)
    wait_for_locks(["cpu_adam"])
    assert not lock.exists()
    ours = [record.message for record in caplog.records if record.name.startswith("shardwise")]
    assert ours == [f"compiling cpu_adam was interrupted: removed {lock}"]  # torch with CUDA warns, too


def test_a_recent_lock_is_waited_for_until_it_is_old(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with compiling(lock):
        waiting = threading.Thread(target=wait_for_locks, args=(["cpu_adam"],))
        waiting.start()
        age(lock, STALE_SECONDS - 60)
        waiting.join(timeout=1)
        assert waiting.is_alive()
        assert lock.exists()
        assert caplog.messages == [
            f"another process compiles cpu_adam. Waiting; if there is none, remove {lock}"
        ]
        age(lock, STALE_SECONDS + 1)
        waiting.join(timeout=5)
    assert not waiting.is_alive()
    assert not lock.exists()
    assert len(caplog.messages) == 2


def test_the_end_of_compiling_ends_the_wait(lock: Path) -> None:
    with compiling(lock):
        waiting = threading.Thread(target=wait_for_locks, args=(["cpu_adam"],))
        waiting.start()
        lock.unlink()
        waiting.join(timeout=5)
        assert not waiting.is_alive()


def test_locks_of_other_operators_are_left_alone(lock: Path) -> None:
    lock.touch()
    wait_for_locks(["async_io"])
    assert lock.exists()
    assert needed_operators(Strategy(engine="deepspeed", stage=2)) == ()
    offload = Strategy(engine="deepspeed", stage=2, offload_optimizer="cpu")
    assert needed_operators(offload) == ("cpu_adam",)
    drive = Strategy(engine="deepspeed", stage=3, offload_optimizer="nvme", offload_parameters="nvme")
    assert needed_operators(drive) == ("cpu_adam", "async_io")


def test_the_folder_is_the_one_that_torch_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(_get_build_directory("cpu_adam", verbose=False)) == extensions_root() / "cpu_adam"


INTERRUPTED = """
import subprocess, sys
from pathlib import Path
from shardwise.engines.deepspeed.runtime.extensions import compiling
with compiling():
    try:
        print("compiling", flush=True)
        subprocess.run(["sh", "-c", "setsid sh -c 'echo $$ > compiler; exec sleep 60' >&- & wait"])
    except Exception:
        sys.exit("as DeepSpeed has it: an operator cannot be compiled")
    finally:
        Path("lock").unlink()
print("compiled")
"""


def test_a_request_to_stop_ends_the_compilers_and_frees_the_lock(tmp_path: Path) -> None:
    """As ninja starts them: in groups of their own. They ran on, and the next run waited for the lock."""
    (tmp_path / "lock").touch()
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        while not (tmp_path / "compiler").exists() or not (tmp_path / "compiler").read_text():
            time.sleep(0.01)
        compiler = psutil.Process(int((tmp_path / "compiler").read_text()))
        process.terminate()
        assert (process.wait(10), process.stdout.read()) == (-signal.SIGTERM, "")
    until = time.monotonic() + 5
    while compiler.is_running() and compiler.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert not (tmp_path / "lock").exists()


def write_job(folder: Path) -> None:
    (folder / "text.txt").write_text("hello world, how are you today? " * 100)
    (folder / "job.yaml").write_text(
        "name: run\n"
        "model: {source: tiny-llama, weights: random, tokenizer: train, tokenizer_vocab: 300}\n"
        "data: {train: text.txt, format: text, sequence_length: 32, eval_fraction: 0}\n"
        "train: {steps: 1, global_batch: 2, precision: fp32}\n"
        "strategy: zero2-offload\n"
    )


WITH_CTRL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without it
runpy.run_module("shardwise", run_name="__main__")
"""


@pytest.mark.slow
def test_ctrl_c_while_deepspeed_compiles_ends_the_run_and_its_compilers(tmp_path: Path) -> None:
    write_job(tmp_path)
    variables = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "ext"), "SHARDWISE_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", WITH_CTRL_C, "train", "job.yaml", "--processes", "2"]
    run = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
    )
    started: list[psutil.Process] = []
    until = time.monotonic() + 120
    try:
        while not any("ninja" in one.info["name"] for one in started):
            assert run.poll() is None
            assert time.monotonic() < until
            time.sleep(0.5)
            every = {one.pid: one for one in psutil.process_iter(["name"])}
            started = [every[one.pid] for one in psutil.Process(run.pid).children(True) if one.pid in every]
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=30)  # compiling takes longer
        found = run.returncode, err.count("error: stopped before"), "Traceback" in err
        assert found == (130, 1, False), err
        assert not (tmp_path / "ext" / "cpu_adam" / "lock").exists()
        time.sleep(1)
        assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
    finally:
        for one in started:
            if one.is_running():
                one.kill()
        run.kill()
        run.communicate()


@pytest.mark.slow
def test_training_with_an_offloaded_optimizer_does_not_wait_for_an_old_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DeepSpeed's real optimizer: what is compiled already is copied, else it is compiled."""
    extensions = tmp_path / "extensions"
    compiled = extensions_root() / "cpu_adam"
    (extensions / "cpu_adam").mkdir(parents=True)
    if (compiled / "cpu_adam.so").is_file() and not (compiled / "lock").exists():
        shutil.copytree(compiled, extensions / "cpu_adam", dirs_exist_ok=True)
    (extensions / "cpu_adam" / "lock").touch()
    age(extensions / "cpu_adam" / "lock", STALE_SECONDS + 1)
    write_job(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("SHARDWISE_CACHE", str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "shardwise", "train", "job.yaml", "--processes", "1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"compiling cpu_adam was interrupted: removed {extensions}/cpu_adam/lock" in done.stderr
    assert "step 1/1" in done.stderr
