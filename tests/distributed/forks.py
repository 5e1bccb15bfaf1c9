"""Processes for tests, forked from templates that have imported everything: the imports cost ten CPU seconds.

Ranks that follow each other come from two templates, as each process hashes strings in another way: an order
taken from a set differs between ranks here as it does for a user. A template (`python -m forks`) has one
thread, and has touched neither gloo nor a GPU, when it forks: where there are GPUs it imports nothing, as
libraries look at them when they are imported. All workers of a test session share the two; they end with it.

A call is a connection: its first packet asks for the process, and answers are the process and its exit code.
The process is killed where the connection ends first. `handed_over` makes one of every `python` that starts.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NoReturn
from uuid import uuid4

from shardwise.hardware.detect import gpu_count
from shardwise.launch import die_with
from shardwise.launch.nodes import free_port

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
TEMPLATES = 2
WORKER = "PYTEST_XDIST_TESTRUNUID"
SESSION = os.environ.get(WORKER) or uuid4().hex
PACKET_BYTES = 1 << 20
START_SECONDS = 300.0  # DeepSpeed may have to compile first
OTHERS_SECONDS = 60.0  # to notice that a rank has failed
LAST_SECONDS = 5.0  # to say what its threads are doing
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
    try:
        codes = run(calls, timeout=timeout)
        problem = f"exit codes {codes}" if any(codes) else None
    except AssertionError as late:
        problem = str(late)
    if problem is not None:
        raise AssertionError("\n".join([problem, *(f"{log}:\n{log.read_text()[-6000:]}" for log in logs)]))


def run(calls: Sequence[Call], *, timeout: float) -> list[int]:
    """Makes the calls side by side; the exit codes of their processes, as subprocess has them.

    AssertionError when they are not done after `timeout` seconds, or soon after one has failed. Then none of
    them is left, and each has written to its errors what its threads were doing.
    """
    began, started = time.monotonic(), list[Started]()
    try:
        for number, call in enumerate(calls):
            started.append(Started(call, template=number % TEMPLATES))
        return _codes(started, began, timeout)
    except BaseException:
        for number in (signal.SIGABRT, signal.SIGKILL):
            for one in started:
                one.send_signal(number)
            for one in started:
                one.poll(LAST_SECONDS)
        raise


def _codes(started: Sequence[Started], began: float, timeout: float) -> list[int]:
    """The exit codes, once all have ended."""
    until = began + timeout
    while None in (codes := [one.poll() for one in started]):
        if any(codes):
            until = min(until, time.monotonic() + OTHERS_SECONDS)
        lines = [one.line for one in started if one.returncode is None]
        if not select.select(lines, [], [], max(0.0, until - time.monotonic()))[0]:
            raise AssertionError(f"not all done after {time.monotonic() - began:.0f} s; exit codes {codes}")
    return [code for code in codes if code is not None]


def warm_up() -> None:
    """Starts the templates from this thread: what another one starts might be in another network."""
    for number in range(TEMPLATES):
        _connected(number).close()


def handed_over(python_path: str | Path = SOURCE) -> dict[str, str]:
    """Variables of an environment in which every `python` that starts runs its program in a fork.

    Everything else is as ever: its command line, folder, files and variables, signals, and how it ends.
    """
    warm_up()
    names = " ".join(address(number)[1:] for number in range(TEMPLATES))
    return {"FORKS": names, "PYTHONPATH": f"{HERE / 'handed'}{os.pathsep}{python_path}"}


class Started:
    """A call that is under way while the test goes on; what tests need of `subprocess.Popen`."""

    def __init__(self, call: Call, *, template: int = 0) -> None:
        self.line = _connected(template)
        self.line.send(json.dumps(asdict(call), default=str).encode())
        self.returncode: int | None = None
        self.pid: int = self._answer(START_SECONDS)

    def _answer(self, seconds: float) -> Any:
        """The next answer; None where there is none in that time."""
        if not select.select([self.line], [], [], max(0.0, seconds))[0]:
            return None
        answer = self.line.recv(PACKET_BYTES)
        assert answer, "the template has ended"
        return json.loads(answer)

    def poll(self, seconds: float = 0.0) -> int | None:
        if self.returncode is None:
            self.returncode = self._answer(seconds)
            if self.returncode is not None:
                self.line.close()
        return self.returncode

    def wait(self, timeout: float = 300.0) -> int:
        code = self.poll(timeout)
        if code is None:
            self.send_signal(signal.SIGKILL)
            raise AssertionError(f"not done after {timeout:.0f} s")
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __del__(self) -> None:
        self.line.close()


_started: dict[int, subprocess.Popen[bytes]] = {}  # The templates that this process has started


def address(number: int) -> str:
    """Of a template of this session: a name that no file needs."""
    return f"\0shardwise-forks-{SESSION}-{number}"


def _connected(number: int) -> socket.socket:
    """A line to a template, which is started where nobody has done so."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            line.connect(address(number))
        except ConnectionRefusedError:
            line.close()
        else:
            return line
        if number not in _started or _started[number].poll() is not None:
            leader = os.getppid() if WORKER in os.environ else os.getpid()
            _started[number] = subprocess.Popen(
                [sys.executable, "-m", "forks", address(number)[1:], str(leader)],
                env={**os.environ, "PYTHONPATH": f"{HERE}{os.pathsep}{os.environ['PYTHONPATH']}"},
                stdin=subprocess.DEVNULL,
            )
        time.sleep(0.05)
    raise AssertionError("no template answers")


