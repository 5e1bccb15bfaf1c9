"""Read JSON, with comments and trailing commas, and YAML as PyYAML does, with the place of every key."""

import json
import re
from dataclasses import replace
from typing import Any, NoReturn

import yaml

from shardwise.job.source import Key, drop, syntax_problem, walk
from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, Span, UnreadableError
from shardwise.lint.schema import table

MOST_KEYS = 10_000
_PIECE = re.compile(r'"(?:\\.|[^"\\\n])*+"?|//[^\n]*|#[^\n]*|/\*|[^\s"#]')
_WORD = re.compile(r"[^\s,:\[\]{}\"]*")
_UNPRINTED = re.compile("[^\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_FOREIGN = {"True": "true", "False": "false", "yes": "true", "no": "false"}
_FOREIGN |= {"None": "null", **dict.fromkeys(("NaN", "Infinity", "-Infinity"), "a finite number")}
_KNOWN = "a number, true, false, null or text in quotes"
_WRONG: dict[str, list[str]] = table("not_json")
"""What is said for the beginning of a message of Python's json, and the fix."""


def read_json(text: str, name: str) -> Document:
    """Read the object in a JSON text, the last of a key given twice; UnreadableError if it holds none."""
    comments, commas = _extra(text)
    plain, place = "", 0
    for start, end in sorted([*comments, *((at, at + 1) for at in commas)]):
        plain += text[place:start] + re.sub(r"[^\n]", " ", text[start:end])
        place = end
    plain += text[place:]

    def constant(word: str) -> NoReturn:
        raise json.JSONDecodeError("Expecting value", plain, plain.find(word))

    try:
        values = json.loads(plain, parse_constant=constant)
        if not isinstance(values, dict):
            what = "a configuration is an object that begins with `{`"
            raise UnreadableError(what, line=1, fix="add the braces")
        # Flow YAML, as soon as white space is spaces, and characters that YAML does not print are others.
        node = yaml.compose(
            _UNPRINTED.sub(lambda m: " " if m[0] in "\t\r" else chr(57344 + ord(m[0]) % 6400), plain)
        )
        assert node is not None
        marks, duplicates = _marks(node)
        names: dict[Key, Key] = {(): ()}  # JSON's, which has other escapes than YAML
        for key, mark in marks.items():
            names[key] = (*names[key[:-1]], json.loads(text[slice(*mark.key)]) if mark.key else key[-1])
    except json.JSONDecodeError as error:
        raise _unreadable(error) from None
    except (yaml.YAMLError, ValueError, RecursionError):  # such as a number of thousands of digits
        raise UnreadableError("a number, a key or a nesting is too long", line=1, fix="shorten it") from None
    here = {names[key]: mark for key, mark in marks.items()}
    read = Document(name=name, text=text, syntax="json", values=values, marks=here, duplicates=duplicates)
    return replace(read, comments=tuple(comments), trailing_commas=tuple(commas))


def _extra(text: str) -> tuple[list[Span], list[int]]:
    """The comments, and the commas before a closing bracket. One pass, so that no text takes long."""
    comments, commas = list[Span](), list[int]()
    at, comma, closed = 0, None, text.rfind("*/")
    while piece := _PIECE.search(text, at):
        start, at = piece.span()
        if piece[0] == "/*" and at <= closed:
            at = text.index("*/", at) + 2
        if piece[0].startswith(("//", "#")) or at > piece.end():
            comments.append((start, at))
            continue
        if piece[0] in "}]" and comma is not None:
            commas.append(comma)
        comma = start if piece[0] == "," else None
    return comments, commas


def _unreadable(error: json.JSONDecodeError) -> UnreadableError:
    if not error.doc[error.pos :].strip():
        return UnreadableError("a bracket or a quote is never closed", line=error.lineno, fix="close it")
    known = (said for start, said in _WRONG.items() if error.msg.startswith(start))
    what, fix = next(known, ("text must end with a double quote on the same line", ""))
    word = _WORD.match(error.doc, error.pos)
    text = (word and word[0]) or error.doc[error.pos]
    before = _WORD.search(error.doc[: error.pos][::-1])  # `01`: json stops within the word
    begun = before[0][::-1] if before and error.doc[error.pos - 1].isalnum() else ""
    if error.msg == "Expecting value" or begun:
        what, fix = f"{begun + text!r} is not a JSON value", f"write {_FOREIGN.get(text, _KNOWN)}"
    return UnreadableError(what, line=error.lineno, fix=fix)


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
            what, fix = "it holds no `key: value` lines", "write `key: value` lines, or name another file"
            raise UnreadableError(what, line=1, fix=fix)
        marks, duplicates = _marks(node)
        values: Any = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        what, line, fix = syntax_problem(error)
        if re.search(r":\s*\{\w+\}[^\s,}]", text.split("\n")[(line or 1) - 1]):
            what, fix = "`{` begins a mapping in YAML, and no text", "fill in the placeholder, or use quotes"
        raise UnreadableError(what, line=line or 1, fix=fix) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as an impossible date
        what, fix = (
            f"not YAML: {(str(error).splitlines() or [''])[0]}",
            "write plain values, numbers in quotes",
        )
        if isinstance(error, RecursionError):
            what, fix = "it is nested too deeply", "a configuration has a few sections within one another"
        raise UnreadableError(what, line=1, fix=fix) from None
    finally:
        loader.dispose()
    return Document(name=name, text=text, syntax="yaml", values=values, marks=marks, duplicates=duplicates)


def _marks(root: yaml.Node) -> tuple[dict[Key, Mark], tuple[tuple[Key, int], ...]]:
    """The places of all keys, and the keys that are given twice with the line of the first."""
    marks, duplicates = dict[Key, Mark](), list[tuple[Key, int]]()
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
