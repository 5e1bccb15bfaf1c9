"""Whether a run switches DeepSpeed on: a JSON of its settings alone does not."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from shardwise.lint.document import Document, line_at
from shardwise.lint.rules.accelerate import DS, FILE, kind_of
from shardwise.lint.shell_text import OPEN

_CALLS = re.compile(r"deepspeed\.initialize|DeepSpeedPlugin|DeepSpeedStrategy|HfDeepSpeedConfig")
_GIVES = re.compile(r"\bdeepspeed=(?!=)")  # an argument of the Trainer's


def switched_off(documents: Sequence[Document]) -> str:
    """The place where a run leaves DeepSpeed off; empty if another switches it on, or none shows it."""
    files = [Path(one.name).name for one in documents if one.kind == "deepspeed"]
    commanded = any(one.syntax == "shell" for one in documents)
    sure = [one for one in documents if commanded or any(file in one.text for file in files)]
    known = (*sure, *(one for one in documents if one.syntax != "python"))
    places = [f"{one.name}:{line}" for one in known if (line := _off(one))]
    return "" if any(map(_on, documents)) or not places else places[0]


def without_deepspeed(document: Document) -> Document:
    """The document without the settings that only DeepSpeed reads."""
    values = {key: value for key, value in document.values.items() if key not in (DS, FILE)}
    marks = {key: mark for key, mark in document.marks.items() if key[0] not in (DS, FILE)}
    kind = (
        "training" if document.has("base_model") else document.kind
    )  # Axolotl's, which has accelerate's keys
    return replace(document, values=values, marks=marks, kind=kind)


def _on(document: Document) -> bool:
    """Whether a document switches DeepSpeed on, or has words that may."""
    if document.kind == "deepspeed":
        return False
    if document.syntax == "python":
        return document.has("deepspeed") or _CALLS.search(document.text) is not None
    by_file = document.kind == "accelerate" and kind_of(document) == "DEEPSPEED"
    given = any(document.get(key) for key in ("deepspeed", "use_deepspeed", OPEN))
    other = (
        document.has("config_file") and "config_file" not in document.flags
    )  # accelerate's, perhaps unread
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
