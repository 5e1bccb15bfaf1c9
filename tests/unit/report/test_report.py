"""The report's numbers are those in the run folder."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from conftest import prediction
from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.record.manifest import FileEntry, Manifest, Origin, hash_files
from shardwise.record.read import LOCK, read_run
from shardwise.record.restarts import LOG
from shardwise.record.schema import EvalEvent, Event, ResumeEvent, RunEvent, StepEvent, StopEvent
from shardwise.record.write import RunFolder, to_line
from shardwise.report.compare import UNREAD, row_of, summary
from shardwise.report.html.pages import run_page
from shardwise.report.terminal import compared, show, sparkline

HEAD = RunEvent(
    name="a",
    strategy="zero2",
    processes=2,
    total_steps=20,
    global_batch=4,
    sequence_length=32,
    parameters=10,
    trainable_parameters=10,
)


def step(number: int, *, seconds: float = 0.5, loss: float | None = None, peak: int = 1) -> StepEvent:
    return StepEvent(
        step=number,
        epoch=0,
        loss=5.0 - number / 10 if loss is None else loss,
        learning_rate=1e-4,
        grad_norm=1.0,
        skipped=loss is not None,
        tokens=100,
        target_tokens=100,
        seconds=seconds,
        tokens_per_second=100 / seconds,
        tokens_per_second_per_gpu=50 / seconds,
        mfu=0.4,
        peak_memory_reserved_bytes=[peak << 30, (peak + 1) << 30],
    )


def make(path: Path, *events: tuple[float, Event]) -> Path:
    RunFolder.create(path, job_yaml=f"name: {path.name}\n", plan={}, environment={})
    lines = [to_line(event, now=1_700_000_000 + at) for at, event in events]
    (path / "events.jsonl").write_text("".join(lines))
    return path


def typical(path: Path) -> Path:
    """20 steps in two launches; the first five steps of each take 9 seconds."""
    first = [(1.0 + n, step(n, seconds=9.0 if n <= 5 else 0.5, peak=n)) for n in range(1, 11)]
    second = [(1000.0 + n, step(n, seconds=9.0 if n <= 15 else 1.0)) for n in range(11, 21)]
    return make(
        path,
        (0.0, HEAD),
        (1.0, EvalEvent(step=0, loss=6.0, target_tokens=9, seconds=0.1)),
        *first,
        (1000.0, ResumeEvent(step=10)),
        *second,
        (1030.0, EvalEvent(step=20, loss=3.5, target_tokens=9, seconds=0.1)),
        (1031.0, StopEvent(step=20, status="finished", seconds=31.0)),
    )


def test_a_supervised_run_shows_its_ettr_everywhere(tmp_path: Path) -> None:
    run = make(tmp_path / "a", (0.0, HEAD), (1.0, step(1)), (2.0, step(2)))
    log = [
        {"event": "began", "at": 0},
        {"event": "failed", "at": 3, "error": "lost"},
        {"event": "ended", "at": 4},
    ]
    (run / LOG).write_text("".join(json.dumps(line) + "\n" for line in log))
    assert summary(run)["supervised"]["ettr"] == 0.25
    out = StringIO()
    show([run], console=Console(file=out, width=100))
    assert "25.0%, 1 failures" in out.getvalue()
    assert re.search(r"ETTR\W.*25\u202f%.*1 failures", run_page([run]), re.DOTALL)


def test_the_headline_numbers(tmp_path: Path) -> None:
    run = summary(typical(tmp_path / "a"))
    assert (run["name"], run["status"], run["strategy"], run["processes"]) == ("a", "finished", "zero2", 2)
    assert (run["steps"], run["total_steps"], run["tokens"]) == (20, 20, 2000)
    assert (run["first_loss"], run["last_loss"], run["best_loss"]) == (4.9, 3.0, 3.0)
    assert run["best_loss_step"] == 20
    assert run["evaluations"] == [{"step": 0, "loss": 6.0}, {"step": 20, "loss": 3.5}]
    assert run["peak_memory_reserved_bytes"] == [10 << 30, 11 << 30]
    assert run["mfu"] == 0.4
    assert json.loads(json.dumps(run)) == run


def test_the_best_loss_has_its_own_step_and_mfu_is_a_median(tmp_path: Path) -> None:
    values = ((1, 5.0, 0.1), (2, 3.0, 0.5), (3, 4.0, 0.2))
    steps = [(n, replace(step(int(n)), loss=loss, mfu=mfu)) for n, loss, mfu in values]
    run = summary(make(tmp_path / "a", (0, HEAD), *steps))
    assert (run["best_loss"], run["best_loss_step"], run["last_loss"]) == (3.0, 2, 4.0)
    assert run["mfu"] == 0.2


def test_throughput_leaves_out_the_warm_up_of_every_launch(tmp_path: Path) -> None:
    run = summary(typical(tmp_path / "a"))
    assert run["steady_steps"] == {"first": 6, "last": 20, "count": 10}
    assert run["tokens_per_second"] == pytest.approx(1000 / 7.5)
    assert run["tokens_per_second_per_gpu"] == pytest.approx(1000 / 7.5 / 2)
    assert run["step_seconds"] == 0.75


def test_wall_time_does_not_count_the_pause_before_a_resume(tmp_path: Path) -> None:
    assert summary(typical(tmp_path / "a"))["wall_seconds"] == pytest.approx(11.0 + 31.0)


def test_a_short_run_counts_all_its_steps(tmp_path: Path) -> None:
    run = summary(make(tmp_path / "a", (0, HEAD), (1, step(1)), (2, step(2))))
    assert run["steady_steps"] == {"first": 1, "last": 2, "count": 2}
    assert run["tokens_per_second"] == 200


def test_a_loss_that_is_not_finite_is_left_out_and_its_step_counted(tmp_path: Path) -> None:
    path = make(tmp_path / "a", (0, HEAD), (1, step(1)), (2, step(2, loss=float("nan"))), (3, step(3)))
    run = summary(path)
    assert (run["steps"], run["last_loss"], run["best_loss"], run["skipped_steps"]) == (3, 4.7, 4.7, 1)
    assert row_of(path)[0]["measured"]["loss"] == [4.9, 4.7]


@pytest.mark.parametrize("status", ["finished", "paused", "stopped", "failed"])
def test_the_status_is_the_last_words(tmp_path: Path, status: str) -> None:
    path = make(tmp_path / "a", (0, HEAD), (1, StopEvent(step=0, status=status, seconds=1.0)))
    assert summary(path)["status"] == status


def test_a_run_without_last_words_is_running_or_was_interrupted(tmp_path: Path) -> None:
    path = make(tmp_path / "a", (0, HEAD), (1, step(1)))
    assert summary(path)["status"] == "running"  # this process holds the folder's lock
    (path / LOCK).unlink()
    (path / LOCK).touch()  # nobody holds the new one
    assert summary(path)["status"] == "interrupted"


def test_checkpoints_are_listed_with_whether_they_are_complete(tmp_path: Path) -> None:
    path = make(tmp_path / "a", (0, HEAD))
    for number in (1, 2):
        folder = path / "checkpoints" / f"step-{number:06d}"
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(bytes(10))
        files: dict[str, FileEntry] = hash_files(folder, ["weights"])
        origin = Origin(world_size=1, strategy={}, identity={}, versions={})
        (folder / "manifest.json").write_text(Manifest(step=number, origin=origin, files=files).to_text())
    (path / "checkpoints" / "step-000002" / "weights").write_bytes(bytes(9))
    seen = [(c["step"], c["bytes"], c["complete"]) for c in summary(path)["checkpoints"]]
    assert seen == [(2, 10, False), (1, 10, True)]


def test_a_folder_without_a_started_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="no folder"):
        summary(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="not a run folder"):
        summary(tmp_path / "empty")
    (tmp_path / "job.yaml").write_text("name: mine\n")
    with pytest.raises(JobError, match="nothing has been run") as caught:
        summary(tmp_path)
    assert caught.value.problems[0].fix.startswith(f"`cd {tmp_path} && shardwise train job.yaml`")
    with pytest.raises(JobError, match="has not started"):
        summary(make(tmp_path / "a"))
    (tmp_path / "a" / "checkpoints" / "step-000004").mkdir(parents=True)
    with pytest.raises(JobError, match=r"recorded is lost(.|\s)*step-000004"):
        summary(tmp_path / "a")


def test_beside_a_job_file_its_runs_are_named(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: a\n")
    run = typical(tmp_path / "runs" / "a")
    with pytest.raises(JobError, match="not a run folder") as caught:
        summary(tmp_path)
    assert str(run) in caught.value.problems[0].fix


def shown(*paths: Path) -> str:
    console = Console(file=StringIO(), width=120)
    show(paths, console=console)
    output: StringIO = console.file  # type: ignore[assignment]
    return output.getvalue()


def test_one_run_on_the_terminal(tmp_path: Path) -> None:
    text = shown(typical(tmp_path / "a"))
    for expected in (
        "a  finished, 20 of 20 steps, 42 s",
        "zero2 on 2",
        "4.9000 → 3.0000",
        "6.0000 → 3.5000",
        "tokens/s, mean  133 (66.7 each; 10 of steps 6-20)",
        "step, median    ",
        "MFU, median     40.0%",
        "11.0 GiB",
        "evaluation after step 20: 3.5000",
        "█",
    ):
        assert expected in text, expected


def test_what_was_predicted_stands_next_to_what_was_measured(tmp_path: Path) -> None:
    path = typical(tmp_path / "a")
    assert "predicted" not in shown(path), "on the CPU, or without a plan"
    events = (path / "events.jsonl").read_text().splitlines()
    on_gpu = [{**json.loads(line), "outside_allocator_bytes": [1 << 30] * 2} for line in events]
    (path / "events.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in on_gpu))
    chosen = {"strategy": {"name": "zero2"}, "why": [], "prediction": prediction(12.0)}
    (path / "plan.json").write_text(json.dumps({"chosen": chosen}))
    assert compared(row_of(path)[0]) == {
        "memory per GPU": "12.0 GiB measured, 13.0 GiB predicted (+8.3 %)",
        "tokens/s per GPU": "67 measured, 1,100 predicted (+1550.0 %)",
    }
    assert "12.0 GiB measured, 13.0 GiB predicted (+8.3 %)" in shown(path)


def test_several_runs_side_by_side(tmp_path: Path) -> None:
    text = shown(typical(tmp_path / "a"), make(tmp_path / "b", (0, HEAD)))
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["a", "b"]
    assert ["steps", "20/20", "0/20"] in lines
    assert ["peak", "memory", "11.0", "GiB", "-"] in lines


def test_several_runs_show_in_what_their_jobs_differ(tmp_path: Path) -> None:
    jobs = {
        "a": "optimizer: {learning_rate: 0.1}",
        "b": "optimizer: {learning_rate: 0.2}",
        "c": "train: {steps: 3}",
    }
    runs = [make(tmp_path / name, (0, HEAD)) for name in jobs]
    for run, text in zip(runs, jobs.values(), strict=True):
        (run / "job.yaml").write_text(f"name: {run.name}\nmodel: {{source: m}}\n{text}\n")
    lines = [line.split() for line in shown(*runs).splitlines()]
    assert lines[-2:] == [["optimizer.learning_rate", "0.1", "0.2", "-"], ["train.steps", "-", "-", "3"]]


@pytest.mark.parametrize("name", ["[red]x", "[/]"])
def test_text_from_a_run_is_never_taken_for_markup(tmp_path: Path, name: str) -> None:
    path = make(tmp_path / "a", (0, HEAD))
    (path / "job.yaml").write_text(f"name: '{name}'\n")
    assert name in shown(path)
    assert name in shown(path, path)


def test_the_curve_goes_from_high_to_low_and_survives_constants() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([3.0, 3.0]) == "▁▁"
    assert sparkline([]) == ""
    assert len(sparkline([float(n) for n in range(1000)], width=10)) == 10


@pytest.mark.parametrize(
    ("file", "text"),
    [("plan.json", '{"chosen": 5}'), ("job.yaml", "name: a\nmodel: 5\n"), ("events.jsonl", "")],
)
def test_a_value_of_a_wrong_type_is_damage_and_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, text: str
) -> None:
    run = make(tmp_path / "a", (0, HEAD), *((n, step(n)) for n in range(1, 9)))
    text = text or (run / file).read_text().replace('"loss": 4.8', '"loss": "low"')
    (run / file).write_text(text)
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert "a file holds a value that no version writes there" in said
    assert str(run) in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"loss": 4.8', '"loss": 1e400', "this line is not an event"),
        ('"grad_norm": 1.0', '"grad_norm": Infinity', "this line is not an event"),
        ('"seconds": 0.5', '"seconds": 0.0', "a file holds a value that no version writes there"),
    ],
)
@pytest.mark.parametrize("form", [["--json"], ["--html", "page.html"]])
def test_numbers_that_no_run_has_are_damage_and_no_bug(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str, form: list[str]
) -> None:
    run = make(tmp_path / "a", (0, HEAD), *((n, step(n)) for n in range(1, 9)))
    text = (run / "events.jsonl").read_text()
    assert old in text
    (run / "events.jsonl").write_text(text.replace(old, new))
    form = [word.replace("page", f"{tmp_path}/page") for word in form]
    assert main(["report", str(run), *form]) == 2
    assert said in capsys.readouterr().err


def test_a_page_replaces_a_page_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, page = make(tmp_path / "a", (0, HEAD), (1, step(1))), tmp_path / "page.html"
    assert [main(["report", str(run), "--html", str(page)]) for _ in range(2)] == [0, 0]
    job = run / "job.yaml"
    assert main(["report", str(run), "--html", str(job)]) == 2
    assert "is no earlier result of this command" in capsys.readouterr().err
    assert job.read_text() == "name: a\n"


def test_json_of_a_report_has_null_for_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(tmp_path / "a", (0, HEAD), *((n, step(n)) for n in range(1, 10)))
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text.replace('"mfu": 0.4', '"mfu": 1e308'))  # two add up to more
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["runs"][0]["mfu"] is None


def test_a_report_keeps_no_more_of_a_step_than_it_shows(tmp_path: Path) -> None:
    run = make(tmp_path / "a", (0, HEAD), *((n, step(n)) for n in range(1, 9)))
    kept, every = row_of(run)[1], read_run(run)
    assert summary(every) == summary(run)
    assert UNREAD & set(every.events[1])
    assert not any(UNREAD & set(event) for event in kept.events)
    first, second = (event["peak_memory_reserved_bytes"] for event in kept.events[1:3])
    assert first is second
