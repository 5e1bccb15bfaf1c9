"""LightningCLI: the calls that it makes of a file of settings and a command, as a script would write them."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_text import read_python

_SECTIONS = ("model", "data", "trainer", "optimizer", "lr_scheduler")


def with_calls(documents: Sequence[Document]) -> list[Document]:
    """The documents; settings of LightningCLI are arguments of calls then, and their files are left out."""
    if not any(one.syntax == "python" and "LightningCLI(" in one.text for one in documents):
        return [*documents]
    held = [one for one in documents if one.syntax == "yaml" and {*_SECTIONS[:3]} & one.values.keys()]
    settings = dict[str, Any]()
    for one in held:
        settings |= deepcopy(dict(one.values))
    commands = [one for one in documents if one.syntax == "shell"]
    for key, value in ((key, one.values[key]) for one in commands for key in one.flags & one.values.keys()):
        if key.partition(".")[0] in (*_SECTIONS, "seed_everything"):
            _set(settings, key.split("."), value)
    made = {one.name: text for one in documents if settings and (text := _with_calls(one, settings))}
    if not made:
        return [*documents]
    rest = [_without_settings(one) for one in documents if one not in held]
    return [read_python(made[one.name], one.name) if one.name in made else one for one in rest]


def _set(settings: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set what a command's flag says: `--model.lr`, which may be one of a class's `init_args`."""
    for part in path[:-1]:
        inner = settings.get(part)
        settings[part] = settings = inner if isinstance(inner, dict) else {}
        settings = settings.get("init_args", settings) if path[-1] != "class_path" else settings
    settings[path[-1]] = value


def _without_settings(document: Document) -> Document:
    """A command without the flags that are arguments of the calls now."""
    flags = {
        one for one in document.flags if one.partition(".")[0] in (*_SECTIONS, "config", "seed_everything")
    }
    values = {key: value for key, value in document.values.items() if key not in flags}
    marks = {key: mark for key, mark in document.marks.items() if key[0] not in flags}
    return replace(document, values=values, marks=marks, flags=document.flags - flags)


def _with_calls(script: Document, settings: Mapping[str, Any]) -> str:
    """The script's text with the calls in place of LightningCLI's; empty where it has none."""
    if script.syntax != "python" or "LightningCLI(" not in script.text:
        return ""
    calls = (one for one in ast.walk(ast.parse(script.text)) if isinstance(one, ast.Call))
    call = next((one for one in calls if name_of(one.func).endswith("LightningCLI")), None)
    if call is None:
        return ""
    given = dict(zip(("model_class", "datamodule_class"), map(ast.unparse, call.args), strict=False))
    given |= {str(one.arg): ast.unparse(one.value) for one in call.keywords}
    text = ", ".join(_parts(given, settings))
    return script.text.replace(ast.get_source_segment(script.text, call) or "", f"({text})", 1)


def _parts(given: Mapping[str, str], settings: Mapping[str, Any]) -> Iterator[str]:
    """The calls, in one line, so that lines keep their numbers."""
    if isinstance(seed := settings.get("seed_everything"), int) and seed is not True:
        yield f"seed_everything({seed})"
    for name in ("optimizer", "lr_scheduler"):
        if name in settings:
            yield _written(settings[name])
    made = [
        _written(settings.get(name, {}), given.get(kind, ""))
        for name, kind in (("model", "model_class"), ("data", "datamodule_class"))
    ]
    yield f"L.Trainer({_arguments(settings.get('trainer', {}))}).fit({', '.join(filter(None, made))})"


def _written(value: Any, name: str = "") -> str:
    """A value as a script writes it; a mapping with the path of a class is a call."""
    if isinstance(value, Mapping) and (name or "class_path" in value):
        path = str(value.get("class_path", name)).rpartition(".")[2]
        return f"{path}({_arguments(value.get('init_args', {}) if 'class_path' in value else value)})"
    return repr(value) if value != {} else ""


def _arguments(section: Any) -> str:
    rows = section.items() if isinstance(section, Mapping) else ()
    return ", ".join(
        f"{name}={_written(one)}" for name, one in rows if str(name).isidentifier() and one != {}
    )
