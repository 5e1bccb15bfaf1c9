"""Checks a document's keys and types against the schema, and words each finding for its author."""

from __future__ import annotations

import copy
import difflib
import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import Problem
from shardwise.job import json_schema
from shardwise.job.schema import Job
from shardwise.job.source import Document, Key, dotted

_REQUIRED: dict[Key, Any] = {("name",): "job", ("model", "source"): "model", ("data", "train"): "data"}
"""Stand-ins for required keys that are absent or wrong, so that the rest can still be checked."""


def check(document: Document) -> tuple[Job | None, dict[Key, Problem]]:
    """The job, and one problem per wrong, unknown or missing key.

    Where keys are wrong, the job returned is the document without them: it serves to find what else is
    wrong, never to run.
    """
    try:
        return Job.model_validate(document.values), {}
    except ValidationError as error:
        problems = _problems(error, document)
    rest = copy.deepcopy(document)
    for key in problems:
        rest.forget(key)
    for key, value in _REQUIRED.items():
        _fill(rest.values, key, value)
    try:
        return Job.model_validate(rest.values), problems
    except ValidationError:
        return None, problems


def _fill(values: Any, key: Key, value: Any) -> None:
    for part in key[:-1]:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return
    values.setdefault(key[-1], value)


def _problems(error: ValidationError, document: Document) -> dict[Key, Problem]:
    found: dict[Key, Problem] = {}
    details = error.errors(include_url=False, include_context=False)
    keys = [_key(detail, document.values) for detail in details]
    for detail, key in zip(details, keys, strict=True):
        branch = len(detail["loc"]) > len(key)
        if key in found or (branch and any(other[: len(key)] == key != other for other in keys)):
            continue  # another branch of a union, or a union whose matching branch has its own finding
        value = _lookup(document.values, key)
        if detail["type"] == "extra_forbidden":
            found[key] = _unknown(key, document)
        elif detail["type"] == "missing":
            found[key] = _missing(key, document)
        else:
            found[key] = _wrong(key, value, document)
    return found


def _key(detail: ErrorDetails, values: Any) -> Key:
    """The key a finding is about: its location without list positions and without names of union branches."""
    key: list[str] = []
    for part in detail["loc"]:
        if isinstance(part, int):
            break
        if isinstance(values, dict) and part in values:
            key.append(part)
            values = values[part]
    if detail["type"] == "missing":
        key.append(str(detail["loc"][-1]))
    return tuple(key)


def _lookup(values: Any, key: Key) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _wrong(key: Key, value: Any, document: Document) -> Problem:
    allowed = json_schema.expected(key)
    return Problem(
        what=f"`{dotted(key)}` is {_shown(value)}; expected {allowed}",
        where=document.where(key),
        fix=_hint(key, value, allowed),
    )


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _hint(key: Key, value: Any, allowed: str) -> str:
    name = key[-1]
    if isinstance(value, str):
        if "true or false" in allowed and value.lower() in _BOOLEANS:
            return f"write `{name}: {_BOOLEANS[value.lower()]}`"
        words = [str(word) for schema in json_schema.at(key) for word in _words(schema)]
        close = difflib.get_close_matches(value, words, n=1)
        if close and close[0] != value:
            return f"did you mean {close[0]}?"
        plain = value.replace("_", "").replace(",", "")
        if "number" in allowed and plain.isdigit():
            if len(plain) > 18:  # read as text (source.py)
                return "a smaller number"
            return f"write `{name}: {plain}`" + (", without quotes" if plain == value else "")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if "whole number" in allowed and isinstance(value, float) and value.is_integer():
            return f"write `{name}: {int(value)}`"
        if "text" in allowed or "a name" in allowed:
            return f'put it in quotes: `{name}: "{value}"`'
    return ""


def _words(schema: dict[str, Any]) -> list[Any]:
    found: list[Any] = [*schema.get("enum", []), *schema.get("items", {}).get("enum", [])]
    return [*found, schema["const"]] if "const" in schema else found


def _missing(key: Key, document: Document) -> Problem:
    return Problem(
        what=f"`{dotted(key)}` is missing; expected {json_schema.expected(key)}",
        where=document.where(key),
        fix="add it; `shardwise init` writes a commented example",
    )


def _unknown(key: Key, document: Document) -> Problem:
    where = document.where(key)
    siblings = json_schema.names_below(key[:-1])
    close = difflib.get_close_matches(key[-1], siblings, n=1)
    elsewhere = [other for other in json_schema.every_key() if other[-1] == key[-1]]
    if not close and not elsewhere:
        every = {other[-1]: other for other in json_schema.every_key()}
        elsewhere = [every[name] for name in difflib.get_close_matches(key[-1], every, n=1, cutoff=0.75)]
    if elsewhere and (not close or key[-1] not in siblings):
        fix = f"did you mean {' or '.join(map(dotted, elsewhere))}?"
    elif close:
        fix = f"did you mean {dotted((*key[:-1], close[0]))}?"
    else:
        place = f"`{dotted(key[:-1])}`" if len(key) > 1 else "a job"
        fix = f"remove it; {place} has {', '.join(siblings)}"
    return Problem(what=f"`{dotted(key)}` is not a key of a job file", where=where, fix=fix)
