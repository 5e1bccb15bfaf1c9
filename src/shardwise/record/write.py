"""Writing a run folder, which only rank 0 does; secrets are removed from what is shown or sent."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from shardwise.errors import JobError, MachineError
from shardwise.folders import replace_json, replace_text
from shardwise.job.secrets import SHAPES
from shardwise.job.source import job_text, job_values
from shardwise.record.read import (
    ENVIRONMENT,
    EVENTS,
    JOB,
    LOCK,
    PLAN,
    is_being_written,
    is_run_folder,
    line_hash,
    read_events_and_gaps,
    read_run,
)
from shardwise.record.schema import Event


@dataclass(frozen=True)
class RunFolder:
    """A run folder that this process writes to, and no other: it holds the folder's lock until `close`."""

    path: Path
    _locks: tuple[int, ...]  # Descriptors that hold it

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @staticmethod
    def create(
        path: Path, *, job_yaml: str, plan: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> RunFolder:
        """Make a new run folder, readable by this user only. JobError where the path exists and is not empty.

        It appears with all its files: a crash before leaves nothing that looks like a run. The job is written
        unchanged, because `--resume`, `export` and `generate` read it; `job.load` refuses a job that holds
        access keys. The environment is written without secrets.
        """
        for left in path.parent.glob(f".{path.name}.partial-*"):
            if not is_being_written(left):
                shutil.rmtree(left, ignore_errors=True)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.mkdir(mode=0o700)
            lock = _lock(partial)
            (partial / JOB).write_text(job_yaml, encoding="utf-8")
            _write_json(partial / PLAN, plan)
            _write_json(partial / ENVIRONMENT, redact_tree(environment))
            partial.rename(path)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if path.exists() and error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                fix = "--resume goes on with it; another `name` starts a new run"
                raise JobError(f"the run folder {path} exists", where="name, output", fix=fix) from None
            raise _not_made(path, error) from None
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

    def keep_length(self, steps: int | None, epochs: float | None) -> None:
        """Write the run's length to job.yaml, where it is another there."""
        values = job_values((self.path / JOB).read_text(encoding="utf-8"))
        train, new = values.get("train", {}), {"steps": steps, "epochs": epochs}
        if {key: train.get(key) for key in new} != new:
            train = train | {key: value for key, value in new.items() if value is not None}
            replace_text(self.path / JOB, job_text({**values, "train": train}))

    def close(self) -> None:
        """Release the folder's lock."""
        for descriptor in self._locks:
            os.close(descriptor)

    def write_engine_config(self, name: str, config: Mapping[str, Any]) -> None:
        """Write `engine/NAME`: the engine's own configuration."""
        (self.path / "engine").mkdir(exist_ok=True)
        _write_json(self.path / "engine" / name, config)


class EventWriter:
    """Appends events, one line each; a line is in the file when `write` returns."""

    def __init__(self, path: Path, *, resumed_step: int | None = None) -> None:
        """With `resumed_step`, the events of later steps are removed first: no step appears twice."""
        self._after, self._gap = "", bool(resumed_step)  # a gap where the file is lost
        if resumed_step is not None and path.exists():
            self._after, self._gap = _drop_after(path, resumed_step)
        self._file: TextIO = path.open("a", encoding="utf-8")

    def write(self, event: Event) -> None:
        line = to_line(event, now=time.time(), after=self._after, gap=self._gap)
        self._after, self._gap = line_hash(line.encode()), False
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:  # which does not say of what file
            error.filename = self._file.name
            raise

    def close(self) -> None:
        self._file.close()


def to_line(event: Event, *, now: float, after: str | None = None, gap: bool = False) -> str:
    """Return an event as a line of JSON, newline included; `after`, `gap`: see `record.read.read_events`."""
    values = asdict(event)
    floats = {key: value for key, value in values.items() if isinstance(value, float)}
    bad = {key: str(value) for key, value in floats.items() if not math.isfinite(value)}
    values.update(dict.fromkeys(bad))
    flag = {"not_finite": bad} if bad else {}
    values = {"kind": event.kind, "time": round(now, 3), **values, **flag}
    return json.dumps(values | _links(after, gap=gap), allow_nan=False) + "\n"


def _links(after: str | None, *, gap: bool) -> dict[str, Any]:
    return ({} if after is None else {"after": after}) | ({"gap": True} if gap else {})


def _drop_after(path: Path, step: int) -> tuple[str, bool]:
    """Rewrite the file without the events of steps after `step`; all or nothing.

    Returns the last line's hash, and whether steps before `step` are missing at the end. Gaps stay marked.
    """
    events, gaps = read_events_and_gaps(path)
    after, lines, last = "", list[str](), 0
    for number, event in enumerate(events, start=1):
        if event.get("step", 0) <= step:
            last = max(last, event.get("step", 0))
            lines.append(json.dumps({**event, **_links(after, gap=number in gaps)}) + "\n")
            after = line_hash(lines[-1].encode())
    replace_text(path, "".join(lines))
    return after, last < step


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def in_use(folder: Path) -> MachineError:
    """Says that another process has locked the run folder."""
    what = f"another process is writing to the run folder {folder}"
    fix = "wait for that run to end, or stop it; two runs in one folder would mix"
    return MachineError(what, where=str(folder / LOCK), fix=fix)


def _lock(path: Path) -> tuple[int, ...]:
    """Lock the folder while the returned descriptors are open. MachineError where another process has.

    The folder itself is locked, too: its file may be removed.
    """
    held: list[int] = []
    for place in (path, path / LOCK):
        descriptor = locked(place)
        if descriptor is None:
            for one in held:
                os.close(one)
            raise in_use(path)
        held.append(descriptor)
    return tuple(held)


def locked(path: Path) -> int | None:
    """The descriptor of a file that is locked while it is open; None where another process has locked it.

    A folder's counts as locked where the file system cannot lock folders (NFS).
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_CREAT | os.O_RDWR, 0o600)
    for _ in range(3):  # who asks whether it is locked, as `monitor` does, holds it for microseconds
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)
        except OSError:
            if not path.is_dir():
                raise
            return descriptor
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
_QUERY = re.compile(r"(?i)([?&](?:sig|x-amz-[a-z-]+|[a-z_-]*(?:token|key|signature|credential))=)([^&\s]+)")
_URL = re.compile(r"([a-z][a-z0-9+.-]*://[^\s:/@]*:)([^\s@/]+)(?=@)")


def redact(text: str) -> str:
    """Replace every token, key, password and private key by `[hidden]`."""
    text = _SECRET.sub(HIDDEN, text)
    for pattern in (_NAMED, _BEARER, _QUERY, _URL):
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


def check_place(path: Path) -> None:
    """MachineError where no run folder can be made at `path`, before the time that preparing takes."""
    try:
        Path(tempfile.mkdtemp(dir=next(one for one in path.parents if one.exists()))).rmdir()
    except OSError as error:
        raise _not_made(path, error) from None


def _not_made(path: Path, error: OSError) -> MachineError:
    what, fix = f"the run folder cannot be made: {error.strerror}", "name a folder you can write to: "
    return MachineError(what, where=str(path), fix=f"{fix}--set output=DIR")
