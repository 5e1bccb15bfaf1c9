"""What a training script or its launch command says, as flat `key: value` pairs: nothing is run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, UnreadableError

LAUNCHERS = ("deepspeed", "torchrun", "accelerate")
_COMMAND = re.compile(
    r"^[ \t]*(?:\w+=\S+[ \t]+|exec[ \t]+|srun\b[^\n]*?[ \t])*"
    r"(deepspeed|torchrun|accelerate[ \t]+launch)(?=[ \t\\])",
    re.MULTILINE,
)
_FLAGS_WITHOUT_VALUE = {"deepspeed", "module", "no_python", "no_ssh", "standalone", "bf16", "fp16"}
_CALLS = (
    "from_pretrained",
    "BitsAndBytesConfig",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "SFTConfig",
    "LoraConfig",
    "Accelerator",
    "DeepSpeedPlugin",
    "initialize",
)
LORA = "lora_rank"
"""The key under which `LoraConfig(r=...)` is kept."""
STEPPED = "optimizer.step"
"""The key under which a call is kept that steps an optimizer beside DeepSpeed's engine: a `Stepped`."""


@dataclass(frozen=True)
class Stepped:
    """A call of `optimizer.step()` where `engine` is to step."""

    optimizer: str
    """What deepspeed.initialize was `given` or, of any name, returned."""
    engine: str
    given: bool


def is_command(text: str) -> bool:
    """Whether a line of it starts processes."""
    return _COMMAND.search(text) is not None


def is_python(text: str) -> bool:
    """Whether it is a Python program; a YAML file can be one by chance, but imports nothing."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def read_python(text: str, name: str) -> Document:
    """Literal arguments of the calls that set up a training; the first call that names a key wins."""
    values: dict[str, Any] = {}
    marks: dict[tuple[str, ...], Mark] = {}
    uses: set[str] = set()
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UnreadableError(f"it is no Python: {error}", line=line, fix="mend it") from None
    for call in (node for node in ast.walk(program) if isinstance(node, ast.Call)):
        called = _called(call.func)
        uses.add(called)
        if called.rpartition(".")[2] not in _CALLS:
            continue
        for argument in call.keywords:
            key = argument.arg or ""
            if called.endswith("LoraConfig") and key == "r":
                key = LORA
            value = _literal(argument.value)
            if value is not None and key and key not in values:
                values[key] = value
                marks[key,] = Mark(line=argument.value.lineno, key=None, value=(0, 0))
    beside = next(_stepped_beside(program), None)
    if beside is not None:
        values[STEPPED], line = beside
        marks[STEPPED,] = Mark(line=line, key=None, value=(0, 0))
    return Document(
        name=name,
        text=text,
        syntax="python",
        values=values,
        marks=marks,
        kind="training",
        uses=frozenset(uses),
    )


def _stepped_beside(program: ast.Module) -> Iterator[tuple[Stepped, int]]:
    """Calls that step an optimizer which DeepSpeed's engine has taken over, and their lines."""
    for made in ast.walk(program):
        match made:
            case ast.Assign(targets=[ast.Tuple(elts=[engine, optimizer, *_])], value=ast.Call() as call):
                pass
            case _:
                continue
        if _called(call.func) != "deepspeed.initialize":
            continue
        given = next((ast.unparse(a.value) for a in call.keywords if a.arg == "optimizer"), None)
        returned = ast.unparse(optimizer)
        for node in ast.walk(program):
            match node:
                case ast.Call(func=ast.Attribute(value=owner, attr="step")):
                    name = ast.unparse(owner)
                    if name in (given, returned):
                        yield Stepped(name, ast.unparse(engine), given=name != returned), node.lineno


def _called(function: ast.expr) -> str:
    """`deepspeed.initialize` for such a call; only the last name of a longer chain of calls."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        above = function.value.id + "." if isinstance(function.value, ast.Name) else ""
        return above + function.attr
    return ""


def _literal(node: ast.expr) -> Any:
    """The value written there; `torch.float16` as this text; None for what only a run would know."""
    if isinstance(node, ast.Attribute):
        return _called(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return None if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER else value


def read_shell(text: str, name: str) -> Document:
    """The flags of the first launch command, the launcher's and the script's together."""
    start = _COMMAND.search(text)
    if start is None:
        raise UnreadableError("there is no deepspeed, torchrun or accelerate command in it", line=1, fix="")
    values: dict[str, Any] = {"launcher": start[1].split()[0]}
    first = text.count("\n", 0, start.start(1)) + 1
    marks: dict[tuple[str, ...], Mark] = {("launcher",): Mark(line=first, key=None, value=(0, 0))}
    words = list(_words(text, start.start()))
    index = 0
    while index < len(words):
        word, line = words[index]
        index += 1
        assigned = re.fullmatch(r"([A-Z_]+)=(.*)", word)
        if assigned:
            key, value = assigned[1], assigned[2]
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                following = words[index][0] if index < len(words) else "--"
                if following.startswith("-") or (
                    key in _FLAGS_WITHOUT_VALUE and not _is_value(key, following)
                ):
                    value = "true"
                else:
                    value, index = following, index + 1
        elif word.endswith(".py") and "script" not in values:
            key, value = "script", word
        else:
            continue
        key = key.replace("-", "_")
        if key not in values:
            values[key] = _scalar(value)
            marks[key,] = Mark(line=line, key=None, value=(0, 0))
    return Document(name=name, text=text, syntax="shell", values=values, marks=marks, kind="training")


def _is_value(key: str, word: str) -> bool:
    """Whether a word is the value of a flag that may also stand alone."""
    if key == "deepspeed":
        return word.endswith(".json")
    return word.lower() in ("true", "false")


def _words(text: str, start: int) -> Iterator[tuple[str, int]]:
    """(word, line) of the command that begins there, over its continued lines."""
    line = text.count("\n", 0, start) + 1
    for row in text[start:].split("\n"):
        more = row.rstrip().endswith("\\")
        try:
            words = shlex.split(row.rstrip().removesuffix("\\"), comments=True)
        except ValueError:
            words = row.split()
        yield from ((word, line) for word in words)
        line += 1
        if not more and words:
            return


def _scalar(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    return text if isinstance(value, int) and len(text) > LONGEST_NUMBER else value
