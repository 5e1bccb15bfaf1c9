"""Reading a run folder, from any process and at any time: during the run, or after it was killed."""

import errno
import fcntl
import hashlib
import json
import os
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import from_json

from shardwise.errors import JobError
from shardwise.job.paths import alike, open_regular
from shardwise.job.source import job_values
from shardwise.record.manifest import step_folders

JOB = "job.yaml"
PLAN = "plan.json"
ENVIRONMENT = "environment.json"
EVENTS = "events.jsonl"
LOCK = ".lock"
MOST_TEXT = 64 << 20  # Bytes of a file that is read at once
MOST_LINE = 4 << 20
"""Bytes of an event: readers hold no longer line in memory."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Content of a run folder."""

    path: Path
    job: Mapping[str, Any]
    plan: Mapping[str, Any]
    environment: Mapping[str, Any]
    events: list[dict[str, Any]]
    gaps: list[int]  # Lines of events.jsonl, from 1, before which lines are missing or were changed


def text_of(path: Path, errors: str = "strict") -> str:
    """The text of a file, as `open_regular` opens it; ValueError for no UTF-8, OSError if too large."""
    with open_regular(path) as file:
        content = file.read(MOST_TEXT + 1)
    if len(content) > MOST_TEXT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    return content.decode(errors=errors)


def is_run_folder(path: Path) -> bool:
    """Whether a run was set up here."""
    return (path / JOB).is_file() and (path / PLAN).is_file()


def ranked(evaluations: Iterable[tuple[int, float]]) -> list[int]:
    """Steps by their loss, the lowest first; of equal ones the first. Step 0 is not among them."""
    return [step for step, _ in sorted((one for one in evaluations if one[0]), key=lambda one: one[1])]


def best_step(evaluations: Iterable[tuple[int, float]]) -> int | None:
    """The step with the lowest loss; None where only step 0 was evaluated."""
    return next(iter(ranked(evaluations)), None)


def evaluations_of(events: Iterable[dict[str, Any]], *, until: int) -> list[tuple[int, float]]:
    """(step, loss) of the evaluations up to a step."""
    return [(e["step"], e["loss"]) for e in events if e.get("kind") == "eval" and e["step"] <= until]


def read_run(path: Path, *, with_events: bool = True, without: Collection[str] = ()) -> RunRecord:
    """All but the checkpoints, and keys `without` of events; JobError for no run folder or a broken file."""
    if not is_run_folder(path):
        raise no_run(path)
    there = with_events and (path / EVENTS).exists()
    events, gaps = read_events_and_gaps(path / EVENTS, without) if there else ([], [])
    return RunRecord(
        path=path,
        job=_read(path / JOB),
        plan=_read(path / PLAN),
        environment=_environment(path / ENVIRONMENT),
        events=events,
        gaps=gaps,
    )


_NEEDED = {"step": {"step", "loss", "tokens", "seconds"}, "eval": {"step", "loss"}}
"""Keys that every reader needs of these kinds of events."""


def read_events(path: Path) -> list[dict[str, Any]]:
    """Read the events in order, without a last line that a crash cut off; JobError for any other damage."""
    return read_events_and_gaps(path)[0]


def read_events_and_gaps(path: Path, without: Collection[str] = ()) -> tuple[list[dict[str, Any]], list[int]]:
    """The events, and the lines before which others are missing or were changed.

    Each line has the hash of the line before it (`after`), the first an empty text. `gap` marks what was
    found when the file was rewritten. What is missing at the end cannot be seen.
    """
    events, gaps, before = list[dict[str, Any]](), list[int](), ""
    for number, line in enumerate(_lines(path), start=1):
        if not line.endswith(b"\n") and len(line) < MOST_LINE:
            break  # still being written, or torn
        event = parse_event(line)
        if event is None:
            fix = "remove the line, or restore the file from a copy"
            what = f"this line is not an event of at most {MOST_LINE} bytes, with finite numbers"
            raise JobError(what, where=f"{path}:{number}", fix=fix)
        if event.pop("after", before) != before or event.pop("gap", False):
            gaps.append(number)
        before = line_hash(line)
        if without:  # and a value that is the last event's is kept once
            last = events[-1] if events else {}
            kept = ((key, value, last.get(key)) for key, value in event.items() if key not in without)
            event = {key: old if old == value else value for key, value, old in kept}
        events.append(event)
    return events, gaps


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            yield from iter(partial(file.readline, MOST_LINE), b"")
    except OSError as error:
        what = f"{path.name} cannot be read: {error.strerror}"
        raise JobError(what, where=str(path), fix="restore it from a copy") from None


