"""What may be resumed with what: by the run's own job, or one that does not differ where it matters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from shardwise.cli import main
from shardwise.job.load import load_job
from shardwise.job.paths import absolute
from shardwise.launch.spec import LaunchSpec
from shardwise.record.manifest import FileEntry, Manifest, Origin, hash_files
from shardwise.record.schema import RunEvent, StopEvent
from shardwise.record.write import RunFolder, to_line
from shardwise.strategy import Strategy


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/a.b`, as a run of two processes leaves it that was started with --set train.steps=60."""
    monkeypatch.chdir(tmp_path)
    Path("qa.jsonl").write_text("{}\n")
    Path("job.yaml").write_text(
        "name: a.b\nmodel: {source: org/model, lora: {rank: 8}}\n"
        "data: {train: qa.jsonl}\ntrain: {steps: 20}\n"
    )
    job = absolute(
        load_job("job.yaml", ["train.steps=60"]).job.model_dump(mode="json", exclude_defaults=True)
    )
    path = Path("runs") / "a.b"
    strategy = Strategy(engine="deepspeed", stage=2, data_parallel=2).to_json()
    plan = {"schema": 1, "chosen": {"strategy": strategy, "why": []}}
    RunFolder.create(path, job_yaml=yaml.safe_dump(job), plan=plan, environment={}).close()
    header = RunEvent(
        name="a.b",
        strategy="zero2",
        processes=2,
        total_steps=60,
        global_batch=16,
        sequence_length=1024,
        parameters=1,
        trainable_parameters=1,
    )
    (path / "events.jsonl").write_text(to_line(header, now=0.0))
    return path


@pytest.mark.parametrize("lost", ["plan.json", "job.yaml"])
def test_a_run_folder_that_has_lost_a_file_says_which(
    run: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints").mkdir(exist_ok=True)
    (run / lost).unlink()
    assert main(["train", str(run), "--resume"]) == 5
    assert f"the run folder has lost its {lost}" in capsys.readouterr().err


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[LaunchSpec]:
    specs: list[LaunchSpec] = []
    monkeypatch.setattr("shardwise.app.train.launch", lambda spec, **_: specs.append(spec) or 0)
    return specs


def test_a_run_folder_is_resumed_with_its_own_job_and_processes(
    run: Path, launched: list[LaunchSpec]
) -> None:
    assert main(["train", str(run), "--resume"]) == 0
    [spec] = launched
    assert (spec.run_dir, spec.resume, spec.processes) == ("runs/a.b", True, 2)
    assert spec.job["train"]["steps"] == 60
    assert spec.job["model"]["lora"]["rank"] == 8
    assert spec.chosen is not None
    assert spec.chosen["strategy"]["stage"] == 2


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_debug_reaches_the_workers(run: Path, launched: list[LaunchSpec], debug: list[str]) -> None:
    assert main([*debug, "train", str(run), "--resume"]) == 0
    assert launched[0].debug is bool(debug)


def test_a_run_folder_may_have_been_moved(run: Path, launched: list[LaunchSpec]) -> None:
    run.rename("elsewhere")
    assert main(["train", "elsewhere", "--resume", "--processes", "4"]) == 0
    assert (launched[0].run_dir, launched[0].processes) == ("elsewhere", 4)


@pytest.mark.parametrize(
    ("status", "newest", "changes", "starts"),
    [
        ("finished", 60, [], False),
        ("finished", 60, ["--set", "train.steps=90"], True),
        ("finished", 60, ["--resume-from", "60"], True),
        ("finished", 60, ["--set", "data.train=moved.jsonl"], True),  # the worker compares its content
        ("finished", 60, ["--set", "data.train=moved.jsonl", "--max-steps", "60"], True),
        ("finished", 60, ["--set", "data.train=./qa.jsonl"], False),
        ("finished", 40, [], True),  # the last checkpoint is lost
        ("paused", 60, [], True),
    ],
)
def test_a_finished_run_says_so_before_anything_is_prepared(
    run: Path,
    launched: list[LaunchSpec],
    capsys: pytest.CaptureFixture[str],
    status: str,
    newest: int,
    changes: list[str],
    starts: bool,
) -> None:
    with (run / "events.jsonl").open("a") as events:
        events.write(to_line(StopEvent(step=60, status=status, seconds=1.0), now=1.0))
    (run / "checkpoints" / f"step-{newest:06d}").mkdir(parents=True)
    Path("moved.jsonl").write_text("{}\n")
    assert main(["train", str(run), "--resume", *changes]) == 0
    assert bool(launched) is starts
    assert (
        "finished already, after step 60; next: shardwise report" in capsys.readouterr().err
    ) is not starts


@pytest.mark.parametrize(
    ("length", "key"), [({"steps": 60}, "steps"), ({"epochs": 1.0}, "epochs"), ({}, "epochs")]
)
def test_the_hint_to_train_more_names_a_key_that_can_be_set(
    run: Path,
    launched: list[LaunchSpec],
    capsys: pytest.CaptureFixture[str],
    length: dict[str, float],
    key: str,
) -> None:
    job = yaml.safe_load((run / "job.yaml").read_text())
    (run / "job.yaml").write_text(yaml.safe_dump({**job, "train": length}))
    with (run / "events.jsonl").open("a") as events:
        events.write(to_line(StopEvent(step=60, status="finished", seconds=1.0), now=1.0))
    (run / "checkpoints" / "step-000060").mkdir(parents=True)
    assert main(["train", str(run), "--resume"]) == 0
    said = capsys.readouterr().err
    assert f"to train more: --set train.{key}=N" in said
    assert main(["train", str(run), "--resume", "--set", f"train.{key}=90"]) == 0, "as it says"
    assert len(launched) == 1


@pytest.mark.parametrize(("most", "starts"), [("59", False), ("60", False), ("61", True)])
def test_a_run_beyond_max_steps_says_so(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str], most: str, starts: bool
) -> None:
    (run / "checkpoints" / "step-000060").mkdir(parents=True)
    assert main(["train", str(run), "--resume", "--max-steps", most]) == 0
    assert bool(launched) is starts
    assert (f"at step 60 already: --max-steps {most} leaves" in capsys.readouterr().err) is not starts


