"""Plans kept on disk: by what was asked, and by everything that has a say in the answer. Free of torch."""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.folders import cache_root
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.planner.plan import Plan

LIBRARIES = ("torch", "transformers", "peft")
"""What a trace depends on. The engines' versions are those that the simulator was written for."""


def plan_key(job: Job, hardware: Hardware, **asked: Any) -> str:
    """What a plan follows from, as the name of its file."""
    content = {
        "job": job.model_dump(mode="json", exclude={"name", "output", "tracking"}),
        "config": _local(job.model.source, "config.json"),
        "tokenizer": _hash(_local(job.model.tokenizer or "", "tokenizer.json")),
        "hardware": hardware.to_json(),
        "asked": asked,
        "versions": {name: _version(name) for name in LIBRARIES},
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def kept_plan(key: str) -> Plan | None:
    """The plan with this key; None where there is none, or a damaged one."""
    try:
        return _adapter().validate_json(_path(key).read_bytes())
    except (OSError, ValidationError):
        return None


def plan_once(key: str, make: Callable[[], Plan]) -> Plan:
    """The kept plan, or a new one; of several processes that ask at the same time one makes it.

    A folder that cannot be written costs only time: the plan is made each time.
    """
    found = kept_plan(key)
    if found is not None:
        return found
    try:
        _path(key).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _path(key).with_suffix(".lock").open("a")
    except OSError:
        return make()
    with lock, _locked(lock.fileno()):
        found = kept_plan(key)
        if found is None:
            found = make()
            with suppress(OSError):
                partial = _path(key).with_suffix(".partial")
                partial.write_bytes(_adapter().dump_json(found))
                partial.rename(_path(key))
    return found


def _path(key: str) -> Path:
    return cache_root() / "plans" / f"{key}.json"


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield


def _local(source: str, name: str) -> str | None:
    """A file of a model or a tokenizer in a local folder, which may change under the same name."""
    try:
        return (Path(source) / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None


def _hash(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _code() -> list[tuple[str, int, int]]:
    """Every file of this package with its size and time of change: while it is worked on, versions stay."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml"))
    return [(str(path.relative_to(root)), (s := path.stat()).st_size, s.st_mtime_ns) for path in files]
