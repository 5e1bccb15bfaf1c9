"""Which settings scripts read: where an object of settings goes, and the words that may be its keys."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.job.source import Key
from shardwise.lint.schema import pattern
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_names import path_of

_SHOWS = pattern("shows_settings")  # calls that only print or note what they get
_ASKS, _OF_PARTS = ("get", "pop", "setdefault"), ("getattr", "hasattr", "setattr")
_COPIES = ("vars", "dict", "copy", "deepcopy", "format")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_TESTS = ast.Compare | ast.If | ast.While | ast.Assert | ast.Not | ast.UnaryOp | ast.Expr
_MOST = 3_000  # places that are followed
_Place = tuple[ast.AST, Key]  # an expression, and the part of the settings that it holds


class Readers:
    """The scripts of one training. `open`: the parts of the settings that leave their sight."""

    def __init__(self, programs: Sequence[ast.Module]) -> None:
        self._nodes = [node for program in programs for node in ast.walk(program)]
        self._above = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._defined, self._calls = defaultdict[str, list[Any]](list), defaultdict[str, list[ast.Call]](list)
        self._reads = defaultdict[tuple[ast.AST, str], list[ast.expr]](list)  # of names and of `self.name`
        self._local, self._shared = set[tuple[ast.AST, str]](), set[str]()
        self.open = set[Key]()
        for node in self._nodes:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    self._defined[name].append(node)
                case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
                    self._local.add((self._scope(node), name))
                case ast.Call():
                    self._calls[name_of(node.func).rpartition(".")[2]].append(node)
                case ast.ImportFrom(names=brought):
                    self._shared |= {one.name for one in brought}
                case ast.Global(names=given):
                    self._shared |= {*given}
        for node in self._nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._reads[self._home(node)].append(node)

    @property
    def words(self) -> set[str]:
        """All attributes that are read, and all texts."""
        used = (one for one in self._nodes if isinstance(one, ast.Attribute))
        read = {one.attr for one in used if isinstance(one.ctx, ast.Load)}
        return read | {str(one.value) for one in self._nodes if isinstance(one, ast.Constant)}

    def calls(self, *last: str) -> list[ast.Call]:
        """The calls whose last name is one of these."""
        return [call for name in last for call in self._calls[name]]

    def follow(self, made: Sequence[ast.AST]) -> None:
        """Follow settings through names, parts, arguments and what functions return."""
        waiting, seen = [(one, Key()) for one in made], set[_Place]()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += self._goes(*place) if len(seen) < _MOST else ()
                self.open |= {()} if len(seen) >= _MOST else set()

    def _scope(self, node: ast.AST) -> ast.AST:
        while (node := self._above.get(node, node)) in self._above and not isinstance(node, _FUNCTIONS):
            pass
        return node

    def _home(self, node: ast.AST) -> tuple[ast.AST, str]:
        """The function, class or module that a name or `self.name` belongs to."""
        match node:
            case ast.Name(id=name):
                scope = self._scope(node)
                while (scope, name) not in self._local and scope in self._above:
                    scope = self._scope(scope)
                return scope, name
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                while node in self._above and not isinstance(node, ast.ClassDef):
                    node = self._above[node]
                return node, f"self.{name}"
        return node, ""

    def _goes(self, node: ast.AST, key: Key) -> Iterator[_Place]:
        above: Any = self._above[node]
        match above:
            case ast.Attribute() | ast.Subscript() if above.value is node:
                yield from self._part(above, node, key)
            case ast.Assign(targets=targets, value=value):
                parts = [part for one in targets for part in getattr(one, "elts", [one])]
                first = isinstance(value, ast.Call) and name_of(value.func).endswith("parse_known_args")
                yield from self._held(parts[:1] if first else parts, key)
            case ast.AnnAssign(target=target) | ast.NamedExpr(target=target):
                yield from self._held([target], key)
            case ast.BoolOp() | ast.IfExp():
                yield above, key
            case ast.Return():
                yield from ((call, key) for call in self._calls[getattr(self._scope(above), "name", "")])
            case ast.keyword(arg=str(name)):
                yield from self._given(self._above[above], name, key, node)
            case ast.Call(args=given) if node in given:
                yield from self._given(above, above.args.index(node), key, node)
            case _ if not isinstance(above, _TESTS):
                self._leaves(node, key)

    def _part(self, part: Any, node: ast.AST, key: Key) -> Iterator[_Place]:
        """A part of settings: `settings.lr`, `settings["lr"]`, `settings.get("lr")`."""
        call: Any = self._above[part]
        held: Any = part
        name: Key | None = None
        asked = isinstance(call, ast.Call) and call.func is part
        if isinstance(part, ast.Subscript):
            name = (path_of(part.slice) or ()) if isinstance(part.slice, ast.Constant) else None
        elif not asked:
            name = (part.attr,)
        elif part.attr in _ASKS and call.args:
            held, name = call, path_of(call.args[0])
        if name is None:
            self._leaves(node, key)
        elif isinstance(part.ctx, ast.Load):
            yield held, key + name

    def _held(self, targets: Sequence[ast.expr], key: Key) -> Iterator[_Place]:
        """Where what a name or an attribute gets is read."""
        for one in targets:
            scope, name = self._home(one)
            if not name or (isinstance(scope, ast.Module) and name in self._shared):
                self._leaves(one, key)
            yield from ((read, key) for read in self._reads[scope, name])

    def _given(self, call: Any, place: int | str, key: Key, node: ast.AST) -> Iterator[_Place]:
        """Where an argument of a call goes."""
        last = name_of(call.func).rpartition(".")[2]
        made = self._defined[last][0] if len(self._defined.get(last, [])) == 1 else None
        if isinstance(made, ast.ClassDef):
            made = next((one for one in made.body if getattr(one, "name", "") == "__init__"), None)
        if last in _OF_PARTS and len(call.args) > 1 and (part := path_of(call.args[1])):
            yield from [(call, key + part)] if last == "getattr" else []
        elif last in _COPIES and place == 0:
            yield call, key
        elif isinstance(made, ast.FunctionDef) and not any(isinstance(one, ast.Starred) for one in call.args):
            method = isinstance(self._above[made], ast.ClassDef)
            every = [one.arg for one in (*made.args.posonlyargs, *made.args.args)][method:]
            name = place if isinstance(place, str) else next(iter(every[place : place + 1]), "")
            if (made, name) in self._local:
                yield from ((read, key) for read in self._reads[made, name])
            else:
                self._leaves(node, key)
        else:
            self._leaves(node, key)

    def _leaves(self, node: ast.AST, key: Key) -> None:
        """Note that a part goes where no line here shows what is read of it, unless that only shows it."""
        while (node := self._above.get(node, node)) in self._above and not isinstance(node, ast.stmt):
            if isinstance(node, ast.Call) and _SHOWS.search(ast.unparse(node.func)):
                return
            if isinstance(node, ast.Call) and name_of(node.func).rpartition(".")[2] not in _COPIES:
                break
        self.open.add(key)
