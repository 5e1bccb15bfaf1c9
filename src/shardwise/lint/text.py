"""Read JSON and YAML with the place of every key.

JSON comments and trailing commas are noted instead of refused. YAML values are PyYAML's, as for accelerate: a
bare `no` is False.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from shardwise.job.source import Key, drop, syntax_problem, walk
from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, Span, UnreadableError, line_at

_SPACE = re.compile(r"[ \t\r\n]*")
_COMMENT = re.compile(r"//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_WORD = re.compile(r"[^\s,:\[\]{}\"]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None}
_FOREIGN = {"True": "true", "False": "false", "yes": "true", "no": "false"}
_FOREIGN |= dict.fromkeys(("None", "NaN", "Infinity"), "null")
DEEPEST = 50


def read_json(text: str, name: str) -> Document:
    """Read the object in a JSON text, the last of a key given twice; UnreadableError if it holds none."""
    reader = _Reader(text)
    values = reader.document()
    return Document(
        name=name,
        text=text,
        syntax="json",
        values=values,
        marks=reader.marks,
        comments=tuple(reader.comments),
        trailing_commas=tuple(reader.trailing),
        duplicates=tuple(reader.duplicates),
    )


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.marks: dict[Key, Mark] = {}
        self.comments: list[Span] = []
        self.trailing: list[int] = []
        self.duplicates: list[tuple[Key, int]] = []

    def document(self) -> dict[str, Any]:
        self._skip()
        if self._next() != "{":
            raise self._wrong("a configuration is an object that begins with `{`", "add the braces")
        values = self._object(())
        self._skip()
        if self.at < len(self.text):
            raise self._wrong("there is text after the closing brace", "remove it: one object per file")
        return values

    def _next(self) -> str:
        return self.text[self.at : self.at + 1]

    def _skip(self) -> None:
        while True:
            self.at = _SPACE.match(self.text, self.at).end()  # type: ignore[union-attr]
            comment = _COMMENT.match(self.text, self.at)
            if comment is None:
                return
            self.comments.append(comment.span())
            self.at = comment.end()

    def _object(self, above: Key) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in self._items("}"):
            start = self.at
            name = self._string("a key must be in double quotes")
            key, span = (*above, name), (start, self.at)
            self._skip()
            if self._next() != ":":
                raise self._wrong(f"there is no `:` after the key {name!r}", f'"{name}": value')
            self.at += 1
            self._skip()
            if name in values:
                self.duplicates.append((key, self.marks[key].line))
                drop(key, self.marks)
            values[name] = self._marked(key, span)
        return values

    def _items(self, closing: str) -> Iterator[int]:
        """Yield at the start of each item of an object or a list; stop after the closing bracket."""
        opened = self.at
        self.at += 1
        index, comma = 0, -1
        while True:
            self._skip()
            if self._next() == closing:
                if comma >= 0:
                    self.trailing.append(comma)
                self.at += 1
                return
            if not self._next():
                line = line_at(self.text, opened)
                what = f"the `{self.text[opened]}` of line {line} is never closed"
                raise self._wrong(what, f"add `{closing}`")
            if index and comma < 0:
                raise self._wrong("there is no comma before this", "put a comma after the previous value")
            yield index
            index += 1
            self._skip()
            comma = -1
            if self._next() == ",":
                comma = self.at
                self.at += 1

    def _string(self, what: str) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise self._wrong(what, 'write "like this"')
        self.at = match.end()
        try:
            return str(json.loads(match[0]))
        except json.JSONDecodeError:
            what = f"{match[0]} has an escape that JSON does not allow"
            raise self._wrong(what, "write \\\\ for a \\") from None

    def _marked(self, key: Key, span: Span | None = None) -> Any:
        """The value, with a mark for it and its key, which stands at `span`."""
        start = self.at
        value = self._value(key)
        line = line_at(self.text, span[0] if span else start)
        self.marks[key] = Mark(line=line, key=span, value=(start, self.at))
        return value

    def _value(self, key: Key) -> Any:
        if len(key) > DEEPEST:
            raise self._wrong(f"more than {DEEPEST} levels of nesting", "")
        character = self._next()
        if character == "{":
            return self._object(key)
        if character == "[":
            return [self._marked((*key, str(index))) for index in self._items("]")]
        if character == '"':
            return self._string("text must end with a double quote on the same line")
        word = _WORD.match(self.text, self.at)
        text = word[0] if word else character
        if text in _WORDS:
            self.at += len(text)
            return _WORDS[text]
        number = _NUMBER.fullmatch(text)
        if number is None:
            known = "a number, true, false, null or text in quotes"
            fix = f"write {_FOREIGN[text]}" if text in _FOREIGN else known
            raise self._wrong(f"{text!r} is not a JSON value", fix)
        if len(text) > LONGEST_NUMBER:
            raise self._wrong(f"a number of {len(text)} digits", "a number")
        self.at += len(text)
        return float(text) if number[1] or number[2] else int(text)

    def _wrong(self, what: str, fix: str) -> UnreadableError:
        return UnreadableError(what, line=line_at(self.text, self.at), fix=fix)


MOST_KEYS = 10_000


def read_yaml(text: str, name: str) -> Document:
    """Read the mapping in a YAML text; UnreadableError if it holds none."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # characters that are not allowed in text
        what = str(error).splitlines()[0]
        raise UnreadableError(f"not YAML: {what}", line=1, fix="save the file as text in UTF-8") from None
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            what, fix = "it holds no `key: value` lines", "see `shardwise check --help`"
            raise UnreadableError(what, line=1, fix=fix)
        marks, duplicates = _marks(node)
        values: Any = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        what, line, fix = syntax_problem(error)
        raise UnreadableError(what, line=line or 1, fix=fix) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an impossible date
        what = (str(error).splitlines() or ["the nesting is too deep"])[0]
        fix = "write plain values, numbers in quotes"
        raise UnreadableError(f"not YAML: {what}", line=1, fix=fix) from None
    finally:
        loader.dispose()
    return Document(name=name, text=text, syntax="yaml", values=values, marks=marks, duplicates=duplicates)


def _marks(root: yaml.Node) -> tuple[dict[Key, Mark], tuple[tuple[Key, int], ...]]:
    """The places of all keys, and the keys that are given twice with the line of the first."""
    marks: dict[Key, Mark] = {}
    duplicates: list[tuple[Key, int]] = []
    for key, key_node, node in walk(root):
        if len(marks) > MOST_KEYS:  # aliases of aliases can stand for any number
            raise UnreadableError(f"more than {MOST_KEYS} keys", line=1, fix="write the values out")
        line = (key_node or node).start_mark.line + 1
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_NUMBER:
            raise UnreadableError(f"a number of {len(node.value)} digits", line=line, fix="a number")
        if key in marks:
            duplicates.append((key, marks[key].line))
            drop(key, marks)
        marks[key] = Mark(line=line, key=_span(key_node) if key_node else None, value=_span(node))
    return marks, tuple(duplicates)


def _span(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index
