"""What `check` finds in files that a test writes."""

from __future__ import annotations

from pathlib import Path

from shardwise.lint.check import check, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup


def checked(folder: Path, **texts: str) -> list[Finding]:
    """All findings; `train_py` is the text of train.py in `folder`."""
    files = [folder / name.replace("_", ".") for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    documents, broken = load(files)
    return list(check(Setup(documents=documents), broken).findings)
