"""Files of other tools, and the job that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.job.source import job_values
from shardwise.lint.foreign import translation

Case = tuple[dict[str, str], dict[str, Any], tuple[str, ...], tuple[str, ...]]
"""Files by name, values of the job by key (None: not in it), what is said, and what is not."""


def made_of(files: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, list[str]]:
    """The job of these files, and what is said of it; those below `data/` are only there."""
    monkeypatch.chdir(folder)
    for name, text in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    return translation([Path(name) for name in files if not name.startswith("data/")])


def value_of(values: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None if it is absent."""
    for part in key.split("."):
        values = values.get(part, {}) if isinstance(values, dict) else {}
    return None if values == {} else values


def check_case(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected, sentences, never = case
    text, said = made_of(files, folder, monkeypatch)
    values, heard = job_values(text), "\n".join(said)
    assert {key: value_of(values, key) for key in expected} == expected, heard
    for sentence in sentences:
        assert sentence in heard
    for sentence in never:
        assert sentence not in heard
