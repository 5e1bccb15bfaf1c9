"""Following events while they are written, replaced, cut off and damaged."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.errors import JobError
from shardwise.record import follow, write
from shardwise.record.follow import FREE_SECONDS, Follower, newest_running
from shardwise.record.read import MOST_LINE, read_events
from shardwise.record.write import RunFolder, locked


def create(path: Path) -> RunFolder:
    return RunFolder.create(path, job_yaml="name: a\n", plan={}, environment={})


def line(number: int) -> str:
    return f'{{"kind": "save", "time": 1.0, "step": {number}}}\n'


def steps(found: tuple[bool, list[dict[str, Any]]]) -> list[int]:
    return [event["step"] for event in found[1]]


def test_only_new_lines_are_read_and_a_half_written_one_waits(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    follower = Follower(run.path)
    assert follower.read() == (False, []), "nothing is written yet"
    with run.events.open("w") as file:
        for text, expected in ((line(1) + line(2), [1, 2]), ("", []), (line(3)[:9], []), (line(3)[9:], [3])):
            file.write(text)
            file.flush()
            assert steps(follower.read()) == expected
    assert follower.problem == ""


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    run.events.write_text(line(1))
    follower = Follower(run.path)
    follower.read()
    with run.events.open("r+") as file:  # in place: were it read again, it would not be an event
        file.write("#")
    with run.events.open("a") as file:
        file.write(line(2))
    assert (steps(follower.read()), follower.problem) == ([2], "")


@pytest.mark.parametrize("kind", ["replaced", "cut", "removed"])
def test_a_file_that_begins_again_is_read_from_its_start(kind: str, tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    run.events.write_text(line(1) + line(2) + line(3))
    follower = Follower(run.path)
    assert follower.read()[0] is False
    if kind == "cut":
        os.truncate(run.events, len(line(1)))
    elif kind == "removed":
        run.events.unlink()
        assert follower.read() == (True, [])
        run.events.write_text(line(1))
    else:  # as a resumed run does
        (tmp_path / "new").write_text(line(1) + line(2) + line(3) + line(4))
        (tmp_path / "new").replace(run.events)
    again, events = follower.read()
    assert again is (kind != "removed")
    assert steps((again, events)) == ([1, 2, 3, 4] if kind == "replaced" else [1])


@pytest.mark.parametrize("bad", ["\x00\x00", "[1]", '{"kind": "step", "step": 2}', '"x"', "{"])
def test_a_damaged_line_is_named_and_skipped(bad: str, tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    run.events.write_text(f"{line(1)}{bad}\n{line(3)}")
    follower = Follower(run.path)
    assert steps(follower.read()) == [1, 3]
    assert follower.problem == "events.jsonl:2 is not an event and was skipped"


def test_a_line_that_is_too_long_is_skipped_without_being_held(tmp_path: Path) -> None:
    """Its last part alone would be an event, and comes later."""
    run = create(tmp_path / "a")
    run.events.write_text(line(1) + " " * (2 * MOST_LINE) + line(2)[:9])
    follower = Follower(run.path)
    assert steps(follower.read()) == [1]
    with run.events.open("a") as file:
        file.write(line(2)[9:] + line(3))
    assert steps(follower.read()) == [3]
    assert follower.problem == "events.jsonl:2 is not an event and was skipped"
    with pytest.raises(JobError, match=r"not an event of at most 4194304 bytes"):
        read_events(run.events)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    os.mkfifo(run.events)
    follower = Follower(run.path)
    assert follower.read() == (False, [])
    assert follower.problem == "events.jsonl cannot be read: it is no regular file"
    with pytest.raises(JobError, match="it is no regular file"):
        read_events(run.events)


def test_a_file_that_cannot_be_read_is_a_problem_while_it_lasts(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    run.events.mkdir()
    follower = Follower(run.path)
    assert follower.read() == (False, [])
    assert follower.problem == "events.jsonl cannot be read: Is a directory"
    run.events.rmdir()
    run.events.write_text(line(1))
    assert (steps(follower.read()), follower.problem) == ([1], "")


def test_a_free_lock_is_left_alone_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = create(tmp_path / "a")
    run.events.write_text("")
    asked: list[Path] = []
    held = [True, False, False, True]
    monkeypatch.setattr(follow, "is_being_written", lambda path: asked.append(path) or held.pop(0))
    follower = Follower(run.path)
    times = (0.0, 1.0, 2.0, 0.9 + FREE_SECONDS, 1.1 + FREE_SECONDS)
    assert [follower.is_written(now) for now in times] == [True, False, False, False, False]
    assert len(asked) == 3
    run.events.write_text(line(1))
    follower.read()
    assert follower.is_written(times[-1]), "it is asked again as soon as something is written"


def test_the_newest_run_that_runs(tmp_path: Path) -> None:
    assert newest_running(tmp_path / "runs") is None
    folders = [create(tmp_path / "runs" / name) for name in ("old", "new", "ended")]
    for age, run in enumerate(reversed(folders)):
        run.events.write_text("")
        for path in (run.events, run.path):
            os.utime(path, (10**9 - age, 10**9 - age))
    folders[2].close()
    assert newest_running(tmp_path / "runs") == tmp_path / "runs" / "new"
    for run in folders[:2]:
        run.close()
    assert newest_running(tmp_path / "runs") is None


def test_asking_whether_a_run_is_written_does_not_stop_one_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader holds a shared lock for microseconds."""
    reader = os.open(tmp_path / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(reader, fcntl.LOCK_SH)
    clock = SimpleNamespace(sleep=lambda _: os.close(reader), time=time.time)
    monkeypatch.setattr(write, "time", clock)  # threads of other tests may sleep, too
    assert locked(tmp_path / "lock") is not None
