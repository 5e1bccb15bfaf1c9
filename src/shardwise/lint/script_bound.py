"""What the names and attributes of a script are bound to."""

import ast
import builtins
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from shardwise.lint.script_flow import Flow
from shardwise.lint.script_inputs import NOTHING, Inputs, Presets, name_of
from shardwise.lint.script_links import Links
from shardwise.lint.script_names import dotted, part_of, path_of

_NOTEBOOK = ("__file__", "__builtins__", "get_ipython", "display", "cd", "ls", "pwd")  # that nothing defines
_PARSERS = ("HfArgumentParser", "transformers.HfArgumentParser", "TrlParser", "parse_args")
REPLACE = ("dataclasses.replace", "replace")
MOST_BOUND = 50  # values of one name; of more, none is known
_OVERRIDDEN = ("from_cli", "hydra")  # names of what puts `train.lr=1e-4` of a command over files
_ASSIGNS = ast.Assign | ast.AnnAssign | ast.NamedExpr
_Asked = TypeVar("_Asked", bound=Callable[[Any, Any], Any])


_LONG = 100  # names that are followed for one question, and then each part of it is answered once


def remembered(asked: _Asked) -> _Asked:
    """Keep a method's answer about a node until a line is noted that may change it.

    One that a guard cut short depends on where the reading began: it is kept within a long question only.
    """

    @wraps(asked)
    def answer(self: Any, node: ast.AST) -> Any:
        key = asked, node
        for known in (self.answers, self.cut_short):
            if key in known:
                return known[key]
        cuts, first = self.cuts, self.deep == 0
        self.began = self.steps if first else self.began
        self.deep += 1
        try:
            found = asked(self, node)
        finally:
            self.deep -= 1
        if self.cuts == cuts:
            self.answers[key] = found
        elif self.steps - self.began > _LONG:
            self.cut_short[key] = found
        if first:
            self.cut_short.clear()
        return found

    return cast(_Asked, answer)


