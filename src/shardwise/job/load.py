"""From a job file and `--set` flags to a `Job`, or to everything that is wrong with it, at once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, Problem
from shardwise.job import contradictions, json_schema, paths, secrets, validate
from shardwise.job.schema import Job
from shardwise.job.source import Document, Key, Origin, apply, dotted, nearest, read_file

_PATHS: dict[str, Callable[[Any], Iterator[tuple[str, str]]]] = {
    "output": paths.blocked_output,
    "model.source": paths.missing_model,
    "model.tokenizer": paths.missing_tokenizer,
    "data.train": paths.missing_data,
    "data.eval": paths.missing_data,
    "data.chat_template": paths.missing_template,
    "strategy.nvme_path": paths.missing,
}
"""Keys whose values are paths, and what finds an absent file."""


@dataclass(frozen=True, kw_only=True)
class LoadedJob:
    """A job, and where the user gave each value."""

    job: Job
    origins: Mapping[str, Origin]
    """By dotted key (`train.steps`); a key that is not in it has its default."""
    folder: Path = Path()
    """That of the job's file."""

    def base(self, key: str) -> Path:
        """The folder from which the paths of a key count."""
        origin = self.origins.get(key)
        return self.folder if origin is not None and origin.kind == "file" else Path()

    def where(self, key: str) -> str:
        """`job.yaml:12: train.steps`, or the flag that set it, or the bare key if it has its default."""
        near = nearest(_split(key), set(map(_split, self.origins)))
        return self.origins[dotted(near)].at(near) if near else key

    def located(self, error: JobError) -> JobError:
        """Return an error that names keys, separated by ", ", with their lines."""
        found = [replace(p, where=", ".join(map(self.where, p.where.split(", ")))) for p in error.problems]
        return _error(found, error.headline, type(error))


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the resolved job."""

    key: str
    value: Any
    origin: str


def load_job(path: str | Path, changes: Sequence[str] = (), *, needs_data: bool = True) -> LoadedJob:
    """Read a job file, apply `--set` changes, check everything; without `needs_data` not the data's files.

    JobError lists every problem with its line: syntax, keys, values, contradictions, files, access keys.
    """
    document = read_file(Path(path))
    apply(document, changes)
    return _checked(document, Path(path).parent, needs_data=needs_data)


def check_job(job: Job, changes: Sequence[str] = ()) -> LoadedJob:
    """Check a job that was made in Python as one from a file, after changes as for `--set`.

    Its files are looked for where they are used: a plan needs none. A value that is the default counts as not
    given, as in a job that was read from JSON.
    """
    document = Document(name="the job", values=job.model_dump(mode="json", exclude_unset=True))
    apply(document, changes)
    changed = leaves(job.model_dump(mode="json", exclude_defaults=True))
    given = frozenset(dotted(key) for key, _ in changed) | frozenset(map(dotted, document.origins))
    return _checked(document, Path(), given=given)


def _checked(
    document: Document, folder: Path, *, given: frozenset[str] | None = None, needs_data: bool = True
) -> LoadedJob:
    """The job of a document whose relative paths count from `folder`; `given`: keys, None for all it has."""
    secret = list(_secrets(document))
    for key in map(_split, _PATHS):
        holder = document.section(key)
        if key[-1] in holder:
            holder[key[-1]] = paths.expand_home(holder[key[-1]])
            here = nearest(key, document.origins)
            if dotted(key) in paths.LOCAL and here and document.origins[here].kind == "file":
                holder[key[-1]] = paths.seen_from(folder, dotted(key), holder[key[-1]])
    job, wrong = validate.check(document)
    problems = [*document.problems, *secret, *wrong.values()]
    if job is not None:
        found = _job_problems(job, document, frozenset(map(dotted, wrong)), given)
        absent = () if needs_data else ("`data.train`:", "`data.eval`:")
        problems += [one for one in found if not one.what.startswith(absent)]
    if job is None or problems:
        raise _error(sorted(problems, key=_line), f"{document.name} has {len(problems)} problems")
    origins = {dotted(key): origin for key, origin in document.origins.items()}
    return LoadedJob(job=job, origins=origins, folder=folder)


def _error(problems: list[Problem], headline: str, kind: type[JobError] = JobError) -> JobError:
    if len(problems) > 1:
        return kind(headline, problems=problems)
    return kind(problems[0].what, where=problems[0].where, fix=problems[0].fix)


def resolved(loaded: LoadedJob) -> list[Setting]:
    """Return every setting of the job in the schema's order, with its origin."""
    settings = []
    for key, value in leaves(loaded.job.model_dump(mode="json")):
        name, free = dotted(key), json_schema.is_free(key)
        inside = [origin for k, origin in loaded.origins.items() if free and k.startswith(f"{name}.")]
        origin = loaded.origins.get(name) or (inside[-1] if inside else None)
        settings.append(Setting(key=name, value=value, origin=origin.text if origin else "default"))
    return settings


def leaves(values: Mapping[str, Any], above: Key = ()) -> Iterator[tuple[Key, Any]]:
    """(key, value) of every value that is not a section."""
    for name, value in values.items():
        key = (*above, name)
        if isinstance(value, dict) and not json_schema.is_free(key):
            yield from leaves(value, key)
        else:
            yield key, value


def _secrets(document: Document) -> Iterator[Problem]:
    """Yield a problem for each access key, and remove the key so that no later message repeats it."""
    for key in list(secrets.find(document.values)):
        origin = document.origins.get(key)
        name, flag = dotted(key), origin is not None and origin.kind == "flag"
        what = f"`{name}` looks like an access key or password; the job file is copied to the run folder"
        where = f"--set {name}=..." if flag else document.where(key)
        fix = "keep it in the service's own environment variable (HF_TOKEN, WANDB_API_KEY, ...)"
        yield Problem(what=what, where=where, fix=fix)
        document.forget(key)


def _job_problems(
    job: Job, document: Document, wrong: frozenset[str], given: frozenset[str] | None
) -> Iterator[Problem]:
    """Yield contradictions and missing files, except for keys that are already known to be wrong."""
    if given is None:
        given = frozenset(dotted(key) for key, value in leaves(document.values) if value is not None)
    for found in contradictions.find(job, given - wrong):
        names = found.where.split(", ")
        if wrong.isdisjoint(names):
            where = [document.where(key) for key in map(_split, names) if key in document.origins]
            yield replace(found, where=", ".join(where) or document.name)
    for name, missing in _PATHS.items():
        key = _split(name)
        if name not in wrong and key in document.origins:
            for what, fix in missing(document.section(key).get(key[-1])):
                yield Problem(what=f"`{name}`: {what}", where=document.where(key), fix=fix)


def _split(key: str) -> Key:
    return tuple(key.split("."))


def _line(problem: Problem) -> tuple[int, str]:
    """Problems are listed in the file's order, flags last."""
    _, _, rest = problem.where.partition(":")
    number = rest.partition(":")[0]
    return (int(number) if number.isdigit() else 10**9, problem.where)


def differences(
    then: Mapping[str, object], now: Mapping[str, object], above: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yield (dotted key, value then, value now) of everything that differs; None for an absent value."""
    for name in sorted({*then, *now}):
        old, new = then.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from differences(old, new, f"{above}{name}.")
        elif _plain(old) != _plain(new):
            yield f"{above}{name}", old, new


def _plain(value: object) -> object:
    """Convert tuples to lists, as JSON does."""
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value
