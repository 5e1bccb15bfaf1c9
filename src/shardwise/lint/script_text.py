"""Read the settings in a training script, without running anything."""

import ast
import builtins
from collections import Counter
from dataclasses import replace
from typing import Any

from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, UnreadableError
from shardwise.lint.schema import names
from shardwise.lint.script_config import configurations

_CALLS = names("calls")
_LIBRARIES = ("transformers", "trl")  # of which the rules know the classes with names that end in these:
_CLASSES = ("Trainer", "TrainingArguments", "SFTConfig")
UNKNOWN = "..."  # a value in a mapping that only a run knows
LORA = "lora_rank"  # the key for `LoraConfig(r=...)`
UNDEFINED = "names.undefined"  # the key for the names that the script uses and nowhere defines
_INITIALIZE = ("args", "model", "optimizer", "model_parameters", "training_data")  # in the order of its call


def is_python(text: str) -> bool:
    """Whether it is a Python program. YAML can parse as Python by chance, but has no imports."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in body)


def read_python(text: str, file: str) -> Document:
    """Read the literal arguments of calls that set up a training; the first call with a key wins."""
    values, marks, uses = dict[str, Any](), dict[tuple[str, ...], Mark](), set[str]()
    try:
        ast.unparse(program := ast.parse(text))  # as rules do
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        what = f"it is not Python: {str(error) or 'nested too deeply'}"
        raise UnreadableError(what, line=line, fix="correct the syntax") from None
    undefined = _undefined(program)
    name_as_imported(program)
    known = assigned_once(program)
    for call in (node for node in ast.walk(program) if isinstance(node, ast.Call)):
        called = name_of(call.func)
        uses.add(called)
        last = called.rpartition(".")[2]
        if last not in (*_CALLS, "Trainer", "Seq2SeqTrainer"):
            continue
        marks.setdefault((last,), Mark(line=call.lineno))
        read = (one for one in call.keywords if last in _CALLS or one.arg == "tokenizer")
        arguments = [(argument.arg or "", argument.value) for argument in read]
        if last == "from_pretrained":
            arguments += [("model_name_or_path", value) for value in call.args[:1]]
        uses |= {f"{called}({name or '**'})" for name, _ in arguments}
        if called == "deepspeed.initialize":
            uses |= {f"deepspeed.initialize({name})" for name, _ in zip(_INITIALIZE, call.args, strict=False)}
        for name, given in arguments:
            value = literal(known.get(given.id, given) if isinstance(given, ast.Name) else given)
            key = LORA if called.endswith("LoraConfig") and name == "r" else name
            if name == "model" and last.endswith("Trainer"):  # TRL's take a name, too
                key = "model_name_or_path" if isinstance(value, str) else ""
            if key and key not in values:
                marks[key,] = Mark(line=given.lineno)  # also of a value that only a run knows
                values |= {} if value is None else {key: value}
    if undefined:
        values[UNDEFINED] = undefined
        uses_of = (n for n in ast.walk(program) if isinstance(n, ast.Name) and n.id in undefined)
        marks[UNDEFINED,] = Mark(line=min(node.lineno for node in uses_of))
    for node in ast.walk(program):  # a class of the script's own is nobody else's Trainer
        if isinstance(node, ast.ClassDef) and not any(ast.unparse(b).endswith("Trainer") for b in node.bases):
            uses.discard(node.name)
    found = Document(name=file, text=text, syntax="python", values=values, marks=marks, kind="training")
    inner = (replace(one, name=file, text=text) for one in configurations(program, known))
    return replace(found, uses=frozenset(uses), inner=tuple(inner))


def name_as_imported(program: ast.Module) -> None:
    """Rename to what the libraries say: `Trainer` for `import Trainer as X`; `mylib.Trainer` is another's."""
    known = dict[str, str]()
    for node in ast.walk(program):
        module = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
        for one in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            own = module and module.partition(".")[0] not in _LIBRARIES and one.name.endswith(_CLASSES)
            if own or (one.asname and "." not in one.name):
                known[one.asname or one.name] = f"{module}.{one.name}" if own else one.name
    for name in (node for node in ast.walk(program) if isinstance(node, ast.Name)):
        name.id = known.get(name.id, name.id)


def assigned_once(program: ast.Module) -> dict[str, ast.expr]:
    """The values of names and attributes that one plain assignment gives a value, and nothing else."""
    nodes = [node for node in ast.walk(program) if isinstance(node, ast.Name | ast.Attribute)]
    stored = Counter(ast.unparse(node) for node in nodes if isinstance(node.ctx, ast.Store))
    pairs = [(one.targets[0], one.value) for one in ast.walk(program) if isinstance(one, ast.Assign)]
    pairs += [(n.target, n.value) for n in ast.walk(program) if isinstance(n, ast.AnnAssign) and n.value]
    return {ast.unparse(name): value for name, value in pairs if stored[ast.unparse(name)] == 1}


def _undefined(program: ast.Module) -> list[str]:
    """Names that the script uses, and that no line of it binds or could bring in unseen."""
    used, bound = dict[str, None](), {*dir(builtins), "__file__", "get_ipython", "display"}
    for node in ast.walk(program):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used[name] = None
            case ast.alias(name=name):
                bound.add((node.asname or name).partition(".")[0])
            case ast.Name(id=name) | ast.arg(arg=name) | ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                bound.add(name)
            case ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                bound.add(name or "")
    unseen = {"*", "exec", "eval", "globals"} & {*used, *bound - {*dir(builtins)}}
    return [] if unseen else [name for name in used if name not in bound]


def name_of(function: ast.expr) -> str:
    """The name of a call, such as `deepspeed.initialize`; the last name of a longer chain."""
    if isinstance(function, ast.Name):
        return function.id
    if isinstance(function, ast.Attribute):
        above = function.value.id + "." if isinstance(function.value, ast.Name) else ""
        return above + function.attr
    return ""


def literal(node: ast.expr) -> Any:
    """The literal value; `torch.float16` as text; None for values that only a run knows."""
    if isinstance(node, ast.Attribute):
        return name_of(node)
    if isinstance(node, ast.Dict) and any(isinstance(n, ast.Call | ast.Name) for n in ast.walk(node)):
        return {key.value: UNKNOWN for key in node.keys if isinstance(key, ast.Constant)} or None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return None
    return None if isinstance(value, int) and abs(value) >= 10**LONGEST_NUMBER else value
