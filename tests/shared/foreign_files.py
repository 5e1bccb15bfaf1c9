"""Files of other tools, and the job that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.lint.foreign import translation


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
