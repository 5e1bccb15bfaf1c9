"""What a command gives a script: flags, variables of the environment, and files that it reads."""

import ast
import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shardwise.job.paths import read_bounded
from shardwise.job.source import Key
from shardwise.lint.script_sums import UNKNOWN

Option = tuple[list[str], str, ast.expr | None]  # names on the command line, name in the script, default

OPEN = re.compile(r"\$[{(\w]|^`")  # what only the shell knows
_LARGEST_FILE_BYTES = 1_000_000
_LOADERS = ("json.load", "json.loads", "yaml.safe_load", "yaml.load", "yaml.full_load", "OmegaConf.load")
_ENVIRONMENT = ("os.environ.get", "os.getenv", "environ.get", "getenv")
_WORLD = "WORLD_SIZE"  # the number of processes
_OF_LAUNCHER = re.compile(r"(LOCAL_)?WORLD_SIZE$|SLURM_|OMPI_|PMI_")  # what starts the processes sets these
_RANK = re.compile(r"(\w+_)?RANK$")  # of which each process has its own
_SET = re.compile(r"int\((os\.)?(environ\.get|getenv)\('(LOCAL_)?RANK', -1\)\) [!=]= -1$")  # by a launcher
_COUNT = re.compile(
    r"(?i)(.*\bget_world_size\(\)|.*(accelerator|state|state\(\))\.num_processes|.*args\.world_size)$"
)
# what every GPU has that shardwise plans for
_SUPPORTED = ("is_bfloat16_supported", "is_bf16_supported", "cuda.is_available")