@pytest.mark.parametrize("more", [[], ["--processes", "3"]])
def test_a_finished_run_needs_neither_its_data_nor_its_processes(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    with (run / "events.jsonl").open("a") as events:
        events.write(to_line(StopEvent(step=60, status="finished", seconds=1.0), now=1.0))
    (run / "checkpoints" / "step-000060").mkdir(parents=True)
    Path("qa.jsonl").unlink()
    assert main(["train", str(run), "--resume", *more]) == 0
    assert "finished already" in capsys.readouterr().err
    (run / "checkpoints" / "step-000060").rmdir()
    assert main(["train", str(run), "--resume", *more]) == 2, "there is something to do, without data"
    assert not launched


def test_a_run_that_is_not_there_is_answered_with_those_that_are(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "runs/nothing", "--resume"]) == 2
    err = capsys.readouterr().err
    assert (
        err
        == "error: there is no folder runs/nothing\n  at:  runs/nothing\n  fix: name one of these: runs/a.b\n"
    )


def test_a_run_of_several_nodes_is_not_resumed_on_one_that_has_its_own_part_only(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run / "checkpoints" / "step-000004"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    origin = Origin(world_size=2, strategy={}, identity={}, versions={})
    mine, theirs = hash_files(folder, ["state.json"]), {"rng-rank1.json": FileEntry(size_bytes=1, sha256="0")}
    manifest = Manifest(step=4, origin=origin, files=mine, elsewhere={"1": theirs})
    (folder / "manifest.json").write_text(manifest.to_text())
    assert main(["train", str(run), "--resume"]) == 5
    err = capsys.readouterr().err
    assert "the run was on 2 nodes" in err
    assert "--nodes, --node-rank and --rendezvous" in err
    assert launched == []
    (folder / "rng-rank1.json").write_text("x")
    assert main(["train", str(run), "--resume"]) == 0


def test_what_differs_is_named_with_both_values_and_the_command_that_works(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", "model.lora=null", "--set", "data.max_samples=5"]
    assert main(["train", "job.yaml", "--resume", *changes]) == 5
    err = capsys.readouterr().err
    assert launched == []
    assert err.startswith("error: this is not the job that runs/a.b was started with\n")
    assert "  - train.steps is 20, in the run it is 60" in err
    assert "    at:  job.yaml:4: train.steps" in err
    assert "  - data.max_samples is 5, in the run it is unset\n    at:  --set data.max_samples=5" in err
    assert '  - model.lora is unset, in the run it is {"rank": 8, "alpha": 16.0, ' in err
    assert err.count("fix: ") == 1
    assert "fix: `shardwise train runs/a.b --resume` goes on with the run's own job" in err


def test_a_run_becomes_longer_only(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(run), "--resume", "--set", "train.steps=90"]) == 0
    assert launched[0].job["train"]["steps"] == 90
    assert main(["train", str(run), "--resume", "--set", "train.steps=59"]) == 5
    err = capsys.readouterr().err
    assert "train.steps is 59, in the run it is 60; a run can become longer only" in err
    assert "--max-steps ends it earlier" in err


def test_a_checkpoint_is_named_by_its_step(
    run: Path, launched: list[LaunchSpec], capsys: pytest.CaptureFixture[str]
) -> None:
    for step in (20, 60):
        folder = run / "checkpoints" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"step": 60, "total_steps": 60}')
    for name in ("step-000020", "20", "final", "latest"):
        assert main(["train", str(run), "--resume-from", name]) == 0, name
    assert [spec.resume_from for spec in launched] == [20, 20, 60, None]
    assert all(spec.resume and not spec.trust_checkpoint for spec in launched)
    assert main(["train", str(run), "--resume", "--trust-checkpoint"]) == 0
    assert launched[-1].trust_checkpoint
    assert main(["train", str(run), "--resume-from", "step-000030"]) == 5
    err = capsys.readouterr().err
    assert "there is no checkpoint step-000030" in err
    assert "name one that is there: step-000060, step-000020" in err
    shutil.rmtree(run / "checkpoints" / "step-000060")
    assert main(["train", str(run), "--resume-from", "final"]) == 5
    assert "there is no checkpoint final" in capsys.readouterr().err


