"""Read a job file and `--set` changes into plain values, with the line of every key.

The dialect is YAML 1.2's core schema, and deliberately smaller than YAML: `1e-4` is a number, `no` and `on`
are text, dates are text. Anchors, aliases and tags are refused. So are keys without a value: `lora:` with
everything below it commented out would silently mean "no LoRA".
"""

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NoReturn

import yaml

from shardwise.errors import JobError, Problem
from shardwise.job import paths

Key = tuple[str, ...]

LARGEST_FILE_BYTES = 1_000_000
DEEPEST_NESTING = 20
_TO_DO = re.compile(r"^# to do: (.*(?:\n#  .*)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a value comes from: `job.yaml:12` or `--set train.steps=5`."""

    kind: Literal["file", "flag"]
    text: str

    def at(self, key: Key) -> str:
        """`job.yaml:12: train.steps`, or the flag."""
        return self.text if self.kind == "flag" else f"{self.text}: {dotted(key)}"


@dataclass
class Document:
    """The values a user wrote, where each key stands, and the problems found so far."""

    name: str
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[Key, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: Key) -> str:
        """`job.yaml:12: train.steps`, with the line of the nearest enclosing key in the file."""
        if near := nearest(key, self.origins):
            return self.origins[near].at(key)
        return f"{self.name}: {dotted(key)}" if key else self.name

    def section(self, key: Key) -> dict[str, Any]:
        """The values of the section that holds a key; empty if there is none."""
        holder: Any = self.values
        for part in key[:-1]:
            holder = holder.get(part) if isinstance(holder, dict) else None
        return holder if isinstance(holder, dict) else {}

    def forget(self, key: Key) -> None:
        """Drop a key and what is below it."""
        self.section(key).pop(key[-1], None)
        drop(key, self.origins)

    def problem(self, what: str, where: str, fix: str) -> None:
        """Note a problem, to be shown together with everything else that is wrong."""
        self.problems.append(Problem(what=what, where=where, fix=fix))


def to_dos(text: str) -> Iterator[tuple[int, str]]:
    """What a job file of `init --from` still asks of its user, and the lines."""
    for comment in _TO_DO.finditer(text):
        asked = " ".join(comment[1].replace("\n#", "").split())
        yield text.count("\n", 0, comment.start()) + 1, asked


def dotted(key: Key) -> str:
    """`("train", "steps")` is `train.steps`."""
    return ".".join(key)


def nearest(key: Key, known: Container[Key]) -> Key:
    """The key, or the nearest section above it, that is known; empty if none is."""
    return next((key[:length] for length in range(len(key), 0, -1) if key[:length] in known), ())


def drop(key: Key, places: dict[Key, Any]) -> None:
    """Remove a key and everything below it."""
    for known in [known for known in places if known[: len(key)] == key]:
        del places[known]


def walk(node: yaml.Node, above: Key = ()) -> Iterator[tuple[Key, yaml.Node | None, yaml.Node]]:
    """Yield (key, its node, its value's node) of everything below a node.

    An item of a list has its index as key, and no node for it.
    """
    pairs: list[tuple[str, yaml.Node | None, yaml.Node]] = []
    if isinstance(node, yaml.SequenceNode):
        pairs = [(str(index), None, item) for index, item in enumerate(node.value)]
    elif isinstance(node, yaml.MappingNode):
        pairs = [(str(key_node.value), key_node, value) for key_node, value in node.value]
    for name, key_node, value in pairs:
        yield (*above, name), key_node, value
        yield from walk(value, (*above, name))


class _Loader(yaml.SafeLoader):
    """Composes nodes under the rules above; every key is text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's name)
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if getattr(event, "anchor", None):
            _refuse(event, "anchors and aliases (&, *) are not part of a job file", "write the value out")
        if getattr(event, "tag", None):
            _refuse(event, f"tags such as {event.tag} are not part of a job file", "write the plain value")
        if self.depth > DEEPEST_NESTING:
            _refuse(event, f"more than {DEEPEST_NESTING} levels of nesting", "")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(parent, yaml.MappingNode) and index is None and node is not None:  # it is a key
            if not isinstance(node, yaml.ScalarNode):
                _refuse(event, "a key must be plain text", "remove the leading `?` or `[`")
            node.tag = "tag:yaml.org,2002:str"
        return node


class _Dumper(yaml.SafeDumper):
    """Writes what both the rules above and YAML 1.1's read alike."""


def _refuse(event: Any, what: str, fix: str) -> NoReturn:
    raise yaml.MarkedYAMLError(problem=what, problem_mark=event.start_mark, note=fix)


_FLOAT = r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+|[-+]?\.inf|\.nan"
for _tag, _pattern, _first in (
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", "true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", "[-+]?(?:0|[1-9][0-9]{0,17})", list("-+0123456789")),
    ("float", _FLOAT, list("-+.0123456789")),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), _first)


