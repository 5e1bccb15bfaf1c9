"""Lists of datasets: Axolotl's, and those that LLaMA-Factory knows by name."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.job import paths
from shardwise.job.source import Key
from shardwise.lint.document import Document, Mark
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.read import found
from shardwise.lint.schema import as_number

_FACTORY = {"finetuning_type", "template", "dataset_dir"}  # keys by which a file is LLaMA-Factory's
_PRESET_TAGS = {"user_tag": "human", "assistant_tag": "gpt", "role_tag": "from", "content_tag": "value"}
_ROLES: dict[str, list[str]] = TABLE["roles"]
_LISTS = ("datasets", "test_datasets")  # Axolotl's
_OF_EACH = "prepare files with so many rows of each; data.max_samples counts those of all"


def with_datasets(document: Document, said: list[str], *, swift: bool) -> list[Document]:
    """The document with paths for its datasets, and one for what is said of them elsewhere."""
    tool = "swift" if swift else "axolotl" if "base_model" in document.values else started(document)
    own = {key: f"{tool}.{key}" for key in TABLE["others"].get(tool, ())}  # words that others mean otherwise
    values = {own.get(key, key): value for key, value in document.values.items()}
    marks = {(own.get(key[0], key[0]), *key[1:]): mark for key, mark in document.marks.items()}
    if swift:
        _take_counts(values, marks, f"{document.name}:{document.line(('dataset',))}", said)
    for name in _LISTS:
        rows = values.get(name)
        if isinstance(rows, list) and rows and all(isinstance(row, Mapping) for row in rows):
            split = {"split": "train"} if any("split" in row for row in rows) else {}  # by default
            values[name] = [_as_one([split | _without_roles(row) for row in rows])]
            if values[name][0].get("type") == "alpaca":  # which has a text of its own
                values.pop("chat_template", None)
    _with_one_split(values, f"{document.name}:{document.line(('test_datasets',))}", said)
    document = replace(document, marks=marks)
    if values.get("stage") == "pt":
        values.pop("template", None)  # it is for conversations
    if swift or not values.keys() & _FACTORY:
        return [replace(document, values=values)]
    held = list[Document]()
    for name in (one for one in ("dataset", "eval_dataset") if values.get(one) is not None):
        info = _Info(document, values)
        names = [one.strip() for one in str(values[name]).split(",") if one.strip()]
        files = [info.file_of(one) for one in names]
        if not all(files):
            write = TABLE["keys"][name] + ", or data.eval_fraction" * (name == "eval_dataset")
            what = f"{values.pop(name)}: files that {info.file} should name; write {write}"
            said.append(f"to do: {document.name}:{document.line((name,))}: {name}: {what}")
        elif names != files:
            values[name] = files if len(files) > 1 else files[0]
        if name == "dataset" and len(names) > 1 and (count := values.pop("max_samples", None)):
            place = f"{document.name}:{document.line(('max_samples',))}"
            said.append(f"to do: {place}: max_samples: {count} rows: {_OF_EACH}")
        held += info.settings(names)
    return [replace(document, values=values), *held]


def _with_one_split(values: dict[str, Any], place: str, said: list[str]) -> None:
    """Take away Axolotl's rows to evaluate on where they are another split: a job has one for all data."""
    firsts = (one[0] if isinstance(one := values.get(name), list) and one else None for name in _LISTS)
    train, test = (one if isinstance(one, dict) else {} for one in firsts)
    if test and (split := test.get("split", "train")) != train.get("split", "train"):
        rows, _ = test.pop("path", ""), test.pop("split", None)
        said.append(
            f"to do: {place}: {rows}, split {split}: a job has one split for all data; write data.eval"
        )