class _NoAliases(yaml.SafeLoader):
    """Of a stranger's file: aliases within aliases stand for any number of values."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("an alias")
        return super().compose_node(parent, index)


@dataclass(eq=False)
class Inputs:
    """`flags`: with `_` in place of `-`. `folder`: where the script is."""

    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    _: KW_ONLY
    commanded: bool = False  # whether a command says all flags
    more: Collection[str] = ()  # flags that only the shell knows whether the command has; `*`: any
    alone: bool = False  # whether nothing starts other processes
    imported: bool = False  # whether another script is the one that is started
    given: Sequence[str] = ()  # files of settings, one of which the script may read
    stem: str = ""  # the script's name as a module
    others: Mapping[str, ast.Module] = field(default_factory=dict)  # named scripts, which it may import
    content: Mapping[str, Any] | None = None  # of whatever file the script loads
    data: Sequence[Mapping[str, Any]] = ()  # files of settings, which may fill classes of the script's own

    def __post_init__(self) -> None:
        self._sections = [(".".join(path), one) for held in self.data for path, one in sections((), held)]
        self._last = {name.rpartition(".")[2]: name for name in self.flags}  # tyro's `--optim.lr`
        self._nodes = dict[ast.AST, str]()  # of the flags' values, and which flag
        self._files = dict[ast.AST, ast.Dict | None]()
        self.defined = set[str]()  # flags of the command that the script has
        self.taken = set[str]()  # those whose value is the value of something
        self.loaded = set[Path]()  # files that the script reads
        self.outside = set[str]()  # files that it names elsewhere, which are not read
        self.supported = False  # whether a value depends on what a GPU supports
        self.absent = dict[str, Any]()  # variables that nothing sets, and what the script takes instead

    def flag(self, names: Sequence[str]) -> ast.expr | None:
        """The value of the first of these flags that the command has."""
        name = next((one for one in names if one in self.flags), None)
        name = name or next((self._last[one] for one in names if one in self._last), None)
        if name is None:
            return None
        self.defined.add(name)
        value = self.flags[name]
        node = ast.Name(id=value) if isinstance(value, str) and OPEN.search(value) else _expression(value)
        self._nodes[node] = name
        return node

    def filled(self, made: ast.ClassDef, meant: Callable[[ast.AST], ast.AST]) -> dict[str, list[ast.expr]]:
        """What files say of the fields of a class, in sections that have no other keys."""
        known = {*field_names(made, meant)} if self._sections else set[str]()
        held = [one for one in self._sections if len(one[1]) > 1 and one[1].keys() <= known]
        words = [re.sub(r".*\.|_|config|conf|arg(ument)?s|settings", "", one[0].lower()) for one in held]
        mine = [one for one, word in zip(held, words, strict=True) if word and word in made.name.lower()]
        found = defaultdict[str, list[ast.expr]](list)
        for path, section in mine or held:
            for name, value in section.items():
                found[name].append(self._part(f"{path}.{name}".lstrip("."), value))
        return found

    def at(self, text: str) -> list[ast.expr]:
        """What files hold at a path such as `cfg.optim.lr`; of two files with other values nothing."""
        parts = text.removeprefix("self.").split(".")
        paths = [".".join(parts[start:-1]) for start in range(len(parts) - 1)]
        found = {path: one[parts[-1]] for path, one in self._sections if path in paths and parts[-1] in one}
        same = len({*map(repr, found.values())}) == 1
        return [self._part(f"{path}.{parts[-1]}", one) for path, one in found.items()][: int(same)]

    def _part(self, path: str, value: Any) -> ast.expr:
        """A value of a file, which counts as taken where it is used."""
        if isinstance(value, Mapping):
            keys = [ast.Constant(str(one), lineno=0) for one in value]
            return ast.Dict([*keys], [self._part(f"{path}.{name}", one) for name, one in value.items()])
        self._nodes[node := _expression(value)] = path
        return node

    def value(self, node: ast.AST, value_of: Callable[[ast.AST], Any]) -> Any:
        """The value of a variable of the environment, or of a question about the launch or the GPU."""
        match node:
            case ast.Call(func=called, args=[name, *other]) if ast.unparse(called) in _ENVIRONMENT:
                return self._variable(value_of(name), value_of(other[0]) if other else None)
            case ast.Subscript(value=holder, slice=name) if ast.unparse(holder) in ("os.environ", "environ"):
                return self._variable(value_of(name), UNKNOWN)
            case ast.Call(func=ast.Name(id="hasattr"), args=[holder, ast.Constant(value=str(name))]):
                known = value_of(ast.Attribute(value=holder, attr=name, ctx=ast.Load()))
                return known if known == UNKNOWN else True
            case ast.Compare(ops=[ast.Eq() | ast.NotEq() as op]) if _SET.match(ast.unparse(node)):
                started = _WORLD in self.environment and not self.alone
                return started is isinstance(op, ast.NotEq) if started or self.alone else UNKNOWN
            case ast.Call(func=called, args=[]) if ast.unparse(called).endswith(_SUPPORTED):
                self.supported |= not ast.unparse(called).endswith("is_available")
                return True
            case ast.Compare(left=one, ops=[ast.In() | ast.NotIn() as op], comparators=[held]) if self.folder:
                sides = value_of(one), value_of(held)  # of a job: rules need more to be sure of a branch
                texts = {*map(type, sides)} == {str}
                known = UNKNOWN not in sides and (texts or isinstance(sides[1], list))
                return (sides[0] in sides[1]) is isinstance(op, ast.In) if known else UNKNOWN
            case ast.Call() | ast.Attribute() if _COUNT.match(ast.unparse(node)):
                count = self.environment.get(_WORLD, "")
                return int(count) if count.isdecimal() else UNKNOWN
        return UNKNOWN

    def _variable(self, name: Any, default: Any) -> Any:
        if not isinstance(name, str):
            return UNKNOWN
        started = _OF_LAUNCHER.match(name) and not self.alone
        if _RANK.match(name) or (started and name not in self.environment):
            return UNKNOWN  # whatever the default
        if name in self.environment:
            self.taken.add(name)
        elif default not in (None, "", UNKNOWN) and not _OF_LAUNCHER.match(name):
            self.absent[name] = default
        return self.environment.get(name, default)

    def use(self, node: ast.AST) -> None:
        """Note that a node's value is used."""
        if node in self._nodes:
            self.taken.add(self._nodes[node])

    def file(
        self, call: ast.Call, meant: Callable[[ast.AST], ast.AST], value_of: Callable[[ast.AST], Any]
    ) -> ast.Dict | None:
        """The mapping in a JSON or YAML file that a call loads; None if it is none, or not there."""
        if call not in self._files:
            self._files[call] = None
            loads = bool(call.args) and ast.unparse(call.func) in _LOADERS
            if loads and self.content is not None:
                self._files[call] = _mapping(self.content, call.lineno)
            elif loads and self.folder is not None:
                name = _file_name(call.args[0], meant, value_of)
                there = name and next((one for one in self.given if one.endswith(Path(name).name)), "")
                alone = self.given[0] if len(self.given) == 1 and not name else ""
                for one in filter(None, (name, there, alone)):  # another machine may have it elsewhere
                    if one.endswith(".json") == ast.unparse(call.func).startswith("json"):
                        self._files[call] = self._files[call] or self._load(one, call.lineno)
        return self._files[call]

    def _load(self, name: str, line: int) -> ast.Dict | None:
        folder = self.folder or Path()
        for path in (Path(name), folder / name):
            try:
                real, roots = path.resolve(), (Path.cwd(), folder.resolve())
                if name not in self.given and not any(map(real.is_relative_to, roots)):
                    if real.is_file():  # a stranger's script does not choose among a user's files
                        self.outside.add(name)
                    continue
                text = read_bounded(path, _LARGEST_FILE_BYTES).decode()
                values = json.loads(text) if name.endswith(".json") else yaml.load(text, _NoAliases)  # noqa: S506
                made = _mapping(values, line)
            except (OSError, ValueError, yaml.YAMLError, RuntimeError, SyntaxError, MemoryError):
                continue
            if made is not None:
                self.loaded.add(real)
                return made
        return None