def line_hash(line: bytes) -> str:
    """Of a line with its newline: what the next line carries. It finds accidents, no attacker."""
    return hashlib.sha256(line).hexdigest()[:12]


def parse_event(line: bytes) -> dict[str, Any] | None:
    """The event that a line holds, with the keys that every reader needs; None where it holds none."""
    try:
        event = from_json(line, allow_inf_nan=False) if line.endswith(b"\n") else None  # faster than json
    except ValueError:
        return None
    if not isinstance(event, dict) or not event.keys() >= _NEEDED.get(str(event.get("kind")), frozenset()):
        return None
    finite = all(isfinite(value) for value in event.values() if isinstance(value, float))  # 1e400 is not
    return event if finite else None


def is_being_written(path: Path) -> bool:
    """Whether a process holds the run folder's lock now."""
    try:
        with open_regular(path / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def status(last: Mapping[str, Any], *, in_use: bool) -> str:
    """Of a run with this last event, whose folder a process holds (`in_use`) or none."""
    if last.get("kind") == "stop":
        return str(last.get("status"))
    if not last:
        return "starting" if in_use else "not started"
    return "running" if in_use else "interrupted"


def _read(path: Path) -> Mapping[str, Any]:
    try:
        text = text_of(path)
        values = json.loads(text) if path.suffix == ".json" else job_values(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        what = f"{path.name} cannot be read ({type(error).__name__})"
        again = "the run was not set up completely: start it again under another name"
        fix = "restore it from a copy" if step_folders(path.parent / "checkpoints") else again
        raise JobError(what, where=str(path), fix=fix) from None
    if not isinstance(values, dict):
        raise JobError(f"{path.name} holds no keys", where=str(path), fix="restore it from a copy")
    return values


def _environment(path: Path) -> Mapping[str, Any]:
    """What it ran on; empty where that is lost, which nothing but a report needs."""
    try:
        return _read(path)
    except JobError:
        return {}


def no_run(folder: Path) -> JobError:
    """The error for what is no run folder: it names the runs in it or next to it, or how to run its job."""
    if not folder.is_dir():
        what = f"{folder} is a file, not a run folder" if folder.exists() else f"there is no folder {folder}"
        near = alike(str(folder), (JOB,), base := folder.parent)
        fix = f"did you mean {base / near}?" if near else _known_runs(base)
        return JobError(what, where=str(folder), fix=fix)
    if (folder / JOB).is_file() and step_folders(folder / "checkpoints"):
        what, fix = f"the run folder has lost its {PLAN}", "restore it from a copy"
        return JobError(what, where=str(folder), fix=fix)
    if (folder / JOB).is_file() and not runs_in(folder):
        place = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        what = f"nothing has been run in {folder} yet: it holds a job file and no run"
        fix = f"`{place}shardwise train {JOB}`, then name the run folder that it writes"
        return JobError(what, where=str(folder), fix=fix)
    above = next((f"name the run folder: {path}" for path in folder.parents if is_run_folder(path)), None)
    return JobError(f"{folder} is not a run folder", where=str(folder), fix=above or _known_runs(folder))


def _known_runs(folder: Path) -> str:
    """Advice that names the run folders in `folder`."""
    runs = ", ".join(str(run) for run in runs_in(folder)[:5])
    return f"name one of these: {runs}" if runs else "name a run folder, e.g. runs/NAME"


def runs_in(folder: Path, kind: Callable[[Path], bool] = is_run_folder) -> list[Path]:
    """Folders of a kind in `folder` and in its subfolders, such as `runs`, that this user may enter."""
    inside = (path for pattern in ("*", "*/*") for path in folder.glob(pattern))
    return sorted(path for path in inside if os.access(path, os.X_OK) and kind(path))
