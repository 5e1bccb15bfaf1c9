"""Processes for tests, forked from templates that have imported everything: the imports cost ten CPU seconds.

Ranks that follow each other come from two templates, as each process hashes strings in another way: an order
taken from a set differs between ranks here as it does for a user. A template (`python -m forks`) has one
thread, and has touched neither gloo nor a GPU, when it forks: where there are GPUs it imports nothing, as
libraries look at them when they are imported.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from threading import Timer
from typing import Any, NoReturn

from shardwise.hardware.detect import gpu_count
from shardwise.launch import die_with
from shardwise.launch.nodes import free_port

HERE = Path(__file__).parent
TEMPLATES = 2
IMPORTED = (
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "engine_scenarios",
    "peft",
    "quantized_worker",
    "shardwise.engines.deepspeed.runtime.engine",
    "shardwise.engines.fsdp2.runtime",
    "shardwise.training.run",
)


@dataclass(frozen=True, kw_only=True)
class Call:
    """`target`, "module:function", to be called in a process of its own."""

    target: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    output: Path
    errors: Path
    input: Path = Path(os.devnull)


def run_set(target: str, *arguments: str, processes: int, folder: Path, timeout: float = 600.0) -> None:
    """Calls `target` in that many processes that can meet over gloo.

    What a rank prints goes to `folder`/rank-N.log. Raises AssertionError with it when one of them fails.
    """
    shared = {
        **os.environ,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank-{rank}.log" for rank in range(processes)]
    calls = [
        Call(
            target=target,
            arguments=arguments,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            output=log,
            errors=log,
        )
        for rank, log in enumerate(logs)
    ]
    codes = run(calls, timeout=timeout)
    if any(codes):
        raise AssertionError("\n".join([f"exit codes {codes}", *(log.read_text()[-6000:] for log in logs)]))


def run(calls: Sequence[Call], *, timeout: float) -> list[int]:
    """Makes the calls side by side; the exit codes of their processes, as subprocess has them.

    AssertionError when they are not done after `timeout` seconds; then none of them is left.
    """
    shares = [calls[number::TEMPLATES] for number in range(min(TEMPLATES, len(calls)))]
    codes = [0] * len(calls)
    try:
        with ExitStack() as timers:
            for number, share in enumerate(shares):
                timer = Timer(timeout, _template(number).kill)
                timer.start()
                timers.callback(timer.cancel)
                _template(number).ask(share)
            for number in range(len(shares)):
                codes[number::TEMPLATES] = _template(number).answer()
    except BaseException:
        for number in range(len(shares)):
            _template(number).kill()
        _template.cache_clear()
        raise
    return codes


def warm_up() -> None:
    """Starts the templates from this thread: the kernel ends them when the thread that started them ends."""
    for number in range(TEMPLATES):
        _template(number)


class Started:
    """A call that is under way while the test goes on; what tests need of `subprocess.Popen`."""

    def __init__(self, call: Call) -> None:
        self._template = _template(0)
        self.pid: int = self._template.tell(asdict(call))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._template.tell(self.pid)
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        until = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.send_signal(signal.SIGKILL)
                raise AssertionError(f"not done after {timeout:.0f} s")
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Template:
    """A process that forks."""

    def __init__(self) -> None:
        parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forks"],
            env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: die_with(parent),  # noqa: PLW1509 - before any thread is there
        )

    def ask(self, calls: Sequence[Call]) -> None:
        self._send([asdict(call) for call in calls])

    def answer(self) -> Any:
        """The exit codes, when all calls have ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the processes took too long, or their template has ended"
        return json.loads(line)

    def tell(self, what: dict[str, Any] | int) -> Any:
        """The process of a call that it starts; of a process, its exit code or None."""
        self._send(what)
        return self.answer()

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what, default=str), file=self._process.stdin, flush=True)

    def kill(self) -> None:
        """Ends it and what it has forked."""
        self._process.kill()


@cache
def _template(_: int) -> Template:
    return Template()


def _serve() -> None:
    """Forks what each line of stdin asks for; answers with the exit codes, a line each time.

    A list: calls that it waits for. A single call it only starts. A process: whether that call has ended.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if not gpu_count():
        _import_all()
    parent = os.getpid()

    def fork(call: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            die_with(parent)
            answers.close()
            to_the_end(partial(_make, **call))
        return pid

    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any
        if isinstance(asked, list):
            pids = [fork(call) for call in asked]
            answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        elif isinstance(asked, dict):
            answer = fork(asked)
        else:
            pid, status = os.waitpid(asked, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        print(json.dumps(answer), file=answers, flush=True)


def _import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    import cpuinfo
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from deepspeed.utils import numa

    from shardwise.engines.deepspeed.runtime.extensions import wait_for_locks

    # What an optimizer for offloading costs: DeepSpeed asks for the vendor each time, for more than a second,
    # and in each process whether it has compiled it already, for two.
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    numa.get_numa_cores = cache(numa.get_numa_cores)  # a process, four times an engine
    wait_for_locks(["cpu_adam"])
    CPUAdamBuilder().load(verbose=False)
    gc.collect()
    gc.freeze()


def _make(
    target: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    output: str,
    errors: str,
    input: str,  # noqa: A002 - as subprocess calls it
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests without it
    gc.unfreeze = lambda: None  # after each run: the next one would search all that the template has imported
    os.environ.clear()
    os.environ.update(environment)
    replace_file(0, input)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the template's has read ahead
    replace_file(1, output)
    replace_file(2, errors)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*arguments)


def to_the_end(call: Callable[[], object]) -> NoReturn:
    """What is left of this process's life; to take the interpreter apart as well would cost a second."""
    code = 1
    try:
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - this process's last line
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def replace_file(number: int, path: str | Path) -> None:
    """From now on this process reads from, or appends to, that file by this descriptor."""
    opened = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(opened, number)
    os.close(opened)


if __name__ == "__main__":
    _serve()
