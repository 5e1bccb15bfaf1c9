"""Plans cached on disk, keyed by everything that the answer depends on. Free of torch."""

import fcntl
import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardwise.folders import cache_root, replace_text
from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job
from shardwise.planner.plan import Plan

LIBRARIES = ("torch", "transformers", "peft", "flash-attn-4")
"""Libraries that a trace depends on, where installed; the simulator fixes the engines' versions."""


def plan_key(job: Job, hardware: Hardware, **asked: Any) -> str:
    """The name of a plan's file: a hash of everything it depends on."""
    content = {
        "job": job.model_dump(mode="json", exclude={"name", "output", "tracking"}),
        "config": _local(job.model.source, "config.json"),
        "tokenizer": _local(job.model.tokenizer or "", "tokenizer.json"),
        "hardware": hardware.to_json(),
        "asked": asked,
        "versions": {one.name: one.version for name in LIBRARIES for one in distributions(name=name)},
        "code": _code(),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def cached_plan(key: str) -> Plan | None:
    """The plan with this key; None where it is missing or damaged."""
    try:
        return _adapter().validate_json(_path(key).read_bytes())
    except (OSError, ValidationError):
        return None


def plan_once(key: str, make: Callable[[], Plan]) -> Plan:
    """The cached plan, or a new one; of several processes only one makes it.

    Where the folder cannot be written, the plan is made each time.
    """
    found = cached_plan(key)
    if found is not None:
        return found
    try:
        _path(key).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = _path(key).with_suffix(".lock").open("a")
    except OSError:
        return make()
    with lock:
        fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
        found = cached_plan(key)
        if found is None:
            found = make()
            with suppress(OSError):
                replace_text(_path(key), _adapter().dump_json(found).decode())
    return found


def _path(key: str) -> Path:
    return cache_root() / "plans" / f"{key}.json"


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _local(source: str, name: str) -> str | None:
    """The hash of a file in a local model folder, which may change under the same name."""
    try:
        return hashlib.sha256((Path(source) / name).read_bytes()).hexdigest()
    except (OSError, ValueError):
        return None


def _code() -> list[tuple[str, int, int]]:
    """Every file of this package with its size and mtime: the version stays while it is developed."""
    root = Path(__file__).parents[1]
    files = sorted(path for path in root.rglob("*") if path.suffix in (".py", ".toml"))
    return [(str(path.relative_to(root)), (s := path.stat()).st_size, s.st_mtime_ns) for path in files]
