"""A DeepSpeed configuration that a script writes as a dict literal, with the lines of its keys."""

import ast
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from shardwise.job.source import Key, drop
from shardwise.lint.document import AUTO, Document, Mark
from shardwise.lint.schema import deepspeed_schema, names

_READS = ("copy", "get", "items", "keys", "values")  # methods that leave a dict as it is


class _UnknownError(Exception):
    """Only a run knows which keys there are."""


def configurations(program: ast.Module, known: Mapping[str, ast.expr]) -> list[Document]:
    """The dicts that DeepSpeed, the Trainer or Accelerate is given. `known`: the values of names."""
    found = list[Document]()
    for call in (node for node in ast.walk(program) if isinstance(node, ast.Call)):
        called, takes = ast.unparse(call.func), ("deepspeed", "hf_ds_config")
        if called == "deepspeed.initialize":
            takes = ("config", "config_params")
        elif not called.endswith(("Arguments", "Config", "Plugin")):
            continue
        for given in (one.value for one in call.keywords if one.arg in takes):
            with suppress(_UnknownError, RecursionError, AttributeError, TypeError):
                one = _Reader(program, known).document(given)
                found += [] if one in found else [one]
    return found


class _Reader:
    def __init__(self, program: ast.Module, known: Mapping[str, ast.expr]) -> None:
        self._nodes, self._known = [*ast.walk(program)], known
        self._arguments = {one.arg for one in self._nodes if isinstance(one, ast.arg)}
        functions = {one.name for one in self._nodes if isinstance(one, ast.FunctionDef)}
        self._safe = functions | {*names("keep_a_dict")}
        self.marks, self.unknown = dict[Key, Mark](), set[Key]()

    def document(self, given: ast.expr) -> Document:
        values = self.section(given, ())
        passed = isinstance(given, ast.Name) and given.id in self._arguments  # may be another of that name
        if passed and not {(key,) for key in values} & deepspeed_schema().sections.keys():
            raise _UnknownError
        here = Document(name="", text="", syntax="python", values=values, marks=self.marks)
        first = min((one.line for one in self.marks.values()), default=1)
        return replace(here, first=first, unknown=frozenset(self.unknown))

    def section(self, node: ast.expr, key: Key) -> dict[str, Any]:
        found = self._known.get(node.id) if isinstance(node, ast.Name) else node
        if not isinstance(found, ast.Dict):
            raise _UnknownError
        values = dict[str, Any]()
        for name, item in zip(found.keys, found.values, strict=True):
            if name is None:  # {**another}
                values |= self.section(item, key)
            else:
                drop((*key, last := _text(name)), self.marks)
                self.marks[*key, last] = Mark(line=name.lineno)
                values[last] = self._value(item, (*key, last))
        for path, line in self._changes(node.id) if isinstance(node, ast.Name) else ():
            holder = values
            for part in path[:-1]:
                holder = holder.setdefault(part, {})  # an AttributeError where it is a value
            holder[path[-1]] = self._not_known((*key, *path))
            self.marks |= {(*key, *path[: n + 1]): Mark(line=line) for n in range(len(path))}
        return values

    def _value(self, item: ast.expr, key: Key) -> Any:
        own = isinstance(item, ast.Name) and item.id not in self._arguments
        meant = self._known.get(ast.unparse(item), item) if own else item
        if isinstance(meant, ast.Dict):
            return self.section(item, key)
        with suppress(ValueError, TypeError, SyntaxError, MemoryError):
            json.dumps(value := ast.literal_eval(meant))
            return value
        return self._not_known(key)

    def _not_known(self, key: Key) -> str:
        if key in deepspeed_schema().sections:
            raise _UnknownError
        self.unknown.add(key)
        return AUTO

    def _changes(self, name: str) -> Iterator[tuple[Key, int]]:
        """The keys that are set later, with their lines; _UnknownError where others may be."""
        for node in self._nodes:
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _root(node) == name:
                yield tuple(_text(one.slice) for one in _above(node)), node.lineno
            match node:
                case ast.Call(func=ast.Attribute(attr=method)):
                    changes = _root(node.func) == name and method not in _READS
                case ast.Expr(value=ast.Call(func=ast.Name(id=function), args=args)):
                    changes = function not in self._safe and name in map(_root, args)
                case _:
                    changes = False
            if changes:
                raise _UnknownError


def _root(node: ast.expr) -> str:
    while isinstance(node, ast.Subscript | ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _above(node: ast.expr) -> list[ast.Subscript]:
    return [*_above(node.value), node] if isinstance(node, ast.Subscript) else []


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise _UnknownError
