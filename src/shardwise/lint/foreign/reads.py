"""What of a training nothing reads: files nobody named, idle functions, flags, settings that are off."""

import ast
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from shardwise.lint.document import AUTO, Document, line_at
from shardwise.lint.foreign.suspects import CALLBACKS, decides
from shardwise.lint.foreign.table import NO_KEY, TABLE, leaves
from shardwise.lint.read import NO_PYTHON, imported
from shardwise.lint.rules.accelerate import DS, FILE, kind_of
from shardwise.lint.schema import names
from shardwise.lint.script_settings import LEARNS
from shardwise.lint.script_text import read_python, without_classes
from shardwise.lint.shell_text import OPEN

_DEEPSPEED = re.compile(r"deepspeed\.initialize|DeepSpeedPlugin|DeepSpeedStrategy|HfDeepSpeedConfig")
_GIVES = re.compile(r"\bdeepspeed=(?!=)")  # an argument of the Trainer's
_LOADS = re.compile(r"\bload_dataset\(|\bread_(json|csv|parquet)\(")
_CONFIG = re.compile(r"(?i)(^|[._])(ds|deepspeed)")  # in names of DeepSpeed's settings
_FILLS = re.compile(TABLE["words"]["fills"])
_TAKES_ALL = re.compile(r"[(,]\s*\*\*(?!kwargs)|setattr\(")  # `Config(**values)`


def unnamed(script: Document, documents: Sequence[Document]) -> Iterator[str]:
    """What is said of unnamed files that a script imports and that may decide something; of idle cells."""
    if (at := script.text.find(NO_PYTHON)) >= 0:
        yield f"left out: {script.name}:{line_at(script.text, at)}: a cell with a placeholder is no Python"
    named = {Path(one.name).resolve() for one in documents}
    away = {path: line for path, line in imported(script).items() if path.resolve() not in named}
    files = [str(path) for path in away if decides(path)]
    if files and "import run_exp" not in script.text:  # LLaMA-Factory's own
        what = f"add {', '.join(files)} to --from: imported, and may decide a part of the job"
        yield f"to do: {script.name}:{min(away.values())}: {what}"


def called(script: Document, documents: Sequence[Document]) -> Document:
    """The script without callbacks, and the functions that no file calls if the rest, or another, trains."""
    if (text := without_classes(script.text, CALLBACKS)) != script.text:
        script = replace(read_python(text, script.name), cells=script.cells, marked=script.marked)
    body, others = ast.parse(script.text).body, "\n".join(one.text for one in documents if one is not script)
    plain = [one for one in body if isinstance(one, ast.FunctionDef) and not one.decorator_list]
    idle = {one.name: one for one in plain if not re.search(rf"(?<![\w./]){one.name}\b(?!\.py)", others)}
    reached = [one for one in body if one not in idle.values()]
    for one in reached:  # which grows by what each part calls
        used = {part.id for part in ast.walk(one) if isinstance(part, ast.Name)}
        reached += [idle.pop(name) for name in used & idle.keys()]
    if not any(map(LEARNS.search, (others, *map(ast.unparse, reached)))):
        return script
    text = reduce(_without, idle.values(), script.text)
    for held in (one for one in reached if isinstance(one, ast.ClassDef)):
        for one in (part for part in held.body[1:] if isinstance(part, ast.FunctionDef)):
            rest = re.sub(r"#.*", "", f"{_without(text, one)}\n{others}")
            own = rf"\b(cls|self|{held.name})" * bool(one.decorator_list)  # of a class method
            made = own or (not held.bases and re.search(rf"\b{held.name}\(", rest))
            if made and one.name[:2] != "__" and not re.search(rf"{own}\.{one.name}\b", rest):
                text = _without(text, one)
    if text == script.text:
        return script
    return replace(read_python(text, script.name), cells=script.cells, marked=script.marked)


def _without(text: str, part: ast.FunctionDef) -> str:
    """A script's text with empty lines in place of a function."""
    first, end = min([part.lineno, *(one.lineno for one in part.decorator_list)]), part.end_lineno or 0
    return "\n".join("" if first <= at <= end else row for at, row in enumerate(text.split("\n"), 1))


