"""A script, and the other scripts that were named: which of them it imports, and what each name is there."""

import ast
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from shardwise.lint.script_names import name_as_imported

_LIBRARIES = ("torch", "transformers", "trl", "peft", "datasets", "accelerate", "deepspeed", "unsloth")


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
