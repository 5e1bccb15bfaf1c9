"""Whether a checkpoint belongs to this run: the same job, at the same strategy and number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import CheckpointError, Problem
from shardwise.job.load import differences
from shardwise.models.fingerprint import other_base
from shardwise.record.manifest import Manifest, Origin
from shardwise.units import processes

LAYOUT = (
    "engine",
    "stage",
    "offload_optimizer",
    "offload_parameters",
    "tensor_parallel",
    "data_parallel",
    "precision",
)
"""The parts of a strategy that decide how the state lies in the files."""


NO_LONGER_COMPARED = "micro_batch"
"""Older checkpoints name it. How many rows a process takes at a time changes a step by rounding only
(decision 0024)."""


def check_origin(manifest: Manifest, expected: Origin, *, where: str) -> None:
    """Raises CheckpointError naming every field in which the checkpoint is not this run's."""
    saved = manifest.origin
    problems = _differences(saved.identity, expected.identity)
    layout = [key for key in LAYOUT if saved.strategy.get(key) != expected.strategy.get(key)]
    if layout or saved.world_size != expected.world_size:
        problems.append(
            Problem(
                what=f"saved by {_place(saved)}, this run is {_place(expected)}; a checkpoint cannot be "
                f"loaded at another strategy yet ({', '.join(layout) or 'world_size'} differ)",
                fix=f"resume with --set strategy={saved.strategy.get('name')} --processes {saved.world_size}",
            )
        )
    if problems:
        raise CheckpointError(f"{where} belongs to another run", problems=problems)


def _differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[Problem]:
    """A problem for each field that differs; fields that an older checkpoint lacks are skipped.

    Where the content is the same, its origin does not count: a branch that has moved may be replaced by its
    commit, and a template that writes the date by one with the date in it.
    """
    skipped = {NO_LONGER_COMPARED}
    problems = []
    if "tokens" in then and then["tokens"] == now.get("tokens"):
        skipped.add("data")
    elif "tokens" not in then or then.get("data") != now.get("data"):
        skipped.add("tokens")  # not known, or reported as other data
    old_base, new_base = then.get("base"), now.get("base")
    if old_base and new_base:
        if old_base["sha256"] == new_base["sha256"]:
            skipped.add("model.revision")
        else:
            problems.append(other_base(old_base, new_base, source=now["model"]["source"]))
    then, now = ({key: value for key, value in side.items() if key != "base"} for side in (then, now))
    found = differences(then, now)
    return problems + [_problem(key, old, new) for key, old, new in found if key not in skipped]


def _problem(key: str, then: object, now: object) -> Problem:
    if key == "data":  # a hash of content: no value to show
        return Problem(
            what="the content of the data, or how it becomes tokens, is not the checkpoint's",
            where="data.train, data.eval, data.split, data.chat_template, model.tokenizer",
            fix="restore the files as they were, or start a run under another name",
        )
    if key == "tokens":
        return Problem(
            what="the same files and settings give other tokens than the checkpoint was trained on",
            where="data.chat_template, or the versions of transformers and tokenizers",
            fix="set SHARDWISE_CACHE to the folder with the run's own tokens; where the template writes the "
            "date (strftime_now), name a copy with the day's date in data.chat_template; or start a run "
            "under another name",
        )
    return Problem(
        what=f"{key} is {_short(now)}, the checkpoint's is {_short(then)}",
        fix="set it back, or start a run under another name",
    )


def _place(origin: Origin) -> str:
    return f"{origin.strategy.get('name')} on {processes(origin.world_size)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
