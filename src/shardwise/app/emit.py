"""Files that start a training elsewhere: of a user's own script, or of the job itself."""

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from shardwise.app.jobs import hardware_of
from shardwise.emit.cluster import TARGETS, WORK
from shardwise.emit.files import Emitted, Target, as_json, with_energy
from shardwise.emit.files import emit as files_for
from shardwise.emit.request import Request
from shardwise.engines import ENGINES, descriptor, parts_of
from shardwise.errors import JobError
from shardwise.job.load import load_job
from shardwise.job.paths import absolute, below
from shardwise.job.schema import BUCKET, Optimizer
from shardwise.job.source import job_text
from shardwise.job.strategies import NAMED
from shardwise.planner.plan import SCHEMA, Plan
from shardwise.planner.planning import Making, make_plan
from shardwise.planner.search import rank
from shardwise.planner.why import does_not_fit
from shardwise.strategy import Strategy


def emit(
    source: Path,
    *,
    to: Target = "torchrun",
    run: Literal["script", "shardwise"] = "script",
    gpus: str | None = None,
    out: Path = Path("engine"),
    changes: Sequence[str] = (),
    making: Making = nullcontext,
) -> Emitted:
    """The texts of the files for a launcher, which belong into the folder `out`.

    Args:
        source: a job file, or a plan that `shardwise plan --out` wrote.
        to: the launcher.
        run: what it starts: a training script of the user's, or `shardwise train` of the job.
        gpus: for a job: `4xRTX4080`; None: this machine's.
        out: the folder of the files; it holds none of them yet.
        changes: for a job: `key=value` texts, as for `--set`.
        making: entered while a plan is made.
    """
    plan, passed_over = _plan(_text(source)), tuple[str, ...]()
    for flag, value in {"--set": changes, "--gpus": gpus}.items():
        if plan is not None and value:
            raise JobError("a plan is not changed", where=flag, fix="name the job that it was made of")
    place = out.resolve().as_posix()
    if plan is not None and run == "shardwise":
        what = "a plan does not hold the job to train"
        raise JobError(what, where=str(source), fix="name the job that it was made of")
    if plan is not None:
        request = _of_plan(source, plan, place)
    else:
        job = load_job(source, changes).job
        made = make_plan(job, hardware_of(gpus), making=making)
        if run == "script":
            made, passed_over = _that_starts(made, to)
        chosen = Request.of_plan(made.to_json(), place, job=job)
        if chosen is None:
            raise does_not_fit(made)
        request = chosen
        if run == "shardwise":
            values = job.model_dump(mode="json", exclude_defaults=True)
            values = below(WORK, values) if to in TARGETS else absolute(values)
            request = replace(chosen, job_text=job_text(values))
    emitted = files_for(to, request)
    emitted = replace(emitted, notes=(*passed_over, *emitted.notes))
    return _new(with_energy(emitted) if run == "script" else emitted, out)


def _that_starts(plan: Plan, to: Target) -> tuple[Plan, tuple[str, ...]]:
    """The plan with the best choice that a launcher starts, and what is said of the plan's own.

    The plan itself where it starts none: `files_for` says why.
    """
    if (best := plan.chosen) is None:
        return plan, ()
    started = [o for o in plan.options if o.fit == best.fit and _starts(to, o.strategy)]
    if best in started or not started:
        return plan, ()
    option = rank(started, plan.objective, plan.hardware)[0]
    left, name = best.strategy.name, option.strategy.name
    return replace(plan, chosen=option), (f"--to {to} does not start {left}, the plan's choice: {name}",)


def _starts(to: Target, strategy: Strategy) -> bool:
    try:
        descriptor(strategy).check_launcher(to, strategy)
    except JobError:
        return False
    return True


def library(name: str, out: Path) -> Emitted:
    """DeepSpeed's files of a strategy's name: for a script of your own, and with `auto` for a Trainer."""
    names = [one for one, parts in NAMED.items() if ENGINES[parts["engine"]].accelerate_type == "DEEPSPEED"]
    if name not in names:
        raise JobError(f"there are no files {name!r}", where="--preset", fix=f"one of {', '.join(names)}")
    strategy = Strategy(**parts_of(name), data_parallel=1, accumulation=1)
    files = descriptor(strategy).script_files(strategy, Optimizer(), BUCKET).files
    texts = {f"{name}{Path(file).stem.removeprefix('deepspeed')}.json": files[file] for file in files}
    notes = ("write your batch and learning rate; the Trainer fills in `auto` from its arguments",)
    return _new(Emitted(files={file: as_json(config) for file, config in texts.items()}, notes=notes), out)


def _new(emitted: Emitted, out: Path) -> Emitted:
    """The same; JobError where a file is there already."""
    taken = [name for name in emitted.files if (out / name).exists()]
    if taken:
        fix = "name a new folder, or remove the file"
        raise JobError(f"{out / taken[0]} exists already", where="--out", fix=fix)
    return emitted


def _text(source: Path) -> str:
    try:
        return source.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise JobError(f"there is no file {source}", where="shardwise emit", fix="check the path") from None
    except (OSError, UnicodeDecodeError):
        raise JobError("it cannot be read", where=str(source), fix="name a job file or a plan") from None


def _plan(text: str) -> dict[str, Any] | None:
    """The plan that a text holds; None for anything else, such as a job."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return values if isinstance(values, dict) and "chosen" in values else None


def _of_plan(source: Path, plan: dict[str, Any], place: str) -> Request:
    """The choice of a plan that `plan --out` wrote."""
    try:
        if plan["schema"] != SCHEMA:
            raise ValueError(plan["schema"])
        request = Request.of_plan(plan, place)
    except (ValueError, KeyError, TypeError, OverflowError):
        fix = "shardwise plan JOB --out plan.json"
        raise JobError("it is not a plan of this version", where=str(source), fix=fix) from None
    if request is None:
        what = "nothing fits in this plan, so there is nothing to emit"
        raise JobError(what, where=str(source), fix="`shardwise plan` names the nearest change that fits")
    return request
