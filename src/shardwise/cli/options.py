"""Options that several verbs share, and the reading of sizes."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shardwise.errors import JobError
from shardwise.units import GIB

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="Job file (YAML).", show_default=False)]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]
Changes = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the job; may be repeated.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else.")]

_SIZES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": GIB}


MOST_BYTES = 2.0**60


def size_in_bytes(text: str, flag: str) -> int:
    """`16GiB` as bytes; JobError naming the flag for anything that is not a size."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)", text.strip().lower())
    factor = _SIZES.get(match[2]) if match else None
    size = float(match[1]) * factor if match and factor else 0.0
    if not 1 <= size < MOST_BYTES:
        raise JobError(
            f"{text!r} is not a size", where=flag, fix="a number and its unit, such as 16GiB or 500MB"
        )
    return int(size)


def write_text(path: Path, text: str, flag: str) -> None:
    """Writes a file that the flag names; JobError where it cannot be there."""
    with placed(path, flag):
        path.write_text(text, encoding="utf-8")


def write_no_more() -> None:
    """The reader of stdout, `head` say, has seen enough: what is still written goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def placed(path: Path, flag: str) -> Iterator[None]:
    """What is written within goes to `path`; JobError where it cannot be there."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise JobError(
            f"{path} cannot be written: {error.strerror}",
            where=flag,
            fix="name another place, in a folder that exists",
        ) from None


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """What libraries and child processes print goes to stderr: stdout is for the verb's own result."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(saved, 1)
        os.close(saved)
