"""What a caller may name: a job as a file or a value, GPUs as text or a value, sizes as text or a number."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import JobError, MachineError
from shardwise.hardware.hardware import Hardware
from shardwise.job import load
from shardwise.job.load import LoadedJob
from shardwise.job.schema import Job
from shardwise.models.catalog import no_tokenizer, unknown
from shardwise.units import GIB

AnyJob = Job | str | Path
Changes = str | Sequence[str] | Mapping[str, Any] | None
"""Like `--set`: `"train.steps=20"`, several of them, or `{"train.steps": 20}`."""

_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": GIB}
MOST_BYTES = 2.0**60


def load_job(path: str | Path, changes: Changes = ()) -> Job:
    """Read a job file.

    Args:
        path: a YAML file.
        changes: what the command line's `--set` is for: `{"train.steps": 20}`, or `key=value` texts.

    Raises:
        JobError: with every problem found, each with its line.
    """
    return read(path, texts(changes)).job


def texts(changes: Changes) -> list[str]:
    """Changes as `key=value` texts."""
    try:
        if isinstance(changes, Mapping):
            return [f"{key}={json.dumps(value, default=_plain)}" for key, value in changes.items()]
        listed: list[Any] = [changes] if isinstance(changes, str) else [*(changes or ())]
        return ["" + change for change in listed]  # a TypeError for what is no text
    except (TypeError, ValueError) as error:
        fix = '{"train.steps": 20}, or texts such as "train.steps=20"'
        raise JobError(f"changes are not keys and values: {error}", where="changes", fix=fix) from None


def _plain(value: Any) -> Any:
    """A path's text, the number of a numpy scalar; TypeError for what JSON has no value for."""
    return value.item() if hasattr(value, "item") else os.fspath(value)


def read(job: AnyJob, changes: Sequence[str] = (), *, needs_data: bool = True) -> LoadedJob:
    """The job of a file or a value, with `changes` applied, and where each value comes from."""
    if isinstance(job, Job):
        return load.check_job(job, changes)
    if not isinstance(job, str | Path):
        raise JobError(
            f"a {type(job).__name__} is no job", where="job", fix="a file's path, or load_job(path)"
        )
    return load.load_job(job, changes, needs_data=needs_data)


def plannable(loaded: LoadedJob) -> LoadedJob:
    """The job; JobError where nothing has the name of its model."""
    if error := unknown(loaded.job.model.source, loaded.base("model.source")):
        raise loaded.located(error)
    return loaded


def trainable(loaded: LoadedJob) -> LoadedJob:
    """The job; JobError where it has no model, or no tokenizer, which only a plan does without."""
    model = plannable(loaded).job.model
    if error := no_tokenizer(model, base=loaded.base("model.tokenizer")):
        raise loaded.located(error)
    return loaded


def hardware_of(gpus: str | Hardware | None) -> Hardware:
    """What `gpus` describes (`4xRTX4080`), else this machine; MachineError where it has no GPU."""
    from shardwise.hardware.detect import detect_hardware
    from shardwise.hardware.parse import EXAMPLES, parse_hardware

    if gpus is not None:
        return gpus if isinstance(gpus, Hardware) else parse_hardware(str(gpus))
    found = detect_hardware()
    if found is None:
        fix = f"name the GPUs: --gpus {EXAMPLES}"
        raise MachineError("no GPU is visible here to plan for", where="--gpus", fix=fix)
    return found


def size_in_bytes(size: str | int, flag: str) -> int:
    """`16GiB` as bytes; JobError naming the flag for anything that is not a size."""
    if isinstance(size, int):
        size = f"{size}b"
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", size.strip().lower())
    factor = _SIZES.get(match[2]) if match else None
    found = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= found < MOST_BYTES:
        fix = "a number and its unit, such as 16GiB or 500MB"
        raise JobError(f"{size!r} is not a size", where=flag, fix=fix)
    return int(found)


def cap_in_bytes(memory_cap: str | int | None, gpus: int) -> int | None:
    """The value of --memory-cap; JobError where it is no size, or there is no GPU to cap."""
    if memory_cap is None:
        return None
    size = size_in_bytes(memory_cap, "--memory-cap")
    if not gpus:
        what = "--memory-cap limits the memory of GPUs, and no GPU is visible here"
        raise JobError(what, where="--memory-cap", fix="leave it out")
    return size
