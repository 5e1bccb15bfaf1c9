"""`data.format` as a mapping: files whose fields have other names than the formats' (data/formats.py)."""

import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

from shardwise.data.sources import Record
from shardwise.errors import DataError
from shardwise.job.schema import SAMPLE_FIELDS

MOST_NAMES = 50  # of fields, which a message lists

LIKELY = {
    "prompt": ("question", "query", "input", "source", "problem", "user"),
    "output": ("completion", "answer", "response", "target", "solution", "assistant"),
    "text": ("content", "body", "document", "passage"),
    "input": ("context",),
    "system": ("system_prompt",),
}
"""What files call the fields of a pair, and of plain text, the likeliest first."""
ANY = {"prompt": "FIELD", "completion": "FIELD"}


class Columns:
    """Gives records the formats' names, and notes which columns and which fields there are."""

    def __init__(self, names: Mapping[str, str]) -> None:
        """`names`: the file's name of each of our fields."""
        self.names, self._used = names, set[str]()
        self._found: dict[str, None] = {}  # as a set that keeps its order

    def renamed(self, record: Record) -> Record:
        """A record without one of the columns, as of another data set, keeps the fields that it has."""
        if not self.names:
            return record
        where, fields = record
        if len(self._found) < MOST_NAMES:
            self._found |= dict.fromkeys(fields)
        there = self.of(fields)
        taken = {*there.values()}
        self._used |= taken
        mapped = {ours: fields[theirs] for ours, theirs in there.items()}
        # a row without one of the columns has that field of no other column
        others = fields.keys() - taken - (self.names.keys() if there else set())
        return where, {name: value for name, value in fields.items() if name in others} | mapped

    def of(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """The names that a record has columns for; none: it is of another data set."""
        return {ours: theirs for ours, theirs in self.names.items() if theirs in fields}

    def absent(self, fields: Mapping[str, Any]) -> str:
        """What to add to an error about a record: the columns that it does not have."""
        names = [theirs for theirs in self.names.values() if theirs not in fields]
        return f"; data.format names {', '.join(names)}, which it does not have" if names else ""

    def check(self) -> None:
        """DataError for a column that no record had."""
        unused = [theirs for theirs in self.names.values() if theirs not in self._used]
        if not unused:
            return
        near = difflib.get_close_matches(unused[0], self._found, n=1)
        fix = f"did you mean {near[0]}? " if near else ""
        fix += f"fields found: {', '.join(self._found) or 'none'}"
        what = f"data.format: no sample has a field {' or '.join(unused)}"
        raise DataError(what, where="data.format", fix=fix)


def kind(value: Any) -> str:
    """What a field holds that is no text, in brackets."""
    kinds: dict[type, str] = {type(None): "null", list: "list", dict: "object", bool: "boolean", str: ""}
    found = kinds.get(type(value), "number")
    return f" ({found})" if found else ""


def proposal(fields: Mapping[str, Any]) -> str:
    """The `data.format` of a record that is of no known format, as far as its fields say it; or empty."""
    for name, value in fields.items():
        first = value[0] if isinstance(value, list) and value else None
        if isinstance(first, dict) and ("role" in first or {"from", "value"} <= first.keys()):
            return _written({"messages": name})
    texts = {name.casefold(): name for name, value in fields.items() if isinstance(value, str)}

    def likely(ours: str) -> str:
        return next((texts[name] for name in (ours, *LIKELY[ours]) if name in texts), "")

    asked, context = texts.get("instruction") or likely("prompt"), likely("input")
    output, extra = likely("output"), {"system": likely("system")}
    if asked and output and ("instruction" in texts or context not in ("", asked)):
        return _written({"instruction": asked, "input": context, "output": output, **extra})
    if asked and output:
        return _written({"prompt": asked, "completion": output, **extra})
    if text := likely("text"):
        return _written({"text": text})
    return "" if any(name in SAMPLE_FIELDS for name in fields) or not fields else _written(ANY)


def _written(names: Mapping[str, str]) -> str:
    """As a job file says it; without the names that are ours already."""
    plain = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
    each = [
        f"{ours}: {theirs if plain.fullmatch(theirs) else json.dumps(theirs, ensure_ascii=False)}"
        for ours, theirs in names.items()
        if theirs not in ("", ours)
    ]
    return f"data.format: {{{', '.join(each)}}}" if each else ""
