"""DeepSpeed files as scripts have them: a script may load one, and set keys of it."""

import ast
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

from shardwise.job.source import drop
from shardwise.lint.document import AUTO, Document, Mark
from shardwise.lint.rules.training import calls, known_values
from shardwise.lint.script_names import Said
from shardwise.lint.script_run import as_run
from shardwise.lint.script_settings import CONFIGURATIONS, open_value
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.setup import Setup

_READERS = ("initialize", "HfDeepSpeedConfig", "DeepSpeedPlugin", "DeepSpeedStrategy", "TrainingArguments")


def with_what_scripts_set(setup: Setup) -> Setup:
    """The setup with values that scripts set in the DeepSpeed files that they load."""
    scripts = [one for one in setup.of("training") if one.syntax == "python" and "load" in one.text]
    documents = [*setup.documents]
    for script in scripts:
        run = as_run(script, [one for one in setup.of("training") if one.name != script.name])
        for at, one in enumerate(documents):
            if one.kind == "deepspeed" and one.syntax == "json":
                said = _set(script, one, setup) | _set(run, one, setup)
                documents[at] = _changed(one, said, script)
    return replace(setup, documents=tuple(documents))


def _set(script: Document, config: Document, setup: Setup) -> Said:
    """What a script sets in a file that it loads and gives to DeepSpeed."""
    known, said = known_values(script, setup, config), Said()
    for node in _given(script):
        said |= known.changes(node)
    return {key: (script.place(line)[1], value) for key, (line, value) in said.items()}


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
