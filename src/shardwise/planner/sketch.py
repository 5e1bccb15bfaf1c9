"""A job from a model's name and a few flags, for a plan without a job file."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import JobError, Problem
from shardwise.job import contradictions, paths, validate
from shardwise.job.schema import Job
from shardwise.job.source import Document, apply
from shardwise.models.catalog import lookup

SEQUENCE_LENGTH = 2048
ROWS_PER_GPU, LEAST_ROWS, MOST_ROWS = 16, 64, 2048
NO_DATA = "(no data: planned by the model alone)"


@dataclass(frozen=True, kw_only=True)
class Sketch:
    """A job to plan with, and the defaults in it."""

    job: Job
    assumed: tuple[str, ...]
    """The defaults, as the flags that change them."""


def sketch(model: str, changes: Sequence[str], *, world_size: int) -> Sketch:
    """The job for a model's name and `changes` (`key=value`, as for --set); JobError with all problems."""
    rows, shape = default_global_batch(world_size), lookup(model)
    tokens = min(SEQUENCE_LENGTH, (shape and shape.positions) or SEQUENCE_LENGTH)
    document = Document(
        name="the command line",
        values={
            "name": "plan",
            "model": {"source": model},
            "data": {"train": NO_DATA, "sequence_length": tokens},
            "train": {"global_batch": rows},
        },
    )
    apply(document, changes)
    job, wrong = validate.check(document)
    where = f"--model {model}"
    missing = [Problem(what=what, where=where, fix=fix) for what, fix in paths.missing_model(model)]
    given = {change.partition("=")[0].strip() for change in changes}
    problems = [*document.problems, *missing, *wrong.values()]
    if job is not None and not problems:
        problems += contradictions.find(job, frozenset(given))
    if job is None or problems:
        raise JobError("the command line describes no job", problems=problems)
    assumed = {
        "data.sequence_length": f"--sequence {tokens}",
        "train.global_batch": f"--global-batch {rows}",
    }
    if job.model.lora is None:
        assumed["model.lora"] = "--full"
    defaults = (flag for key, flag in assumed.items() if not any(name.startswith(key) for name in given))
    return Sketch(job=job, assumed=tuple(defaults))


def default_global_batch(world_size: int) -> int:
    """Rows per step: about 16 per GPU, from 64 to 2048; a power of two per GPU."""
    per_gpu = min(max(LEAST_ROWS, ROWS_PER_GPU * world_size), MOST_ROWS) // world_size
    return world_size * (1 << max(0, per_gpu.bit_length() - 1))