NOTHING = Inputs()


class Presets:
    """What flags of a parser, fields of classes and arguments of `__init__` are."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._held = dict[str, tuple[int, list[ast.expr]]]()  # the highest rank counts

    def of(self, name: str) -> list[ast.expr]:
        """The values that a flag or field may have."""
        return self._held.get(name, (0, []))[1]

    def take(self, node: ast.AST, meant: Callable[[ast.AST], ast.AST]) -> None:
        """Take flags of a parser, fields of classes, and what a call gives these; a command gives more."""
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument")):
                flags, name, value = options(node)
                off = "store_false" in (getattr(one.value, "value", "") for one in node.keywords)
                given = ast.Constant(value=False, lineno=node.lineno) if off else None
                value = value or (None if "required=True" in ast.unparse(node) else ast.Constant(None))
                value = None if {"*", *flags} & {*self._inputs.more} else value
                self._note(name, value, 0, flags, given)
            case ast.Call(func=called, keywords=given):
                if name_of(called).endswith("set_defaults") or isinstance(meant(called), ast.ClassDef):
                    for keyword in given:
                        if getattr(keyword.value, "attr", "") == keyword.arg:
                            continue  # `Rows(size=args.size)` hands a flag on
                        self._note(keyword.arg or "", keyword.value, 1)
            case ast.ClassDef():
                self._of_class(node, meant)

    def _of_class(self, node: ast.ClassDef, meant: Callable[[ast.AST], ast.AST]) -> None:
        for name, value in fields(node):
            self._note(name, value, 0, [name])
        inner = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        for name, value in (row for one in inner for row in presets(one).items()):
            self._note(name, value, 0)
        for name, held in self._inputs.filled(node, meant).items():
            for value in (one for one in held if not isinstance(one, ast.Dict)):  # no section: `torch.optim`
                self._note(name, ast.copy_location(value, node), 2)

    def _note(
        self,
        name: str,
        value: ast.expr | None,
        rank: int,
        flags: Sequence[str] = (),
        switched: ast.expr | None = None,
    ) -> None:
        """Note a value; by rank a default, what a call, a file or the command gives (`switched` if so)."""
        if (given := self._inputs.flag(flags)) is not None:
            value, rank = switched or given, 3
        if value is None:
            return
        if isinstance(value, ast.Constant) and value.value is None:
            if self._inputs.commanded:  # else a command may give another
                self._held.setdefault(name, (-1, [value]))
            return
        before, values = self._held.get(name, (0, []))
        if rank > before or not values:
            self._held[name] = rank, [value]
        elif rank == before and ast.unparse(value) not in map(ast.unparse, values):
            values.append(value)


def sections(path: Key, values: Mapping[str, Any]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    """A mapping of a file and those within it, each with its path."""
    yield path, values
    for name, one in values.items():
        if isinstance(one, Mapping):
            yield from sections((*path, str(name)), one)


def _expression(value: Any) -> ast.expr:
    return ast.parse(repr(value), mode="eval").body


def _mapping(value: Any, line: int) -> ast.Dict | None:
    """A mapping as a script would write it in a line; None of another value."""
    made = _expression(value)
    for node in (one for one in ast.walk(made) if isinstance(one, ast.expr)):
        node.lineno = line
    return made if isinstance(made, ast.Dict) else None


def _file_name(node: ast.AST, meant: Callable[[ast.AST], ast.AST], value_of: Callable[[ast.AST], Any]) -> str:
    """The file of `open("x")`, `Path("x").read_text()` or `"x"`; empty where only a run knows."""
    node = meant(node)
    match node:
        case ast.Call(func=ast.Name(id="open" | "Path"), args=[inner, *_]):
            return _file_name(inner, meant, value_of)
        case ast.Call(func=ast.Attribute(value=inner, attr="open" | "read" | "read_text")):
            return _file_name(inner, meant, value_of)
    name = value_of(node)
    return name if isinstance(name, str) and name != UNKNOWN else ""


def options(call: ast.Call) -> Option:
    """A flag as argparse and click take it."""
    words = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    given = {one.arg: one.value for one in call.keywords if one.arg}
    flags = [word.lstrip("-").partition("/")[0].replace("-", "_") for word in words]
    long = next((i for i, word in enumerate(words) if word.startswith("--")), 0)
    name = flags[long] if flags else ""
    name = next((word for word in words if not word.startswith("-")), name)  # click's own name
    dest = given.get("dest")
    if isinstance(dest, ast.Constant):
        name = str(dest.value)
    default = given.get("default")
    action = given.get("action")
    kind = action.value if isinstance(action, ast.Constant) else ""
    if default is None and kind in ("store_true", "store_false"):
        default = ast.Constant(value=kind == "store_false", lineno=call.lineno)
    return flags, name.replace("-", "_"), default


def options_of(text: str) -> set[str]:
    """The names of a script's own flags: of parsers, and the fields of classes."""
    found = set[str]()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Call(func=called) if name_of(called).endswith("add_argument"):
                found |= {*options(node)[0]}
            case ast.ClassDef():
                found |= {*field_names(node, lambda one: one)}
    return found


