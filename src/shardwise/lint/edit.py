"""Changes to a text that keep everything else as it is; in scripts only names of arguments."""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import yaml

from shardwise.job.source import Key
from shardwise.lint.document import Document, Span
from shardwise.lint.script_text import read_python
from shardwise.lint.shell_text import read_shell
from shardwise.lint.text import read_json, read_yaml


@dataclass(frozen=True)
class Put:
    """Give a key a value; the key need not exist."""

    key: Key
    value: Any


@dataclass(frozen=True)
class Drop:
    """Remove a key."""

    key: Key


@dataclass(frozen=True)
class Rename:
    """Give a key another name in the same section."""

    key: Key
    name: str
    line: int = 0  # of an argument in a script or a flag of a command, whose key is its name


@dataclass(frozen=True)
class Strict:
    """Remove comments, trailing commas and the byte order mark from a JSON text."""


Change = Put | Drop | Rename | Strict


_READERS = {"json": read_json, "yaml": read_yaml, "python": read_python}
_READERS["shell"] = partial(read_shell, plain=True)


class CannotEditError(Exception):
    """This module cannot change text in such a form."""


def edited(document: Document, changes: Sequence[Change]) -> Document:
    """Return the document after all changes; CannotEditError if a change is impossible."""
    for change in changes:
        if document.syntax == "yaml" and not isinstance(change, Strict) and _shared(document, change.key):
            raise CannotEditError(".".join(change.key))  # an alias: the edit would change both
        if isinstance(change, Drop | Rename) and change.key in dict(document.duplicates):
            raise CannotEditError(".".join(change.key))  # the first one would then count
        again = _READERS[document.syntax](_changed(document, change), document.name)
        marked = document.marked and not isinstance(change, Strict)
        document = replace(again, kind=document.kind, marked=marked)
    return document


def _shared(document: Document, key: Key) -> bool:
    """Whether the key, or a section above it, has its value from the same text as another key."""
    above = [key[:n] for n in range(1, len(key) + 1) if key[:n] in document.marks]
    here = {document.marks[one].value: one for one in above}
    return any(here.get(mark.value, other) != other for other, mark in document.marks.items())


def in_words(document: Document, changes: Sequence[Change]) -> str:
    """What the changes do to a document: `bf16.enabled: "true" -> true`."""
    return "; ".join(_said(document, change) for change in changes)


def _said(document: Document, change: Change) -> str:
    if isinstance(change, Strict):
        counts = {"comments": len(document.comments), "trailing commas": len(document.trailing_commas)}
        counts["byte order mark"] = int(document.marked)
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count) + " -> removed"
    name, old = ".".join(change.key), document.get(*change.key)
    if isinstance(change, Rename):
        return f"`{name}` -> `{'.'.join((*change.key[:-1], change.name))}`"
    before = json.dumps(old, default=str) if document.has(*change.key) else "absent"
    return f"`{name}`: {before} -> {json.dumps(change.value) if isinstance(change, Put) else 'removed'}"


def _replace(text: str, start: int, end: int, new: str) -> str:
    return text[:start] + new + text[end:]


def _nearest(document: Document, key: Key, value: Any) -> tuple[Key, Any]:
    """The key to write, and its value: the outermost missing section above `key`, if any."""
    for length in range(1, len(key)):
        if not document.has(*key[:length]):
            for part in reversed(key[length:]):
                value = {part: value}
            return key[:length], value
    return key, value


def _place(document: Document, key: Key) -> tuple[Span, Span]:
    mark = document.marks.get(key)
    if mark is None or mark.key is None:
        raise CannotEditError(".".join(key))
    return mark.key, mark.value


def _siblings(document: Document, section: Key) -> list[Key]:
    found = [key for key in document.marks if len(key) == len(section) + 1 and key[:-1] == section]
    return sorted(found, key=lambda key: document.marks[key].value)


def _changed(document: Document, change: Change) -> str:
    if document.syntax in ("python", "shell"):
        return _with_argument(document, change)
    is_json = document.syntax == "json"
    if isinstance(change, Strict):
        return _strict(document) if is_json else document.text
    if isinstance(change, Drop):
        return _json_without(document, change.key) if is_json else _yaml_without(document, change.key)
    if isinstance(change, Rename):
        if document.has(*change.key[:-1], change.name):
            raise CannotEditError(change.name)
        name = json.dumps(change.name) if is_json else change.name
        return _replace(document.text, *_place(document, change.key)[0], name)
    key, value = _nearest(document, change.key, change.value)
    if not document.has(*key):
        return _json_with(document, key, value) if is_json else _yaml_with(document, key, value)
    text = _dumps(value, key) if is_json else yaml_scalar(value)
    return _replace(document.text, *document.marks[key].value, text)