def _without_roles(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row without those of Axolotl's `roles` that say what a job takes for them anyway."""
    given = row.get("roles")
    words = {role: held if isinstance(held, list) else [held] for role, held in dict(given or {}).items()}
    kept = {role: held for role, held in words.items() if not {*map(str, held)} <= {*_ROLES.get(role, ())}}
    return {key: value for key, value in row.items() if key != "roles"} | ({"roles": kept} if kept else {})


def started(document: Document) -> str:
    """The tool whose module a command starts."""
    shell = document.syntax == "shell"
    return next(
        (tool for tool, words in TABLE["started"].items() if shell and re.search(words, document.text)), ""
    )


def _take_counts(values: dict[str, Any], marks: dict[Key, Mark], place: str, said: list[str]) -> None:
    """Take the numbers of rows of ms-swift's `ID#1000`."""
    given = values.get("dataset")
    parts = [str(one).partition("#") for one in (given if isinstance(given, list) else [given])]
    counts = [count for *_, count in parts if count]
    if counts and len(parts) == 1:
        values |= {"dataset": parts[0][0], "max_samples": as_number(counts[0]) or counts[0]}
        marks["max_samples",] = marks["dataset",]
    elif counts:
        values["dataset"] = [name for name, *_ in parts]
        said.append(f"to do: {place}: dataset: {', '.join(counts)} rows: {_OF_EACH}")


def _as_one(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Axolotl's datasets as one: a list of each key, or its value where all have the same."""
    columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
    return {key: held[0] if held.count(held[0]) == len(rows) else held for key, held in columns.items()}


class _Info:
    """LLaMA-Factory's dataset_info.json: a row for each name."""

    def __init__(self, document: Document, values: Mapping[str, Any]) -> None:
        self.file, self._rows = f"{values.get('dataset_dir', 'data')}/dataset_info.json", dict[str, Any]()
        self._there = False
        for there in found([self.file], Path(document.name).parent):
            with suppress(ValueError, OSError):
                rows, self.file, self._there = dict(json.loads(there.read_bytes())), str(there), True
                self._rows = {name: row for name, row in rows.items() if isinstance(row, Mapping)}

    def file_of(self, name: str) -> str:
        """The file or hub dataset of a name; empty if nothing says it."""
        row = self._rows.get(name, {})
        if "hf_hub_url" in row:
            return str(row["hf_hub_url"])
        if "file_name" in row:
            return str(Path(self.file).parent / row["file_name"])
        return name if not self._there and ("/" in name or paths.is_local(name)) else ""

    def settings(self, names: Sequence[str]) -> Iterator[Document]:
        """A document with what the rows say in addition to the files, if they say anything."""
        rows = [self._rows[name] for name in names if self._rows.get(name)]
        if not rows:
            return
        made = {key: value for key, value in _as_one(rows).items() if key not in ("file_name", "hf_hub_url")}
        shapes = {_shape(row) for row in rows}
        shape = shapes.pop() if len(shapes) == 1 else ""
        fields = {} if shape or shapes else _fields(rows)
        if shape or shapes or fields:  # else the row's own words are said
            made = {key: value for key, value in made.items() if key not in ("columns", "tags", "formatting")}
            how = {"fields": fields} if fields else {"formatting": "a different one for each dataset"}
            made |= {"shape": shape} if shape else how
        values = {"dataset_info": made}
        yield Document(name=self.file, text="", syntax="json", kind="training", values=values, marks={})


def _fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The fields of single questions and answers, of all rows; empty for what `data.format` cannot name."""
    names: dict[str, str] = TABLE["single_turn"]
    columns = [dict(row.get("columns") or {}) for row in rows]
    plain = all(row.get("formatting", "alpaca") == "alpaca" and not row.get("tags") for row in rows)
    plain = plain and all(isinstance(value, str) for value in columns[0].values() if value)
    named = {names.get(key, ""): value for key, value in columns[0].items() if value}
    known = plain and "" not in named and named.keys() >= {"instruction", "output"}
    return named if known and columns.count(columns[0]) == len(rows) else {}


def _shape(row: Mapping[str, Any]) -> str:
    """The `data.format` whose fields are those of a row; empty if none is, `auto` if it names no field."""
    formatting, tags = row.get("formatting", "alpaca"), dict(row.get("tags") or {})
    columns = {key: value for key, value in dict(row.get("columns") or {}).items() if value}
    if not columns and not tags:
        return str(formatting) if "formatting" in row else "auto"
    for shape, (kind, fields, words) in TABLE["shapes"].items():
        same = all(fields.get(key, key) == value for key, value in columns.items())
        all_there = all(columns.get(key) == value for key, value in fields.items() if key != "query")
        tagged = all((_PRESET_TAGS | words).get(key, value) == value for key, value in tags.items())
        used = all(tags.get(key, _PRESET_TAGS[key]) == value for key, value in words.items())
        if kind == formatting and same and all_there and tagged and used:
            return str(shape)
    return ""
