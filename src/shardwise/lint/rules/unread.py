"""Settings of one's own that no line reads."""

import ast
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document, every
from shardwise.lint.finding import Hit, training_rule
from shardwise.lint.read import LARGEST_FILE_BYTES, imported
from shardwise.lint.rules.program import calls, tree_of
from shardwise.lint.rules.training import tool_of
from shardwise.lint.schema import names, pattern
from shardwise.lint.script_inputs import options
from shardwise.lint.script_reads import Readers
from shardwise.lint.setup import Setup

_LOADS = {"yaml": re.compile(r"(yaml|OmegaConf)\.\w*load\w*$"), "json": re.compile(r"\bjson\.loads?$")}
_LOADERS = ("safe_load", "full_load", "load", "loads")
_PARSES = ("parse_args", "parse_known_args", "parse_args_into_dataclasses")
_OTHERS, _NEED_NONE = pattern("other_parsers"), names("need_no_reader")
_SHOWN = 8  # names in one finding


def _words_elsewhere(setup: Setup, document: Document) -> set[str]:
    """The words of commands, and of files that scripts import and the command does not name."""
    scripts = setup.of("training", "python")
    shells = [one.text for one in setup.documents if one.syntax == "shell"]  # which give options, too
    texts = shells if document.syntax != "python" else []
    for path in (path for one in scripts for path in imported(one)):
        with suppress(OSError):
            texts.append(read_bounded(path, LARGEST_FILE_BYTES).decode(errors="replace"))
    return {*re.findall(r"\w+", " ".join(texts))}


def _options(document: Document) -> Iterator[tuple[str, int]]:
    """The options of parsers, and the fields of classes that a parser of dataclasses gets; their lines."""
    for call in calls(document, "add_argument"):
        _, name, _ = options(call)
        kinds = {one.arg: ast.unparse(one.value).strip("'") for one in call.keywords}
        if name and kinds.get("action") not in ("version", "help"):
            yield name, call.lineno
    parsed = " ".join(ast.unparse(one) for one in calls(document, "HfArgumentParser"))
    for made in (one for one in tree_of(document).body if isinstance(one, ast.ClassDef) and not one.bases):
        for row in made.body if re.search(rf"\b{made.name}\b", parsed) else ():
            if isinstance(row, ast.AnnAssign) and isinstance(row.target, ast.Name):
                yield row.target.id, row.lineno


@training_rule("warning", "the scripts' own lines: each use of the settings is among the files")
def settings_nobody_reads(document: Document, setup: Setup) -> Iterator[Hit]:
    """A setting is given, and no line of the scripts reads it: it is silently ignored."""
    scripts = [tree_of(one) for one in setup.of("training", "python")]
    program = document.syntax == "python"
    parsed = [*_options(document)] if program else []
    leaves = (key for key, value in every(document.values) if not (isinstance(value, Mapping) and value))
    keys = [*leaves] if document.syntax in _LOADS else []
    if not scripts or not (parsed or keys) or _OTHERS.search(setup.scripts) or tool_of(document):
        return
    read = Readers(scripts)
    starts = read.calls(*_PARSES) if program else read.calls(*_LOADERS)
    sign = _LOADS.get(document.syntax)
    starts = [one for one in starts if program or (sign and sign.search(ast.unparse(one.func)))]
    if not starts:
        return
    read.follow(starts)
    words = read.words | _words_elsewhere(setup, document)
    asked = [((name,), line) for name, line in parsed] + [(key, document.line(key)) for key in keys]
    closed = [row for row in asked if not any(row[0][:n] in read.open for n in range(len(row[0])))]
    unread = [row for row in closed if row[0][-1] not in words and row[0][-1].lower() not in _NEED_NONE]
    if unread and 3 * len(unread) <= 2 * len(asked):  # else the scripts are not those of this file
        said = [f"`{'.'.join(key)}`" for key, _ in unread]
        more = f" and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
        what = f"no line reads {', '.join(said[:_SHOWN])}{more}: silently ignored"
        yield Hit((), what, "read it where it belongs, or remove it", line=unread[0][1])
