"""A script as it runs: the statements of its functions and methods where it calls them."""

import ast
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
_PLACE = ast.Name | ast.Attribute


def as_run(document: Document, others: Sequence[Document]) -> Document:
    """The script with the bodies of functions in place of their calls; the same script if it has none.

    `lines` are those of the file; for a function that one of the others defines, the line of its call.
    """
    texts = {PurePath(one.name).stem: one.text for one in others if one.syntax == "python"}
    text, lines = _as_run(document.text, tuple(texts.items()))
    return replace(document, text=text, lines=lines)


@lru_cache(maxsize=8)
def _as_run(text: str, others: tuple[tuple[str, str], ...]) -> tuple[str, tuple[int, ...]]:
    program = ast.parse(text)
    if not _Run(ast.parse(text), dict(others)).changes(program):
        return text, ()
    made = ast.unparse(ast.fix_missing_locations(program))
    try:
        pairs = zip(_statements(program), _statements(ast.parse(made)), strict=False)
    except SyntaxError:  # a value where only a name is allowed
        return text, ()
    lines, last = {new.lineno: old.lineno for old, new in pairs}, 1
    return made, tuple(last := lines.get(at, last) for at in range(made.count("\n") + 2))


def _statements(program: ast.Module) -> Iterator[ast.stmt]:
    return (one for one in ast.walk(program) if isinstance(one, ast.stmt))


class _Run(ast.NodeTransformer):
    """Puts the statements of a function before the statement that calls it."""

    def __init__(self, program: ast.Module, others: Mapping[str, str]) -> None:
        nodes, self._far = [*ast.walk(program)], set[ast.AST]()  # what other files define
        for one in (one for one in nodes if isinstance(one, ast.ImportFrom)):
            there = ast.parse(others.get(str(one.module).rpartition(".")[2], "")).body
            names = {alias.name for alias in one.names if not alias.asname}
            found = (part for part in there if getattr(part, "name", "") in names)
            self._far |= {inner for part in found for inner in ast.walk(part)}
        defined = (*self._far, *nodes)
        self._classes = {one.name: one for one in defined if isinstance(one, ast.ClassDef)}
        self._methods: dict[ast.AST, Any] = {one: made for made in self._classes.values() for one in made.body}
        functions = [one for one in defined if isinstance(one, ast.FunctionDef) and one not in self._methods]
        self._functions = {one.name: one for one in functions}
        self._objects, self._made = dict[str, Any](), set[str]()  # names of objects and their class; all classes
        self._open, self._called = list[tuple[ast.FunctionDef, Any]](), set[tuple[str, int]]()
        self._before, self._statement, self._left = list[ast.stmt](), ast.stmt(), _MOST

    def changes(self, program: ast.Module) -> bool:
        """Change a program; whether a call or a class became statements."""
        self.generic_visit(program)
        for node in ast.walk(program):
            for one in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(one, ast.FunctionDef) and (one.name, one.lineno) not in self._called:
                    self._objects["self"] = self._classes.get(getattr(node, "name", ""))
                    self.generic_visit(one)
        before = len(self._called)
        for node in ast.walk(program):
            if isinstance(body := getattr(node, "body", None), list):
                gone = [one for one in body if (getattr(one, "name", 0), one.lineno) in self._called]
                node.body = [one for one in body if one not in gone] or [ast.copy_location(ast.Pass(), node)]
            if isinstance(node, ast.ClassDef) and node.name not in self._made:
                before += _joined(node)
        return before > 0

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, _LATER):
            return node
        if not isinstance(node, ast.stmt):
            return super().visit(node)
        outer = self._before, self._statement
        self._before, self._statement = before, _ = [], node
        self.generic_visit(node)
        self._before, self._statement = outer
        done = isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call)
        done |= isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == ast.unparse(node.value)
        return before if done and before else [*before, node]

    def visit_Call(self, call: ast.Call) -> Any:
        """What a function returns; its statements come before this one."""
        holds = isinstance(self._statement, ast.Assign) and self._statement.value is call
        to: Any = self._statement.targets[0] if isinstance(self._statement, ast.Assign) and holds else None
        self.generic_visit(call)
        function, holder = self._found(call, to)
        opened = [one for one, _ in self._open]
        if not function or function in opened or len(opened) == _DEEPEST or self._left < 0:
            return call
        inner = [*ast.walk(function)]
        within = {part for one in inner[1:] if isinstance(one, _LATER) for part in ast.walk(one)}
        if any(isinstance(one, ast.Yield | ast.YieldFrom) for one in inner):
            return call
        self._left -= len(inner)
        self._called.add((function.name, function.lineno))
        given = _given(function, call, holder)
        names = {name: one for name, one in given.items() if isinstance(one, _PLACE)}
        before = [_assign(ast.Name(name), one, call) for name, one in given.items() if name not in names]
        returns = [one for one in inner if isinstance(one, ast.Return) and one not in within]
        single = len(returns) == 1 and returns[0] is function.body[-1]
        for local, place in zip(*map(_parts, (returns[0].value, to)), strict=False) if single and to else ():
            if isinstance(local, ast.Name) and local.id not in given and isinstance(place, _PLACE):
                names[local.id] = place
        block = ast.Module([_Named(names).visit(deepcopy(one)) for one in function.body], [])
        for one in ast.walk(block) if function in self._far else ():
            one.lineno = call.lineno  # type: ignore[attr-defined]
        result = to or ast.Name(function.name)
        value: Any = result if any(one.value for one in returns) else ast.Constant(None)
        if single:
            value = block.body.pop().value or value
        if function.name == "__init__":
            before += [_assign(to, call, call)] if to else []
            value = to or call
        block.body = _in_caller(block.body, result)
        self._open.append((function, holder))
        self.generic_visit(block)
        self._before += [*before, *block.body]
        if holds:
            self._statement.value = value
        value = value if value is call else self.visit(value)
        self._open.pop()
        return value

    def _found(self, call: ast.Call, to: ast.expr | None) -> tuple[Any, ast.expr | None]:
        """The function that a call runs, and what is `self` in it."""
        match call.func:
            case ast.Name(id=name) if name in self._classes:
                made = self._classes[name]
                self._made.add(name)
                self._objects[ast.unparse(to or call.func)] = made
                return self._method(made, "__init__"), to or call.func
            case ast.Name(id=name):
                return self._functions.get(name), None
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name) if self._open:
                function, holder = self._open[-1]
                bases = [self._classes.get(ast.unparse(one)) for one in getattr(self._methods.get(function), "bases", [])]
                return next((one for base in bases if (one := self._method(base, name))), None), holder
            case ast.Attribute(value=holder, attr=name):
                holder = holder.func if isinstance(holder, ast.Call) else holder
                return self._method(self._objects.get(ast.unparse(holder)), name), holder
        return None, None

    def _method(self, made: ast.ClassDef | None, name: str) -> Any:
        """A method of a class, or of a class that it is derived of."""
        for one in made.body if made else ():
            if isinstance(one, ast.FunctionDef) and one.name == name:
                return one
        bases = [self._classes.get(ast.unparse(one)) for one in made.bases] if made else []
        return next((one for base in bases if base is not made and (one := self._method(base, name))), None)