def without_preparations(documents: Sequence[Document], said: list[str]) -> Iterator[Document]:
    """The documents but for scripts that only prepare data: the training neither starts nor imports them."""
    scripts = [one for one in documents if one.syntax == "python"]
    tool = any(one.get("launcher") in ("llamafactory-cli", "axolotl", "swift") for one in documents)
    trains = [one for one in scripts if LEARNS.search(one.text)]
    for one in documents:
        rest = [other.text for other in scripts if other is not one]
        rest += [str(other.get("script")) for other in documents]
        made = [getattr(part, "name", "main") for part in ast.parse(one.text if one in scripts else "").body]
        names_ = "|".join(map(re.escape, {Path(one.name).stem, *made} - {"main"}))
        used = one not in scripts or any(re.search(rf"\b({names_})\b", text) for text in rest)
        if not used and (tool or trains) and one not in trains and _LOADS.search(one.text):
            said.append(f"left out: {one.name}: nothing of the training starts or imports it")
        else:
            yield one


def without_idle(document: Document, texts: str, taken: set[str], said: list[str]) -> Document:
    """A file that a script loads, without the keys that no script names, where none takes all keys.

    The others are `taken`.
    """
    keys = {key: key.rpartition(".")[2] for key, _ in leaves(document.values) if not re.search(r"\.\d", key)}
    named = {key for key, name in keys.items() if re.search(rf"\b{re.escape(name)}\b", texts)}
    every = _TAKES_ALL.search(texts) is not None
    taken |= named | {key for key, name in keys.items() if every and name in names("trainer_arguments")}
    idle = keys.keys() - named
    if not named or not idle or every:
        return document
    values = deepcopy(dict(document.values))
    for *above, last in (key.split(".") for key in idle):
        del reduce(getitem, above, values)[last]
    said.append(f"left out: {document.name}: {', '.join(sorted(idle))}: no script reads it")
    return replace(document, values=values)


def unread(documents: Sequence[Document], used: set[str], said: list[str]) -> None:
    """Say once which flags no script reads; say of no key that a job has none, if its value is `used`."""
    start, scripts = f"left out: {NO_KEY}: ", [one for one in documents if one.syntax == "python"]
    read = names_read(scripts)
    read |= {*names("trainer_arguments")} if any(_FILLS.search(one.text) for one in scripts) else set()
    asked = " ".join(one for one in said if one.startswith("to do"))
    for one in documents if scripts else ():
        flags = [
            name for name in sorted(one.flags - read - used) if name.isidentifier() and start + name in said
        ]
        flags = [name for name in flags if not re.search(rf"\b{re.escape(name)}\b", asked)]
        if flags and one.syntax == "shell":
            what = f"{', '.join(flags)}: no script of --from reads them; add the one that does, if any"
            said.append(f"to do: {one.name}:{min(one.line((flag,)) for flag in flags)}: {what}")
            used = used | {*flags}
    said[:] = [one for one in said if one.removeprefix(start) not in used]


def overwritten(config: Document, documents: Sequence[Document], said: list[str]) -> Document:
    """DeepSpeed's file with what scripts write over it: `ds["scheduler"]["params"]["warmup_num_steps"] = 9`.

    A number is taken; of what only a run knows, and of what a branch writes, the value is not known.
    """
    if config.kind != "deepspeed" or config.syntax == "python":
        return config
    values, unknown = deepcopy(config.values), {*config.unknown}
    for script in (one for one in documents if one.syntax == "python" and "deepspeed" in one.text):
        nodes = [*ast.walk(ast.parse(script.text))]
        maybe = {inner for one in nodes if isinstance(one, ast.If) for inner in ast.walk(one)}
        for node in (one for one in nodes if isinstance(one, ast.Assign)):
            path, holder = _path(node.targets[0])
            if not config.has(*path) or (not path[1:] and not _CONFIG.search(holder)):
                continue
            number = getattr(node.value, "value", None) if node not in maybe else None
            known = type(number) in (int, float, bool)
            unknown = unknown - {path} if known else unknown | {path}
            holding: dict[str, Any] = reduce(getitem, path[:-1], values)  # type: ignore[arg-type]
            holding[path[-1]] = number if known else AUTO
            said.append(f"assumed: {script.name}:{node.lineno} writes over {'.'.join(path)} of {config.name}")
    return replace(config, values=values, unknown=frozenset(unknown))


