"""Fingerprint of a frozen base model: an adapter is never silently loaded on another base.

A checkpoint of adapters holds a hash of the base instead of its weights.
"""

import fcntl
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, MachineError, Problem
from shardwise.folders import cache_root, replace_json
from shardwise.job.schema import Model
from shardwise.models.source import TOKENIZER_FILES, Source, safetensors_files
from shardwise.models.tokenizer import tokenizer_folder
from shardwise.record.manifest import hash_files

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fingerprint(model: Model, found: Source) -> dict[str, Any] | None:
    """Identify the base of the job's adapters; None for random weights, and where nothing is frozen.

    `sha256` covers the values of config.json, and name and content of every safetensors file with weights. It
    covers neither code from a repository nor the tokenizer, which has a hash of its own. `commit`
    is that of a hub repository, for people.

    Files of the hub's cache are named by their hash. Others are read in full, once: the cache keeps the
    hashes while path, size, inode and times of change of every file stay the same. Reading samples of a file
    would miss a change of a single embedding row.
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


def tokenizer_fingerprint(model: Model) -> str | None:
    """A hash of the names and contents of a tokenizer's files; None where it is learned from the data.

    Two tokenizers may give the same tokens for all data, and only one of them is worth saving.
    """
    if model.tokenizer == "train":
        return None
    folder = tokenizer_folder(model)
    files = {path.name for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}
    return _hash({name: entry.sha256 for name, entry in hash_files(folder, sorted(files)).items()})


def check_base(then: Mapping[str, Any] | None, model: Model, found: Source) -> None:
    """Raise CheckpointError where the base is not `then`; older checkpoints have none."""
    now = None if then is None else fingerprint(model, found)
    if then is not None and now is not None and then["sha256"] != now["sha256"]:
        problem = other_base(then, now, source=model.source)
        raise CheckpointError(problem.what, where=problem.where, fix=problem.fix)


def other_base(then: Mapping[str, Any], now: Mapping[str, Any], *, source: str) -> Problem:
    """Describe that an adapter's base was `then` and is `now`."""
    what = f"the frozen base, {source}, is not the one that the adapter was trained on"
    if then["commit"] is None or then["commit"] == now["commit"]:
        fix = "put its config.json and safetensors files back as they were"
    else:
        what += f": it is commit {now['commit']}, was {then['commit']}"
        fix = f"write `revision: {then['commit']}` below `model` in the run folder's job.yaml"
    return Problem(what=what, where="model.source", fix=f"{fix}, or train under another name")


def _named_by_the_hub(files: Mapping[str, Path]) -> dict[str, str] | None:
    """Hashes of files that the hub's client downloaded: links to files that are named by their hash."""
    named = {name: path.resolve() for name, path in files.items() if path.is_symlink()}
    blobs = [t for t in named.values() if t.parent.name == "blobs" and _SHA256.fullmatch(t.name)]
    return {name: target.name for name, target in named.items()} if len(blobs) == len(files) else None


def _kept(files: Mapping[str, Path]) -> dict[str, str]:
    """Hashes of files, from the cache; where they changed, one process reads them and the others wait."""
    try:
        path = cache_root() / "bases" / f"{_hash({name: _state(file) for name, file in files.items()})}.json"
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                hashes = hash_files(Path(), [str(file) for file in files.values()])
                read = {name: hashes[str(file)].sha256 for name, file in files.items()}
                replace_json(path, read)
        kept: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"the hash of the base model cannot be computed and cached: {error.strerror or error}"
        fix = "make room or give permission, or set SHARDWISE_CACHE to another folder"
        raise MachineError(what, where=str(error.filename or cache_root()), fix=fix) from None
    return kept


def _state(file: Path) -> list[object]:
    """Values that change when a file is written to or replaced, even if its date is set back."""
    about = file.stat()
    return [str(file.resolve()), about.st_size, about.st_ino, about.st_mtime_ns, about.st_ctime_ns]


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
