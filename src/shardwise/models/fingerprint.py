"""What a frozen base was, so that an adapter is never put on another one without a word.

A checkpoint of adapters leaves the base out. It names the base by a hash instead.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, MachineError, Problem
from shardwise.folders import cache_root
from shardwise.job.schema import Model
from shardwise.models.source import Source, safetensors_files
from shardwise.record.manifest import hash_files

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(model: Model, found: Source) -> dict[str, Any] | None:
    """What the base of the job's adapters is; None where nothing is frozen, and for random weights.

    Random ones follow from the job's seed.

    `sha256` covers the values of config.json, and name and whole content of every safetensors file that
    weights are read from. It does not cover code that a repository brings, nor the tokenizer: its tokens
    have a hash of their own. `commit` is that of a hub repository, for people.

    Files of the hub's cache are named by their hash. Any others are read whole, once: the hashes are kept
    in the cache for as long as path, size, inode and times of change of every file stay what they were.
    Blocks here and there would do for weights that were trained on, not for a single row of an embedding.
    """
    if model.lora is None or model.weights == "random":
        return None
    assert found.folder is not None
    files = {path.relative_to(found.folder).as_posix(): path for path in safetensors_files(found.folder)}
    hashes = _named_by_the_hub(files) or _kept(files)
    of_hub = not Path(model.source).is_dir() and found.folder.parent.name == "snapshots"
    return {
        "sha256": _hash({"config": found.config, "files": hashes}),
        "commit": found.folder.name if of_hub else None,
    }


def check_base(then: Mapping[str, Any] | None, model: Model, found: Source) -> None:
    """CheckpointError where the base is not `then`; None, of older checkpoints, says nothing."""
    now = None if then is None else fingerprint(model, found)
    if then is not None and now is not None and then["sha256"] != now["sha256"]:
        problem = other_base(then, now, source=model.source)
        raise CheckpointError(problem.what, where=problem.where, fix=problem.fix)


def other_base(then: Mapping[str, Any], now: Mapping[str, Any], *, source: str) -> Problem:
    """What to say where an adapter's base `then` is not the one that is there `now`."""
    what = f"the frozen base, {source}, is not the one that the adapter was trained on"
    if then["commit"] is None or then["commit"] == now["commit"]:
        fix = "put its config.json and safetensors files back as they were"
    else:
        what += f": it is commit {now['commit']}, was {then['commit']}"
        fix = f"write `revision: {then['commit']}` below `model` in the run folder's job.yaml"
    return Problem(what=what, where="model.source", fix=f"{fix}, or train under another name")


def _named_by_the_hub(files: Mapping[str, Path]) -> dict[str, str] | None:
    """Hashes of files that the hub's client downloaded: each is a link to one that is named by its hash."""
    targets = {name: path.resolve() for name, path in files.items() if path.is_symlink()}
    named = {
        name: target.name
        for name, target in targets.items()
        if target.parent.name == "blobs" and _SHA256.fullmatch(target.name)
    }
    return named if len(named) == len(files) else None


def _kept(files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes of files from the cache; where they changed, one process reads them and the others wait."""
    try:
        path = cache_root() / "bases" / f"{_hash({name: _state(file) for name, file in files.items()})}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                temporary = path.with_suffix(".tmp")
                temporary.write_text(json.dumps(_read(files)), encoding="utf-8")
                temporary.replace(path)
        kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise MachineError(
            f"the hash of the base model cannot be made and kept: {error.strerror or error}",
            where=str(error.filename or cache_root()),
            fix="make room or give permission, or set SHARDWISE_CACHE to another folder",
        ) from None
    return kept


def _read(files: Mapping[str, Path]) -> dict[str, str]:
    hashes = hash_files(Path(), [str(path) for path in files.values()])
    return {name: hashes[str(path)].sha256 for name, path in files.items()}


def _state(file: Path) -> list[object]:
    """What is another where a file was written to or replaced, whatever date it was given."""
    about = file.stat()
    return [str(file.resolve()), about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
