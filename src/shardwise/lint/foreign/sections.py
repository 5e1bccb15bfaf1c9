"""A user's own files of settings: sections, `sft_config: {learning_rate: 1e-5}`, and values in Python."""

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from shardwise.job.paths import read_bounded
from shardwise.job.source import Key
from shardwise.lint.document import Document
from shardwise.lint.foreign.table import TABLE, targets
from shardwise.lint.read import LARGEST_FILE_BYTES, found
from shardwise.lint.schema import names
from shardwise.lint.script_inputs import OPEN
from shardwise.lint.script_inputs import sections as all_sections
from shardwise.lint.script_text import read_python

_ARGUMENTS = frozenset(names("trainer_arguments"))
_ADAPTERS = {"r": "lora_r", "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_RUNS = re.compile(r"(?m)^[ \t]*exec\((open\(|\w+\.read\()")
_SETTING = re.compile(r"(?m)^([A-Za-z_]\w*) *= *([^=\s].*)")
_STATEMENT = re.compile(r"(?m)^(?!import |from |#|[A-Za-z_]\w* *=|[\])}\s]|$)")  # of more than settings
_OFF = ("enabled", "enable", "use", "use_lora", "use_peft")
_OTHERS = re.compile(r"(?i)dpo|grpo|ppo|orpo|kto|reward|(^|_)(rm|eval|infer|generat|serv|pretrain)")
_LEAST = 3  # arguments of the Trainer that make a section one of a training


def opened(document: Document, scripts: Sequence[Document], said: list[str]) -> Document:
    """The document with the keys of its sections at its top.

    With scripts only where it says what these leave open, and none that they decide.
    """
    if document.kind != "training" or document.syntax not in ("json", "yaml"):
        return document
    sections = {path: one for path, one in all_sections((), document.values) if path}
    trained = [path for path, one in sections.items() if len(_ARGUMENTS & one.keys()) >= _LEAST]
    mine = [path for path in trained if not _OTHERS.search("_".join(path))]
    if not mine:
        return document
    top = [path for path in mine if len(path) == min(map(len, mine))]
    if len(mine) > 1:
        at, which = f"{document.name}:{document.line(mine[0])}", ", ".join(map(".".join, mine))
        said.append(f"to do: {at}: {which}: give a file with the one of these sections that the run takes")
    places = [(one.get(*key) is None, ".".join(key)) for one in scripts for key in one.marks]
    open_ = {target for is_open, key in places if is_open for target in targets(key, below=True)}
    decided = {target for _, key in places for target in targets(key, below=True)} - open_
    near = [path for path in sections if path not in trained and path[:-1] in ((), top[0][:-1])]
    chosen = [*near, *(top if len(top) == 1 else [])]
    moved = [one for path in chosen for one in _keys(path, sections[path])]
    moved = [one for one in moved if not targets(one[-1], below=False) & decided]
    if scripts and not any(targets(one[-1], below=False) & open_ for one in moved):
        return document
    values, marks = deepcopy(dict(document.values)), dict(document.marks)
    for path, key, meant in moved:
        if meant in TABLE["keys"] and ".".join((*path, key)) not in TABLE["keys"] and meant not in values:
            values[meant] = reduce(getitem, path, values).pop(key)
            inner = {at: mark for at, mark in document.marks.items() if at[: len(path) + 1] == (*path, key)}
            marks |= {(meant, *at[len(path) + 1 :]): mark for at, mark in inner.items()}
    return replace(document, values=values, marks=marks)


def _keys(path: Key, section: Mapping[str, Any]) -> Iterator[tuple[Key, str, str]]:
    """The section and each of its keys, with the name that it has at the top of a file."""
    names_ = _ADAPTERS if re.search("lora|peft", path[-1].lower()) else {}
    if not any(section.get(switch) is False for switch in _OFF):
        held = (key for key, value in section.items() if value is not None and not isinstance(value, Mapping))
        yield from ((path, key, names_.get(key, key)) for key in held)


def with_settings(documents: Sequence[Document], said: list[str]) -> Iterator[Document]:
    """The documents; of a script with `exec(open(...).read())` the values are those of files and flags."""
    commands = [one for one in documents if one.syntax == "shell"]
    running = [one for one in documents if one.syntax == "python" and _RUNS.search(one.text)]
    texts = [one.text for one in documents if one.syntax == "python" and not _STATEMENT.search(one.text)]
    texts += [text for one in commands if running for text in _named(one, documents, said)]
    known = dict(row for held in texts for row in _SETTING.findall(held))
    own = {name for one in running for name, _ in _SETTING.findall(one.text)}
    kept = {key for key, rule in TABLE["keys"].items() if isinstance(rule, str) and rule[:6] != "batch."}
    for one in commands:
        for name in own & one.flags & one.values.keys():
            known[name] = "input()" if OPEN.search(str(one.get(name))) else repr(one.get(name))
    for one in documents:
        if one in running and known:
            lines = [(row.partition("=")[0].rstrip(), row) for row in one.text.split("\n")]
            text = "\n".join(f"{name} = {known[name]}" if name in known else row for name, row in lines)
            yield replace(read_python(text, one.name), cells=one.cells)
        elif one in commands:  # whose flags have done their part
            values = {name: value for name, value in one.values.items() if name not in own & one.flags - kept}
            yield replace(one, values=values, flags=one.flags - (own - kept))
        else:
            yield one


def _named(command: Document, documents: Sequence[Document], said: list[str]) -> Iterator[str]:
    """The texts of the files of settings that a command names after its script, and that nobody gave."""
    given, script = {Path(one.name).name for one in documents}, str(command.get("script"))
    for name in re.findall(r"(?<=[\s=])[\w./-]+\.py\b", command.text.partition(script)[2]):
        there = found([name], Path(command.name).parent)
        text = read_bounded(there[0], LARGEST_FILE_BYTES).decode(errors="replace") if there else ""
        if Path(name).name in given or (text and _STATEMENT.search(text)):
            continue
        place = f"{command.name}:{command.line(('script',))}"
        what = f"assumed: {script} reads {name}"
        said.append(what if there else f"to do: {place}: {name} is not there; add it to --from")
        yield text
