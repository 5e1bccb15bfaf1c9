"""Hydra: one file of settings that a file's `defaults:` and a command make of several."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.document import Document, Mark, every

_PACKAGE = re.compile(r"(?m)^#\s*@package\s+(\S+)")
_NAMED = re.compile(r"config_name\s*=\s*[\"']([\w./-]+)")
_PART = re.compile(r"\$\{([\w.]+)\}")  # `${model.name}`
_MOST, _LONGEST = 20, 1000  # interpolations within one another, and characters of a text with some


def composed(documents: Sequence[Document], said: list[str]) -> list[Document]:
    """The documents, with one in place of those that a script's Hydra puts together; others are left out."""
    scripts = [one for one in documents if one.syntax == "python" and "hydra" in one.text]
    names = [name for one in scripts for name in _NAMED.findall(one.text)]
    roots = [one for one in documents if one.syntax == "yaml" and isinstance(one.get("defaults"), list)]
    if not roots or not scripts:
        return [*documents]
    root = next((one for one in roots if Path(one.name).stem in names), roots[0])
    made = _Made(root, documents, said)
    folders = {path.parent for path in made.used} | {Path(root.name).resolve()}
    rest = list[Document]()
    for one in documents:
        path = Path(one.name).resolve()
        if one is root:
            rest.append(made.document())
        elif one.syntax == "yaml" and path not in made.used and path.parent in folders - {made.folder}:
            said.append(f"left out: {one.name}: {root.name} takes another file of this group")
        elif path not in made.used:
            rest.append(made.without_choices(one) if one.syntax == "shell" else one)
    return rest


class _Made:
    """The settings that a file's `defaults:` give, in their order."""

    def __init__(self, root: Document, documents: Sequence[Document], said: list[str]) -> None:
        self.folder, self._root, self._said = Path(root.name).resolve().parent, root, said
        self._files = {Path(one.name).resolve(): one for one in documents if one.syntax == "yaml"}
        self._given = {key: one.get(key) for one in documents if one.syntax == "shell" for key in one.flags}
        self.used, self._choices = set[Path](), set[str]()
        self._values = dict[str, Any]()
        self._take(root, "", ())

    def _take(self, document: Document, group: str, package: Key) -> None:
        """Put a file's settings, and those of its `defaults:`, below a package."""
        values = {key: value for key, value in document.values.items() if key not in ("defaults", "hydra")}
        items = document.get("defaults")
        items = [*items] if isinstance(items, list) else []
        for one in items if "_self_" in items else [*items, "_self_"]:
            if one == "_self_":
                _merge(self._values, package, values)
                continue
            for name, usual, below in _parts(one):
                inner = f"{group}/{name}".strip("/") if name else group
                chosen = self._given.get(inner) if name else None
                self._choices |= {inner} if isinstance(chosen, str) else set()
                option = chosen if isinstance(chosen, str) else usual
                self._file(inner, option, package if not name else (*package, *below), document)

    def _file(self, group: str, option: str, package: Key, by: Document) -> None:
        if group.startswith("hydra"):
            return
        path = (self.folder / group / option).with_suffix(".yaml").resolve()
        document = self._files.get(path)
        if document is None:
            place = f"{by.name}:{by.line(('defaults',))}"
            name = Path(self._root.name).parent / group / option
            self._said.append(f"to do: {place}: defaults: add {name}.yaml to --from, a part of the settings")
        elif path not in self.used:
            self.used.add(path)
            header = _PACKAGE.search(document.text)
            if header:
                package = () if header[1] == "_global_" else tuple(header[1].split("."))
            self._take(document, group, package)

    def document(self) -> Document:
        """The file with all settings; `${model.name}` is what stands there."""
        values, line = deepcopy(self._values), self._root.line(("defaults",))
        for _ in range(_MOST):
            values = _resolved(values, values)
        marks = {key: mark for key, mark in self._root.marks.items() if key[0] not in ("defaults", "hydra")}
        marks = {key: Mark(line=line) for key, _ in every(values)} | marks
        text = re.sub(r"(?m)^(?=defaults:)", "# ", self._root.text)
        return replace(self._root, values=values, marks=marks, text=text)

    def without_choices(self, command: Document) -> Document:
        """A command without the words that choose files, such as `model=small`."""
        values = {key: value for key, value in command.values.items() if key not in self._choices}
        return replace(command, values=values, flags=command.flags - self._choices)


def _parts(item: Any) -> Iterator[tuple[str, str, Key]]:
    """Group, option, and the package below the file's own, of an item of `defaults:`."""
    rows = item.items() if isinstance(item, Mapping) else [("", item)]
    for name, options in rows:
        group, _, package = re.sub(r"^(override|optional)\s+", "", str(name)).lstrip("/").partition("@")
        below = tuple(part for part in (package or group.replace("/", ".")).split(".") if part)
        for option in options if isinstance(options, list) else [options]:
            if option is not None and (group or isinstance(item, str)):
                yield group, str(option), () if package == "_global_" else below


def _merge(values: dict[str, Any], package: Key, more: Mapping[str, Any]) -> None:
    for name in package:
        inner = values.get(name)
        values[name] = values = inner if isinstance(inner, dict) else {}
    for name, value in more.items():
        if isinstance(value, Mapping) and isinstance(values.get(name), dict):
            _merge(values[name], (), value)
        else:
            values[name] = deepcopy(value)


def _resolved(value: Any, all_: Mapping[str, Any]) -> Any:
    """A value with what its interpolations name, as far as the files say it."""
    if isinstance(value, dict):
        return {key: _resolved(one, all_) for key, one in value.items()}
    if isinstance(value, list):
        return [_resolved(one, all_) for one in value]
    if not isinstance(value, str) or len(value) > _LONGEST:
        return value
    if (alone := _PART.fullmatch(value)) and not isinstance(found := _at(all_, alone[1]), dict | list | None):
        return found
    return _PART.sub(lambda one: _text(_at(all_, one[1]), one[0]), value)


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _text(found: Any, before: str) -> str:
    return str(found) if isinstance(found, str | int | float) and "${" not in str(found) else before
