"""Finds access keys in a job: it is copied to the run folder and to trackers, where keys must not go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardwise.job.source import Key

_SECRET_VALUE = re.compile(
    r"hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|AKIA[0-9A-Z]{16}"
    r"|wandb_v1_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|//[^/\s:@]+:[^/\s:@]+@"
)
_SECRET_KEY = re.compile(
    r"(^|_)(api_?key|hf_token|access_token|auth_token|token|password|secret)$", re.IGNORECASE
)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")
_COMMITS = {("model", "revision")}
"""Keys where 40 hexadecimal digits are a commit, not a Weights & Biases key."""


def find(values: Any, key: Key = ()) -> Iterator[Key]:
    """Keys whose value is, or is named like, an access key."""
    if isinstance(values, dict):
        for name, value in values.items():
            yield from find(value, (*key, str(name)))
    elif isinstance(values, list):
        if any(True for value in values for _ in find(value, key)):
            yield key
    elif isinstance(values, str) and (
        _SECRET_VALUE.search(values)
        or (_SECRET_KEY.search(key[-1]) and values)
        or (_WANDB_KEY.fullmatch(values) and key not in _COMMITS)
    ):
        yield key
