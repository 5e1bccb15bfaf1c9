"""DeepSpeed files as scripts have them: a script may load one, and set keys of it."""

import ast
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from shardwise.job.source import drop
from shardwise.lint.document import AUTO, Document, Mark
from shardwise.lint.rules.program import calls, known_values, tree_of
from shardwise.lint.script_names import Said, changes_by, path_of
from shardwise.lint.script_run import as_run
from shardwise.lint.script_settings import ARGUMENT_CLASSES, CONFIGURATIONS, open_value
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values
from shardwise.lint.setup import Setup

_LOADS = re.compile("load|to_container")
_READERS = ("initialize", "HfDeepSpeedConfig", "DeepSpeedPlugin", "DeepSpeedStrategy", *ARGUMENT_CLASSES)


def with_what_scripts_set(setup: Setup) -> Setup:
    """The setup with values that scripts set in the DeepSpeed files that they load."""
    scripts = [one for one in setup.of("training", "python") if _LOADS.search(one.text)]
    documents = [*setup.documents]
    for script in scripts:
        run = as_run(script, [one for one in setup.of("training") if one.name != script.name])
        for at, one in enumerate(documents):
            if one.kind == "deepspeed":
                documents[at] = _changed(one, _set(script, one, setup) | _set(run, one, setup), script)
    return replace(setup, documents=tuple(documents))


def _set(script: Document, config: Document, setup: Setup) -> Said:
    """What a script sets in a file that it loads and gives to DeepSpeed."""
    known, said = known_values(script, setup, config), Said()
    for node in _given(script):
        said |= known.changes(node) or _written(script, node, known)
    return {key: (script.place(line)[1], value) for key, (line, value) in said.items()}


def _written(script: Document, given: ast.expr, known: Values) -> Said:
    """What the lines above set in a dict of which no file is known: Hydra makes it, or a function does."""
    said, name = Said(), ast.unparse(given)
    if known.entries(given)[()][1] == {}:
        return said  # `known` follows it
    nodes = (node for node in ast.walk(tree_of(script)) if getattr(node, "lineno", 0) <= given.lineno)
    pairs = ((node, part) for node in nodes for part in ast.iter_child_nodes(node))
    for change in (one for node, part in pairs for one in changes_by(part, node)):
        holder, path, value, _ = change
        while isinstance(holder, ast.Subscript) and path is not None:
            key, holder = path_of(holder.slice), holder.value
            path = (*key, *path) if key else None
        if path is not None and ast.unparse(holder) == name:
            said |= known.entries(value, path) if value else {path: (given.lineno, UNKNOWN)}
    return said


def _given(script: Document) -> Iterator[ast.expr]:
    for call in calls(script, *_READERS):
        yield from (one.value for one in call.keywords if one.arg in CONFIGURATIONS)
        yield from call.args[:1] if ast.unparse(call.func).endswith("HfDeepSpeedConfig") else ()


def _changed(config: Document, said: Said, script: Document) -> Document:
    """The file with these values; of those that only a run knows, each part is unknown."""
    values, marks = deepcopy(dict(config.values)), dict(config.marks)
    places = {key: (script.name, line) for key, (line, _) in said.items() if key}
    unknown = {key for key in places if said[key][1] == UNKNOWN}
    if said.get((), (0, {}))[1] == UNKNOWN:  # a function may fill in what the file leaves open
        unknown |= {key for key in marks if config.get(*key) == AUTO}
    for key in places:
        holder: Any = values
        for part in key[:-1]:
            holder[part] = holder = holder[part] if isinstance(holder.get(part), dict) else {}
        holder[key[-1]] = open_value(key) if key in unknown else deepcopy(said[key][1])
        drop(key, marks)
        marks[key] = config.marks.get(key, Mark(line=1))
    known = replace(config, values=values, marks=marks, unknown=config.unknown | unknown)
    return replace(known, set_at={**config.set_at, **places})