def commanded(function: ast.FunctionDef) -> dict[str, Option] | None:
    """The options of click, typer or fastcore by argument; None if the function is no command."""
    found = dict[str, Option]()
    is_command = False
    for one in function.decorator_list:
        last = ast.unparse(getattr(one, "func", one)).rpartition(".")[2]
        is_command = is_command or last in ("command", "option", "argument", "call_parse")
        if isinstance(one, ast.Call) and last in ("option", "argument"):
            option = options(one)
            found[option[1]] = option
    return found if is_command else None


def unwrapped(value: ast.expr) -> ast.expr:
    """The default in `typer.Option(3)` and `Field(3)`; else the value itself."""
    if isinstance(value, ast.Call) and name_of(value.func).endswith(("Option", "Argument", "Field")):
        given = [one.value for one in value.keywords if one.arg == "default"] + value.args[:1]
        return given[0] if given else value
    return value


def fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    """The fields of a class that have a default."""
    for one in node.body:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value:
            target = one.targets[0] if isinstance(one, ast.Assign) else one.target
            if isinstance(target, ast.Tuple) and isinstance(one.value, ast.Tuple):
                yield from ((ast.unparse(t), v) for t, v in zip(target.elts, one.value.elts, strict=False))
                continue
            made = one.value.keywords if isinstance(one.value, ast.Call) else []  # of `field(...)`
            given = [part.value for part in made if part.arg in ("default", "default_factory")]
            value = [*given, unwrapped(one.value)][0]
            yield ast.unparse(target), value.body if isinstance(value, ast.Lambda) else value


def field_names(node: ast.AST, meant: Callable[[ast.AST], ast.AST], deep: int = 5) -> list[str]:
    """All fields of a class, after those of the classes that it is derived of; as its call takes them."""
    if not isinstance(node, ast.ClassDef) or not deep:
        return []
    own = [name for base in node.bases for name in field_names(meant(base), meant, deep - 1)]
    own += [ast.unparse(one.target) for one in node.body if isinstance(one, ast.AnnAssign)]
    return [*dict.fromkeys([*own, *(name for name, _ in fields(node))])]


def placed(
    made: ast.AST | None, given: Sequence[ast.expr], name: str, meant: Callable[[ast.AST], ast.AST]
) -> list[Any]:
    """What a call of a class of the script's own gives a field by its place; None after a `*`."""
    if not isinstance(made, ast.ClassDef) or ast.Starred in map(type, given):
        return [None] * isinstance(made, ast.ClassDef)
    inner = [one for one in made.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
    order = [one.arg for one in inner[0].args.args[1:]] if inner else field_names(made, meant)
    return [value for field, value in zip(order, given, strict=False) if field == name]


def presets(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """The arguments of a function that have a default."""
    places = [one.arg for one in function.args.args]
    more = zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
    found = dict(zip(places[::-1], function.args.defaults[::-1], strict=False))
    found |= {one.arg: value for one, value in more if value}
    return {name: unwrapped(value) for name, value in found.items()}


def name_of(function: ast.AST) -> str:
    """The name of a call, such as `deepspeed.initialize`; the last name of a longer chain."""
    if isinstance(function, ast.Subscript) and isinstance(function.slice, ast.Constant):
        return str(function.slice.value)  # `modules["SFTTrainer"](...)`
    if isinstance(function, ast.Attribute):
        return f"{name_of(function.value)}." * isinstance(function.value, ast.Name) + function.attr
    return function.id if isinstance(function, ast.Name) else ""
