"""The `shardwise` command in a fork, and forks wherever it starts a worker: nobody imports torch anew.

All else is real: the launcher, what it does with processes, and the processes that it has.
"""

from __future__ import annotations

import importlib
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

from forks import Call, Started, replace_file, run, to_the_end


def forked_shardwise(
    *arguments: str,
    cwd: Path,
    worker: str = "shardwise.training.worker",
    timeout: float = 300.0,
    **variables: str,
) -> tuple[int, str, str]:
    """The exit code of a command, and what it printed; `worker`: the module that ranks run."""
    call = _call(arguments, cwd, "forked", worker, variables)
    (code,) = run([call], timeout=timeout)
    return code, call.output.read_text(), call.errors.read_text()


class Command(Started):
    """A command that is under way."""

    def __init__(self, *arguments: str, cwd: Path, stdin: str = "", name: str = "started") -> None:
        """What it reads and prints are files in `cwd` with that name."""
        call = _call(arguments, cwd, name, "shardwise.training.worker", {})
        call.input.write_text(stdin)
        self._output, self._errors = call.output, call.errors
        super().__init__(call)

    @property
    def output(self) -> str:
        return self._output.read_text()

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def finish(self) -> tuple[int, str, str]:
        return self.wait(), self.output, self.errors

    def until(self, pattern: str, timeout: float = 120.0) -> re.Match[str]:
        """Waits for it among the errors."""
        until = time.monotonic() + timeout
        while not (found := re.search(pattern, self.errors)):
            assert self.poll() is None, self.errors
            assert time.monotonic() < until, self.errors
            time.sleep(0.02)
        return found


def _call(arguments: Sequence[str], cwd: Path, name: str, worker: str, variables: Mapping[str, str]) -> Call:
    streams = {stream: cwd / f"{name}.{stream}" for stream in ("input", "output", "errors")}
    for path in streams.values():
        path.write_bytes(b"")
    return Call(
        target="forked_command:main",
        arguments=[str(cwd), worker, *arguments],
        environment={**os.environ, "SHARDWISE_CACHE": str(cwd / "cache"), **variables},
        **streams,
    )


def main(cwd: str, worker: str, *arguments: str) -> None:
    """In the fork."""
    import shardwise.launch.local as local
    from shardwise.cli import main as command

    os.chdir(cwd)
    sys.argv = ["shardwise", *arguments]
    starting = SimpleNamespace(**{**vars(subprocess), "Popen": Fork})
    for name in ("shardwise.trials.process", "shardwise.launch.local", "shardwise.diagnosis.child"):
        importlib.import_module(name).subprocess = starting  # type: ignore[attr-defined]
    local.launch = partial(local.launch, module=worker)  # type: ignore[assignment]
    sys.exit(command(list(arguments)))


class Fork:
    """What the launcher needs of `subprocess.Popen([sys.executable, …, "-m", MODULE, …])`."""

    def __init__(
        self,
        command: list[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: int,
        stdout: BinaryIO | None,
        stderr: int | None,
        process_group: int | None = None,
        start_new_session: bool = False,
        preexec_fn: Callable[[], None] = lambda: None,
    ) -> None:
        def become() -> None:
            if start_new_session:
                os.setsid()
            if process_group is not None:
                os.setpgid(0, process_group)
            preexec_fn()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            replace_file(0, os.devnull)
            if stdout is not None:
                os.dup2(stdout.fileno(), 1)
            if stderr is not None:
                os.dup2(1, 2)
            sys.argv = command[command.index("-m") + 1 :]
            warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            to_the_end(become)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
