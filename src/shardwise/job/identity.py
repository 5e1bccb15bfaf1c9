"""Which keys of a job make a run that run: with another value, a checkpoint is not resumed.

Every key of a job is in one of these four sets; a section stands for all its keys.
"""

from functools import reduce
from operator import getitem
from typing import Any

from shardwise.job.paths import absolute
from shardwise.job.schema import Job

COMPARED = {
    "model": "model",
    "optimizer": "optimizer",
    "data.sequence_length": "sequence_length",
    "data.packing": "packing",
    "data.weights": "data_weights",
    "train.global_batch": "global_batch",
    "train.steps": "steps",
    "train.epochs": "epochs",
    "train.precision": "precision",
    "train.seed": "seed",
    "train.worst_case_first": "worst_case_first",
}
"""Keys, and the field of a checkpoint's identity that holds their value."""

IN_DATA_KEY = (
    "data.format",
    "data.max_samples",
    "data.loss_on",
    "data.system",
    "data.too_long",
    "data.skip_bad",
    "data.eval_fraction",
)
"""Keys that a checkpoint's identity holds in one hash: how samples become tokens (data/prepare.py)."""

BY_CONTENT = ("data.train", "data.eval", "data.split", "data.subset", "data.chat_template")
"""Names of files and data sets: they may change, their content not. Only the worker can compare that."""

FREE = (
    "name",
    "output",
    "strategy",  # compared as the state's layout: training/snapshot.py
    "energy",
    "tracking",
    "train.micro_batch",
    "train.checkpointing",
    "train.eval_every",
    "train.patience",
    "train.sample_prompts",
    "train.save_every",
    "train.keep",
    "train.deterministic",
)
"""Keys that change the weights by rounding at most."""

DECISIVE = (*COMPARED, *IN_DATA_KEY)
"""Keys whose change is refused before any process starts."""


def within(key: str, keys: tuple[str, ...]) -> bool:
    """Whether a dotted key is one of `keys`, or lies in a section that is."""
    return any(key == one or key.startswith(f"{one}.") for one in keys)


def longer(key: str, then: Any, now: Any) -> bool:
    """Whether a run became longer: in `train.steps`, or in `train.epochs`, 1 where it has neither."""
    then = 1.0 if then is None and key.endswith("epochs") else then
    return isinstance(then, (int, float)) and isinstance(now, (int, float)) and now > then


def identity_of(job: Job) -> dict[str, Any]:
    """The job's part of a checkpoint's identity, as JSON values."""
    values: Any = absolute(job.model_dump(mode="json"))
    return {field: reduce(getitem, key.split("."), values) for key, field in COMPARED.items()}
