"""Run probes in child processes, so that a crash or a hang is a finding and does not end the doctor.

The parent makes no CUDA context. A child answers its probes one after the other and writes a line of JSON for
each event (probes/__main__.py). If it ends or stays silent for too long, its current probe has failed,
and another child continues with the rest.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE = "shardwise.diagnosis.probes"
LIMIT_SECONDS = 60.0  # without an event; importing torch from a cold network disk takes half of it
STARVED_SHARE = 0.25  # of a silence in which it waited for a core: the machine is busy, the probe may be fine
GRACE_SECONDS = 5.0  # the same for ranks that wait for one that has failed
Say = Callable[[int, int, list[str]], None]
"""Takes the number of answers, of probes, and the probes that are being asked."""
_LOOK_EVERY_SECONDS = 0.02
_TAIL_LINES, _TAIL_CHARACTERS = 3, 400


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a probe found, or how it failed: then `facts` is None."""

    facts: Mapping[str, Any] | None = field(default=None, hash=False)
    failure: str = ""  # `hung for 60 s while joining`, `crashed with SIGSEGV`, `RuntimeError: ...`
    printed: str = ""  # the last lines before the process crashed or was killed
    busy: bool = False  # It got too little of a core to answer in time: nothing is known

    @property
    def why(self) -> str:
        return f"{self.failure}: {self.printed}" if self.printed else self.failure


@dataclass
class Child:
    """A process that answers the probes `names` in turn, and its answers so far."""

    names: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    limit_seconds: float
    module: str
    answers: dict[str, Answer] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _runs: int = 0
    _event: tuple[float, float] = (0.0, 0.0)
    """When the last event was seen first, and the seconds it had waited for a core by then."""

    def start(self) -> None:
        self._runs += 1
        with self._file("log").open("wb") as log:
            self._process = subprocess.Popen(
                # -P: a file of the user's folder must not stand in for a module of the same name.
                [sys.executable, "-P", "-m", self.module, str(self._file("events")), *self.left],
                env={**self.environment, "SHARDWISE_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._started = time.time()
        self._event = (self._started, 0.0)

    def look(self) -> bool:
        """Read its events; True when all probes have an answer."""
        assert self._process is not None
        code = self._process.poll()
        at, stage, last = self._read()
        if not self.left:
            self.kill()
            return True
        now = time.time()
        if last > self._event[0]:
            self._event = (last, _waited_for_a_core(self._process.pid))
        if code is None and now - max(last, self._started) < self.limit_seconds:
            return False
        waited = _waited_for_a_core(self._process.pid) - self._event[1] if code is None else 0.0
        self.kill()
        if waited > STARVED_SHARE * (now - self._event[0]):
            share = waited / (now - self._event[0])
            words = f"no answer in {self.limit_seconds:.0f} s, {min(1.0, share):.0%} of it without a core"
            self.answers |= dict.fromkeys(self.left, Answer(failure=words, busy=True))
            return True
        words = f"hung for {self.limit_seconds:.0f} s" if code is None else _ended(code)
        words += f" while {stage}" if stage else ""
        at = at if at in self.left else self.left[0]
        self.answers[at] = Answer(failure=words, printed=self.printed())
        if self.left:
            self.start()
        return not self.left

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def printed(self) -> str:
        lines = self._file("log").read_text(encoding="utf-8", errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())[-_TAIL_CHARACTERS:]

    @property
    def left(self) -> list[str]:
        return [name for name in self.names if name not in self.answers]

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self._runs}"

    def _read(self) -> tuple[str, str, float]:
        """The current probe, its stage, and the time of the last event (Unix seconds)."""
        at, stage, events = "", "", self._file("events")
        if not events.exists():
            return at, stage, 0.0
        last = events.stat().st_mtime
        for line in events.read_text(encoding="utf-8").split("\n")[:-1]:  # the last one may be incomplete
            event = json.loads(line)
            at, stage = event["probe"], event.get("stage", "")
            if "facts" in event:
                self.answers[at] = Answer(facts=event["facts"])
            elif "error" in event:
                self.answers[at] = Answer(failure=event["error"])
        return at, stage, last


class Children:
    """All the children of one examination; they run at the same time."""

    def __init__(self, folder: Path, *, module: str, limit_seconds: float, say: Say) -> None:
        self._folder, self._module, self._limit_seconds, self._say = folder, module, limit_seconds, say
        self.all: list[Child] = []
        self._teams: list[list[Child]] = []

    def ask(self, *names: str, environment: Mapping[str, str] | None = None, limit: float = 0.0) -> Child:
        """Start a child for the probes `names`, silent for `limit` seconds at most; `wait` brings answers."""
        folder = self._folder / str(len(self.all))
        folder.mkdir(mode=0o700)
        used = environment or dict(os.environ)
        child = Child(names, used, folder, limit or self._limit_seconds, self._module)
        self.all.append(child)
        child.start()
        return child

    def ask_together(self, name: str, environments: Sequence[Mapping[str, str]], limit: float) -> list[Child]:
        """A child for each environment. They wait for each other, but not long for one that has failed."""
        team = [self.ask(name, environment=one, limit=limit) for one in environments]
        self._teams.append(team)
        return team

    def wait(self) -> None:
        waiting, answered = list(self.all), -1
        while waiting:
            waiting = [child for child in waiting if not child.look()]
            done = sum(len(child.answers) for child in self.all)
            if done > answered:
                answered = done
                left = dict.fromkeys(next(iter(child.left)) for child in waiting)
                self._say(done, sum(len(child.names) for child in self.all), list(left))
            for team in self._teams:
                if any(answer.facts is None for child in team for answer in child.answers.values()):
                    for child in team:
                        child.limit_seconds = min(child.limit_seconds, GRACE_SECONDS)
            time.sleep(_LOOK_EVERY_SECONDS if waiting else 0)


@contextmanager
def children(
    *, module: str = MODULE, limit_seconds: float = LIMIT_SECONDS, say: Say = lambda *_: None
) -> Iterator[Children]:
    """Children that end with the block, however it ends; `say` hears of every answer."""
    with tempfile.TemporaryDirectory(prefix="shardwise-doctor-", ignore_cleanup_errors=True) as folder:
        family = Children(Path(folder), module=module, limit_seconds=limit_seconds, say=say)
        try:
            yield family
        finally:
            for child in family.all:
                child.kill()


def _waited_for_a_core(group: int) -> float:
    """Seconds that the processes of a group could run and had no core; 0.0 where Linux does not say."""
    total = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            fields = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            )
            if int(fields[2]) == group:
                total += int((folder / "schedstat").read_text(encoding="ascii").split()[1])
    return total / 1e9


def _ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed, probably out of host memory"
    return f"ended with exit code {code}" if code >= 0 else f"crashed with {signal.Signals(-code).name}"
