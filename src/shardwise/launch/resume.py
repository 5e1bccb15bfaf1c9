"""What `--resume` uses: the job in the run folder, and the run's number of processes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardwise.errors import CheckpointError, JobError, Problem
from shardwise.job import validate
from shardwise.job.identity import DECISIVE, within
from shardwise.job.load import LoadedJob, differences
from shardwise.job.schema import Job
from shardwise.job.source import read_file
from shardwise.record.read import JOB, PLAN, is_run_folder, read_run

_LENGTH = ("train.steps", "train.epochs")


def resume_command(run_dir: Path) -> str:
    """The command line that resumes a run."""
    return f"shardwise train {shlex.quote(str(run_dir))} --resume"


def job_file(path: Path, *, resume: bool) -> Path:
    """The job file of `train PATH`: the file itself or, to resume, the run folder's.

    Raises JobError for a run folder without --resume, CheckpointError for one that has lost its files.
    """
    if not is_run_folder(path):
        if resume and (path / "checkpoints").is_dir():
            what = f"the run folder has lost its {PLAN if (path / JOB).is_file() else JOB}"
            raise CheckpointError(what, where=str(path), fix="restore it from a copy")
        return path
    if not resume:
        another = f"shardwise train {shlex.quote(str(path / JOB))} --set name={path.name}-2"
        fix = f"`{resume_command(path)}` goes on with it; `{another}` starts another"
        raise JobError(f"{path} is a run folder, not a job file", fix=fix)
    return path / JOB


def processes_of(run_dir: Path) -> int | None:
    """Processes the run was started with; None if it never started."""
    heads = [event for event in read_run(run_dir).events if event.get("kind") == "run"]
    return heads[0]["processes"] if heads else None


def check_same_job(loaded: LoadedJob, run_dir: Path) -> None:
    """Raise CheckpointError with each key that differs from the run's job, and both values.

    The content of the data is compared later, by the workers.
    """
    then, now = _job_of(run_dir).model_dump(mode="json"), loaded.job.model_dump(mode="json")
    problems = [
        Problem(what=_difference(key, old, new), where=loaded.where(key))
        for key, old, new in differences(then, now)
        if within(key, DECISIVE)
    ]
    if problems:
        advice = f"`{resume_command(run_dir)}` goes on with the run's own job"
        if any(problem.what.startswith(_LENGTH) for problem in problems):
            advice += (
                "; to train longer, start another run from its weights: `shardwise export`, model.source"
            )
        problems[-1] = replace(problems[-1], fix=advice)
        raise CheckpointError(f"this is not the job that {run_dir} was started with", problems=problems)


def _job_of(run_dir: Path) -> Job:
    document = read_file(run_dir / JOB)
    job, wrong = validate.check(document)
    problems = [*document.problems, *wrong.values()]
    if job is None or problems:
        raise JobError("the run folder's job cannot be read", problems=problems)
    return job


def _difference(key: str, old: object, new: object) -> str:
    text = f"{key} is {_shown(new)}, in the run it is {_shown(old)}"
    if key in _LENGTH:
        # With a constant rate and a warm-up given in steps the weights would not depend on the length,
        # but the run's record (its steps, the evaluation after the last) still would.
        text += "; a run keeps its length, from which its learning rates and its record follow"
    return text


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
