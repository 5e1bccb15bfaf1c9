"""What `--resume` uses of the run folder: the job, the number of processes, the strategy."""

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, JobError, Problem
from shardwise.job import validate
from shardwise.job.identity import BY_CONTENT, DECISIVE, longer, within
from shardwise.job.load import LoadedJob, differences
from shardwise.job.paths import absolute
from shardwise.job.schema import Job
from shardwise.job.source import read_file
from shardwise.record.manifest import read_json, read_manifest, step_folders
from shardwise.record.read import JOB, PLAN, is_run_folder, no_run, read_run
from shardwise.strategy import Strategy

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
        if resume and not path.is_file():
            raise no_run(path)
        return path
    if not resume:
        another = f"shardwise train {shlex.quote(str(path / JOB))} --set name={path.name}-2"
        fix = f"`{resume_command(path)}` goes on with it; `{another}` starts another"
        raise JobError(f"{path} is a run folder, not a job file", fix=fix)
    return path / JOB


def set_aside(run_dir: Path) -> None:
    """Rename the folder of a run that has saved nothing (`NAME-1`): it begins again, and its logs stay."""
    if is_run_folder(run_dir):
        names = (run_dir.with_name(f"{run_dir.name}-{number}") for number in itertools.count(1))
        run_dir.rename(next(name for name in names if not name.exists()))


def processes_of(run_dir: Path, *, nodes: int = 1) -> int | None:
    """Processes on each of `nodes` that the run was last run with; None where they cannot be shared out."""
    size = _last_strategy(run_dir).world_size
    return size // nodes if size % nodes == 0 else None


def _last_strategy(run_dir: Path) -> Strategy:
    try:
        return Strategy.from_json(read_run(run_dir).plan["chosen"]["strategy"])
    except (KeyError, TypeError, ValueError):
        what, fix = "it does not say the strategy that the run was last run with", "restore it from a copy"
        raise CheckpointError(what, where=f"{run_dir}/{PLAN}", fix=fix) from None


def finished(run_dir: Path, job: Job, max_steps: int | None = None) -> str:
    """What to say of a run that has nothing left to do with this job; empty for any other."""
    record, last = read_run(run_dir), step_folders(run_dir / "checkpoints")[:1]
    changed = [key for key, *_ in _changes(Job.model_validate(record.job), job)]
    if any(within(key, BY_CONTENT) for key in changed):
        return ""  # the workers compare the content
    if last and max_steps is not None and last[0][0] >= max_steps:
        return f"at step {last[0][0]} already: --max-steps {max_steps} leaves nothing to do"
    end = record.events[-1] if record.events else {}
    done = end.get("status") == "finished" and end.get("mirror") is None
    same = not any(key.startswith("train.") for key in changed)
    if not done or not same or [step for step, _ in last] != [end["step"]]:
        return ""
    what = f"finished already, after step {end['step']}; next: shardwise report {shlex.quote(str(run_dir))}"
    key = "train.epochs" if job.train.steps is None else "train.steps"
    return f"{what}; to train more: --set {key}=N"


def last_choice(run_dir: Path, job: Job, processes: int) -> dict[str, Any] | None:
    """The strategy that the run was last run with, as plan.json's `chosen`; None where the job decides.

    A resumed run keeps its last strategy: `auto` might choose another now, and the one that the job names may
    have run out of memory. A changed micro-batch or checkpointing in the job counts.
    """
    then, strategy = Job.model_validate(read_run(run_dir).job), _last_strategy(run_dir)
    if strategy.world_size != processes or job.strategy != then.strategy:
        return None
    micro_batch, asked = job.train.micro_batch, job.train.checkpointing
    if micro_batch not in (None, then.train.micro_batch):
        rows = strategy.micro_batch * strategy.accumulation
        strategy = replace(strategy, micro_batch=micro_batch, accumulation=max(1, rows // micro_batch))
    if asked not in ("auto", then.train.checkpointing):
        every = {"none": 0, "full": 1}[asked] if isinstance(asked, str) else asked
        strategy = replace(strategy, checkpoint_every=every)
    return {"strategy": strategy.to_json(), "why": ["the strategy the run was last run with"]}


def step_named(run_dir: Path, name: str) -> int | None:
    """The step of a checkpoint: `step-000400` or `400`, `final`, or None for the `latest`.

    Raises CheckpointError where the run has none of that name.
    """
    folders, wanted = dict(step_folders(run_dir / "checkpoints")), name.removeprefix("step-")
    if name == "final" and folders:
        with suppress(OSError, ValueError, KeyError, TypeError):
            state = next(iter(folders.values())) / "state.json"
            wanted = str(read_json(state)["total_steps"])
    if name == "latest" or (wanted.isdigit() and int(wanted) in folders):
        return None if name == "latest" else int(wanted)
    there = ", ".join(path.name for path in folders.values()) or "none"
    fix = f"name one that is there: {there}"
    raise CheckpointError(f"there is no checkpoint {name}", where=str(run_dir / "checkpoints"), fix=fix)


def check_nodes(run_dir: Path) -> None:
    """CheckpointError where the newest checkpoint has files on other nodes, and one node is to resume it."""
    for _, folder in step_folders(run_dir / "checkpoints")[:1]:
        with suppress(ValueError):  # a damaged manifest: the workers look for an older checkpoint
            manifest = read_manifest(folder)
            if any(not (folder / name).exists() for name in manifest.of(None)):
                what = f"the run was on {len(manifest.nodes)} nodes, and each has its part of the checkpoints"
                fix = "on each of them: --nodes, --node-rank and --rendezvous as before; or bring their "
                fix += "`checkpoints` together here (docs/several-machines.md)"
                if len(manifest.nodes) > 1:
                    raise CheckpointError(what, where=str(run_dir), fix=fix)


def check_same_job(loaded: LoadedJob, run_dir: Path) -> None:
    """Raise CheckpointError with each key that differs from the run's job, and both values.

    The content of the data is compared later, by the workers.
    """
    problems = [
        Problem(what=_difference(key, old, new), where=loaded.where(key))
        for key, old, new in _changes(_job_of(run_dir), loaded.job)
        if within(key, DECISIVE) and not (key in _LENGTH and longer(key, old, new))
    ]
    if problems:
        advice = f"`{resume_command(run_dir)}` goes on with the run's own job"
        if any(problem.what.startswith(_LENGTH) for problem in problems):
            advice += "; --max-steps ends it earlier"
        problems[-1] = replace(problems[-1], fix=advice)
        raise CheckpointError(f"this is not the job that {run_dir} was started with", problems=problems)


def _changes(then: Job, now: Job) -> Iterator[tuple[str, object, object]]:
    """Each key that differs, with both values; the same path written in another way does not."""
    before, after = (absolute(job.model_dump(mode="json")) for job in (then, now))
    return differences(before, after)


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
        text += "; a run can become longer only: its learning rates follow from its length"
    return text


def _shown(value: object) -> str:
    if value is None:
        return "unset"
    text = json.dumps(dict(value) if isinstance(value, Mapping) else value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
