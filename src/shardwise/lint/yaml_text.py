"""YAML with the place of every key. Values are PyYAML's, as for accelerate: a bare `no` is False."""

from __future__ import annotations

from typing import Any

import yaml

from shardwise.lint.document import LONGEST_NUMBER, Document, Key, Mark, UnreadableError

MOST_KEYS = 10_000


def read_yaml(text: str, name: str) -> Document:
    """The mapping a YAML text holds; UnreadableError where it is not one."""
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # characters that no text has
        what = str(error).splitlines()[0]
        raise UnreadableError(f"not YAML: {what}", line=1, fix="save the file as text in UTF-8") from None
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise UnreadableError(
                "it holds no `key: value` lines", line=1, fix="see `shardwise check --help`"
            )
        marks: dict[Key, Mark] = {}
        duplicates: list[tuple[Key, int]] = []
        _places(node, (), marks, duplicates)
        values: Any = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UnreadableError(
            f"not YAML: {error.problem}",
            line=mark.line + 1 if mark else 1,
            fix="check indentation, quotes and brackets on this line and the one before",
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date that is none, say
        what = (str(error).splitlines() or ["it is too deep"])[0]
        raise UnreadableError(
            f"not YAML: {what}", line=1, fix="write plain values, numbers in quotes"
        ) from None
    finally:
        loader.dispose()
    return Document(
        name=name, text=text, syntax="yaml", values=values, marks=marks, duplicates=tuple(duplicates)
    )


def _places(node: yaml.Node, above: Key, marks: dict[Key, Mark], duplicates: list[tuple[Key, int]]) -> None:
    if len(marks) > MOST_KEYS:  # aliases of aliases can stand for any number
        raise UnreadableError(f"more than {MOST_KEYS} keys", line=1, fix="write the values out")
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            key = (*above, str(index))
            marks[key] = Mark(line=item.start_mark.line + 1, key=None, value=_span(item))
            _places(item, key, marks, duplicates)
        return
    if not isinstance(node, yaml.MappingNode):
        if node.tag == "tag:yaml.org,2002:int" and len(node.value) > LONGEST_NUMBER:
            what = f"a number of {len(node.value)} digits"
            raise UnreadableError(what, line=node.start_mark.line + 1, fix="a number")
        return
    for key_node, value_node in node.value:
        key, line = (*above, str(key_node.value)), key_node.start_mark.line + 1
        if key in marks:
            duplicates.append((key, marks[key].line))
            for old in [old for old in marks if old[: len(key)] == key]:
                del marks[old]
        marks[key] = Mark(line=line, key=_span(key_node), value=_span(value_node))
        _places(value_node, key, marks, duplicates)


def _span(node: yaml.Node) -> tuple[int, int]:
    return node.start_mark.index, node.end_mark.index
