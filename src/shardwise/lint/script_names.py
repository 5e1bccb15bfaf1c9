"""Names of a script as the libraries say them, and values by key."""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.schema import names

Said = dict[Key, tuple[int, Any]]  # of each key in a mapping: its line, and its value; {} of a mapping

Change = tuple[ast.expr, Key | None, ast.expr | None, ast.AST]

_STARTERS = {
    "spawn": 1,
    "notebook_launcher": 0,
}  # call a function in processes of its own, `spawn` with a rank
# methods that leave a dict as it is, and those of texts in it
_READS = {"copy", "get", "items", "keys", "values", *(name for name in dir(str) if name[0] != "_")}
_LIBRARIES = ("transformers", "trl")  # of which the rules know the classes with names that end in these:
_CLASSES = ("Trainer", "TrainingArguments", "SFTConfig")


def nested(said: Said) -> Any:
    """The value whose parts have these keys, outermost first."""
    made: dict[Key, Any] = {(): {}}
    for key, (_, value) in said.items():
        made[key] = {} if value == {} else value
        if key:
            made[key[:-1]][key[-1]] = made[key]
    return made[()]


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


def derived_of(program: ast.Module, classes: Collection[str]) -> dict[str, ast.ClassDef]:
    """The classes of a script that are derived of one of these, by name; of each other, too."""
    found = dict[str, ast.ClassDef]()
    for one in (node for node in ast.walk(program) if isinstance(node, ast.ClassDef)):
        bases = {ast.unparse(base).rpartition(".")[2] for base in one.bases}
        if bases & {*classes, *found}:
            found[one.name] = one
    return found


def dotted(node: ast.AST, next_of: Callable[[Any], list[Any]], deep: int = 6) -> str:
    """The path of a part of a configuration below its own name: `.train` of `t = cfg.train`."""
    match node if deep else None:
        case (
            ast.Attribute(value=holder, attr=name)
            | ast.Subscript(value=holder, slice=ast.Constant(str(name)))
        ):
            return f"{dotted(holder, next_of, deep - 1)}.{name}"
        case ast.Call(func=called, args=[holder, *_]) if ast.unparse(called).endswith(names("as_a_mapping")):
            return dotted(holder, next_of, deep - 1)
        case ast.Name():
            found = next_of(node)
            return dotted(found[0], next_of, deep - 1) if len(found) == 1 and found[0] else ""
    return ""


def part_of(node: ast.AST, above: ast.AST | None, by: ast.AST | None) -> ast.expr | None:
    """What a name gets in `with open(x) as name` and `name, other = x, y`."""
    if isinstance(above, ast.withitem):
        return above.context_expr
    if isinstance(by, ast.Assign) and isinstance(by.value, ast.Tuple) and isinstance(above, ast.Tuple):
        pairs = zip(above.elts, by.value.elts, strict=False)
        return next((value for target, value in pairs if target is node), None)
    return None


def rest_of(given: Sequence[ast.keyword], function: ast.FunctionDef, line: int) -> ast.Dict:
    """What `**rest` of a function gets of the arguments that a line gives it by name."""
    named = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
    rest = [one for one in given if one.arg not in named]
    keys: list[ast.expr | None] = [
        ast.Constant(value=one.arg, lineno=line) if one.arg else None for one in rest
    ]
    return ast.Dict(keys=keys, values=[one.value for one in rest], lineno=line)


def plain_rows(node: ast.AST, scopes: Callable[[ast.AST], Iterator[ast.AST]] | None) -> list[Any] | None:
    """Path, value and line of the keys of a mapping that the text shows; with `scopes` of `locals()`, too."""
    match node:
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return [(path_of(k) if k else (), v, k.lineno if k else 0) for k, v in pairs]
        case ast.Call(func=ast.Name(id="dict"), args=others, keywords=given):
            named = [((k.arg,) if k.arg else (), k.value, k.lineno if k.arg else 0) for k in given]
            return [*(((), one, 0) for one in others), *named]
        case ast.Call(func=ast.Attribute(attr="copy", value=other), args=[]):
            return [((), other, 0)]
        case ast.Call(func=ast.Name(id="locals"), args=[]) if scopes:
            by = next(scopes(node))
            own = [*by.args.args, *by.args.kwonlyargs] if isinstance(by, ast.FunctionDef) else []
            names_ = (one for one in ast.walk(by) if isinstance(one, ast.Name))
            again = {one.id for one in names_ if isinstance(one.ctx, ast.Store)}  # which are set later
            return [((one.arg,), None if one.arg in again else one, node.lineno) for one in own]
    return None


def handed_on(call: ast.Call, function: ast.AST) -> tuple[int, ast.expr] | None:
    """Of `mp.spawn(main, args=(4, args))`, after how many others `main` gets these arguments."""
    first = _STARTERS.get(ast.unparse(call.func).rpartition(".")[2])
    held = [*(one.value for one in call.keywords if one.arg == "args"), *call.args[1:2]]
    return (first, held[0]) if first is not None and held and call.args[:1] == [function] else None


def path_of(node: ast.expr) -> Key | None:
    """The key that a literal is; None if it is no text."""
    return (node.value,) if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def changes_by(node: ast.AST, above: ast.AST) -> Iterator[Change]:
    """What a node, which `above` holds, changes: a dict, a key of it, the new value, and the part that does.

    No key: it is not known which. No value: it is removed, or not known.
    """
    match node:
        case ast.Subscript(ctx=ast.Store() | ast.Del(), value=holder, slice=key):
            plain = isinstance(above, ast.Assign) and above.targets == [node]
            yield holder, path_of(key), above.value if plain else None, above  # type: ignore[attr-defined]
        case ast.AugAssign(target=ast.Name() as holder, value=ast.Dict() as given):
            yield holder, (), given, node
        case ast.Call(func=ast.Attribute(attr="update", value=holder), args=given, keywords=more):
            for one in given:
                yield holder, (), one, above
            for other in more:
                yield holder, (other.arg,) if other.arg else (), other.value, above
        case ast.Call(func=ast.Attribute(attr="pop", value=holder), args=[key, *_]) if path_of(key):
            yield holder, path_of(key), None, node
        case ast.Call(func=ast.Attribute(attr=method, value=holder)) if method not in _READS:
            yield holder, None, None, node


def never_read(nodes: Sequence[ast.AST], others: str) -> Iterator[ast.Call]:
    """Objects of settings that nothing gets, as where `model = get_peft_model(model, config)` is a comment.

    `others`: the text of other scripts, which may take them.
    """
    read = {one.id for one in nodes if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    read |= {*re.findall(r"\w+", others)}
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call() as made) if name not in read:
                last = ast.unparse(made.func).rpartition(".")[2]
                if last in (*names("settings_objects"), *names("collators")):
                    yield made
