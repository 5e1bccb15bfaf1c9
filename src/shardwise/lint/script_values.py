"""What expressions of a script stand for, as far as its text shows."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from shardwise.job.source import Key, drop
from shardwise.lint.schema import names
from shardwise.lint.script_bound import REPLACE, Bound, remembered
from shardwise.lint.script_inputs import Inputs, commanded, fields, name_of, placed, presets
from shardwise.lint.script_names import Said, changes_by, dotted, handed_on, path_of, plain_rows, rest_of
from shardwise.lint.script_sums import UNKNOWN, computed, holds, literal

MOST_READ = 20_000  # entries of dicts of a script
MOST_STEPS = 100_000  # names that are followed; the rest of a script is unknown
DEEPEST = 60  # expressions within one another

ARGUMENTS = re.compile(r"(?i)^(\w+_)?(args|arguments|config|cfg|opts?|hparams|flags)$")  # made elsewhere
_PART = re.compile(r"\['(\w+)'\]")  # `["train"]`
_ASKED: list[Any] = []  # of an argument whose values are just being read
_COMMANDS = ("fire.Fire", "Fire", "typer.run", "tyro.cli")  # make flags of a function's arguments


class Values(Bound):
    """`inputs`: what a command gives the script. With it, flags and fields of classes have their defaults."""

    def __init__(self, program: ast.Module, inputs: Inputs | None = None) -> None:
        super().__init__(program, inputs, self.value)
        self._changes = defaultdict[Any, list[Any]](list)
        self._read = 0
        self._reading, self._open, self._held = set[ast.AST](), frozenset[ast.AST](), frozenset[ast.AST]()
        self._arguments = dict[ast.AST, list[Any]]()
        self._spread: list[tuple[ast.AST, ast.expr | None]] | None = None  # what `setattr` in loops sets
        for node in filter(self.used, self._links.nodes if self._defaults else ()):
            self.answers = {}  # which hold until the next line is noted
            (self._far if self._links.away(node) else self.presets).take(node, self.meant)
        for node, value in self._attributes:
            self.answers = {}
            self._store(node, value)
        for node in self._links.nodes:
            self.answers = {}
            self._change(node)
        self._spread = None  # which only now is certain
        self.answers = {}

    @remembered
    def meant(self, node: ast.AST) -> ast.AST:
        """What a name, a flag, or a call of a function of the script stands for; else the node itself."""
        before = self._open
        self.steps += 1
        while not self._cut(node in self._open or len(self._open) >= DEEPEST or self.steps >= MOST_STEPS):
            self._open = self._open | {node}
            found = self._next(node)
            alike = {ast.dump(one) if isinstance(one, ast.Constant) else one for one in found}
            if len(alike) != 1 or found[0] is None:
                break
            node = found[0]
        self._open = before
        return node

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
        away = self._links.away(found)  # whose lines are another file's
        at = line or getattr(node if away else found, "lineno", 0)
        said: Said = {key: (at, {})}
        self._reading.add(found)
        for path, item, there in rows:
            inner, line = (*key, *(path or ())), at if away else there or at
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

    @remembered
    def value(self, node: ast.AST) -> Any:
        """What an expression is, as far as literals, names and what the command gives show it."""
        node = self.meant(node)
        self._inputs.use(node)
        if self._cut(node in self._reading or len(self._reading) > DEEPEST):
            return UNKNOWN
        self._reading.add(node)
        holder = self.meant(node.value) if isinstance(node, ast.Attribute) else None
        own = isinstance(holder, ast.ClassDef | ast.Module)
        made = UNKNOWN if own else literal(node)  # a name of a library is a value: `torch.float16`
        if made == UNKNOWN:
            made = computed(node, self.value)
        for asked in (self._inputs.value, partial(holds, self.entries)) if self._defaults else ():
            made = asked(node, self.value) if made == UNKNOWN else made
        self._reading.discard(node)
        return made

    def later(self, made: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
        """Attributes of what a call made that are set later; None where only a run knows the value."""
        for name, stores in [*self._stores.items()]:
            for holder, value in stores:
                if made is holder or made in self._next(holder) or self._original(holder) is made:
                    yield name, None if name == "**" else value

    def _original(self, holder: ast.AST) -> ast.AST:
        """What a name holds, or holds a changed copy of."""
        made = self.meant(holder)
        while isinstance(made, ast.Call) and made.args and name_of(made.func) in REPLACE:
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

    def _rows(self, node: ast.AST) -> list[tuple[Key | None, ast.expr | None, int]] | None:
        """Path, value and line of a mapping's keys, then changes; () for `**`, None for any path or value."""
        rows = plain_rows(node, self.flow.scopes if self._defaults else None)
        loads = rows is None and isinstance(node, ast.Call) and self._defaults
        if loads and (held := self._inputs.file(cast(ast.Call, node), self.meant, self.value)):
            self._above[held] = node
            for one in ast.walk(held):
                self._above |= dict.fromkeys(ast.iter_child_nodes(one), one)
            rows = [((), held, 0)]
        return None if rows is None else [*rows, *self._changes.get(node, [])]

    def _store(self, node: ast.Attribute, value: ast.expr | None) -> None:
        """Note what an attribute is set to, but for the epochs that transformers' scripts compute again."""
        again = node.attr == "num_train_epochs" and value and "max_train_steps" in ast.unparse(value)
        block = self.flow.block(self.flow.statement(node), taken=self._defaults)
        if not again and not (self._defaults and not self.flow.runs(node)):
            certain = block is next(self.flow.scopes(node), None)
            self._stores[node.attr].append((node.value, value if certain else None))

    def _next(self, node: ast.AST) -> list[Any]:
        """What a node may stand for; None, or nothing, where only a run knows."""
        match node:
            case ast.Name():
                return self.named(node)
            case ast.Attribute(value=holder, attr=name):
                return self._attribute(holder, name)
            case ast.arg():
                return self._given(node)
            case ast.NamedExpr(value=value):
                return [value]
            case ast.Subscript(value=holder, slice=key):
                return self._item(holder, key)
            case ast.Call(func=ast.Attribute(attr="get", value=holder), args=[key, *other]):
                return self._item(holder, key, other)
            case ast.Call(func=ast.Name(id="getattr"), args=[holder, ast.Constant(str(name)), *other]):
                return self._attribute(holder, name) or other
            case ast.IfExp(test=test, body=one, orelse=ast.Constant(None)) if self.value(test) == UNKNOWN:
                return [one] * (type(self.value(one)) in (int, float))  # which None does not set
            case ast.BoolOp(op=ast.Or(), values=[one, ast.Dict(keys=[])]):
                return [one]  # `yaml.safe_load(file) or {}`
            case ast.Call(func=called) if isinstance(function := self.meant(called), ast.FunctionDef):
                own = (one for one in ast.walk(function) if isinstance(one, ast.Return | ast.Yield))
                found = [one for one in own if next(self.flow.scopes(one)) is function]
                plain = not function.decorator_list and all(self.flow.block(one) is function for one in found)
                return [one.value for one in found] if plain else []
        return []

    def _attribute(self, holder: ast.expr, name: str) -> list[Any]:
        """What was stored there, or what `_of_made` says."""
        member = self.meant(holder) if name == "value" else holder
        if member is not holder and literal(member) != UNKNOWN:  # of an Enum
            return [member]
        if given := self.configured(holder, name):
            return given
        stores = self._stores.get(name, [])
        text, made = ast.unparse(holder) if stores else "", None
        if isinstance(holder, ast.Name) and stores:
            made = self.meant(holder)
        stored = [
            value
            for other, value in stores
            if (ast.unparse(other) == text and self._links.same(holder, other))
            or (isinstance(made, ast.Call) and self.meant(other) is made)
            if not self._defaults or self.flow.runs(other)
        ]
        scopes = {next(self.flow.scopes(other), None) for other, _ in stores}
        if stored:  # in several functions, of which the last one is run last
            return stored[-1:] if len(scopes) == len(stores) and None not in stored else stored
        made = self.meant(holder) if self._defaults else None
        if isinstance(made, ast.Module):
            return self._bound.get((made, name), [])
        if self._spread is None:
            before, self._open, self._spread = self._open, frozenset(), []  # each holder is followed once
            self._spread = [(self.meant(other), one) for other, one in self._stores["**"]]
            self._open = before
        for mapping in (one for other, one in self._spread if other is made):
            if (item := self._item(mapping, ast.Constant(name)) if mapping else []) or self._is_open(mapping):
                return item  # which a loop sets, whatever the fields are
        return self._of_made(made, holder, name)

    def _of_made(self, made: ast.AST | None, holder: ast.expr, name: str) -> list[Any]:
        """What the call that made a holder gives an attribute; else the flag or field of that name."""
        kind = made.annotation if isinstance(made, ast.arg) else getattr(made, "func", None)
        maker = self.meant(kind) if kind else made
        if isinstance(made, ast.Call) and not isinstance(maker, ast.FunctionDef):
            given = [one.value for one in made.keywords if one.arg == name]
            rest = [one.value for one in made.keywords if one.arg is None]
            if not given and len(held := rest + made.args) == 1:
                given = self._item(held[0], ast.Constant(name))
            given = given or placed(maker, made.args, name, self.meant)
            if given or (name not in self._inputs.flags and any(map(self._is_open, rest))):
                return given
        if isinstance(made, ast.expr) and self._rows(made) is not None:
            return self._item(made, ast.Constant(name))
        for one in (made, holder):
            text = ast.unparse(one) if isinstance(one, ast.Attribute | ast.Name) else ""
            own = ARGUMENTS.match(text.removeprefix("self.").partition(".")[0])
            if own and (held := self._inputs.at(f"{text}.{name}")):
                return held
        path = f"{dotted(holder, self._next)}.{name}".lstrip(".")
        if "." in path and (flag := self._inputs.flag([path])):
            return [flag]  # tyro's `--optim.lr`
        presets = [self.presets, self._far][:: -1 if made and self._links.away(made) else 1]
        known = self._fields(maker, name) or presets[0].of(name) or presets[1].of(name)
        root, _, path = f"{ast.unparse(holder)}.{name}".partition(".")
        if not known and ARGUMENTS.match(root):
            if flag := self._inputs.flag([path]):
                return [flag]  # of a parser in another file, or of hydra
            if path == "dataset_config" and self._inputs.commanded:
                return [ast.Constant(None)]  # TRL's default
        return known

    def _is_open(self, mapping: ast.expr | None) -> bool:
        """Whether nothing shows the keys of a mapping."""
        return mapping is None or self._rows(self.meant(mapping)) is None

    def _fields(self, made: ast.AST | None, name: str) -> list[Any]:
        """What a class, or one that it is derived of, says of a field that the command does not give."""
        if not isinstance(made, ast.ClassDef) or name in self._inputs.flags:
            return []
        mine = (one for one in self._stores[name] if made in self.flow.scopes(one[0]))
        filled = self._inputs.filled(made, self.meant).get(name)
        own: list[Any] = filled or [value for by, value in mine if ast.unparse(by) == "self"]
        own = own or [value for field, value in fields(made) if field == name]
        inherited = (self._fields(self.meant(base), name) for base in made.bases)
        return own or [value for values in inherited for value in values]

    def _item(self, holder: ast.expr, name: ast.expr, other: Sequence[ast.expr] = ()) -> list[Any]:
        if given := self.configured(holder, getattr(name, "value", None)):
            return given
        made = self.meant(holder)
        if isinstance(made, ast.Call) and name_of(made.func) in names("as_a_mapping") and made.args:
            text = self.value(name)  # a flag or a field, of the arguments as a mapping
            return self._attribute(made.args[0], text) if isinstance(text, str) and text != UNKNOWN else []
        if (rows := self._rows(made)) is None or self._cut(made in self._held):  # a mapping may hold itself
            path = f"cfg{dotted(holder, self._next)}" if self._uses["hydra"] else ast.unparse(holder)
            path = _PART.sub(r".\1", path) if self._uses["OmegaConf"] else path
            path = f"{path}.{self.value(name)}" if isinstance(name, ast.Constant) else ""
            # without a use of the name, which may be a flag
            return self._inputs.at(path) if ARGUMENTS.match(path.partition(".")[0]) else []
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
            self._cut(self._arguments.get(arg) is _ASKED)
            return self._arguments.get(arg, [])
        self._arguments[arg], places = _ASKED, [one.arg for one in function.args.args]
        preset = presets(function)
        if self._defaults and (flagged := commanded(function)) is not None:
            flags, _, value = flagged.get(arg.arg, ([arg.arg], "", preset.get(arg.arg)))
            value = self._inputs.flag(flags) or (None if {"*", *flags} & {*self._inputs.more} else value)
            if arg is function.args.kwarg:
                every = [(name, self._inputs.flag(flags) or one) for name, (flags, _, one) in flagged.items()]
                value = rest_of([ast.keyword(name, one) for name, one in every if one], function, arg.lineno)
            self._arguments[arg] = [value] if value else []
            return self._arguments[arg]
        flag = self._inputs.flag([arg.arg]) if self._uses.get(function.name) else None
        made = function.name == "__init__"
        for use in self._uses_of(function):
            call, given = self._above[use], dict[Any, ast.expr]()
            if isinstance(call, ast.Call) and call.func is use and ast.Starred not in map(type, call.args):
                own = places[made or isinstance(use, ast.Attribute) :]
                given = dict(zip(own, call.args, strict=False)) | {k.arg: k.value for k in call.keywords}
                rest = [preset[arg.arg]] if arg.arg in preset else []
                rest = self._item(given[None], ast.Constant(arg.arg), rest) if None in given else rest
                given = {arg.arg: rest[0]} | given if rest else given
            elif isinstance(call, ast.Call) and (handed := handed_on(call, use)):
                given = dict(
                    zip(places[handed[0] :], getattr(self.meant(handed[1]), "elts", []), strict=False)
                )
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
        here, block = self._block_of_maker(holder), self.flow.block(by, taken=self._defaults)
        for one in found:
            certain = len(found) == 1 and block in (self.flow.block(self.flow.statement(one)), here)
            self._changes[one].append((path, value if certain else None, getattr(by, "lineno", 1)))

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
        """The mappings that a node may stand for, each once."""
        found = {node: True}
        for _ in range(deep + 1):
            yield from (one for one in found if self._rows(one) is not None)
            found = {one: True for held in found for one in self._next(held) if one}