def test_what_does_not_make_the_run_may_change(run: Path, launched: list[LaunchSpec]) -> None:
    free = ["train.save_every=5", "train.keep=9", "train.eval_every=0", "tracking=[]", "strategy=zero2"]
    Path("moved.jsonl").write_text("{}\n")  # the worker compares its content
    changes = [flag for change in [*free, "data.train=moved.jsonl"] for flag in ("--set", change)]
    assert main(["train", "job.yaml", "--resume", "--set", "train.steps=60", *changes]) == 0
    assert launched[0].job["train"]["save_every"] == 5


def test_a_run_folder_s_job_that_is_broken_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "job.yaml").write_text(
        "name: a.b\nmodel: {source: org/model}\ndata: {train: qa.jsonl, tokens: 5}\n"
    )
    assert main(["train", "job.yaml", "--resume"]) == 2
    err = capsys.readouterr().err
    assert "runs/a.b/job.yaml:3: data.tokens" in err


def test_the_same_command_starts_a_run_and_goes_on_with_it(run: Path, launched: list[LaunchSpec]) -> None:
    """As a batch system gives it again and again; the job file is the one that the run was started with."""
    same = ["train", "job.yaml", "--set", "train.steps=60", "--resume-or-start"]
    assert main([*same, "--dry-run"]) == 0
    assert launched.pop().resume is False
    assert run.is_dir(), "a dry run changes nothing"
    (run / "checkpoints" / "step-000010").mkdir(parents=True)
    assert main(same) == 0
    assert (launched.pop().resume, [path.name for path in Path("runs").iterdir()]) == (True, ["a.b"])
    (run / "checkpoints" / "step-000010").rmdir()
    for number in (1, 2):
        assert main(same) == 0, "what was killed before its first checkpoint begins again"
        spec = launched.pop()
        assert (spec.resume, Path(spec.run_dir).exists()) == (False, False)
        RunFolder.create(run, job_yaml="", plan={}, environment={}).close()
        assert (run.with_name(f"a.b-{number}") / "plan.json").is_file()
