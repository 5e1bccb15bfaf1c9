"""What the names of a script are bound to, in other scripts, too, and which of its statements run."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import wraps
from pathlib import PurePath
from typing import Any, TypeVar, cast

from shardwise.lint.script_inputs import NOTHING, Inputs, Presets, name_of
from shardwise.lint.script_names import name_as_imported, part_of, path_of
from shardwise.lint.script_sums import UNKNOWN

_NOTEBOOK = ("__file__", "__builtins__", "get_ipython", "display", "cd", "ls", "pwd")  # that nothing defines
_PARSERS = ("HfArgumentParser", "transformers.HfArgumentParser", "TrlParser", "parse_args")
REPLACE = ("dataclasses.replace", "replace")
SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
_LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "deepspeed", "unsloth")
_IS_MAIN = "__name__ == '__main__'"
_Asked = TypeVar("_Asked", bound=Callable[[Any, Any], Any])


class Flow:
    """`above`: the parent of each node. `imported`: programs that are not started, but imported."""

    def __init__(
        self,
        above: Mapping[ast.AST, ast.AST],
        value_of: Callable[[ast.AST], Any],
        *,
        imported: Collection[ast.AST],
    ) -> None:
        self._above, self._value_of, self._imported = above, value_of, imported

    def runs(self, node: ast.AST) -> bool:
        """Whether nothing shows that a node is in the branch of an `if` that is not taken."""
        while above := self._above.get(node):
            if isinstance(above, ast.If | ast.IfExp) and node is not above.test:
                taken = self._value_of(above.test)
                if self._above.get(above) in self._imported and ast.unparse(above.test) == _IS_MAIN:
                    taken = False
                inside = node is above.body if isinstance(above, ast.IfExp) else node in above.body
                if taken != UNKNOWN and bool(taken) is not inside:
                    return False
            node = above
        return True

    def certain(self, node: ast.AST) -> bool:
        """Whether no branch that only a run may take holds a node; of a loop's branches each is taken."""
        maybe = False
        while (above := self._above.get(node)) and not isinstance(above, SCOPES):
            if isinstance(above, ast.For | ast.While):
                return True
            if isinstance(above, ast.If) and node is not above.test and ast.unparse(above.test) != _IS_MAIN:
                maybe = maybe or self._value_of(above.test) == UNKNOWN
            node = above
        return not maybe

    def apart(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether a condition lets only one of two nodes run."""
        mine, its = ({ast.unparse(test): held for test, held in self.taken(node)} for node in (one, other))
        return any(mine[test] is not its[test] for test in mine.keys() & its.keys())

    def taken(self, node: ast.AST) -> Iterator[tuple[ast.expr, bool]]:
        """The conditions above a node, and whether it is in the branch where they hold."""
        while above := self._above.get(node):
            main = isinstance(above, ast.If) and ast.unparse(above.test) == _IS_MAIN
            if isinstance(above, ast.If) and node is not above.test and not main:
                yield above.test, node in above.body
            node = above

    def covered(self, nodes: Sequence[ast.AST]) -> bool:
        """Whether one of these runs, whatever the conditions are that only a run knows."""
        rows = [{ast.unparse(test): held for test, held in self.taken(one)} for one in nodes]
        for row in rows:  # which grows: two that differ in one condition are one without it
            for other in [one for one in rows if one.keys() == row.keys()]:
                differ = [test for test in row if row[test] is not other[test]]
                joined = {test: held for test, held in row.items() if test not in differ}
                if len(differ) == 1 and joined not in rows:
                    rows.append(joined)
        return {} in rows

    def after(self, marks: Sequence[ast.AST]) -> set[ast.AST]:
        """The nodes of all statements that follow one of these in its own block."""
        found = set[ast.AST]()
        for one in marks:
            if one in found:  # so is what follows it
                continue
            statement = self.statement(one)
            block = self._above.get(statement)
            body: list[ast.stmt] = getattr(block, "body", [])
            later = body[body.index(statement) + 1 :] if statement in body else []
            found |= {inner for node in later for inner in ast.walk(node) if not isinstance(node, SCOPES)}
        return found

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        while above := self._above.get(node):
            node = above
            if isinstance(node, SCOPES):
                yield node

    def block(self, statement: ast.AST, *, taken: bool = False) -> ast.AST | None:
        """The statement or scope that holds one, through those whose body always runs.

        `taken`: also through branches of which the text shows that they are taken.
        """
        above = self._above.get(statement)
        while isinstance(above, ast.With | ast.Try) or (
            isinstance(above, ast.If)
            and (ast.unparse(above.test) == _IS_MAIN or (taken and self._taken(above.test)))
        ):
            above = self._above.get(above)
        return above

    def _taken(self, test: ast.expr) -> bool:
        return self._value_of(test) not in (UNKNOWN, False)

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and node in self._above:  # a value of the command is in no line
            node = self._above[node]
        return node


def modules_of(texts: Mapping[str, str]) -> dict[str, ast.Module]:
    """The programs of files by the last part of their modules' names."""
    programs = {PurePath(name).stem: ast.parse(text) for name, text in texts.items()}
    for one in programs.values():
        name_as_imported(one)
    return programs


class Links:
    """`nodes`: of all scripts, the program's first, by line. `of`: the script of each node."""

    def __init__(self, program: ast.Module, name: str, others: Mapping[str, ast.Module]) -> None:
        self._modules, self._imports = {name: program, **others}, set[tuple[ast.AST, ast.AST]]()
        self._program, self.nodes, self.of = program, list[ast.AST](), dict[ast.AST, ast.AST]()
        for one in (program, *others.values()):
            own = sorted(ast.walk(one), key=lambda node: getattr(node, "lineno", 0))
            self.nodes += own
            self.of |= dict.fromkeys(own, one)

    def bound(self, one: ast.alias, by: ast.AST | None) -> Iterator[tuple[str, ast.AST | None, ast.AST]]:
        """The names that an import binds: each with its value, and the script that this is in.

        The value is a name in another script, or the script itself; None of what no script defines.
        """
        inside = self._exporting(one.name, by) if isinstance(by, ast.ImportFrom) else None
        module = inside or self._modules.get(_last(one.name))
        if module is None:  # `name_as_imported` calls it by both names
            yield from ((name, None, one) for name in ((one.asname or one.name).partition(".")[0], one.name))
            return
        self._imports.add((self.of[one], module))
        long = f"{getattr(by, 'module', '')}.{one.name}"  # as `name_as_imported` calls trainers
        for name in _top(module) if one.name == "*" else filter(None, (one.name, one.asname, long)):
            last = name if one.name == "*" else one.name
            yield name, ast.Name(id=last, ctx=ast.Load(), lineno=one.lineno) if inside else module, module

    def _exporting(self, name: str, by: ast.ImportFrom) -> ast.Module | None:
        """The script that an import names, or the only one that defines what a user's package exports."""
        if (named := self._modules.get(_last(by.module))) or (by.module or "").split(".")[0] in _LIBRARIES:
            return named
        others = [one for one in self._modules.values() if one is not self.of[by]]
        held = [one for one in others if name in {getattr(part, "name", "") for part in one.body}]
        return held[0] if len(held) == 1 else None

    def imported(self) -> set[ast.AST]:
        """The scripts that the program imports, and those that these do."""
        found: set[ast.AST] = {self._program}
        next_ = found
        while next_ := {to for by, to in self._imports if by in next_} - found:
            found = found | next_
        return found - {self._program}

    def away(self, one: ast.AST) -> bool:
        """Whether a node is in another script than the program."""
        return self.of.get(one, self._program) is not self._program

    def joins(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether the script of one node imports that of another."""
        return (self.of[one], self.of[other]) in self._imports

    def same(self, one: ast.AST, other: ast.AST) -> bool:
        """Whether two nodes are in one script, as far as the first is in any."""
        return self.of.get(one, self.of[other]) is self.of[other]


def _last(module: str | None) -> str:
    return (module or "").rpartition(".")[2]


def _top(module: ast.Module) -> Iterator[str]:
    """What the top level of a script binds."""
    for one in module.body:
        if isinstance(one, ast.FunctionDef | ast.ClassDef):
            yield one.name
        for part in ast.walk(one) if isinstance(one, ast.Assign | ast.AnnAssign) else ():
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                yield part.id


def remembered(asked: _Asked) -> _Asked:
    """Keep a method's answer about a node, once there are `answers`, unless a guard cut it short."""

    @wraps(asked)
    def answer(self: Any, node: ast.AST) -> Any:
        if self.answers is None:
            return asked(self, node)
        key = asked, node
        if key not in self.answers:
            cuts = self.cuts
            found = asked(self, node)
            if self.cuts != cuts:
                return found
            self.answers[key] = found
        return self.answers[key]

    return cast(_Asked, answer)


class Bound:
    """Of a program and of the scripts that it imports: `flow` says what runs."""

    def __init__(self, program: ast.Module, own: Inputs | None, value_of: Callable[[ast.AST], Any]) -> None:
        self._defaults, self._inputs = own is not None, (inputs := own or NOTHING)
        self.answers: dict[Any, Any] | None = None  # about nodes, once all names are bound
        self.cuts = 0  # answers that a guard against endless reading cut short
        self._links = Links(program, inputs.stem, inputs.others)
        self.presets, self._far = Presets(inputs), Presets(inputs)
        nodes = self._links.nodes
        self._above = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._bound, self._uses = (defaultdict[Any, list[Any]](list) for _ in range(2))
        self._stores = defaultdict[str, list[tuple[ast.expr, ast.expr | None]]](list)  # of attributes
        self._attributes = list[tuple[ast.Attribute, ast.expr | None]]()  # that are set
        idle = {program} if inputs.imported else set[ast.AST]()
        self.flow = Flow(self._above, value_of, imported=idle)
        for node in nodes:
            self._bind(node)
        idle |= self._links.imported()

    def _cut(self, endless: bool) -> bool:
        self.cuts += endless
        return endless

    def used(self, made: ast.AST) -> bool:
        """Whether some line names a class, or none shows which classes the command fills in."""
        shown = any(self._uses[name] for name in _PARSERS)
        return not (shown and isinstance(made, ast.ClassDef)) or bool(self._uses[made.name])

    def undefined(self) -> dict[str, int]:
        """Names that the script uses, and that no line of it binds or could bring in unseen; their lines."""
        bound = {*dir(builtins), *_NOTEBOOK, *(name for _, name in self._bound)}
        names_ = (one for uses in self._uses.values() for one in uses if isinstance(one, ast.Name))
        used = {one.id: one.lineno for one in reversed([*names_])}
        unseen = "*" in bound or {"exec", "eval", "globals"} & used.keys()
        return {one: used[one] for one in used if not unseen and one not in bound and "." not in one}

    def _bind(self, node: ast.AST) -> None:
        above, scope = self._above.get(node), next(self.flow.scopes(node), None)
        plain = isinstance(above, ast.Assign | ast.AnnAssign) and getattr(above, "targets", [node]) == [node]
        value = getattr(above, "value", None) if plain else None
        value = value or part_of(node, above, self._above.get(above) if above else None)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                self._uses[name.rpartition(".")[2]].append(node)  # without the module of `name_as_imported`
            case ast.Name() if isinstance(above, ast.AugAssign) and isinstance(above.value, ast.Dict):
                pass  # `settings |= {...}` is a change
            case ast.Name(id=name, ctx=ast.Store()):
                self._bound[scope, name].append(value)
            case ast.Attribute():
                self._attributes.append((node, value))
            case ast.Call(func=ast.Name(id="setattr"), args=[holder, key, given]):
                certain = isinstance(above, ast.Expr) and self.flow.block(above) is scope
                value = (given if certain else None) if path_of(key) else self._items_above(node)
                self._stores[(path_of(key) or ("**",))[0]].append((holder, value))
            case ast.Call(args=[holder], keywords=given) if name_of(node.func) in REPLACE:
                for keyword in given:
                    self._stores[keyword.arg or "**"].append((holder, keyword.value))
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self._bound[scope, name].append(node)
            case ast.alias():
                for name, made, by in self._links.bound(node, above):
                    self._bound[scope, name].append(made)
                    self._above |= {made: by} if made and made is not by else {}
            case ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                self._bound[scope, name].append(None)

    def _items_above(self, node: ast.AST) -> ast.expr | None:
        """The mapping of the loop around a node: `for key, value in mapping.items()`."""
        while above := self._above.get(node):
            match above:
                case ast.For(iter=ast.Call(func=ast.Attribute(value=mapping, attr="items"))):
                    return mapping
            node = above
        return None