def job_text(values: Mapping[str, Any]) -> str:
    """The text of a job file with these values. Text that any reader of YAML takes for a number is quoted."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def job_values(text: str) -> Any:
    """The values of a job file without their origins. YAMLError where it is none."""
    return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader


def read_file(path: Path) -> Document:
    """Read the values of a job file; JobError if it is missing, not text, or not YAML.

    Findings about single keys are collected in `Document.problems`, to be shown with everything else.
    """
    document = Document(name=str(path))
    try:
        node = yaml.compose(_text(path), Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        what, line, fix = syntax_problem(error)
        raise JobError(what, where=f"{path}:{line}" if line else str(path), fix=fix) from None
    except yaml.YAMLError as error:
        raise JobError(f"not YAML: {error}".splitlines()[0], where=str(path)) from None
    if node is None:
        what = "the job file is empty"
        raise JobError(what, where=str(path), fix="`shardwise init` writes a commented one")
    if not isinstance(node, yaml.MappingNode):
        what = f"the job file holds {'a list' if isinstance(node, yaml.SequenceNode) else 'a single value'}"
        fix = "a job is made of `key: value` lines; `shardwise init` writes a commented example"
        raise JobError(what, where=f"{path}:{node.start_mark.line + 1}", fix=fix)
    document.values = _values(node, (), None, document)
    return document


def apply(document: Document, changes: Sequence[str]) -> None:
    """Write each `key=value` of `--set` into the document; the value is read as in the job file."""
    for text in changes:
        flag = Origin(kind="flag", text=f"--set {text}")
        name, equals, value = text.partition("=")
        key: Key = tuple(name.strip().split("."))
        if not equals or not all(key):
            document.problem(f"`{flag.text}` is not key=value", "", "for example --set train.steps=20")
        elif _make_sections(document, key, flag):
            before = document.section(key).get(key[-1])
            document.forget(key)
            now = document.section(key)[key[-1]] = _flag_value(value, key, flag, document)
            both = isinstance(before, dict) and isinstance(now, dict)
            lost = set(before or ()) - set(now or ()) if both else None
            if lost and len(key) == 1 and key != ("strategy",):
                what = f"`{flag.text}` would drop {', '.join(sorted(lost))} of `{key[0]}`"
                fix = " ".join(f"--set {key[0]}.{part}={json.dumps(now[part])}" for part in now)
                document.problem(what, "", f"key by key: {fix}")


def _make_sections(document: Document, key: Key, flag: Origin) -> bool:
    """Make the sections above a key where they are absent; False if there is something else."""
    for above in (key[:length] for length in range(1, len(key))):
        holder = document.section(above)
        below = holder.get(above[-1])
        if below is None:
            holder[above[-1]] = {}
            document.origins[above] = flag
        elif not isinstance(below, dict):
            what = f"`{flag.text}` sets a part of `{dotted(above)}`, which is {below!r}"
            document.problem(what, document.where(above), f"--set {dotted(above)}={{...}} replaces all of it")
            return False
    return True


def _flag_value(text: str, key: Key, flag: Origin, document: Document) -> Any:
    try:
        node = yaml.compose(text, Loader=_Loader) or yaml.ScalarNode("tag:yaml.org,2002:null", "")
    except yaml.YAMLError as error:
        what = f"not YAML: {error}".splitlines()[0]
        if isinstance(error, yaml.MarkedYAMLError):
            what, _, _ = syntax_problem(error)
        document.problem(what, flag.text, "quote the value for the shell and for YAML")
        return None
    document.origins[key] = flag
    return _values(node, key, flag, document)


def _values(node: yaml.Node, above: Key, flag: Origin | None, document: Document) -> Any:
    """Return the values of a node; note the origins of the keys below it, and problems."""

    def origin(key_node: yaml.Node) -> Origin:
        return flag or Origin(kind="file", text=f"{document.name}:{key_node.start_mark.line + 1}")

    for key, key_node, value in chain([(above, None, node)], walk(node, above)):
        if key_node is not None:
            document.origins[key] = origin(key_node)
        if isinstance(value, yaml.ScalarNode):
            _check_scalar(value, nearest(key, document.origins), document)
        elif isinstance(value, yaml.MappingNode):
            first: dict[str, tuple[yaml.Node, yaml.Node]] = {}
            for inner, item in value.value:
                if first.setdefault(inner.value, (inner, item))[0] is not inner:
                    name = (*key, inner.value)
                    what = f"`{dotted(name)}` is given twice, first in {origin(first[inner.value][0]).text}"
                    document.problem(what, origin(inner).at(name), "keep one of the two")
            value.value = list(first.values())  # the first counts, to keep the other problems few
    return yaml.constructor.SafeConstructor().construct_document(node)


def _check_scalar(node: yaml.ScalarNode, key: Key, document: Document) -> None:
    where = document.where(key)
    if node.tag.endswith(":null") and node.value == "":
        fix = "give it one, remove the line, or write `{}` for a section with only defaults"
        document.problem(f"`{dotted(key)}` has no value", where, fix)
    elif any(character == "\0" or "\ud800" <= character <= "\udfff" for character in node.value):
        what = f"`{dotted(key)}` holds a NUL or half a surrogate pair, which is not a character"
        document.problem(what, where, "write the text in UTF-8")


def _text(path: Path) -> str:
    try:
        raw = paths.read_bounded(path, LARGEST_FILE_BYTES)
    except FileNotFoundError:
        fix = f"{paths.nearest(path)}; `shardwise init` writes one; a model's name goes behind --model"
        raise JobError(f"there is no job file {path}", fix=fix) from None
    except IsADirectoryError:
        raise JobError(f"{path} is a folder, not a job file", fix="name the YAML file in it") from None
    except OSError as error:
        raise JobError(f"the job file cannot be read: {error.strerror}", where=str(path)) from None
    if len(raw) > LARGEST_FILE_BYTES:
        what = f"the file has more than {LARGEST_FILE_BYTES:,} bytes: too large for a job file"
        fix = "name the job file; the data belongs under data.train inside it"
        raise JobError(what, where=str(path), fix=fix)
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        fix = f"save it as UTF-8: iconv -f LATIN1 -t UTF-8 {path}"
        raise JobError("the job file is not UTF-8 text", where=f"{path}:{line}", fix=fix) from None


def syntax_problem(error: yaml.MarkedYAMLError) -> tuple[str, int | None, str]:
    """(what is wrong, its line, how to fix it) of a text that is not YAML."""
    mark, problem = error.problem_mark or error.context_mark, error.problem or ""
    line = mark.line + 1 if mark else None
    if error.note is not None:
        return problem, line, error.note
    fix = "check indentation, quotes and brackets on this line and the one before"
    for part, better in (
        ("'\\t'", "indent with spaces, not tabs"),
        ("another document", "one document per file: remove the second `---`"),
        ("mapping values are not allowed", "put text with `: ` in quotes, and check the indentation"),
    ):
        fix = better if part in problem else fix
    return f"not YAML: {problem}" + (f" ({error.context})" if error.context else ""), line, fix
