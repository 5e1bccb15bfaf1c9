"""Read the settings in a training script or its launch command, without running anything."""

import ast
import re
import shlex
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import yaml

from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, UnreadableError
from shardwise.lint.schema import names

_COMMAND = re.compile(
    r"^[ \t]*(?:\w+=\S+[ \t]+|exec[ \t]+|srun\b[^\n]*?[ \t])*"
    r"(deepspeed|torchrun|accelerate[ \t]+launch)(?=[ \t\\])",
    re.MULTILINE,
)
_FLAGS_WITHOUT_VALUE = {"deepspeed", "module", "no_python", "no_ssh", "standalone", "bf16", "fp16"}
_CALLS = names("calls")
LORA = "lora_rank"  # the key for `LoraConfig(r=...)`
STEPPED = "optimizer.step"  # the key for a step of an optimizer instead of DeepSpeed's engine: `Stepped`


@dataclass(frozen=True)
class Stepped:
    """A call of `optimizer.step()` that should be a step of `engine`."""

    optimizer: str  # the optimizer that deepspeed.initialize was `given`, or else returned
    engine: str
    given: bool


def is_command(text: str) -> bool:
    """Whether a line of the text starts processes."""
    return _COMMAND.search(text) is not None


def is_python(text: str) -> bool:
    """Whether it is a Python program. YAML can parse as Python by chance, but has no imports."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def read_python(text: str, name: str) -> Document:
    """Read the literal arguments of calls that set up a training; the first call with a key wins."""
    values: dict[str, Any] = {}
    marks: dict[tuple[str, ...], Mark] = {}
    uses: set[str] = set()
    try:
        program = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        raise UnreadableError(f"it is not Python: {error}", line=line, fix="correct the syntax") from None
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
                marks[key,] = Mark(line=argument.value.lineno)
    stepped = next(_stepped(program), None)
    if stepped is not None:
        values[STEPPED], line = stepped
        marks[STEPPED,] = Mark(line=line)
    found = Document(name=name, text=text, syntax="python", values=values, marks=marks, kind="training")
    return replace(found, uses=frozenset(uses))


def _stepped(program: ast.Module) -> Iterator[tuple[Stepped, int]]:
    """Yield calls that step an optimizer of DeepSpeed's engine, with their lines."""
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
    """The name of a call, such as `deepspeed.initialize`; the last name of a longer chain."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        above = function.value.id + "." if isinstance(function.value, ast.Name) else ""
        return above + function.attr
    return ""


def _literal(node: ast.expr) -> Any:
    """The literal value; `torch.float16` as text; None for values that only a run knows."""
    if isinstance(node, ast.Attribute):
        return _called(node)
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return None if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER else value


def read_shell(text: str, name: str) -> Document:
    """Read the flags of the first launch command, both the launcher's and the script's."""
    start = _COMMAND.search(text)
    if start is None:
        raise UnreadableError("it has no deepspeed, torchrun or accelerate command", line=1, fix="")
    values: dict[str, Any] = {"launcher": start[1].split()[0]}
    first = text.count("\n", 0, start.start(1)) + 1
    marks: dict[tuple[str, ...], Mark] = {("launcher",): Mark(line=first)}
    words = deque(_words(text, start.start()))
    while words:
        word, line = words.popleft()
        assigned = re.fullmatch(r"([A-Z_]+)=(.*)", word)
        if assigned:
            key, value = assigned[1], assigned[2]
        elif word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                value = words[0][0] if words else "--"
                fits = value.endswith(".json") if key == "deepspeed" else value.lower() in ("true", "false")
                if value.startswith("-") or (key in _FLAGS_WITHOUT_VALUE and not fits):
                    value = "true"
                else:
                    words.popleft()
        elif word.endswith(".py") and "script" not in values:
            key, value = "script", word
        else:
            continue
        key = key.replace("-", "_")
        if key not in values:
            values[key] = _scalar(value)
            marks[key,] = Mark(line=line)
    return Document(name=name, text=text, syntax="shell", values=values, marks=marks, kind="training")


def _words(text: str, start: int) -> Iterator[tuple[str, int]]:
    """Yield (word, line) of the command at `start`, over its continued lines."""
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
