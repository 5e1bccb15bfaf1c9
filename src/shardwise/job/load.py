"""From a job file and `--set` flags to a `Job`, or to everything that is wrong with it, at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, Problem
from shardwise.job import contradictions, json_schema, overrides, paths, secrets, validate
from shardwise.job.schema import Job, StrategySpec
from shardwise.job.source import Document, Key, Origin, dotted, read_file

DEFAULT = Origin(kind="default", text="default")

_PATH_KEYS: tuple[Key, ...] = (
    ("output",),
    ("model", "source"),
    ("model", "tokenizer"),
    ("data", "train"),
    ("data", "eval"),
    ("data", "chat_template"),
    ("strategy", "nvme_path"),
)


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job, and where each value a user gave stands."""

    job: Job
    origins: Mapping[str, Origin]
    """By dotted key (`train.steps`); a key that is not in it has its default."""

    def where(self, key: str) -> str:
        """`job.yaml:12: train.steps`, or the flag that set it, or the bare key where it has its default."""
        parts = _split(key)
        for length in range(len(parts), 0, -1):
            origin = self.origins.get(dotted(parts[:length]))
            if origin is not None:
                return origin.text if origin.kind == "flag" else f"{origin.text}: {dotted(parts[:length])}"
        return key

    def located(self, error: JobError) -> JobError:
        """An error that names keys, separated by ", ", with the lines they stand on."""
        found = [
            replace(problem, where=", ".join(map(self.where, problem.where.split(", "))))
            for problem in error.problems
        ]
        if len(found) > 1:
            return JobError(error.headline, problems=found)
        return JobError(found[0].what, where=found[0].where, fix=found[0].fix)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the resolved job."""

    key: str
    value: Any
    origin: str


def load_job(path: str | Path, changes: Sequence[str] = ()) -> LoadedJob:
    """Reads a job file, applies `--set` overrides, checks everything.

    Raises:
        JobError: with every problem found: syntax, unknown keys, wrong values, contradictions, missing
            files and access keys, each with the line it stands on.
    """
    document = read_file(Path(path))
    overrides.apply(document, changes)
    secret = _secrets(document)
    _expand_home(document)
    job, wrong = validate.check(document)
    problems = [*document.problems, *secret, *wrong.values()]
    if job is not None:
        problems += _job_problems(job, document, frozenset(map(dotted, wrong)))
    if len(problems) == 1:
        raise JobError(problems[0].what, where=problems[0].where, fix=problems[0].fix)
    if job is None or problems:
        raise JobError(f"{document.name} has {len(problems)} problems", problems=sorted(problems, key=_line))
    return LoadedJob(job=job, origins={dotted(key): origin for key, origin in document.origins.items()})


def resolved(loaded: LoadedJob) -> list[Setting]:
    """Every setting of the job in the schema's order, with its origin."""
    return [
        Setting(key=dotted(key), value=value, origin=_origin(key, loaded.origins).text)
        for key, value in leaves(loaded.job.model_dump(mode="json"))
    ]


def leaves(values: Mapping[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(key, value) of every value that is not a section."""
    for name, value in values.items():
        key = (*above, name)
        if isinstance(value, dict) and not json_schema.is_free(key):
            yield from leaves(value, key)
        else:
            yield key, value


def _origin(key: Key, origins: Mapping[str, Origin]) -> Origin:
    own = origins.get(dotted(key))
    if own is None and json_schema.is_free(key):
        inside = [origin for name, origin in origins.items() if name.startswith(dotted(key) + ".")]
        own = inside[-1] if inside else None
    return own or DEFAULT


def _secrets(document: Document) -> list[Problem]:
    """A problem for each access key, which is removed so that no later message repeats it."""
    found = []
    for key in list(secrets.find(document.values)):
        origin = document.origins[key]
        where = f"--set {dotted(key)}=..." if origin.kind == "flag" else document.where(key)
        found.append(
            Problem(
                what=f"`{dotted(key)}` looks like an access key or password; the job file is copied "
                "to the run folder",
                where=where,
                fix="keep it in the service's own environment variable (HF_TOKEN, WANDB_API_KEY, ...)",
            )
        )
        document.forget(key)
    return found


def _expand_home(document: Document) -> None:
    for key in _PATH_KEYS:
        holder: Any = document.values
        for part in key[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key[-1] in holder:
            holder[key[-1]] = paths.expand_home(holder[key[-1]])


def _job_problems(job: Job, document: Document, wrong: frozenset[str]) -> Iterator[Problem]:
    """Contradictions and missing files, except where a key is already known to be wrong."""
    given = frozenset(dotted(key) for key, value in leaves(document.values) if value is not None)
    for finding in contradictions.find(job, given - wrong):
        if wrong.isdisjoint(finding.keys):
            where = [document.where(key) for key in map(_split, finding.keys) if key in document.origins]
            yield Problem(what=finding.what, where=", ".join(where) or document.name, fix=finding.fix)
    for key, findings in _missing_files(job).items():
        if key not in wrong and _split(key) in document.origins:
            for what, fix in findings:
                yield Problem(what=f"`{key}`: {what}", where=document.where(_split(key)), fix=fix)


def _missing_files(job: Job) -> dict[str, Iterator[tuple[str, str]]]:
    nvme = job.strategy.nvme_path if isinstance(job.strategy, StrategySpec) else None
    return {
        "output": paths.blocked_output(job.output),
        "model.source": paths.missing_model(job.model.source),
        "model.tokenizer": paths.missing_tokenizer(job.model.tokenizer),
        "data.train": paths.missing_data(job.data.train),
        "data.eval": paths.missing_data(job.data.eval),
        "data.chat_template": paths.missing_file(job.data.chat_template),
        "strategy.nvme_path": paths.missing_folder(nvme),
    }


def _split(key: str) -> Key:
    return tuple(key.split("."))


def _line(problem: Problem) -> tuple[int, str]:
    """Problems are listed in the file's order, flags last."""
    _, _, rest = problem.where.partition(":")
    number = rest.partition(":")[0]
    return (int(number) if number.isdigit() else 10**9, problem.where)