class _Named(ast.NodeTransformer):
    """Gives names their values in a copy."""

    def __init__(self, names: Mapping[str, ast.expr]) -> None:
        self._names = names

    def visit_Name(self, name: ast.Name) -> ast.expr:
        return deepcopy(self._names.get(name.id, name))


def _parts(node: ast.expr | None) -> Sequence[ast.expr | None]:
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _assign(to: ast.expr, value: ast.expr, by: ast.AST) -> ast.stmt:
    return ast.copy_location(ast.Assign([to], value), by)


def _given(function: ast.FunctionDef, call: ast.Call, holder: ast.expr | None) -> dict[str, ast.expr]:
    """What the parameters of a function are in a call."""
    places = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    alone = holder is None or any(ast.unparse(one) == "staticmethod" for one in function.decorator_list)
    plain = takewhile(lambda one: not isinstance(one, ast.Starred), call.args)
    given = presets(function) | dict(zip(places, plain if alone else (holder, *plain), strict=False))
    return given | {one.arg: one.value for one in call.keywords if one.arg}


def _in_caller(body: list[ast.stmt], to: ast.expr) -> list[ast.stmt]:
    """What `return` leaves out is the `else` of its `if`, and its value is assigned."""
    made = list[ast.stmt]()
    for at, one in enumerate(body):
        if isinstance(one, ast.Return):
            return made + ([_assign(to, one.value, one)] if one.value else [])
        left = isinstance(one, ast.If) and not one.orelse and isinstance(one.body[-1], ast.Return)
        if isinstance(one, ast.If) and left:
            one.orelse = body[at + 1 :]
        for part in (one, *getattr(one, "handlers", ())) if not isinstance(one, _LATER) else ():
            for name in ("body", "orelse", "finalbody"):
                if inner := getattr(part, name, None):
                    setattr(part, name, _in_caller(inner, to) or [ast.copy_location(ast.Pass(), one)])
        made.append(one)
        if left:
            break
    return made


def _joined(made: ast.ClassDef) -> bool:
    """Put the methods of a class that nothing makes in one, from `__init__` on; whether it has this."""
    own = [one for one in made.body if isinstance(one, ast.FunctionDef)]
    own.sort(key=lambda one: one.name != "__init__")
    if len(own) < 2 or own[0].name != "__init__":
        return False
    made.body = [one for one in made.body if one not in own[1:]]
    own[0].name, own[0].body = made.name, [part for one in own for part in one.body]
    return True
