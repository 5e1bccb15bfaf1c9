"""Running out of memory, explained and retried: `shardwise train` with two real processes.

CPUs do not run out of GPU memory: oom_worker.py puts a border on the rows that a process may take at a time.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked_command import forked_shardwise
from harness import steps_of
from test_whole_runs import evaluations, job, losses

from shardwise.job.schema import Job
from shardwise.training.saving import SWITCH

pytestmark = pytest.mark.slow

STEPS = 8


@dataclass(frozen=True)
class Done:
    code: int
    err: str
    folder: Path

    @property
    def run(self) -> Path:
        return self.folder / "runs" / "run"

    def rows(self) -> dict[int, Counter[str]]:
        """The rows of every step, of its last try."""
        by_step: dict[int, Counter[str]] = {}
        for rank in range(2):
            last: dict[int, list[str]] = {}
            begins = False
            for line in map(json.loads, (self.folder / f"rows.{rank}").read_text().splitlines()):
                if line is None:
                    begins = True
                    continue
                step, row = line
                if begins:
                    last = {earlier: rows for earlier, rows in last.items() if earlier < step}
                    begins = False
                last.setdefault(step, []).append(row)
            for step, rows in last.items():
                by_step.setdefault(step, Counter()).update(rows)
        return by_step

    def failures(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((self.run / "out_of_memory.json").read_text())["failures"]
        return found


def write_job(folder: Path, strategy: str, **train: Any) -> None:
    settings = {
        "steps": STEPS,
        "global_batch": 8,
        "micro_batch": 4,
        "save_every": 2,
        "eval_every": 4,
        **train,
    }
    values = {**job(folder, "run", strategy, **settings), "output": "runs"}
    written = Job.model_validate(values).model_dump(mode="json", exclude_defaults=True)
    (folder / "job.yaml").write_text(yaml.safe_dump(written))


def train(folder: Path, *arguments: str, border: dict[str, Any] | None = None) -> Done:
    code, _, err = forked_shardwise(
        "train",
        *arguments,
        cwd=folder,
        worker="oom_worker",
        SHARDWISE_CACHE=str(folder.parent / "cache"),
        OOM_ROWS=str(folder / "rows"),
        OOM_BORDER=json.dumps(border or {}),
    )
    return Done(code=code, err=err, folder=folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """What every run here must come to: the losses do not depend on the strategy (test_whole_runs.py)."""
    folder = tmp_path_factory.mktemp("undisturbed")
    write_job(folder, "zero2")
    done = train(folder, "job.yaml", "--processes", "2")
    assert done.code == 0, done.err
    assert [len(list(rows.elements())) for rows in done.rows().values()] == [8] * STEPS
    return done


def check_same(done: Done, undisturbed: Done) -> None:
    """Every step once, on the same rows, with the same losses."""
    assert done.code == 0, done.err
    assert [event["step"] for event in steps_of(done.run)] == list(range(1, STEPS + 1))
    assert done.rows() == undisturbed.rows()
    assert losses(done.run) == pytest.approx(losses(undisturbed.run), rel=1e-5)
    assert evaluations(done.run) == pytest.approx(evaluations(undisturbed.run), rel=1e-5)


@pytest.mark.parametrize(("strategy", "rank"), [("zero2", None), ("fsdp2", 1)])
def test_a_backward_pass_is_explained_and_the_run_goes_on_with_fewer_rows_at_a_time(
    tmp_path: Path, undisturbed: Done, strategy: str, rank: int | None
) -> None:
    write_job(tmp_path, strategy)
    border = {"phase": "backward", "rows": 2, "from_step": 4, "rank": rank}
    done = train(tmp_path, "job.yaml", "--processes", "2", "--on-oom", "retry", border=border)
    check_same(done, undisturbed)
    where = "backward pass of step 4, in model.layers.1, on rank"
    assert done.err.count(f"out of memory, going on: out of GPU memory in the {where}") == 1
    assert "2.0 GiB were asked for, 71.0 GiB are in tensors, 5.0 GiB reserved in fragments" in done.err
    assert (
        f"going on from the state after step 2, with {strategy} with micro-batch 2, accumulation 2"
        in done.err
    )
    assert "error:" not in done.err
    [failure] = done.failures()
    assert set(failure["evidence"]["ranks"]) == ({0, 1} if rank is None else {1})
    assert (failure["evidence"]["phase"], failure["evidence"]["module"]) == ("backward", "model.layers.1")
    assert (failure["evidence"]["step"], failure["from_step"]) == (4, 2)
    plan = json.loads((done.run / "plan.json").read_text())
    strategies = (failure["retried_with"], plan["chosen"]["strategy"])
    assert [(s["name"], s["micro_batch"], s["accumulation"]) for s in strategies] == [(strategy, 2, 2)] * 2


def test_stopped_it_is_one_error_whose_advice_goes_on(tmp_path: Path, undisturbed: Done) -> None:
    write_job(tmp_path, "zero2")
    border = {"phase": "forward", "rows": 2, "from_step": 3, "rank": 1}
    done = train(tmp_path, "job.yaml", "--processes", "2", border=border)
    assert done.code == 3
    assert done.err.count("error:") == 1
    module = "model.layers.1.mlp"
    assert f"error: out of GPU memory in the forward pass of step 3, in {module}, on rank 1\n" in done.err
    assert "nanobind" not in done.err
    advice = "shardwise train runs/run --resume --set train.micro_batch=2"
    assert f"    fix: {advice}\n" in done.err
    assert done.failures()[0]["retried_with"] is None

    done = train(tmp_path, *advice.split()[2:], border=border)
    check_same(done, undisturbed)


def test_before_anything_is_saved_it_starts_again(tmp_path: Path, undisturbed: Done) -> None:
    """In the evaluation before the first step; the folder of the first try makes room for the second."""
    write_job(tmp_path, "fsdp2")
    border = {"phase": "evaluation", "rows": 2, "from_step": 0}
    done = train(tmp_path, "job.yaml", "--processes", "2", "--on-oom", "retry", border=border)
    check_same(done, undisturbed)
    assert "out of GPU memory in the evaluation after step 0, in model.layers.1.mlp" in done.err
    assert "going on from the start, as nothing was saved yet, with fsdp2 with micro-batch 2" in done.err
    assert done.failures()[0]["from_step"] == 0
    events = [json.loads(line)["kind"] for line in (done.run / "events.jsonl").read_text().splitlines()]
    assert events.count("run") == 1
    assert "resume" not in events


def test_a_rank_that_runs_out_while_saving_is_no_damaged_disk(
    tmp_path: Path, undisturbed: Done, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SWITCH, "0")  # a thread that writes needs no GPU
    write_job(tmp_path, "zero2")
    border = {"phase": "saving", "rows": 2, "from_step": 4, "rank": 1}
    done = train(tmp_path, "job.yaml", "--processes", "2", "--on-oom", "retry", border=border)
    check_same(done, undisturbed)
    assert "out of GPU memory in saving after step 4, on rank 1" in done.err
    assert "could not be written" not in done.err
    assert done.failures()[0]["from_step"] == 2


def test_where_nothing_is_left_it_ends_with_what_would_have_to_change(tmp_path: Path) -> None:
    """The leanest of its kind, on a machine whose GPUs are not known: nothing else is predicted."""
    write_job(tmp_path, "zero2", micro_batch=1, checkpointing="full")
    border = {"phase": "backward", "rows": 0, "from_step": 3}
    done = train(tmp_path, "job.yaml", "--processes", "2", "--on-oom", "retry", border=border)
    assert done.code == 3
    assert done.err.count("error:") == 1
    assert "nothing is known to need less than what was tried" in done.err
    assert "fix: shorter rows (data.sequence_length)" in done.err
    assert len(steps_of(done.run)) == 2


def test_a_killed_process_is_no_gpu_that_is_full(tmp_path: Path) -> None:
    write_job(tmp_path, "zero2")
    border = {"phase": "forward", "rows": 2, "from_step": 3, "rank": 1, "killed": True}
    done = train(tmp_path, "job.yaml", "--processes", "2", "--on-oom", "retry", border=border)
    assert done.code == 4
    assert "error: rank 1 was killed" in done.err
    assert "GPU" not in done.err.partition("error: ")[2]
    assert not (done.run / "out_of_memory.json").exists()