def _path(target: ast.expr) -> tuple[tuple[str, ...], str]:
    """The keys by which `ds["a"]["b"]` is a part of a mapping, and the name of that."""
    keys = list[str]()
    while isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        keys, target = [str(target.slice.value), *keys], target.value
    return tuple(keys), ast.unparse(target)


def names_read(scripts: Sequence[Document]) -> set[str]:
    """The names by which scripts take values."""
    return {name for one in scripts for node in ast.walk(ast.parse(one.text)) for name in _read_by(node)}


def is_choice(name: str, value: Any, scripts: Sequence[Document]) -> bool:
    """Whether a setting's value is a word that scripts compare it with, or one of a parser's choices."""
    held = re.compile(rf"\b{re.escape(name)}\b['\"\])]*(\.\w+\(\))?$")
    for node in (node for one in scripts for node in ast.walk(ast.parse(one.text))):
        match node:
            case ast.Compare(left=one, comparators=[other]):
                sides: list[ast.AST] = [one, other]
            case ast.Match(subject=one, cases=cases):
                sides = [one, *(part.pattern for part in cases)]
            case ast.Subscript(value=other, slice=one):
                sides = [one, other]
            case _:
                continue
        words = {getattr(part, "value", None) for side in sides for part in ast.walk(side)}
        if value in words and any(held.search(ast.unparse(side)) for side in sides):
            return True
    return False


def _read_by(node: ast.AST) -> Iterator[str]:
    """A name by which a script takes a value: `args.name`, `args["name"]`, or a function's argument."""
    match node:
        case ast.Attribute(attr=name) | ast.arg(arg=name):
            yield name
        case ast.Call(func=ast.Attribute(attr="add_argument"), args=given):
            yield from (str(getattr(one, "value", "")).lstrip("-").replace("-", "_") for one in given)
        case ast.Subscript(slice=ast.Constant(name)) | ast.Call(args=[ast.Constant(name), *_]):
            yield str(name)


def switched_off(documents: Sequence[Document]) -> str:
    """The place where a run leaves DeepSpeed off; empty if another switches it on, or none shows it."""
    files = [Path(one.name).name for one in documents if one.kind == "deepspeed"]
    commanded = any(one.syntax == "shell" for one in documents)  # else a flag may give one of the files
    known = [one for one in documents if commanded or any(file in one.text for file in files)]
    known += [one for one in documents if one.syntax != "python"]
    places = [f"{one.name}:{line}" for one in known if (line := _off(one))]
    return "" if any(map(_on, documents)) or not places else places[0]


def without_deepspeed(document: Document) -> Document:
    """The document without the settings that only DeepSpeed reads."""
    values = {key: value for key, value in document.values.items() if key not in (DS, FILE)}
    marks = {key: mark for key, mark in document.marks.items() if key[0] not in (DS, FILE)}
    kind = "training" if document.has("base_model") else document.kind  # Axolotl's has accelerate's keys
    return replace(document, values=values, marks=marks, kind=kind)


def _on(document: Document) -> bool:
    """Whether a document switches DeepSpeed on, or has words that may."""
    if document.syntax == "python":
        return document.has("deepspeed") or _DEEPSPEED.search(document.text) is not None
    by_file = document.kind == "accelerate" and kind_of(document) == "DEEPSPEED"
    given = any(document.get(key) for key in ("deepspeed", "use_deepspeed", OPEN))
    other = document.has("config_file") and "config_file" not in document.flags  # perhaps unread
    return by_file or given or other or document.get("launcher") == "deepspeed"


def _off(document: Document) -> str:
    """The line and the words with which a document leaves DeepSpeed off."""
    if document.syntax == "python":
        found = _GIVES.search(document.text)
        off = found and "TrainingArguments(deepspeed)" in document.uses and not document.has("deepspeed")
        return f"{line_at(document.text, found.start())}: deepspeed is None" if found and off else ""
    if document.has("deepspeed") and not document.get("deepspeed"):
        return f"{document.line(('deepspeed',))}: deepspeed is empty"
    by_flag = document.get("launcher") == "accelerate" and FILE not in document.flags and document.has(FILE)
    return f"{document.line((FILE,))}: no --use_deepspeed" if by_flag else ""
