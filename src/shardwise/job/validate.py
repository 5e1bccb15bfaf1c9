"""Check a document's keys and types against the schema; word each problem for the user."""

import copy
import difflib
import json
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shardwise.errors import Problem
from shardwise.job import json_schema
from shardwise.job.schema import SAMPLE_FIELDS, Job
from shardwise.job.source import Document, Key, dotted
from shardwise.job.strategies import with_degree

_REQUIRED: dict[Key, Any] = {("name",): "job", ("model", "source"): "model", ("data", "train"): "data"}
"""Values for required keys that are absent or wrong, so that the other keys can still be checked."""


def check(document: Document) -> tuple[Job | None, dict[Key, Problem]]:
    """Return the job, and one problem per wrong, unknown or missing key.

    If keys are wrong, the job is the document without them: it serves to find what else is wrong.
    """
    for key, origin in list(document.origins.items()):
        value, kinds = document.section(key).get(key[-1]), json_schema.at(key)
        if origin.kind == "flag" and value is None and kinds and {"type": "null"} not in kinds:
            document.forget(key)  # null unsets it
    try:
        return Job.model_validate(document.values), {}
    except ValidationError as error:
        problems = _problems(error, document)
    rest = copy.deepcopy(document)
    for key in problems:
        rest.forget(key)
    for key, value in _REQUIRED.items():
        for length in range(1, len(key)):
            rest.section(key[:length]).setdefault(key[length - 1], {})
        rest.section(key).setdefault(key[-1], value)
    try:
        return Job.model_validate(rest.values), problems
    except ValidationError:
        return None, problems


def _problems(error: ValidationError, document: Document) -> dict[Key, Problem]:
    found: dict[Key, Problem] = {}
    details = error.errors(include_url=False, include_context=False)
    keys = [_key(detail, document.values) for detail in details]
    for detail, key in zip(details, keys, strict=True):
        branch = len(detail["loc"]) > len(key)
        if key in found or (branch and any(other[: len(key)] == key != other for other in keys)):
            continue  # another branch of a union, or a union whose matching branch has its own finding
        found[key] = _problem(detail["type"], key, document)
    return found


def _key(detail: ErrorDetails, values: Any) -> Key:
    """The key of an error: its location without list positions and without names of union branches."""
    key: list[str] = []
    for part in detail["loc"]:
        if isinstance(part, int) or json_schema.is_free(tuple(key)):
            break
        if isinstance(values, dict) and part in values:
            key.append(part)
            values = values[part]
    if detail["type"] == "missing":
        key.append(str(detail["loc"][-1]))
    return tuple(key)


def _problem(kind: str, key: Key, document: Document) -> Problem:
    name, allowed = dotted(key), json_schema.expected(key)
    if kind == "extra_forbidden":
        what, fix = f"`{name}` is not a key of a job file", _meant(key)
    elif kind == "missing":
        what = f"`{name}` is missing; expected {allowed}"
        fix = "add it; `shardwise init` writes a commented example"
    else:
        value = document.section(key).get(key[-1])
        text = json.dumps(value, ensure_ascii=False, default=str)
        shown = text if len(text) <= 60 else text[:57] + "..."
        what, fix = f"`{name}` is {shown}; expected {allowed}", _hint(key, value, allowed) or _column(value)
    return Problem(what=what, where=document.where(key), fix=fix)


_WORDS = {**dict.fromkeys(("int4", "fp4", "4bit"), "nf4"), **dict.fromkeys(("fp8", "8bit"), "int8")}
_BOOLEANS = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _hint(key: Key, value: Any, allowed: str) -> str:
    name = key[-1]
    if isinstance(value, str):
        if "true or false" in allowed and value.lower() in _BOOLEANS:
            return f"write `{name}: {_BOOLEANS[value.lower()]}`"
        if key == ("strategy",) and (parts := with_degree(value)):
            said = ", ".join(f"{one}: {json.dumps(part)}" for one, part in parts.items())
            return f"write `strategy: {{{said}}}`"
        words = [str(word) for schema in json_schema.at(key) for word in json_schema.choices(schema)]
        close = [word for word in (_WORDS.get(value.lower()),) if word in words]
        close = close or difflib.get_close_matches(value, words, n=1)
        if close and close[0] != value:
            return f"did you mean {close[0]}?"
        plain = value.replace("_", "").replace(",", "").lstrip("0") or value
        if ("number" in allowed or "integer" in allowed) and plain.isdigit():
            if len(plain) > 18:  # read as text (source.py)
                return "a smaller number"
            return f"write `{name}: {plain}`" + (", without quotes" if plain == value else "")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if "integer" in allowed and isinstance(value, float) and value.is_integer():
            return f"write `{name}: {int(value)}`"
        if "an integer" in allowed and "below 1" in allowed and value > 1:
            return f"write `{name}: {round(value)}` for so many, or a share below 1"
        if "text" in allowed or "a name" in allowed:
            return f'put it in quotes: `{name}: "{value}"`'
    return ""


def _column(value: Any) -> str:
    """The fix for a mapping in which one of the samples' fields is misspelt."""
    wrong = [one for one in value if one not in SAMPLE_FIELDS] if isinstance(value, dict) else []
    near = difflib.get_close_matches(wrong[0], SAMPLE_FIELDS, n=1) if wrong else []
    return f"did you mean {near[0]}, not {wrong[0]}?" if near else ""


_OTHERS = {
    **dict.fromkeys(("batch_size", "train_batch_size", "gradient_accumulation_steps"), "global_batch"),
    **dict.fromkeys(("max_seq_length", "max_length", "seq_len", "cutoff_len"), "sequence_length"),
    **dict.fromkeys(("num_epochs", "num_train_epochs"), "epochs"),
    "lr": "learning_rate",
    "max_steps": "steps",
    **dict.fromkeys(("lora_r", "r"), "rank"),
    "lora_alpha": "alpha",
    **dict.fromkeys(("columns", "column_mapping"), "format"),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size"), "micro_batch"),
}
"""What other trainers call a key."""


def _meant(key: Key) -> str:
    """The fix for an unknown key."""
    siblings, every = json_schema.names_below(key[:-1]), json_schema.every_key()
    close = difflib.get_close_matches(key[-1], siblings, n=1)
    elsewhere = [other for other in every if other[-1] == _OTHERS.get(key[-1], key[-1])]
    if not close and not elsewhere:
        last = {other[-1]: other for other in every}
        elsewhere = [last[name] for name in difflib.get_close_matches(key[-1], last, n=1, cutoff=0.75)]
    if elsewhere and (not close or key[-1] not in siblings or key[-1] in _OTHERS):
        return f"did you mean {' or '.join(map(dotted, elsewhere))}?"
    if close:
        return f"did you mean {dotted((*key[:-1], close[0]))}?"
    place = f"`{dotted(key[:-1])}`" if len(key) > 1 else "a job"
    return f"remove it; {place} has {', '.join(siblings)}"