class Template:
    """Forks what is asked for, tells how it ends, and ends with the process `leader`."""

    def __init__(self, listening: socket.socket, leader: int) -> None:
        self._listening, self._leader, self._pid = listening, os.pidfd_open(leader), os.getpid()
        self._forks: dict[Any, int] = {}
        """By the line on which it was asked for, and by what becomes readable when it ends: a process."""
        self._lines: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        for one in (listening, self._leader):
            self._selector.register(one, selectors.EVENT_READ)

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listening:
                    self._selector.register(self._listening.accept()[0], selectors.EVENT_READ)
                elif key.fileobj == self._leader:
                    return
                elif isinstance(key.fileobj, socket.socket):
                    if key.fileobj.fileno() >= 0:  # not closed since, as its process has ended
                        self._hear(key.fileobj)
                elif key.fileobj in self._forks:
                    self._ended(key.fileobj)

    def _hear(self, line: socket.socket) -> None:
        asked = b""
        with suppress(ConnectionResetError):
            asked = line.recv(PACKET_BYTES)
        if asked:
            pid = self._fork(json.loads(asked))
            with suppress(BrokenPipeError):
                line.send(json.dumps(pid).encode())
            end = os.pidfd_open(pid)
            self._selector.register(end, selectors.EVENT_READ)
            self._forks |= {end: pid, line: pid}
            self._lines[end] = line
            return
        if line in self._forks:  # nobody waits for it any more
            os.kill(self._forks.pop(line), signal.SIGKILL)
        self._close(line)

    def _ended(self, end: Any) -> None:
        code, line = os.waitstatus_to_exitcode(os.waitpid(self._forks.pop(end), 0)[1]), self._lines.pop(end)
        self._selector.unregister(end)
        os.close(end)
        if self._forks.pop(line, None) is not None:
            with suppress(BrokenPipeError):
                line.send(json.dumps(code).encode())
            self._close(line)

    def _close(self, line: socket.socket) -> None:
        self._selector.unregister(line)
        line.close()

    def _fork(self, call: dict[str, Any]) -> int:
        pid = os.fork()
        if pid == 0:
            die_with(self._pid)
            for key in list(self._selector.get_map().values()):
                os.close(key.fd)
            self._selector.close()
            to_the_end(partial(_make, **call))
        return pid


def _serve(name: str, leader: str) -> None:
    """A template, unless this session has it already."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(f"\0{name}")
    except OSError:
        return
    listening.listen(64)
    os.dup2(2, 1)
    if not gpu_count():
        _import_all()
    Template(listening, int(leader)).serve()
    os._exit(0)


def _import_all() -> None:
    gc.disable()  # imports make a million objects that last
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
    gc.enable()


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
    faulthandler.enable(2)
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(*arguments)


def run_python(caller: str, parent: str, folder: str, *command: str) -> None:
    """In a fork: the program of a command line; `parent` has started the process `caller` in `folder`."""
    os.sched_setaffinity(0, os.sched_getaffinity(int(caller)))
    me, of_others = os.getpid(), os.getppid
    os.getppid = lambda: int(parent) if os.getpid() == me else of_others()
    os.chdir(folder)
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    first = next(number for number, word in enumerate(command) if word in ("-c", "-m") or word[0] != "-")
    lines = "-u" in command[:first] or os.isatty(1)
    sys.stdout = open(1, "w", 1 if lines else -1, encoding="utf-8", closefd=False)  # noqa: SIM115 - as below
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    kind, *rest = command[first:]
    warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
    if kind == "-m":
        sys.argv, sys.path[:0] = rest, [folder] * ("-P" not in command[:first])
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv, sys.path[:0] = ["-c", *rest[1:]], [""]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[:0] = [kind, *rest], [str(Path(kind).resolve().parent)]
        runpy.run_path(kind, run_name="__main__")


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
    _serve(*sys.argv[1:])
