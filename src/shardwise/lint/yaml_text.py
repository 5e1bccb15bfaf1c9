"""Read YAML with the place of every key. Values are PyYAML's, as for accelerate: a bare `no` is False."""

from __future__ import annotations

from typing import Any

import yaml

from shardwise.job.source import Key, drop, syntax_problem, walk
from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, UnreadableError

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