class Bound:
    """Of a program and of the scripts that it imports: `flow` says what runs."""

    def __init__(self, program: ast.Module, own: Inputs | None, value_of: Callable[[ast.AST], Any]) -> None:
        self._defaults, self._inputs = own is not None, (inputs := own or NOTHING)
        self.answers, self.cut_short = dict[Any, Any](), dict[Any, Any]()  # about nodes
        self.cuts = 0  # answers that a guard against endless reading cut short
        self.steps = self.began = self.deep = 0  # names that were followed; the same before a question
        self._links = Links(program, inputs.stem, inputs.others)
        self.presets, self._far = Presets(inputs), Presets(inputs)
        nodes = self._links.nodes
        self._above = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._bound, self._uses = (defaultdict[Any, list[Any]](list) for _ in range(2))
        self._stores = defaultdict[str, list[tuple[ast.expr, ast.expr | None]]](list)  # of attributes
        self._sums = dict[ast.AST, ast.AST]()  # of lines such as `steps //= world_size`
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

    def meant(self, node: ast.AST) -> ast.AST:
        """What a node stands for."""
        raise NotImplementedError

    def runs(self, node: ast.AST, deep: int = 3) -> bool:
        """Whether nothing shows that a node, or each call of its function, is in a branch not taken."""
        function = next((one for one in self.flow.scopes(node) if isinstance(one, ast.FunctionDef)), None)
        uses = self._uses_of(function, idle=True) if function is not None and deep else []
        return self.flow.runs(node) and (not uses or any(self.runs(one, deep - 1) for one in uses))

    def _uses_of(self, function: ast.FunctionDef, *, idle: bool = False) -> list[Any]:
        """Where a function is called (`idle`: also if never); `json.load` is none of a `load` in no class."""
        above = self._above[function]
        uses = self._uses[getattr(above, "name", "") if function.name == "__init__" else function.name]
        uses = [one for one in uses if idle or self.runs(one, 2)] if self._inputs.others else uses
        method = isinstance(above, ast.ClassDef)
        own = [one for one in uses if self._links.same(one, function)]
        far = [one for one in uses if self._links.joins(one, function)]
        own = own if method else [one for one in own if isinstance(one, ast.Name)]
        return own + (far if method else [one for one in far if self.meant(one) is function])

    def named(self, node: ast.Name) -> list[Any]:
        """What a name may stand for; None, or nothing, where only a run knows."""
        scopes = self.flow.scopes(node)
        found = next((f for scope in scopes if (f := self._bound.get((scope, node.id)))), [])
        several = self._defaults and len(found) > 1
        known = found if len(found) <= MOST_BOUND else []
        known = [one for one in known if not several or one is None or self.flow.runs(one)]
        return self._counted(node, self._latest(node, known)) if several else known

    def _latest(self, node: ast.Name, known: list[Any]) -> list[Any]:
        """What the last line before a use assigns, of lines that run one after the other: `x = x["part"]`."""
        lines: list[Any] = [self.flow.statement(one) for one in known if isinstance(one, ast.expr)]
        plain = len(lines) == len(known) and all(isinstance(one, _ASSIGNS) for one in lines)
        blocks = {self.flow.block(one, taken=True) for one in lines if plain}
        here = self.flow.statement(node) if blocks == {next(self.flow.scopes(node), None)} else None
        at = getattr(here, "lineno", 0)
        before = [one for one, by in zip(known, lines, strict=False) if at and by.lineno < at]
        return before[-1:] or known

    def _counted(self, node: ast.Name, known: list[Any]) -> list[Any]:
        """What a name may stand for, after the only line that changes its number: `steps //= world_size`."""
        changed = [one for one in known if isinstance(self._above.get(one), ast.AugAssign)]
        by: Any = self._above[changed[0]] if len(changed) == 1 else None
        by = by if by and isinstance(by.op, ast.Mult | ast.Div | ast.FloorDiv) else None
        here = next(self.flow.scopes(node), None)
        if (
            len(known) != 2
            or not by
            or here is not self.flow.block(by, taken=True)
            or node.lineno <= by.lineno
        ):
            return known
        before = next(one for one in known if one not in changed)
        return [self._sums.setdefault(by, ast.BinOp(left=before, op=by.op, right=by.value, lineno=by.lineno))]

    def configured(self, holder: ast.expr, name: Any) -> list[Any]:
        """A part of a configuration that OmegaConf or Hydra makes of files, and a command over these."""
        if not isinstance(name, str) or not any(self._uses[one] for one in _OVERRIDDEN):
            return []
        path = f"{dotted(holder, self.named)}.{name}".lstrip(".")
        flag = self._inputs.flag([path, f"+{path}", f"++{path}"])
        return [flag] if flag else []

    def undefined(self) -> dict[str, int]:
        """Names that the script uses, and that no line of it binds or could bring in unseen; their lines."""
        bound = {*dir(builtins), *_NOTEBOOK, *(name for _, name in self._bound)}
        names_ = (one for uses in self._uses.values() for one in uses if isinstance(one, ast.Name))
        used = {one.id: one.lineno for one in reversed([*names_])}
        unseen = "*" in bound or {"exec", "eval", "globals"} & used.keys()
        return {one: used[one] for one in used if not unseen and one not in bound and "." not in one}

    def _bind(self, node: ast.AST) -> None:
        above, scope = self._above.get(node), next(self.flow.scopes(node), None)
        plain = isinstance(above, _ASSIGNS) and getattr(above, "targets", [node]) == [node]
        value = getattr(above, "value", None) if plain else None
        value = value or part_of(node, above, self._above.get(above) if above else None)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                self._uses[name.rpartition(".")[2]].append(node)  # without the module of `name_as_imported`
            case ast.Name() if isinstance(above, ast.AugAssign) and isinstance(above.value, ast.Dict):
                pass  # `settings |= {...}` is a change
            case ast.Name(id=name, ctx=ast.Store()):  # `steps *= 8` is open, where it runs
                self._bound[scope, name].append(node if isinstance(above, ast.AugAssign) else value)
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
