"""Writing a run folder, which only rank 0 does; secrets are removed from what is shown or sent."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import JobError, MachineError
from shardwise.job.secrets import SHAPES
from shardwise.record.read import ENVIRONMENT, EVENTS, JOB, LOCK, PLAN, is_run_folder, read_events, read_run
from shardwise.record.schema import Event


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process writes to, and no other: it holds the folder's lock until `close`."""

    path: Path
    _lock: int  # Descriptor of the locked file

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @staticmethod
    def create(
        path: Path, *, job_yaml: str, plan: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> RunFolder:
        """Make a new run folder, readable by this user only. JobError where the path exists.

        The job is written unchanged, because `--resume`, `export` and `generate` read it; `job.load` refuses
        a job that holds access keys. The environment is written without secrets.
        """
        if path.exists():
            fix = "--resume goes on with it; another `name` starts a new run"
            raise JobError(f"the run folder {path} exists", where="name, output", fix=fix)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        except OSError as error:
            what, fix = f"the run folder cannot be made: {error.strerror}", "name a folder you can write to: "
            raise MachineError(what, where=str(path), fix=f"{fix}--set output=DIR") from None
        lock = _lock(path)
        (path / JOB).write_text(job_yaml, encoding="utf-8")
        _write_json(path / PLAN, plan)
        _write_json(path / ENVIRONMENT, redact_tree(environment))
        return RunFolder(path, lock)

    @staticmethod
    def reopen(path: Path) -> RunFolder:
        """Open the folder of a run to resume. JobError where it is none, MachineError where it is in use."""
        if not is_run_folder(path):
            raise JobError(f"there is no run to resume in {path}", where="--resume", fix="leave --resume out")
        return RunFolder(path, _lock(path))

    def keep_choice(self, chosen: Mapping[str, Any]) -> None:
        """Write `chosen` to plan.json, where its strategy differs from the one there."""
        plan = dict(read_run(self.path).plan)
        if plan.get("chosen", {}).get("strategy") != chosen["strategy"]:
            replace_json(self.path / PLAN, {**plan, "chosen": chosen})

    def close(self) -> None:
        """Release the folder's lock."""
        os.close(self._lock)

    def write_engine_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Write `engine/NAME`: the engine's own configuration."""
        (self.path / "engine").mkdir(exist_ok=True)
        _write_json(self.path / "engine" / name, config)


class EventWriter:
    """Appends events, one line each; a line is in the file when `write` returns."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """With `resumed_step`, the events of later steps are removed first: no step appears twice."""
        if resumed_step is not None and path.exists():
            _drop_after(path, resumed_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        self._file.write(to_line(event, now=time.time()))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def to_line(event: Event, *, now: float) -> str:
    """Return an event as a line of JSON, newline included."""
    values = asdict(event)
    floats = {key: value for key, value in values.items() if isinstance(value, float)}
    bad = {key: str(value) for key, value in floats.items() if not math.isfinite(value)}
    values.update(dict.fromkeys(bad))
    flag = {"not_finite": bad} if bad else {}
    return json.dumps({"kind": event.kind, "time": round(now, 3), **values, **flag}, allow_nan=False) + "\n"


def _drop_after(path: Path, step: int) -> None:
    """Rewrite the file without the events of steps after `step`; all or nothing."""
    kept = [event for event in read_events(path) if event.get("step", 0) <= step]
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file at once: a reader sees the old or the new content, never a part."""
    temporary = path.with_suffix(".tmp")
    _write_json(temporary, values)
    temporary.replace(path)


def _lock(path: Path) -> int:
    """Lock the folder while the returned descriptor is open. MachineError where another process has."""
    descriptor = locked(path / LOCK)
    if descriptor is None:
        fix = "wait for that run to end, or stop it; two runs in one folder would mix"
        what = f"another process is writing to the run folder {path}"
        raise MachineError(what, where=str(path / LOCK), fix=fix)
    return descriptor


def locked(path: Path) -> int | None:
    """The descriptor of a file that is locked while it is open; None where another process has locked it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(3):  # who asks whether it is locked, as `monitor` does, holds it for microseconds
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        else:
            return descriptor
    os.close(descriptor)
    return None


HIDDEN = "[hidden]"

_SECRET = re.compile(
    rf"(?<![A-Za-z0-9_-])(?:{'|'.join(SHAPES)})"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----"
)
# Names that hold secrets; `pad_token`, `target_tokens` and the like are not among them.
_NAMED = re.compile(
    r"(?i)\b([a-z0-9_]*(?:api_?key|access_?key|secret|password|passwd|"
    r"(?:hf|hub|auth|access|api|gh|github|gitlab|slack|refresh|session)_?token)"
    r"[\"']?\s*[=:]\s*[\"']?)([^\s\"',}&]{6,})"
)
_BEARER = re.compile(r"(?i)\b(bearer\s+)([A-Za-z0-9._~+/=-]{12,})")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:/@]*:)([^\s@/]+)(?=@)")


def redact(text: str) -> str:
    """Replace every token, key, password and private key by `[hidden]`."""
    text = _SECRET.sub(HIDDEN, text)
    for pattern in (_NAMED, _BEARER, _URL):
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def redact_tree(value: Any) -> Any:
    """Apply `redact` to every string in nested JSON values, except keys."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redact_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_tree(item) for item in value]
    return value
