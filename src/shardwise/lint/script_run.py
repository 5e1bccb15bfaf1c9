"""A script as it runs: the statements of its functions and methods where it calls them."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from pathlib import PurePath
from typing import Any

from shardwise.lint.document import Document
from shardwise.lint.script_inputs import presets

_DEEPEST, _MOST = 8, 30_000  # functions within one another; nodes, which calls can multiply
_LATER = ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp | ast.FunctionDef
_LATER |= ast.AsyncFunctionDef | ast.ClassDef  # whose parts run later, or more often
_YIELDS = ast.Yield | ast.YieldFrom
_PLACE = ast.Name | ast.Attribute


def as_run(document: Document, others: Sequence[Document]) -> Document:
    """The script with the bodies of functions in place of their calls; the same script if it has none.

    `lines` say where each line is, also in a function that one of the others defines.
    """
    texts = ((PurePath(one.name).stem, one.name, one.text) for one in others if one.syntax == "python")
    text, lines = _as_run(document.text, tuple(texts))
    return replace(document, text=text, lines=tuple((file or document.name, line) for file, line in lines))


@lru_cache(maxsize=8)
def _as_run(text: str, others: tuple[tuple[str, str, str], ...]) -> tuple[str, tuple[tuple[str, int], ...]]:
    program = ast.parse(text)
    if not _Run(ast.parse(text), {stem: (name, text) for stem, name, text in others}).changes(program):
        return text, ()
    made = ast.unparse(ast.fix_missing_locations(program))
    try:
        trees = program, ast.parse(made)
    except SyntaxError:  # a value where only a name is allowed
        return text, ()
    old, new = ([one for one in ast.walk(tree) if isinstance(one, ast.stmt)] for tree in trees)
    pairs = zip(old, new, strict=False)
    lines, last = {to.lineno: (getattr(one, "file", ""), one.lineno) for one, to in pairs}, ("", 1)
    return made, tuple(last := lines.get(at, last) for at in range(made.count("\n") + 2))


class _Run(ast.NodeTransformer):
    """Puts the statements of a function before the statement that calls it."""

    def __init__(self, program: ast.Module, others: Mapping[str, tuple[str, str]]) -> None:
        nodes, far = [*ast.walk(program)], list[Any]()  # what other files define
        texts = [ast.unparse(program), *(text for _, text in others.values())]
        self._words = Counter(re.findall(r"\w+", " ".join(texts)))
        for one in (one for one in nodes if isinstance(one, ast.ImportFrom)):
            file, text = others.get(str(one.module).rpartition(".")[2], ("", ""))
            names = {alias.name for alias in one.names if not alias.asname}
            there = (part for part in ast.parse(text).body if getattr(part, "name", "") in names)
            far += [(file, inner) for part in there for inner in ast.walk(part)]
        for file, inner in far:
            inner.file = file
        nodes = [inner for _, inner in far] + nodes
        self._classes = {one.name: one for one in nodes if isinstance(one, ast.ClassDef)}
        own = {one for made in self._classes.values() for one in made.body}
        functions = (one for one in nodes if isinstance(one, ast.FunctionDef) and one not in own)
        self._functions = {one.name: one for one in functions}
        self._objects, self._made = dict[str, Any](), set[str]()  # the class of each object; all of them
        self._open, self._called = list[ast.FunctionDef](), set[tuple[str, int]]()
        self._before, self._statement, self._left = list[ast.stmt](), ast.stmt(), _MOST

    def changes(self, program: ast.Module) -> bool:
        """Change a program; whether a call or a class became statements."""
        self.generic_visit(program)
        started = bool(self._called or self._words["__main__"])  # no module of another script
        node: Any
        for node in ast.walk(program):
            parts: list[Any] = node.body if isinstance(node, ast.ClassDef) else [node]
            for one in parts:
                if isinstance(one, ast.FunctionDef) and (one.name, one.lineno) not in self._called:
                    self._objects["self"] = self._classes.get(getattr(node, "name", ""))
                    self.generic_visit(one)
        changed = len(self._called)
        if started:  # what nothing names does not run
            used = [one for one in program.body if not self._unused(one)]
            changed, program.body = changed + len(program.body) - len(used), used
        for node in ast.walk(program):
            if isinstance(body := getattr(node, "body", None), list):
                kept = [one for one in body if (getattr(one, "name", ""), one.lineno) not in self._called]
                node.body = kept or [ast.copy_location(ast.Pass(), node)]
            if isinstance(node, ast.ClassDef) and node.name not in self._made:
                changed += _joined(node)
        return changed > 0

    def _unused(self, node: ast.stmt) -> bool:
        plain = isinstance(node, ast.FunctionDef) and not node.decorator_list
        return plain and self._words[getattr(node, "name", "")] == 1

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _LATER):
            return node
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return []  # a text about the function
        outer = self._before, self._statement
        self._before, self._statement = before, _ = list[ast.stmt](), node
        self.generic_visit(node)
        self._before, self._statement = outer
        done = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
        done |= isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(node.value)
        return before if done and before else [*before, node]

    def visit_Call(self, call: ast.Call) -> Any:
        """What a function returns; its statements come before this one."""
        by: Any = self._statement
        to = by.targets[0] if isinstance(by, ast.Assign) and by.value is call else None
        self.generic_visit(call)
        function, holder = self._found(call, to)
        if not function or function in self._open or len(self._open) == _DEEPEST or self._left < 0:
            return call
        body, inner = deepcopy(function.body), [*own_parts(function)]
        early = [one for one in inner if isinstance(one, ast.Return) and one is not function.body[-1]]
        several, yields = any(one.value for one in early), any(isinstance(one, _YIELDS) for one in inner)
        place = to if to and all(isinstance(one, _PLACE) for one in _parts(to)) else ast.Name(function.name)
        value = None if several else body.pop().value if isinstance(body[-1], ast.Return) else None
        if yields or (several and _ended(body, place) is None):
            return call
        self._left -= len(inner)
        self._called.add((function.name, function.lineno))
        given, value = _given(function, call, holder), value or ast.Constant(None)
        names = {name: one for name, one in given.items() if isinstance(one, _PLACE)}
        before = [_assign(ast.Name(name), one, call) for name, one in given.items() if name not in names]
        for local, part in zip(_parts(value), _parts(to), strict=False):
            if isinstance(local, ast.Name) and local.id not in given and isinstance(part, _PLACE):
                names[local.id] = part
        if function.name == "__init__":
            before, value = [_assign(to, call, call), *before] if to else before, to or call
        else:
            value = _Named(names).visit(value)
        body = [_Named(names).visit(one) for one in body]
        if several:
            body, value = _ended([*body, _placed(ast.Return(), call)], place) or [], place
        elif early:  # what these leave out ends with the function
            body = [_placed(ast.With([ast.withitem(ast.Name(function.name))], body), call)]
        block = ast.Module(body, [])
        self._open.append(function)
        self.generic_visit(block)
        self._before += [*before, *block.body]
        by.value = value if to else getattr(by, "value", None)
        value = value if value is call else self.visit(value)
        self._open.pop()
        return value

    def _found(self, call: ast.Call, to: ast.expr | None) -> tuple[Any, ast.expr | None]:
        """The function that a call runs, and what is `self` in it."""
        match call.func:
            case ast.Name(id=name) if name in self._classes:
                self._made.add(name)
                self._objects[ast.unparse(to or call.func)] = self._classes[name]
                return self._method(self._classes[name], "__init__"), to or call.func
            case ast.Name(id=name):
                return self._functions.get(name), None
            case ast.Attribute(value=holder, attr=name):
                holder = holder.func if isinstance(holder, ast.Call) else holder
                return self._method(self._objects.get(ast.unparse(holder)), name), holder
        return None, None

    def _method(self, made: ast.ClassDef | None, name: str) -> Any:
        """A method of a class, or of a class that it is derived of."""
        own = [one for one in made.body if isinstance(one, ast.FunctionDef)] if made else []
        bases = [self._classes.get(ast.unparse(one)) for one in made.bases] if made else []
        inherited = (self._method(base, name) for base in bases if base is not made)
        return next(filter(None, [one for one in own if one.name == name] or inherited), None)


class _Named(ast.NodeTransformer):
    """Gives names their values in a copy."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return deepcopy(self._names.get(name.id, name))


