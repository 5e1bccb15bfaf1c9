"""Settings whose names say that they decide something of a job, where no reader has understood them.

A job without LoRA must not come out of files that name it. Such a setting is a to do, and no default of a
tool stands for what it may say.
"""

import ast
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import JobError
from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document, UnreadableError, line_at
from shardwise.lint.foreign.table import TABLE, leaves, plain_number
from shardwise.lint.read import LARGEST_FILE_BYTES, found, read, text_of
from shardwise.lint.script_inputs import fields, name_of, options
from shardwise.lint.script_text import without_classes

_OF_DATA = TABLE["concepts_of_data"]
_ALL = TABLE["concepts"] | _OF_DATA
_CONCEPTS = {key: re.compile(pattern, re.IGNORECASE) for key, pattern in _ALL.items()}
_OTHER = re.compile(TABLE["not_training"], re.IGNORECASE)
_METHOD = re.compile(r"(?i)(?<![a-z])(dpo|grpo|ppo|orpo|kto|reward)")  # of another run than this one
_WRITE = {"batch.micro": "train.micro_batch, train.global_batch", "batch.accumulation": "train.global_batch"}
_STEPS = re.compile("steps?$|iter", re.IGNORECASE)
_LORA, _OF_PEFT = re.compile("[Ll]o[Rr][aA]|(^|_)lora"), ("peft", "unsloth", "trl", "swift")
_SET, _COMMON = re.compile(r"\b(\w+)[\"']? *[:=](?!=)"), ("model.source", "data.train", "another loss")
CALLBACKS = re.compile(TABLE["words"]["callbacks"])
_SEEDS = {"set_seed", "manual_seed", "seed_everything"}
_CALLS = re.compile(
    rf"(?<!class )\b({'|'.join(TABLE['calls'].keys() - _SEEDS)}|from_pretrained|LoraConfig)\("
)
_READS, _ROWS = re.compile(TABLE["rows_are_read"]), re.compile(TABLE["files_of_rows"])
_HELD_OUT = "data.eval_fraction"
_OWN_LOSS = "another loss"  # which no key of a job has
_LONGEST = 80  # characters of a value that are shown
_LOSS = "it changes the loss, and a job has only that of the next token"


Setting = tuple[str, int, Any]  # name, line, value; None where the text does not show it


def suspects(documents: Sequence[Document], known: set[str], said: list[str]) -> dict[str, tuple[str, str]]:
    """By key of the job, the place of what may decide it, and its value if that is a likely one, as JSON.

    `known`: keys that something decides.
    """
    said_of = dict[str, tuple[str, str]]()
    flags = {flag for one in documents for flag in one.flags}  # which count more than a script's default
    settings = [(one, *each) for one in documents for each in _settings(one)]
    settings = [one for one in settings if one[0].syntax != "python" or one[1] not in flags]
    settings = [one for one in settings if not _METHOD.search(one[1])]
    settings = [one for one in settings if not (_READS.search(one[1]) and _is_configuration(one[0], one[3]))]
    for concept, pattern in _CONCEPTS.items():
        key = concept
        if any(one.startswith((key, *TABLE["instead_of_concepts"].get(key, ()))) for one in known):
            continue
        write = _WRITE.get(key, key)
        if any(one.startswith("to do") and write in one for one in said):
            continue
        held = [one for one in settings if one[0].syntax in ("yaml", "json") or key not in _OF_DATA]
        named = [one for one in held if _is_of(key, one[1], one[3])]
        given = [one for one in named if one[3] not in (None, 0, "", "none", "None")]
        if key == _OWN_LOSS:  # and what a script computes of losses to show them
            given = [one for one in given if one[3] is not ... or one[0].syntax != "python"]
            given = [one for one in given if not _of_another_method(one[1], documents)]
        given = [one for one in given if pattern.search(one[1]) or pattern.search(_last(one[1]))] or given
        switched = any(value is True or (value is ... and one.syntax != "python") for one, *_, value in given)
        off = any(value is False for *_, value in named)  # `use_lora=False`
        if not given or (off and not switched):
            continue
        document, _, line, _ = given[0]
        words = [name + _shown(value) for one, name, _, value in given if one is document]
        place = f"{document.name}:{line}"
        names = ", ".join(dict.fromkeys(words[:3]))
        key = "train.steps" if concept == "train.epochs" and _STEPS.search(given[0][1]) else concept
        write = _WRITE.get(key, key)
        what = _LOSS if key == _OWN_LOSS else f"not understood; write {write}"
        if until := _likely(key, given, any(one.syntax == "python" for one in documents)):
            first, several, _ = write.partition(", ")
            what += f"; until then {first} {until}" if several else f"; until then {until}"
        said.append(f"to do: {place}: {names}: {what}")
        said_of[key] = place, until
    return said_of


def _is_configuration(script: Document, path: Any) -> bool:
    """Whether a file that a script opens has settings of DeepSpeed, and no rows."""
    there = found([path], Path(script.name).parent) if str(path).endswith(".json") else []
    with suppress(UnreadableError, OSError, ValueError, JobError):
        return any(read(text_of(one, ""), one.name).kind == "deepspeed" for one in there)
    return False


def _likely(key: str, given: Sequence[tuple[Document, str, int, Any]], scripts: bool) -> str:
    """What a setting says, as JSON, if it is a likely value of the key; empty if a script may say another."""
    bounds, value = TABLE["likely"].get(key, ()), given[0][3]
    here = key in TABLE["likely_in_scripts"]  # a script's constant decides it, too
    if not here and (given[0][0].syntax == "python" or len({repr(value) for *_, value in given}) > 1):
        return ""
    number = value if value is True else plain_number(value)
    kinds = {*map(type, bounds), int} if float in map(type, bounds) else {*map(type, bounds)}
    fits = type(number) in kinds and bounds[0] <= number <= bounds[1]
    return json.dumps(number) if fits and not (scripts and key in _OF_DATA) else ""


