"""A script as a program: its tree, its text, its calls, and what its expressions stand for."""

import ast
import json
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from shardwise.lint.document import Document
from shardwise.lint.schema import names
from shardwise.lint.script_inputs import Inputs, name_of
from shardwise.lint.script_names import name_as_imported
from shardwise.lint.script_values import Values
from shardwise.lint.setup import Setup

Node = TypeVar("Node", bound=ast.AST)


def tree_of(document: Document) -> ast.Module:
    """The program of a script; an empty one of other files. Rules share it, and leave it as it is."""
    return _program(document.text if document.syntax == "python" else "")


def code_of(document: Document) -> str:
    """The text of `tree_of`: a statement a line, without comments."""
    return _code(tree_of(document))


def all_code(setup: Setup) -> str:
    """The same of all scripts."""
    return "\n".join(map(code_of, setup.of("training", "python")))


def values_of(document: Document) -> Values:
    """What the expressions of `tree_of` stand for."""
    return _values(tree_of(document))


@lru_cache(maxsize=8)
def _program(text: str) -> ast.Module:
    program = ast.parse(text)
    name_as_imported(program)
    return program


_values, _code = lru_cache(maxsize=8)(Values), lru_cache(maxsize=8)(ast.unparse)


def known_values(document: Document, setup: Setup, config: Document | None = None) -> Values:
    """The same with the flags of a script's commands, and the defaults of flags and parameters.

    `config`: the file that the script loads; else the first DeepSpeed file.
    """
    last, flags = Path(document.name).name, dict[str, Any]()
    commands = setup.of("training", "shell")
    mine = [one for one in commands if Path(str(one.get("script"))).name == last]
    for one in mine or commands:  # a script that no command starts is a module of the one that is started
        flags |= {name: one.values[name] for name in one.flags & one.values.keys()}
    config = config or next((one for one in setup.of("deepspeed") if one.syntax == "json"), None)
    world, content = setup.world_size or "", config.values if config else None
    return _valued(tree_of(document), json.dumps([flags, str(world), content], sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _valued(program: ast.Module, given: str) -> Values:
    flags, world, content = json.loads(given)
    return Values(program, Inputs(flags, {"WORLD_SIZE": world} if world else {}, content=content))


def walk(node: ast.AST, kind: type[Node]) -> Iterator[Node]:
    """All nodes of a kind in a part of a program."""
    return (one for one in ast.walk(node) if isinstance(one, kind))


def words_of(call: ast.Call) -> dict[str | None, ast.expr]:
    """The arguments of a call that have a name; under None, what `**` gives."""
    return {one.arg: one.value for one in call.keywords}


def within(*nodes: ast.AST) -> Iterator[ast.Call]:
    """All calls in these parts of a program."""
    return (call for one in nodes for call in walk(one, ast.Call))


def calls(document: Document, *last: str) -> Iterator[ast.Call]:
    """The calls of a script whose last name is one of these."""
    found = within(tree_of(document)) if any(name in document.text for name in last) else ()
    return (call for call in found if name_of(call.func).rpartition(".")[2] in last)


def modules_of(document: Document) -> dict[str, str]:
    """The modules that the script's names, as the libraries say them, are imported from."""
    found = walk(tree_of(document), ast.ImportFrom)
    return {alias.name: str(one.module) for one in found for alias in one.names}


def is_optimizer(called: str) -> bool:
    """Whether a call of this name makes an optimizer, such as bitsandbytes' Adam8bit."""
    name = re.sub("^(DeepSpeedCPU|Fused|Paged)|W?(8bit)?$", "", called.rpartition(".")[2])
    return name in ("Adam", "Lion", "Lamb", *names("torch_optimizers"))