def _with_argument(document: Document, change: Change) -> str:
    """A script's text with another name of one argument, or a command's with that of a flag."""
    if not isinstance(change, Rename) or not change.line:
        raise CannotEditError(str(change))
    lines = document.text.split("\n")
    line, old, places = lines[change.line - 1], change.key[-1], list[int]()
    if document.syntax == "python":
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.keyword) and node.arg == old and node.lineno == change.line:
                places.append(len(line.encode()[: node.col_offset].decode()))
    else:
        places = [one.start(1) for one in re.finditer(rf"(?<=--)({re.escape(old)})(?![\w-])", line)]
    if len(places) != 1:
        raise CannotEditError(old)
    lines[change.line - 1] = _replace(line, places[0], places[0] + len(old), change.name)
    return "\n".join(lines)


# JSON


def _strict(document: Document) -> str:
    text = document.text
    pieces = [(position, position + 1) for position in document.trailing_commas] + list(document.comments)
    for start, end in sorted(pieces, reverse=True):
        before, after = text[:start], text[end:]
        if text[start] != "," and after[:1] in ("", "\n"):
            before = before.rstrip(" \t")
            if before[-1:] in ("", "\n"):  # the comment was alone on its line
                after = after[1:]
        text = before + after
    return text


def _json_without(document: Document, key: Key) -> str:
    text, ((start, _), (_, end)) = document.text, _place(document, key)
    comma, siblings = _comma(document, end), _siblings(document, key[:-1])
    index = siblings.index(key)
    end = end if comma is None else comma + 1
    rest = re.match(r"[ \t\r]*(//[^\n]*|#[^\n]*)?(?=\n|$)", text[end:])
    before = re.search(r"\n[ \t]*$", text[:start])
    if rest and before:  # alone on its lines: remove them with their comment
        start, end = before.start(), end + rest.end()
    text = _replace(text, start, end, "")
    if comma is None and index > 0:  # it was the last: remove the comma before it
        previous = _comma(document, document.marks[siblings[index - 1]].value[1])
        if previous is not None:
            text = _replace(text, previous, previous + 1, "")
    return text


def _comma(document: Document, position: int) -> int | None:
    """The position of the comma after a value, past white space and comments; None if there is none."""
    spans = dict(document.comments)
    while position < len(document.text):
        if position in spans:
            position = spans[position]
        elif document.text[position].isspace():
            position += 1
        else:
            return position if document.text[position] == "," else None
    return None


def _json_with(document: Document, key: Key, value: Any) -> str:
    if len(key) > 1 and not isinstance(document.get(*key[:-1]), Mapping):
        raise CannotEditError(".".join(key))
    text, siblings = document.text, _siblings(document, key[:-1])
    entry = f"{json.dumps(key[-1])}: {_dumps(value, key)}"
    if not siblings:
        section = document.marks[key[:-1]].value[0] if len(key) > 1 else text.index("{")
        return _replace(text, section + 1, section + 1, entry)
    (start, _), (_, at) = _place(document, siblings[-1])
    comma = _comma(document, at)
    at = at if comma is None else comma + 1  # a trailing comma: it now separates the two
    indent = re.search(r"(\n[ \t]*)$", text[:start])
    gap = indent[1] if indent else " "
    return _replace(text, at, at, f"{',' if comma is None else ''}{gap}{entry}")


def _dumps(value: Any, key: Key) -> str:
    """The value as JSON, indented to the depth of the key."""
    flat = json.dumps(value)
    inner = value.values() if isinstance(value, Mapping) else ()
    if not inner or (len(flat) < 80 and not any(isinstance(one, Mapping) for one in inner)):
        return flat
    return json.dumps(value, indent=2).replace("\n", "\n" + "  " * len(key))


# YAML


def _yaml_without(document: Document, key: Key) -> str:
    text, (name, value) = document.text, _place(document, key)
    start = text.rfind("\n", 0, name[0]) + 1
    end = text.find("\n", max(value[1] - 1, name[1]))
    end = len(text) if end < 0 else end + 1
    others = [document.marks[other].key for other in _siblings(document, key[:-1]) if other != key]
    if text[start : name[0]].strip() or any(span and start <= span[0] < end for span in others):
        raise CannotEditError(".".join(key))  # in braces, several on a line
    return _replace(text, start, end, "")


def _yaml_with(document: Document, key: Key, value: Any) -> str:
    siblings, text = _siblings(document, key[:-1]), document.text
    if not siblings or isinstance(value, Mapping):
        raise CannotEditError(".".join(key))
    (first, _), _ = _place(document, siblings[0])
    start = text.rfind("\n", 0, first) + 1
    indent = text[start:first]
    if indent.strip():
        raise CannotEditError(".".join(key))
    return _replace(text, start, start, f"{indent}{key[-1]}: {yaml_scalar(value)}\n")


def yaml_scalar(value: Any) -> str:
    """A value on one line, as in accelerate's own files."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
