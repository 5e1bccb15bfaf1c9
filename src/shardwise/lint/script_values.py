"""What expressions of a script stand for, as far as its text shows."""

import ast
import builtins
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.job.source import Key, drop
from shardwise.lint.schema import names
from shardwise.lint.script_flow import Flow
from shardwise.lint.script_inputs import NOTHING, Inputs, Presets, commanded, name_of, presets
from shardwise.lint.script_names import Said, changes_by, name_as_imported, nested, part_of, path_of, rest_of
from shardwise.lint.script_sums import UNKNOWN, computed, literal

__all__ = ["ARGUMENTS", "Said", "Values", "name_as_imported", "nested"]

MOST_READ = 20_000  # entries of dicts of a script
MOST_STEPS = 100_000  # names that are followed; the rest of a script is unknown
DEEPEST = 60  # expressions within one another
MOST_BOUND = 50  # values of one name; of more, none is known

ARGUMENTS = re.compile(r"(?i)^(\w+_)?(args|arguments|config|cfg|opts?|hparams|flags)$")  # made elsewhere
_NOTEBOOK = ("__file__", "__builtins__", "get_ipython", "display", "cd", "ls", "pwd")  # that nothing defines
_REPLACE = ("dataclasses.replace", "replace")
_COMMANDS = ("fire.Fire", "Fire", "typer.run", "tyro.cli")  # make flags of a function's arguments


