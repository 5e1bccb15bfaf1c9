"""Runs probes in child processes, so that one that crashes or hangs is a finding and not the end.

The parent makes no CUDA context. A child answers its probes one after the other and writes a line of JSON for
each event (doctor/probes/__main__.py). Where it dies or stays silent for too long, the probe it was at has
failed, and another child goes on with the rest.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODULE = "shardwise.doctor.probes"
LIMIT_SECONDS = 60.0
"""Without an event. Importing torch from a cold network disk takes half of it."""
GRACE_SECONDS = 5.0
"""For ranks that wait for one that has failed."""
_LOOK_EVERY_SECONDS = 0.02
_TAIL_LINES, _TAIL_CHARACTERS = 3, 400


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a probe found, or how it failed."""

    facts: Mapping[str, Any] | None = field(default=None, hash=False)
    """None where it failed."""
    failure: str = ""
    """In words: `hung for 60 s while joining`, `crashed with SIGSEGV`, `RuntimeError: ...`."""
    printed: str = ""
    """The last lines that the process printed before it crashed or was killed."""

    @property
    def why(self) -> str:
        """The failure with what was printed last."""
        return f"{self.failure}: {self.printed}" if self.printed else self.failure


Answers = Mapping[str, Answer]
"""By probe."""


@dataclass
class Child:
    """A process that answers `names` in turn, and what it has answered so far."""

    names: Sequence[str]
    environment: Mapping[str, str]
    folder: Path
    limit_seconds: float
    module: str
    answers: dict[str, Answer] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _runs: int = 0

    def start(self) -> None:
        """Begins with the probes that have no answer yet."""
        self._runs += 1
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                # -P: a file of the user's folder must not stand in for a module of the same name.
                [sys.executable, "-P", "-m", self.module, str(self._events), *self._left],
                env={**self.environment, "SHARDWISE_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self._started = time.time()

    def look(self) -> bool:
        """Take in what it has said; True when there is nothing more to wait for."""
        assert self._process is not None
        code = self._process.poll()
        at, stage, last = self._read()
        if not self._left:
            self.kill()
            return True
        silent = time.time() - max(last, self._started)
        if code is None and silent < self.limit_seconds:
            return False
        self.kill()
        failed = at if at in self._left else self._left[0]
        words = f"hung for {self.limit_seconds:.0f} s" if code is None else _ended(code)
        self.answers[failed] = Answer(
            failure=words + (f" while {stage}" if stage else ""), printed=self.printed()
        )
        if not self._left:
            return True
        self.start()
        return False

    @property
    def failed(self) -> bool:
        """Whether a probe has failed so far."""
        return any(answer.facts is None for answer in self.answers.values())

    def kill(self) -> None:
        """End it and what it has started."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def printed(self) -> str:
        """The last lines of its present process."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return " / ".join(line.strip() for line in lines[-_TAIL_LINES:] if line.strip())[-_TAIL_CHARACTERS:]

    @property
    def _left(self) -> list[str]:
        return [name for name in self.names if name not in self.answers]

    @property
    def _events(self) -> Path:
        return self.folder / f"events-{self._runs}.jsonl"

    @property
    def _log(self) -> Path:
        return self.folder / f"log-{self._runs}.txt"

    def _read(self) -> tuple[str, str, float]:
        """The probe it is at, the stage of it, and when it last said something (Unix seconds)."""
        at = stage = ""
        try:
            lines = self._events.read_text(encoding="utf-8").splitlines(keepends=True)
            last = self._events.stat().st_mtime
        except OSError:
            return at, stage, 0.0
        for line in lines:
            if not line.endswith("\n"):
                break  # it is being written
            event = json.loads(line)
            at, stage = event["probe"], event.get("stage", "")
            if "facts" in event:
                self.answers[at] = Answer(facts=event["facts"])
            elif "error" in event:
                self.answers[at] = Answer(failure=event["error"])
        return at, stage, last


class Children:
    """All the children of one look at the machine; they run at the same time."""

    def __init__(self, folder: Path, *, module: str, limit_seconds: float) -> None:
        self._folder = folder
        self._module = module
        self._limit_seconds = limit_seconds
        self._all: list[Child] = []
        self._teams: list[list[Child]] = []

    def ask(
        self, *names: str, environment: Mapping[str, str] | None = None, limit_seconds: float | None = None
    ) -> Child:
        """Starts one child that answers `names`; its `answers` are there after `wait`."""
        folder = self._folder / str(len(self._all))
        folder.mkdir(mode=0o700)
        child = Child(
            names=names,
            environment=dict(os.environ) if environment is None else environment,
            folder=folder,
            limit_seconds=self._limit_seconds if limit_seconds is None else limit_seconds,
            module=self._module,
        )
        self._all.append(child)
        child.start()
        return child

    def ask_together(
        self, name: str, environments: Sequence[Mapping[str, str]], limit_seconds: float | None = None
    ) -> list[Child]:
        """A child for each environment. They wait for each other, but not long for one that has failed."""
        team = [
            self.ask(name, environment=environment, limit_seconds=limit_seconds)
            for environment in environments
        ]
        self._teams.append(team)
        return team

    def wait(self) -> None:
        """Until every child has answered or failed."""
        waiting = list(self._all)
        while waiting:
            waiting = [child for child in waiting if not child.look()]
            for team in self._teams:
                if any(child.failed for child in team):
                    for child in team:
                        child.limit_seconds = min(child.limit_seconds, GRACE_SECONDS)
            if waiting:
                time.sleep(_LOOK_EVERY_SECONDS)

    def kill(self) -> None:
        for child in self._all:
            child.kill()


@contextmanager
def children(*, module: str = MODULE, limit_seconds: float = LIMIT_SECONDS) -> Iterator[Children]:
    """Children that do not outlive the block, whatever ends it."""
    folder = Path(tempfile.mkdtemp(prefix="shardwise-doctor-"))  # mode 0700
    family = Children(folder, module=module, limit_seconds=limit_seconds)
    try:
        yield family
    finally:
        family.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    if code == -signal.SIGKILL:
        return "was killed, probably out of host memory"
    return f"crashed with {signal.Signals(-code).name}"