def own_parts(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a function that run with it."""
    for one in (one for one in ast.iter_child_nodes(node) if not isinstance(one, _LATER)):
        yield one
        yield from own_parts(one)


def _ended(body: Sequence[ast.stmt], to: ast.expr) -> list[ast.stmt] | None:
    """Statements that give a place what they return; None where a loop does, or an `if` in part."""
    for at, one in enumerate(body):
        if isinstance(one, ast.Return | ast.Raise):
            value = deepcopy(getattr(one, "value", None) or ast.Constant(None))
            return [*body[:at], one if isinstance(one, ast.Raise) else _assign(deepcopy(to), value, one)]
        if any(isinstance(part, ast.Return) for part in own_parts(one)):
            then = _ended(one.body, to) if isinstance(one, ast.If) and _leaves(one.body) else None
            other = _ended([*one.orelse, *body[at + 1 :]], to) if isinstance(one, ast.If) else None
            if then is None or other is None or not isinstance(one, ast.If):
                return None
            return [*body[:at], _placed(ast.If(one.test, then, other), one)]
    return [*body]


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether what follows these statements never runs."""
    last = body[-1] if body else None
    both = isinstance(last, ast.If) and _leaves(last.body) and _leaves(last.orelse)
    return both or isinstance(last, ast.Return | ast.Raise)


def _parts(node: ast.expr | None) -> Sequence[ast.expr | None]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _assign(to: ast.expr, value: ast.expr, by: ast.AST) -> ast.stmt:
    return _placed(ast.Assign([to], value), by)


def _placed(made: ast.stmt, by: ast.AST) -> ast.stmt:
    """A new node, with the place of another."""
    vars(made)["file"] = getattr(by, "file", "")
    return ast.copy_location(made, by)


def _given(function: ast.FunctionDef, call: ast.Call, holder: ast.expr | None) -> dict[str, ast.expr]:
    """What the parameters of a function are in a call."""
    static = any(ast.unparse(one) == "staticmethod" for one in function.decorator_list)
    plain = takewhile(lambda one: not isinstance(one, ast.Starred), call.args)
    words = plain if holder is None or static else (holder, *plain)
    given = dict(zip((one.arg for one in function.args.args), words, strict=False))
    return presets(function) | given | {one.arg: one.value for one in call.keywords if one.arg}


def _joined(made: ast.ClassDef) -> bool:
    """Put the methods of a class that nothing makes in one, from `__init__` on; whether it has this."""
    own = [one for one in made.body if isinstance(one, ast.FunctionDef)]
    own.sort(key=lambda one: one.name != "__init__")
    if len(own) < 2 or own[0].name != "__init__":
        return False
    made.body = [one for one in made.body if one not in own[1:]]
    own[0].name, own[0].body = made.name, [part for one in own for part in one.body]
    return True