class Values:
    """`inputs`: what a command gives the script. With it, flags and fields of classes have their defaults."""

    def __init__(self, program: ast.Module, inputs: Inputs | None = None) -> None:
        nodes = sorted(ast.walk(program), key=lambda node: getattr(node, "lineno", 0))
        self._above = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._bound, self._uses, self._changes = (defaultdict[Any, list[Any]](list) for _ in range(3))
        self._read, self._steps = 0, 0
        self._defaults, self._inputs = inputs is not None, inputs or NOTHING
        self.flow = Flow(self._above, self.value, imported=self._inputs.imported)
        self.presets = Presets(self._inputs)
        self._stores = defaultdict[str, list[tuple[ast.expr, ast.expr | None]]](list)  # of attributes
        self._attributes = list[tuple[ast.Attribute, ast.expr | None]]()  # that are set
        self._reading, self._open, self._held = set[ast.AST](), frozenset[ast.AST](), frozenset[ast.AST]()
        self._arguments = dict[ast.AST, list[Any]]()
        for node in nodes:
            self._bind(node)
        for node in nodes if self._defaults else ():
            self.presets.take(node, self.meant)
        for node, value in self._attributes:
            self._store(node, value)
        for node in nodes:
            self._change(node)

    def meant(self, node: ast.AST) -> ast.AST:
        """What a name, a flag, or a call of a function of the script stands for; else the node itself."""
        before = self._open
        self._steps += 1
        while node not in self._open and len(self._open) < DEEPEST and self._steps < MOST_STEPS:
            self._open = self._open | {node}
            found = self._next(node)
            if len(found) != 1 or found[0] is None:
                break
            node = found[0]
        self._open = before
        return node

    def undefined(self) -> dict[str, int]:
        """Names that the script uses, and that no line of it binds or could bring in unseen; their lines."""
        bound = {*dir(builtins), *_NOTEBOOK, *(name for _, name in self._bound)}
        names_ = (one for uses in self._uses.values() for one in uses if isinstance(one, ast.Name))
        used = {one.id: one.lineno for one in reversed([*names_])}
        unseen = "*" in bound or {"exec", "eval", "globals"} & used.keys()
        return {one: used[one] for one in used if not unseen and one not in bound and "." not in one}

    def arguments(self, call: ast.Call) -> Said:
        """A call's keyword arguments, and those in a mapping; `**` if only a run knows these."""
        said = Said()
        for one in call.keywords:
            below = self.entries(one.value, (one.arg,) if one.arg else ())
            if one.arg or below.pop(())[1] == {}:
                said |= below
                continue
            known = [self._rows(held) or () for held in self._may_be(one.value) if self._defaults]
            keys: list[Key] = [("**",), *(path for rows in known for path, _, _ in rows if path)]
            said |= dict.fromkeys(keys, (one.value.lineno, UNKNOWN))
        return said

    def entries(self, node: ast.expr, key: Key = (), line: int = 0) -> Said:
        """The line and value of a node, and of each key in a mapping, outermost first."""
        found = self.meant(node)
        self._read += 1  # dicts of dicts can stand for any number
        if (rows := self._rows(found)) is None or found in self._reading or self._read > MOST_READ:
            return {key: (line or node.lineno, self.value(found))}
        at = line or getattr(found, "lineno", 0)
        said: Said = {key: (at, {})}
        self._reading.add(found)
        for path, item, line in rows:
            inner = (*key, *(path or ()))
            below = self.entries(item, inner, line) if item else {inner: (line, UNKNOWN)}
            above = [inner[:n] for n in range(len(key), len(inner))]
            open_ = path is None or (not path and below.pop(inner)[1] != {})
            if open_ or any(said.get(one, (0, {}))[1] != {} for one in above):
                said = {key: (at, UNKNOWN)}
                break
            for one in below.keys() & said.keys():
                drop(one, said)
            said |= {one: (line, {}) for one in above[1:]} | below
        self._reading.remove(found)
        return said

    def changes(self, node: ast.expr, key: Key = ()) -> Said:
        """What a script changes in the dicts that a node may stand for; of a key UNKNOWN, any part of it."""
        said = Said()
        for made in (one for one in self._may_be(node) if one not in self._reading):
            self._reading.add(made)
            for row in self._rows(made) or ():
                (path, item, line), inner = row, (*key, *(row[0] or ()))
                if row not in self._changes.get(made, []):
                    said |= self.changes(item, inner) if item else {}
                else:
                    said |= self.entries(item, inner, line) if path and item else {inner: (line, UNKNOWN)}
                    said |= self.entries(item, inner) if path == () and item else {}
            self._reading.discard(made)
        return said

    def value(self, node: ast.AST) -> Any:
        """What an expression is, as far as literals, names and what the command gives show it."""
        node = self.meant(node)
        self._inputs.use(node)
        if node in self._reading or len(self._reading) > DEEPEST:
            return UNKNOWN
        self._reading.add(node)
        own = isinstance(node, ast.Attribute) and isinstance(self.meant(node.value), ast.ClassDef)
        made = UNKNOWN if own else literal(node)  # a name of a library is a value: `torch.float16`
        if made == UNKNOWN:
            made = computed(node, self.value)
        if made == UNKNOWN and self._defaults:
            made = self._inputs.value(node, self.value)
        self._reading.discard(node)
        return made

    def later(self, made: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
        """Attributes of what a call made that are set later; None where only a run knows the value."""
        for name, stores in [*self._stores.items()]:
            for holder, value in stores:
                if made is holder or made in self._next(holder) or self._original(holder) is made:
                    yield name, value

    def _original(self, holder: ast.AST) -> ast.AST:
        """What a name holds, or holds a changed copy of."""
        made = self.meant(holder)
        while isinstance(made, ast.Call) and made.args and name_of(made.func) in _REPLACE:
            made = self.meant(made.args[0])
        return made

    def stored(self, holders: re.Pattern[str]) -> Iterator[tuple[str, int, ast.expr | None]]:
        """Attributes that are set of names like these, where nothing shows what the names hold."""
        for name, stores in [*self._stores.items()]:
            for holder, value in stores:
                if isinstance(holder, ast.Name) and holders.match(holder.id):
                    made = self.meant(holder)
                    if not isinstance(made, ast.Call) or name_of(made.func).endswith("parse_args"):
                        yield name, holder.lineno, value

    def runs(self, node: ast.AST, deep: int = 3) -> bool:
        """Whether nothing shows that a node, or each call of its function, is in a branch not taken."""
        function = next((one for one in self.flow.scopes(node) if isinstance(one, ast.FunctionDef)), None)
        uses = self._uses_of(function) if function is not None and deep else []
        return self.flow.runs(node) and (not uses or any(self.runs(one, deep - 1) for one in uses))

    def _rows(self, node: ast.AST) -> list[tuple[Key | None, ast.expr | None, int]] | None:
        """Path, value and line of a mapping's keys, then changes; () for `**`, None for any path or value."""
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                rows = [(path_of(k) if k else (), v, k.lineno if k else 0) for k, v in pairs]
            case ast.Call(func=ast.Name(id="dict"), args=others, keywords=given):
                rows = [((), one, 0) for one in others]
                rows += [((k.arg,) if k.arg else (), k.value, k.lineno if k.arg else 0) for k in given]
            case ast.Call(func=ast.Attribute(attr="copy", value=other), args=[]):
                rows = [((), other, 0)]
            case ast.Call() if self._defaults and (held := self._inputs.file(node, self.meant, self.value)):
                self._above[held] = node
                for one in ast.walk(held):
                    self._above |= dict.fromkeys(ast.iter_child_nodes(one), one)
                rows = [((), held, 0)]
            case _:
                return None
        return [*rows, *self._changes.get(node, [])]

    def _bind(self, node: ast.AST) -> None:
        above, scope = self._above.get(node), next(self.flow.scopes(node), None)
        plain = isinstance(above, ast.Assign | ast.AnnAssign) and getattr(above, "targets", [node]) == [node]
        value = getattr(above, "value", None) if plain else None
        value = value or part_of(node, above, self._above.get(above) if above else None)
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                self._uses[name].append(node)
            case ast.Name() if isinstance(above, ast.AugAssign) and isinstance(above.value, ast.Dict):
                pass  # `settings |= {...}` is a change
            case ast.Name(id=name, ctx=ast.Store()):
                self._bound[scope, name].append(value)
            case ast.Attribute():
                self._attributes.append((node, value))
            case ast.Call(func=ast.Name(id="setattr"), args=[holder, ast.Constant(value=str(name)), given]):
                certain = isinstance(above, ast.Expr) and self.flow.block(above) is scope
                self._stores[name].append((holder, given if certain else None))
            case ast.Call(args=[holder], keywords=given) if name_of(node.func) in _REPLACE:
                for keyword in given:
                    self._stores[keyword.arg or ""].append((holder, keyword.value))
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                self._bound[scope, name].append(node)
            case ast.alias(name=name):
                for one in ((node.asname or name).partition(".")[0], name):  # see `name_as_imported`
                    self._bound[scope, one].append(None)
            case ast.AsyncFunctionDef(name=name) | ast.ExceptHandler(name=name) | ast.MatchAs(name=name):
                self._bound[scope, name].append(None)

    def _store(self, node: ast.Attribute, value: ast.expr | None) -> None:
        """Note what an attribute is set to, but for the epochs that transformers' scripts compute again."""
        again = node.attr == "num_train_epochs" and value and "max_train_steps" in ast.unparse(value)
        certain = self._block(self.flow.statement(node)) is next(self.flow.scopes(node), None)
        if not again and not (self._defaults and not self.flow.runs(node)):
            self._stores[node.attr].append((node.value, value if certain else None))

    def _next(self, node: ast.AST) -> list[Any]:
        """What a node may stand for; None, or nothing, where only a run knows."""
        match node:
            case ast.Name(id=name):
                found = next(
                    (f for scope in self.flow.scopes(node) if (f := self._bound.get((scope, name)))), []
                )
                if found and not any(found) and name.isupper() and name in self._inputs.elsewhere:
                    return [self._inputs.elsewhere[name]]  # `from consts import RATE`
                several = self._defaults and len(found) > 1
                known = found if len(found) <= MOST_BOUND else []
                return [one for one in known if not several or one is None or self.flow.runs(one)]
            case ast.Attribute(value=holder, attr=name):
                return self._attribute(holder, name)
            case ast.arg():
                return self._given(node)
            case ast.Subscript(value=holder, slice=key):
                return self._item(holder, key)
            case ast.Call(func=ast.Attribute(attr="get", value=holder), args=[key, *other]):
                return self._item(holder, key, other)
            case ast.Call(func=called) if isinstance(function := self.meant(called), ast.FunctionDef):
                own = (one for one in ast.walk(function) if isinstance(one, ast.Return | ast.Yield))
                found = [one for one in own if next(self.flow.scopes(one)) is function]
                plain = not function.decorator_list and all(self.flow.block(one) is function for one in found)
                return [one.value for one in found] if plain else []
        return []

    def _attribute(self, holder: ast.expr, name: str) -> list[Any]:
        """What was stored there; else what the call that made the holder gives; else the flag or field."""
        text, made = ast.unparse(holder), None
        if isinstance(holder, ast.Name) and self._stores[name]:
            made = self.meant(holder)
        stored = [
            value
            for other, value in self._stores[name]
            if ast.unparse(other) == text or (isinstance(made, ast.Call) and self.meant(other) is made)
            if not self._defaults or self.flow.runs(other)
        ]
        scopes = {next(self.flow.scopes(other), None) for other, _ in self._stores[name]}
        if stored:  # in several functions, of which the last one is run last
            return stored[-1:] if len(scopes) == len(self._stores[name]) and None not in stored else stored
        made = self.meant(holder) if self._defaults else None
        if isinstance(made, ast.Call) and not isinstance(self.meant(made.func), ast.FunctionDef):
            given = [one.value for one in made.keywords if one.arg == name]
            held = [one.value for one in made.keywords if one.arg is None] + made.args
            if not given and len(held) == 1:
                given = self._item(held[0], ast.Constant(name))
            if given:
                return given
        if isinstance(made, ast.expr) and self._rows(made) is not None:
            return self._item(made, ast.Constant(name))
        known = self.presets.of(name)
        root, _, path = f"{text}.{name}".partition(".")
        if not known and ARGUMENTS.match(root):
            if flag := self._inputs.flag([path]):
                return [flag]  # of a parser in another file, or of hydra
            if path in self._inputs.elsewhere and self._inputs.commanded:
                return [self._inputs.elsewhere[path]]
            if path == "dataset_config" and self._inputs.commanded:
                return [ast.Constant(None)]  # TRL's default
        return known

    def _item(self, holder: ast.expr, name: ast.expr, other: Sequence[ast.expr] = ()) -> list[Any]:
        made = self.meant(holder)
        if (rows := self._rows(made)) is None or made in self._held:  # a mapping may hold itself
            return []  # without a use of the name, which may be a flag
        self._held = self._held | {made}
        try:
            return self._in_rows(rows, name, other)
        finally:
            self._held = self._held - {made}

    def _in_rows(self, rows: Sequence[Any], name: ast.expr, other: Sequence[ast.expr]) -> list[Any]:
        text = self.value(name)
        key = (text,) if isinstance(text, str) and text != UNKNOWN else None
        for path, item, _ in reversed(rows):
            if path == () and item and self._rows(self.meant(item)) is not None:  # {**another}
                if inner := self._item(item, name):
                    return inner
            elif not path or path[:1] == key:
                return [item] if path and path == key else []
        return [*other] if key else []

    def _given(self, arg: ast.arg) -> list[Any]:
        """What the calls of its function give an argument; None where they do not show it."""
        function, found = next(self.flow.scopes(arg)), list[Any]()
        if arg in self._arguments or not isinstance(function, ast.FunctionDef):
            return self._arguments.get(arg, [])
        self._arguments[arg], places = [], [one.arg for one in function.args.args]
        preset = presets(function)
        if self._defaults and (flagged := commanded(function)) is not None:
            flags, _, value = flagged.get(arg.arg, ([arg.arg], "", preset.get(arg.arg)))
            value = self._inputs.flag(flags) or value
            if arg is function.args.kwarg:
                every = [(name, self._inputs.flag(flags) or one) for name, (flags, _, one) in flagged.items()]
                value = rest_of([ast.keyword(name, one) for name, one in every if one], function, arg.lineno)
            self._arguments[arg] = [value] if value else []
            return self._arguments[arg]
        flag = self._inputs.flag([arg.arg]) if self._uses.get(function.name) else None
        made = function.name == "__init__"
        if self._inputs.imported and not self._uses_of(function) and not made:  # another file calls it
            other = self._inputs.elsewhere.get(arg.arg) if self._inputs.commanded else None
            found = [one for one in (self._inputs.flag([arg.arg]) or other,) if one]
        for use in self._uses_of(function):
            call, given = self._above[use], dict[Any, ast.expr]()
            if isinstance(call, ast.Call) and call.func is use and ast.Starred not in map(type, call.args):
                own = places[made or isinstance(use, ast.Attribute) :]
                given = dict(zip(own, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
                rest = [preset[arg.arg]] if arg.arg in preset else []
                rest = self._item(given[None], ast.Constant(arg.arg), rest) if None in given else rest
                given = {arg.arg: rest[0]} | given if rest else given
            elif isinstance(call, ast.Call) and self._defaults and name_of(call.func) in _COMMANDS:
                given = preset | ({arg.arg: flag} if flag else {})
            if arg is function.args.kwarg and isinstance(call, ast.Call):
                found.append(rest_of(call.keywords, function, call.lineno))
                continue
            found.append(given.get(arg.arg))
        self._arguments[arg] = [*dict.fromkeys(one and self.meant(one) for one in found)]
        return self._arguments[arg]

    def _change(self, node: ast.AST) -> None:
        for change in changes_by(node, self._above.get(node, node)):
            self._changed(*change)
        match node:
            case ast.Expr(value=ast.Call(func=ast.Name(id=name) as called, args=args)):
                kept = name in names("keep_a_dict") or isinstance(self.meant(called), ast.FunctionDef)
                for one in [] if kept else args:
                    if not isinstance(self.meant(one), ast.Constant):  # which no function can change
                        self._changed(one, None, None, node)

    def _changed(self, holder: ast.expr, path: Key | None, value: ast.expr | None, by: ast.AST) -> None:
        """Note a change of the dicts that an expression may stand for, or of those that hold it."""
        while not (found := [*self._may_be(holder)]):
            if not isinstance(holder, ast.Subscript | ast.Attribute | ast.Call):
                return
            inner = path_of(holder.slice) if isinstance(holder, ast.Subscript) else None
            path = (*inner, *path) if inner and path is not None else None
            holder = holder.func if isinstance(holder, ast.Call) else holder.value
        if self._defaults and not self.flow.runs(by):
            return
        here, block = self._block_of_maker(holder), self._block(by)
        for one in found:
            certain = len(found) == 1 and block in (self.flow.block(self.flow.statement(one)), here)
            self._changes[one].append((path, value if certain else None, getattr(by, "lineno", 1)))

    def _block(self, by: ast.AST) -> ast.AST | None:
        """The statement or scope that holds another, through those whose body runs."""
        block = self.flow.block(by)
        while self._defaults and isinstance(block, ast.If) and self.value(block.test) not in (UNKNOWN, False):
            block = self.flow.block(block)
        return block

    def _uses_of(self, function: ast.FunctionDef) -> list[Any]:
        """Where a function is called; `json.load` is no use of a `load` outside a class."""
        above = self._above[function]
        uses = self._uses[getattr(above, "name", "") if function.name == "__init__" else function.name]
        return uses if isinstance(above, ast.ClassDef) else [one for one in uses if isinstance(one, ast.Name)]

    def _block_of_maker(self, holder: ast.expr) -> ast.AST | None:
        """Where the only call of a function made what a name holds; None if no such call did."""
        while isinstance(holder, ast.Subscript | ast.Attribute):
            holder = holder.value
        made = self._next(holder) if isinstance(holder, ast.Name) else []
        if len(made) != 1 or not isinstance(made[0], ast.Call):
            return None
        function = self.meant(made[0].func)
        once = isinstance(function, ast.FunctionDef) and len(self._uses_of(function)) == 1
        return self.flow.block(self.flow.statement(made[0])) if once else None

    def _may_be(self, node: ast.AST, deep: int = 5) -> Iterator[ast.AST]:
        if self._rows(node) is not None:
            yield node
        for one in self._next(node) if deep else ():
            yield from self._may_be(one, deep - 1) if one else ()
