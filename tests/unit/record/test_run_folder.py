"""The run folder: made once, written by one process, readable at any moment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

import shardwise
from shardwise.errors import WRITE_ERRORS, JobError, MachineError
from shardwise.record.read import is_being_written, read_events, read_events_and_gaps, read_run
from shardwise.record.schema import EvalEvent, Event, ResumeEvent, SaveEvent, StepEvent, StopEvent
from shardwise.record.write import EventWriter, RunFolder


def step(number: int, loss: float = 1.0, grad_norm: float = 0.5) -> StepEvent:
    return StepEvent(
        step=number,
        epoch=0,
        loss=loss,
        learning_rate=1e-4,
        grad_norm=grad_norm,
        skipped=False,
        tokens=100,
        target_tokens=80,
        seconds=0.5,
        tokens_per_second=200.0,
        tokens_per_second_per_gpu=100.0,
        mfu_unavailable="the peak of this CPU is not known",
        memory_allocated_bytes=[1, 2],
    )


def create(path: Path, job_yaml: str = "name: a\n") -> RunFolder:
    return RunFolder.create(path, job_yaml=job_yaml, plan={"schema": 1}, environment={"python": "3.11"})


def test_a_run_folder_is_private_and_reads_back(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        run = create(tmp_path / "runs" / "a")
    finally:
        os.umask(before)
    assert run.path.stat().st_mode & 0o777 == 0o700
    run.write_engine_config("deepspeed.json", {"train_batch_size": 4})
    assert json.loads((run.path / "engine/deepspeed.json").read_text()) == {"train_batch_size": 4}
    record = read_run(run.path)
    assert (record.job, record.plan, record.environment) == ({"name": "a"}, {"schema": 1}, {"python": "3.11"})
    assert record.events == []


def test_an_existing_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("mine")
    with pytest.raises(JobError, match="exists"):
        create(tmp_path / "a")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["mine.txt"]


def test_a_folder_that_cannot_be_made_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be made"):
        create(tmp_path / "file" / "a")


def test_the_command_is_kept_without_secrets_and_the_job_word_for_word(tmp_path: Path) -> None:
    token = "hf_" + "aB3" * 11
    job = {"name": "a", "data": {"system": "The password: kitchen-door. Use api_key=0123456789."}}
    environment = {"command": ["train", f"--set=x={token}"]}
    run = RunFolder.create(tmp_path / "a", job_yaml=yaml.safe_dump(job), plan={}, environment=environment)
    record = read_run(run.path)
    assert record.job == job, "what is resumed is what ran"
    assert record.environment["command"] == ["train", "--set=x=[hidden]"]


HOLD = """
import sys
from pathlib import Path
from shardwise.record.write import RunFolder
run = RunFolder.reopen(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_never_write_to_one_run_folder(tmp_path: Path) -> None:
    made = (
        "from shardwise.record.write import RunFolder; from pathlib import Path; import sys;"
        "RunFolder.create(Path(sys.argv[1]), job_yaml='name: a', plan={}, environment={})"
    )
    path = tmp_path / "a"
    environment = {**os.environ, "PYTHONPATH": str(Path(shardwise.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", made, str(path)], check=True, env=environment)
    assert not is_being_written(path)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert is_being_written(path)
    with pytest.raises(MachineError, match="another process"):
        RunFolder.reopen(path)
    other.kill()
    other.communicate()
    assert not is_being_written(path)
    RunFolder.reopen(path)


def test_resuming_where_there_is_no_run_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no run to resume"):
        RunFolder.reopen(tmp_path)
    assert list(tmp_path.iterdir()) == []


def write(path: Path, *events: Event, resumed_step: int | None = None) -> None:
    writer = EventWriter(path, resumed_step=resumed_step)
    for event in events:
        writer.write(event)
    writer.close()


def test_each_event_is_one_line_at_once_with_kind_and_time(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    path = tmp_path / "events.jsonl"
    writer = EventWriter(path)
    request.addfinalizer(writer.close)
    writer.write(step(1))
    [event] = read_events(path)  # before close
    assert event["kind"] == "step"
    assert event["time"] > 1.6e9
    assert (event["loss"], event["memory_allocated_bytes"], event["mfu"]) == (1.0, [1, 2], None)
    assert "not_finite" not in event
    writer.write(SaveEvent(step=1, seconds=0.1))
    assert [event["kind"] for event in read_events(path)] == ["step", "save"]
    path.write_text(path.read_text() + '{"kind": "step"}\n')
    with pytest.raises(JobError, match="not an event"):
        read_events(path)


def test_numbers_that_are_not_finite_stay_readable_json(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1, loss=float("nan"), grad_norm=float("inf")))
    event = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert event["loss"] is None
    assert event["grad_norm"] is None
    assert event["not_finite"] == {"loss": "nan", "grad_norm": "inf"}


def test_after_a_resume_no_step_appears_twice(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    evaluation = EvalEvent(step=2, loss=3.0, target_tokens=9, seconds=0.1)
    stop = StopEvent(step=4, status="stopped", seconds=9.0)
    write(path, step(1), step(2), evaluation, SaveEvent(step=2, seconds=0.1), step(3), step(4), stop)
    with path.open("a") as file:
        file.write('{"kind": "step", "st')  # killed while writing
    write(path, ResumeEvent(step=2), step(3), resumed_step=2)
    seen = [(event["kind"], event["step"]) for event in read_events(path)]
    expected = [("step", 1), ("step", 2), ("eval", 2), ("save", 2), ("resume", 2), ("step", 3)]
    assert seen == expected


def test_a_torn_last_line_is_left_out_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1), step(2))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for end in range(first, len(whole)):
        path.write_bytes(whole[:end])
        assert [event["step"] for event in read_events(path)] == [1]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, step(1))
    for garbage in (b"not json\n", b"[1]\n", b"\xff\xfe\n"):
        path.write_bytes(path.read_bytes().splitlines(keepends=True)[0] + garbage)
        with pytest.raises(JobError) as error:
            read_events(path)
        assert error.value.problems[0].where == f"{path}:2"


def test_what_is_no_run_folder_is_told_with_the_runs_nearby(tmp_path: Path) -> None:
    create(tmp_path / "runs" / "mine")
    for path in (tmp_path / "runs", tmp_path / "runs" / "typo"):
        with pytest.raises(JobError) as error:
            read_run(path)
        assert str(tmp_path / "runs" / "mine") in error.value.problems[0].fix


CRASH = """
import os, sys
from pathlib import Path
from shardwise.record import write
write.redact_tree = lambda _: os._exit(9)
write.RunFolder.create(Path(sys.argv[1]), job_yaml="name: a", plan={}, environment={})
"""


def test_a_crash_while_the_folder_is_made_leaves_nothing_like_a_run(tmp_path: Path) -> None:
    path = tmp_path / "a"
    assert subprocess.run([sys.executable, "-c", CRASH, str(path)], check=False).returncode == 9
    assert not path.exists()
    assert len(list(tmp_path.iterdir())) == 1
    path.mkdir()
    create(path)
    assert [found.name for found in tmp_path.iterdir()] == ["a"], "and an empty folder is no run"


def test_what_was_removed_or_changed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *map(step, range(1, 6)))
    lines = path.read_text().splitlines(keepends=True)
    assert read_events_and_gaps(path)[1] == []
    for kept, gaps in (([1, 2, 3, 4], [1]), ([0, 1, 3, 4], [3]), ([0, 2, 4], [2, 3])):
        path.write_text("".join(lines[number] for number in kept))
        assert read_events_and_gaps(path)[1] == gaps
    path.write_text("".join(lines).replace('"loss": 1.0', '"loss": 1.5', 1))
    assert read_events_and_gaps(path)[1] == [2]
    assert all(event.keys().isdisjoint({"after", "gap"}) for event in read_events(path))


def test_a_resume_keeps_what_was_noticed_and_notices_a_lost_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write(path, *map(step, range(1, 6)))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[number] for number in (0, 2, 3, 4)))
    write(path, ResumeEvent(step=4), step(5), resumed_step=4)
    events, gaps = read_events_and_gaps(path)
    assert ([event["step"] for event in events], gaps) == ([1, 3, 4, 4, 5], [2])
    write(path, ResumeEvent(step=7), step(8), resumed_step=7)
    events, gaps = read_events_and_gaps(path)
    assert ([event["step"] for event in events], gaps) == ([1, 3, 4, 4, 5, 7, 8], [2, 6])


