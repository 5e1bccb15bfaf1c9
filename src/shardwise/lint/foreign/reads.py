"""What of a training no named file reads: modules that a script imports, and flags of its command."""

import ast
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path

from shardwise.lint.document import Document
from shardwise.lint.foreign.suspects import decides
from shardwise.lint.foreign.table import NO_KEY, leaves
from shardwise.lint.read import imported

_TAKES_ALL = re.compile(r"[(,]\s*\*\*(?!kwargs)|setattr\(")  # `Config(**values)`


def unnamed(script: Document, documents: Sequence[Document]) -> Iterator[str]:
    """What is said of files that a script imports, that may decide something, and that are not named."""
    named = {Path(one.name).resolve() for one in documents}
    away = {path: line for path, line in imported(script).items() if path.resolve() not in named}
    files = [str(path) for path in away if decides(path)]
    if files and "import run_exp" not in script.text:  # LLaMA-Factory's own
        what = f"add {', '.join(files)} to --from: imported, and may decide a part of the job"
        yield f"to do: {script.name}:{min(away.values())}: {what}"


def without_idle(document: Document, texts: str, taken: set[str], said: list[str]) -> Document:
    """A file that a script loads, without the keys that no script names, where none takes all keys.

    The others are `taken`.
    """
    keys = {key: key.rpartition(".")[2] for key, _ in leaves(document.values) if not re.search(r"\.\d", key)}
    named = {key for key, name in keys.items() if re.search(rf"\b{re.escape(name)}\b", texts)}
    taken |= named
    idle = keys.keys() - named
    if not named or not idle or _TAKES_ALL.search(texts):
        return document
    values = deepcopy(dict(document.values))
    for *above, last in (key.split(".") for key in idle):
        del reduce(getitem, above, values)[last]
    said.append(f"left out: {document.name}: {', '.join(sorted(idle))}: no script reads it")
    return replace(document, values=values)


def unread(documents: Sequence[Document], used: set[str], said: list[str]) -> None:
    """Say once which flags no script reads; say of no key that a job has none, if its value is `used`."""
    start, scripts = f"left out: {NO_KEY}: ", [one for one in documents if one.syntax == "python"]
    read = {name for one in scripts for node in ast.walk(ast.parse(one.text)) for name in _read_by(node)}
    asked = " ".join(one for one in said if one.startswith("to do"))
    for one in documents if scripts else ():
        flags = [name for name in sorted(one.flags - read - used) if start + name in said]
        flags = [name for name in flags if not re.search(rf"\b{re.escape(name)}\b", asked)]
        if flags and one.syntax == "shell":
            what = f"{', '.join(flags)}: no script of --from reads them; add the one that does, if any"
            said.append(f"to do: {one.name}:{min(one.line((flag,)) for flag in flags)}: {what}")
            used = used | {*flags}
    said[:] = [one for one in said if one.removeprefix(start) not in used]


def _read_by(node: ast.AST) -> Iterator[str]:
    """A name by which a script takes a value: `args.name`, `args["name"]`, or a function's argument."""
    match node:
        case ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.Subscript(slice=ast.Constant(name)) | ast.Call(args=[ast.Constant(name), *_]):
            yield str(name)
