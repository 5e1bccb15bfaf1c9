"""Where shardwise keeps what it can make again, how files get to the disk, and the tables it brings."""

import json
import os
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any


def cache_root() -> Path:
    """`$SHARDWISE_CACHE`, else `~/.cache/shardwise`: tokenised data, tokenizers, plans, calibrations."""
    return Path(os.environ.get("SHARDWISE_CACHE") or Path.home() / ".cache" / "shardwise")


@cache
def packaged(file: str) -> dict[str, Any]:
    """A TOML file of this package, by its path in it; everyone gets the same values."""
    return tomllib.loads(resources.files("shardwise").joinpath(file).read_text(encoding="utf-8"))


def sync(path: Path) -> None:
    """Bring a file's bytes, or a folder's entries, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Write a file at once: a reader sees the old or the new content. A link in its place is not followed."""
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)  # left by a crash, or put there by someone else
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
    sync(temporary)
    temporary.replace(path)


def replace_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file at once: a reader sees the old or the new content, never a part."""
    replace_text(path, json.dumps(values, indent=1) + "\n")
