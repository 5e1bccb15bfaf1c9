"""Sections of a file of the user's own, such as `sft_config: {learning_rate: 1e-5}`, read as its top."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.foreign.table import TABLE, targets
from shardwise.lint.schema import names

_ARGUMENTS = frozenset(names("trainer_arguments"))
_ADAPTERS = {"r": "lora_r", "rank": "lora_r", "alpha": "lora_alpha", "dropout": "lora_dropout"}
_OFF = ("enabled", "enable", "use", "use_lora", "use_peft")
_OTHERS = re.compile(r"(?i)dpo|grpo|ppo|orpo|kto|reward|(^|_)(rm|eval|infer|generat|serv|pretrain)")
_LEAST = 3  # arguments of the Trainer that make a section one of a training


def opened(document: Document, scripts: Sequence[Document], said: list[str]) -> Document:
    """The document with the keys of its sections at its top.

    With scripts only where it says what these leave open, and none that they decide.
    """
    if document.kind != "training" or document.syntax not in ("json", "yaml"):
        return document
    sections = {name: one for name, one in document.values.items() if isinstance(one, Mapping)}
    trained = [name for name, one in sections.items() if len(_ARGUMENTS & one.keys()) >= _LEAST]
    mine = [name for name in trained if not _OTHERS.search(name)]
    if not mine:
        return document
    if len(mine) > 1:
        at, which = f"{document.name}:{document.line((mine[0],))}", ", ".join(mine)
        said.append(f"to do: {at}: {which}: give a file with the one of these sections that the run takes")
    places = [(one.get(*key) is None, ".".join(key)) for one in scripts for key in one.marks]
    open_ = {target for is_open, key in places if is_open for target in targets(key, below=True)}
    decided = {target for _, key in places for target in targets(key, below=True)} - open_
    chosen = [name for name in sections if name not in trained or [name] == mine]
    moved = [one for name in chosen for one in _keys(name, sections[name])]
    moved = [one for one in moved if not targets(one[-1], below=False) & decided]
    if scripts and not any(targets(one[-1], below=False) & open_ for one in moved):
        return document
    values, marks = dict(document.values), dict(document.marks)
    for section, key, meant in moved:
        if meant in TABLE["keys"] and f"{section}.{key}" not in TABLE["keys"] and meant not in values:
            values[meant] = sections[section][key]
            marks |= {(meant, *at[2:]): m for at, m in document.marks.items() if at[:2] == (section, key)}
            values[section] = {other: one for other, one in values[section].items() if other != key}
    return replace(document, values=values, marks=marks)


def _keys(name: str, section: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The section and each of its keys, with the name that it has at the top of a file."""
    names_ = _ADAPTERS if re.search("lora|peft", name.lower()) else {}
    if not any(section.get(switch) is False for switch in _OFF):
        held = (key for key, value in section.items() if value is not None and not isinstance(value, Mapping))
        yield from ((name, key, names_.get(key, key)) for key in held)