@pytest.mark.parametrize("left", [None, ""])
def test_a_resume_notices_that_all_of_the_record_is_lost(tmp_path: Path, left: str | None) -> None:
    path = tmp_path / "events.jsonl"
    if left is not None:
        path.write_text(left)
    write(path, ResumeEvent(step=4), step(5), resumed_step=4)
    assert read_events_and_gaps(path)[1] == [1]


def test_a_full_disk_is_said_of_the_file_that_found_no_room() -> None:
    writer = EventWriter(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left") as error:
        writer.write(step(1))
    assert error.value.filename == "/dev/full"
    with suppress(OSError):  # what is left in its buffer
        writer.close()


def test_a_run_with_checkpoints_is_not_to_be_started_again(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    (run.path / "plan.json").write_text("{")
    for fix, folder in (("start it again", ""), ("restore it from a copy", "checkpoints/step-000004")):
        (run.path / folder).mkdir(parents=True, exist_ok=True)
        with pytest.raises(JobError, match=f"plan.json cannot be read(.|\\s)*{fix}"):
            read_run(run.path)
    (run.path / "plan.json").unlink()
    with pytest.raises(JobError, match=r"has lost its plan\.json"):
        read_run(run.path)


def test_a_link_in_the_folder_is_not_written_through(tmp_path: Path) -> None:
    path, mine = tmp_path / "events.jsonl", tmp_path / "mine"
    write(path, step(1))
    mine.write_text("mine")
    path.with_suffix(".tmp").symlink_to(mine)
    write(path, step(2), resumed_step=1)
    assert mine.read_text() == "mine"
    assert len(read_events(path)) == 2


def test_a_lost_environment_is_no_reason_to_stop(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    (run.path / "environment.json").write_text("")
    assert read_run(run.path).environment == {}
    (run.path / "environment.json").unlink()
    (run.path / "environment.json").mkdir()
    assert read_run(run.path).environment == {}


def test_a_folder_in_place_of_a_file_is_an_error_with_its_name(tmp_path: Path) -> None:
    run = create(tmp_path / "a")
    run.events.mkdir()
    with pytest.raises(JobError, match=r"events\.jsonl cannot be read: Is a directory"):
        read_run(run.path)


@pytest.mark.parametrize("name", ["job.yaml", "plan.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    run = create(tmp_path / "a")
    (run.path / name).write_text("[1, 2")
    with pytest.raises(JobError, match=name):
        read_run(run.path)


def test_a_run_folder_stays_locked_without_its_lock_file(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    (folder.path / ".lock").unlink()
    with pytest.raises(MachineError, match="another process is writing"):
        RunFolder.reopen(folder.path)
    folder.close()
    RunFolder.reopen(folder.path).close()


def test_a_folder_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    folder = create(tmp_path / "a")
    (folder.path / "engine" / "single.json").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as error:
        folder.write_engine_config("single.json", {})
    assert error.value.errno in WRITE_ERRORS


def test_a_longer_run_says_so_in_its_job(tmp_path: Path) -> None:
    folder = create(tmp_path / "a", "name: a\ntrain: {steps: 60, seed: 3}\n")
    folder.keep_length(60, None)
    assert (folder.path / "job.yaml").read_text() == "name: a\ntrain: {steps: 60, seed: 3}\n"
    folder.keep_length(90, None)
    assert read_run(folder.path).job == {"name": "a", "train": {"steps": 90, "seed": 3}}
