"""Following a run while it runs: each look reads only what was written since the last one."""

import os
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.job.paths import open_regular
from shardwise.record.read import EVENTS, MOST_LINE, is_being_written, parse_event, runs_in

FREE_SECONDS = 10.0
"""A lock that was found free is not tried again for so long: trying it holds it for microseconds."""


AT_ONCE = 200  # events of one look: all of a long run would take a gigabyte, and a collector much time


class Follower:
    """The events of one run folder, and whether a process writes to it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / EVENTS
        self._inode, self._offset, self._lines = 0, 0, 0
        self._free_since: float | None = None
        self._damage, self._cut = "", False  # cut: within a line that is too long
        self.problem = ""
        """Why the file cannot be read, or which of its lines are no events; empty where all is well."""

    def read(self) -> tuple[bool, list[dict[str, Any]]]:
        """At most AT_ONCE new events; True before them where the file is a new one: then they are its first.

        A resumed run replaces its file. A last line without its end is left for the next look; a line that
        is no event is skipped, and `problem` names it.
        """
        try:
            with open_regular(self._path) as file:
                found = self._new(file)
        except FileNotFoundError:
            again, self._inode, self._offset = self._offset > 0, 0, 0
            return again, []
        except OSError as error:
            self.problem = f"{self._path.name} cannot be read: {error.strerror}"
            return False, []
        self.problem = self._damage
        return found

    def is_written(self, now: float) -> bool:
        """Whether a process holds the folder's lock, at the time `now` (seconds of any clock)."""
        if self._free_since is not None and now - self._free_since < FREE_SECONDS:
            return False
        held = is_being_written(self._run_dir)
        self._free_since = None if held else now
        return held

    def _new(self, file: BinaryIO) -> tuple[bool, list[dict[str, Any]]]:
        found = os.fstat(file.fileno())
        again = self._inode != 0 and (found.st_ino != self._inode or found.st_size < self._offset)
        if again or self._inode == 0:
            self._inode, self._offset, self._lines, self._damage, self._cut = found.st_ino, 0, 0, "", False
        if found.st_size == self._offset:
            return again, []
        file.seek(self._offset)
        events = []
        for line in iter(partial(file.readline, MOST_LINE), b""):
            ended = line.endswith(b"\n")
            if not ended and len(line) < MOST_LINE:
                break  # still being written, or torn
            self._offset, self._lines = self._offset + len(line), self._lines + (not self._cut)
            event, self._cut = None if self._cut else parse_event(line), not ended
            if event is None:
                self._damage = f"{EVENTS}:{self._lines} is not an event and was skipped"
            else:
                events.append(event)
            if len(events) == AT_ONCE:
                break
        self._free_since = None if events else self._free_since
        return again, events


def ends(run_dir: Path, tail_bytes: int = 1 << 16) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first event of a run, and those in the last bytes: enough to say how far it is."""
    try:
        with open_regular(run_dir / EVENTS) as file:
            first, size = file.readline(tail_bytes), file.seek(0, os.SEEK_END)
            file.seek(max(len(first), size - tail_bytes))
            if file.tell() > len(first):
                file.readline()
            lines = [line for line in file if line.endswith(b"\n")]
    except FileNotFoundError:
        return {}, []
    return parse_event(first) or {}, [event for event in map(parse_event, lines) if event is not None]


def newest_running(folder: Path) -> Path | None:
    """The run folder within `folder` that changed last, of those that a process writes to."""

    def written(run: Path) -> float:
        try:
            return max(path.stat().st_mtime for path in (run / EVENTS, run) if path.exists())
        except (OSError, ValueError):  # removed meanwhile
            return 0.0

    return next(filter(is_being_written, sorted(runs_in(folder), key=written, reverse=True)), None)
