"""Reads a job file into plain values, and remembers the line of every key.

The dialect is YAML 1.2's core schema, on purpose smaller than YAML: `1e-4` is a number, `no` and `on` are
text, dates are text; anchors, aliases and tags are refused, and so are keys without a value, because
`lora:` with everything below it commented out would silently mean "no LoRA".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from shardwise.errors import JobError, Problem
from shardwise.job import paths

Key = tuple[str, ...]

LARGEST_FILE_BYTES = 1_000_000
DEEPEST_NESTING = 20


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value comes from: `job.yaml:12`, `--set train.steps=5` or `default`."""

    kind: Literal["file", "flag", "default"]
    text: str


@dataclass
class Document:
    """The values a user wrote, where each key stands, and what is already known to be wrong."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: Key) -> str:
        """`job.yaml:12: train.steps`, or the nearest enclosing key that stands in the file."""
        for length in range(len(key), 0, -1):
            origin = self.origins.get(key[:length])
            if origin is not None:
                return origin.text if origin.kind == "flag" else f"{origin.text}: {dotted(key)}"
        return f"{self.name}: {dotted(key)}" if key else self.name

    def forget(self, key: Key) -> None:
        """Drops a key and what is below it."""
        holder: Any = self.values
        for part in key[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        if isinstance(holder, dict):
            holder.pop(key[-1], None)
        for known in [known for known in self.origins if known[: len(key)] == key]:
            del self.origins[known]


def dotted(key: Key) -> str:
    """`("train", "steps")` is `train.steps`."""
    return ".".join(key)


class _Loader(yaml.SafeLoader):
    """Composes nodes under the rules above; never constructs objects."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's name)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None):
            raise _refused(
                event, "anchors and aliases (&, *) are not part of a job file", "write the value out"
            )
        if getattr(event, "tag", None):
            raise _refused(
                event, f"tags such as {event.tag} are not part of a job file", "write the plain value"
            )
        if self.depth > DEEPEST_NESTING:
            raise _refused(event, f"more than {DEEPEST_NESTING} levels of nesting", "")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _resolve(tag: str, pattern: str, first: str) -> None:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(pattern), list(first))


_INTEGER = r"[-+]?(?:0|[1-9][0-9]{0,17})"
_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
_resolve("null", r"^(?:~|null|Null|NULL|)$", "~nN")
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^$"), [""])
_resolve("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF")
_resolve("int", rf"^(?:{_INTEGER})$", "-+0123456789")
_resolve("float", rf"^(?:{_FLOAT})$", "-+.0123456789")


def _refused(event: Any, what: str, fix: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark, note=fix)


def read_file(path: Path) -> Document:
    """The values of a job file.

    Raises:
        JobError: the file is missing, not text, or not YAML. Findings about single keys are collected in
            `Document.problems` instead, to be shown together with everything else that is wrong.
    """
    document = Document(name=str(path))
    node = _compose(_text(path), document.name)
    if node is None:
        raise JobError(
            "the job file is empty", where=document.name, fix="`shardwise init` writes a commented one"
        )
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
        raise JobError(
            f"the job file holds {kind}; a job is made of `key: value` lines",
            where=f"{document.name}:{node.start_mark.line + 1}",
            fix="`shardwise init` writes a commented example",
        )
    document.values = _mapping(node, (), document, None)
    return document


def read_value(text: str, key: Key, origin: Origin, document: Document) -> Any:
    """The value in `--set key=text`, noting its origin and problems in the document."""
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        document.problems.append(
            Problem(what=_syntax(error), where=origin.text, fix="quote the value for the shell and for YAML")
        )
        return None
    if node is None:
        document.problems.append(_empty(key, origin.text))
        return None
    document.origins[key] = origin
    return _value(node, key, document, origin)


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        fix = f"{paths.nearest(path)}; `shardwise init` writes one"
        raise JobError(f"there is no job file {path}", fix=fix) from None
    except IsADirectoryError:
        raise JobError(f"{path} is a folder, not a job file", fix="name the YAML file in it") from None
    except OSError as error:
        raise JobError(f"the job file cannot be read: {error.strerror}", where=str(path)) from None
    if len(raw) > LARGEST_FILE_BYTES:
        raise JobError(
            f"the file has {len(raw):,} bytes: too large for a job file",
            where=str(path),
            fix="name the job file; the data belongs under data.train inside it",
        )
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise JobError(
            "the job file is not UTF-8 text",
            where=f"{path}:{line}",
            fix=f"save it as UTF-8: iconv -f LATIN1 -t UTF-8 {path}",
        ) from None


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise JobError(_syntax(error), where=where, fix=_syntax_fix(error)) from None
    except yaml.YAMLError as error:
        raise JobError(f"not YAML: {error}".splitlines()[0], where=name) from None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    if error.note is not None:
        return str(error.problem)
    return f"not YAML: {error.problem}" + (f" ({error.context})" if error.context else "")


def _syntax_fix(error: yaml.MarkedYAMLError) -> str:
    if error.note is not None:
        return error.note
    problem = error.problem or ""
    if "'\\t'" in problem:
        return "indent with spaces, not tabs"
    if "another document" in problem:
        return "one job per file: remove the second `---`"
    if "mapping values are not allowed" in problem:
        return "put text that holds `: ` in quotes, and check the indentation"
    return "check indentation, quotes and brackets on this line and the one before"


def _empty(key: Key, where: str) -> Problem:
    return Problem(
        what=f"`{dotted(key)}` has no value",
        where=where,
        fix="give it one, remove the line, or write `{}` for a section with only defaults",
    )


def _mapping(node: yaml.MappingNode, above: Key, document: Document, flag: Origin | None) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = f"{document.name}:{key_node.start_mark.line + 1}"
        origin = flag or Origin(kind="file", text=line)
        if not isinstance(key_node, yaml.ScalarNode):
            document.problems.append(
                Problem(
                    what="a key must be plain text", where=origin.text, fix="remove the leading `?` or `[`"
                )
            )
            continue
        key = (*above, key_node.value)
        if key_node.value in values:
            first = document.origins[key].text
            document.problems.append(
                Problem(
                    what=f"`{dotted(key)}` is given twice, first in {first}",
                    where=document.name and f"{line}: {dotted(key)}",
                    fix="keep one of the two",
                )
            )
            continue
        document.origins[key] = origin
        values[key_node.value] = _value(value_node, key, document, flag)
    return values


def _value(node: yaml.Node, key: Key, document: Document, flag: Origin | None) -> Any:
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, key, document, flag)
    if isinstance(node, yaml.SequenceNode):
        return [_value(item, key, document, flag) for item in node.value]
    assert isinstance(node, yaml.ScalarNode)
    kind = node.tag.rpartition(":")[2]
    if kind == "null" and node.value == "":
        document.problems.append(_empty(key, flag.text if flag else document.where(key)))
        return None
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        document.problems.append(
            Problem(
                what=f"`{dotted(key)}` holds half a surrogate pair, which is no character",
                where=flag.text if flag else document.where(key),
                fix="write the text in UTF-8",
            )
        )
    return _scalar(kind, node.value)


def _scalar(kind: str, text: str) -> Any:
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        return int(text)
    if kind == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text
