"""`--set train.steps=20`: changes to a job given on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.errors import Problem
from shardwise.job.source import Document, Key, Origin, dotted, read_value


def apply(document: Document, overrides: Sequence[str]) -> None:
    """Writes each `key=value` into the document; the value is read as in the job file."""
    for text in overrides:
        flag = Origin(kind="flag", text=f"--set {text}")
        name, equals, value = text.partition("=")
        key: Key = tuple(name.strip().split("."))
        if not equals or not all(key):
            document.problems.append(
                Problem(what=f"`{flag.text}` is not key=value", fix="for example --set train.steps=20")
            )
            continue
        holder = _holder(document, key, flag)
        if holder is not None:
            document.forget(key)
            holder[key[-1]] = read_value(value, key, flag, document)


def _holder(document: Document, key: Key, flag: Origin) -> dict[str, Any] | None:
    """The section a key belongs in, made where it is absent; None where something else stands there."""
    values = document.values
    for length, part in enumerate(key[:-1], start=1):
        if values.get(part) is None:
            values[part] = {}
            document.origins[key[:length]] = flag
        below = values[part]
        if not isinstance(below, dict):
            document.problems.append(
                Problem(
                    what=f"`{flag.text}` sets a part of `{dotted(key[:length])}`, which is {below!r}",
                    where=document.where(key[:length]),
                    fix=f"--set {dotted(key[:length])}={{...}} replaces it whole",
                )
            )
            return None
        values = below
    return values