def not_followed(key: str, documents: Sequence[Document]) -> str:
    """What a script calls for the rows or the model, where that did not show which they are; else empty."""
    makes = re.compile(TABLE["not_followed"][key])
    for one in (one for one in documents if one.syntax == "python" and one.kind == "training"):
        for at, row in enumerate(one.text.split("\n"), 1):
            if called := makes.search(row):
                return f"; {one.name}:{at}: {called[1]}() was not followed"
    return ""


def decides(script: Path) -> bool:
    """Whether a script may decide a part of a job: it calls a library for one, or has a setting of one."""
    text = read_bounded(script, LARGEST_FILE_BYTES).decode(errors="replace")
    text = without_classes(without_classes(text, CALLBACKS), _METHOD)
    patterns = [one for key, one in _CONCEPTS.items() if key not in (*_COMMON, *_OF_DATA)]
    named = {name for name in _SET.findall(text) if not _OTHER.search(name)}
    return bool(_CALLS.search(text)) or any(one.search(name) for one in patterns for name in named)


def _is_of(key: str, name: str, value: Any) -> bool:
    """Whether a setting may decide the key: by its name, or by a value such as `my-run-qlora`."""
    own_word = key in (_OWN_LOSS, "train.save_every", *_OF_DATA)
    if isinstance(value, str) if key == _HELD_OUT else not own_word and _OTHER.search(_last(name)):
        return False  # the name of a split; what names another thing
    if key == "data.train" and _READS.search(name) and isinstance(value, str):
        return bool(_ROWS.search(value))
    in_value = key.startswith("model.") and isinstance(value, str) and _CONCEPTS[key].search(value)
    return bool(_CONCEPTS[key].search(name) or _CONCEPTS[key].search(_last(name)) or in_value)


def _of_another_method(name: str, documents: Sequence[Document]) -> bool:
    """Whether scripts give a setting to calls of other methods alone: `DPOConfig(beta=args.beta)`."""
    taken = re.compile(rf"\b(\w+)\((?:[^()]|\([^()]*\)){{0,2000}}?\b{re.escape(_last(name))} *=(?!=)")
    called = [one for part in documents for one in taken.findall(part.text) if part.syntax == "python"]
    return bool(called) and all(map(_METHOD.search, called))


def _last(name: str) -> str:
    """The last part of a key, with the index of an item: `betas.0` of `optim.betas.0`."""
    return re.sub(r"^.*\.(?!\d+$)", "", name)


def _shown(value: Any) -> str:
    text = " ".join(str(value).split()) if isinstance(value, int | float | str) else ""
    return f" {text}" if text and not isinstance(value, bool) and len(text) <= _LONGEST else ""


def _settings(document: Document) -> Iterator[Setting]:
    """Of a script its flags, fields, constants and arguments; of other files all keys."""
    if document.syntax != "python":
        if document.kind != "deepspeed":
            for key, value in leaves(document.values):
                yield key, document.line(tuple(key.split("."))), value
            for name in sorted(document.flags - document.values.keys()):  # a script has taken it
                word = re.escape(name).replace("_", "[-_]")
                there = re.search(rf"--{word}(?![\w-])[ =]*(\S*)", document.text)
                if there:
                    given = there[1].strip("'\"\\")
                    words = {"": ..., "true": ..., "false": False}
                    known = ... if given.startswith("-") else words.get(given.lower(), given)
                    yield name, line_at(document.text, there.start()), known
        return
    with suppress(SyntaxError, ValueError):
        own = "LoraConfig" in document.text  # which is read, or not taken
        for node in ast.walk(ast.parse(document.text)):
            yield from (one for one in _of(node) if not own or one[0] != "get_peft_model")


def _of(node: ast.AST) -> Iterator[Setting]:
    match node:
        case ast.Call(func=ast.Attribute(attr="add_argument")):
            _, name, default = options(node)
            yield name, node.lineno, _constant(default)
        case ast.Call(func=called, args=[ast.Constant(str(path)), *more]) if _READS.search(name_of(called)):
            if not {one.value for one in more if isinstance(one, ast.Constant)} & {"w", "a", "wb", "w+"}:
                yield name_of(called).rpartition(".")[2], node.lineno, path
        case ast.Call(func=called) if name_of(called).endswith("get_peft_model"):
            yield "get_peft_model", node.lineno, "is called"
        case ast.Call(func=called, keywords=given) if name_of(called).endswith("partial"):
            yield from ((one.arg, one.value.lineno, _constant(one.value)) for one in given if one.arg)
        case ast.ImportFrom(module=str(module), names=given) if module.partition(".")[0] not in _OF_PEFT:
            yield from (("lora", node.lineno, one.name) for one in given if _LORA.search(one.name))
        case ast.ClassDef(name=called):
            if _LORA.search(called):  # a script's own adapters
                yield "lora", node.lineno, called
            for name, default in [] if _METHOD.search(called) else fields(node):
                yield name, node.lineno, _constant(default)
        case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() | ast.BinOp() as value):
            yield name, node.lineno, _constant(value)


def _constant(node: ast.expr | None) -> Any:
    """A constant, or the last part of a path; an ellipsis for what is computed."""
    if isinstance(node, ast.BinOp) and isinstance(getattr(node.right, "value", None), str):
        node = node.right if isinstance(node.op, ast.Div) else node
    return node.value if isinstance(node, ast.Constant) else ... if isinstance(node, ast.BinOp) else None
