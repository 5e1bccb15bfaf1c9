"""Locks on DeepSpeed's compiled operators: left by killed processes, held by living ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils import file_baton

from shardwise.engines.deepspeed.runtime.extensions import (
    LONGEST_BUILD_SECONDS,
    extensions_root,
    needed_operators,
    pass_locks,
)
from shardwise.errors import MachineError
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
    """A process that holds torch's own lock; it is killed, and so never gives it back."""
    command = [sys.executable, "-c", COMPILING, file_baton.__file__, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "compiling\n"
        try:
            yield process
        finally:
            process.kill()


def test_the_lock_of_a_killed_process_is_removed_and_told(
    lock: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with compiling(lock):
        pass
    assert lock.exists(), "torch would wait for ever"
    pass_locks(["cpu_adam"])
    assert not lock.exists()
    [told] = caplog.messages
    assert told.startswith(f"removed {lock}: the process that compiled cpu_adam was killed")


def test_a_living_process_is_waited_for_until_it_dies(lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    with compiling(lock):
        waiting = threading.Thread(target=pass_locks, args=(["cpu_adam"],))
        waiting.start()
        waiting.join(timeout=1)
        assert waiting.is_alive()
        assert lock.exists()
        assert [m.partition(":")[0] for m in caplog.messages] == ["another process compiles cpu_adam"]
    waiting.join(timeout=5)
    assert not waiting.is_alive()
    assert not lock.exists()


def test_what_is_compiled_is_waited_for_no_longer(lock: Path) -> None:
    with compiling(lock):
        waiting = threading.Thread(target=pass_locks, args=(["cpu_adam"],))
        waiting.start()
        lock.unlink()
        waiting.join(timeout=5)
        assert not waiting.is_alive()


def test_a_lock_held_for_too_long_is_an_error_that_names_it(lock: Path) -> None:
    with compiling(lock):
        long_ago = time.time() - LONGEST_BUILD_SECONDS - 60
        os.utime(lock, (long_ago, long_ago))
        with pytest.raises(MachineError) as caught:
            pass_locks(["cpu_adam"])
        assert lock.exists()
    assert caught.value.problems[0].where == str(lock)
    assert "remove that file" in caught.value.problems[0].fix


def test_locks_of_other_operators_are_left_alone(lock: Path) -> None:
    lock.touch()
    pass_locks(["async_io"])
    assert lock.exists()
    assert needed_operators(Strategy(engine="deepspeed", stage=2)) == ()
    offload = Strategy(engine="deepspeed", stage=2, offload_optimizer="cpu")
    assert needed_operators(offload) == ("cpu_adam",)
    drive = Strategy(engine="deepspeed", stage=3, offload_optimizer="nvme", offload_parameters="nvme")
    assert needed_operators(drive) == ("cpu_adam", "async_io")


def test_the_folder_is_the_one_that_torch_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import _get_build_directory

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Path(_get_build_directory("cpu_adam", verbose=False)) == extensions_root() / "cpu_adam"


@pytest.mark.slow
def test_training_with_an_offloaded_optimizer_does_not_wait_for_the_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With DeepSpeed's real optimizer: what is compiled already is copied, else it is compiled."""
    extensions = tmp_path / "extensions"
    compiled = extensions_root() / "cpu_adam"
    (extensions / "cpu_adam").mkdir(parents=True)
    if (compiled / "cpu_adam.so").is_file() and not (compiled / "lock").exists():
        shutil.copytree(compiled, extensions / "cpu_adam", dirs_exist_ok=True)
    (extensions / "cpu_adam" / "lock").touch()
    (tmp_path / "text.txt").write_text("hello world, how are you today? " * 100)
    (tmp_path / "job.yaml").write_text(
        "name: run\n"
        "model: {source: tiny-llama, weights: random, tokenizer: train, tokenizer_vocab: 300}\n"
        "data: {train: text.txt, format: text, sequence_length: 32, eval_fraction: 0}\n"
        "train: {steps: 1, global_batch: 2, precision: fp32}\n"
        "strategy: zero2-offload\n"
    )
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
    assert f"removed {extensions}/cpu_adam/lock" in done.stderr
    assert "step 1/1" in done.stderr
