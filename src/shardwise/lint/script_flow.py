"""Which statements of a script run, and in what block they are."""

import ast
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from shardwise.lint.script_sums import UNKNOWN

SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef | ast.Module
_IS_MAIN = ("__name__ == '__main__'", "'__main__' == __name__")


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
                if self._above.get(above) in self._imported and _is_main(above):
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
            if isinstance(above, ast.If) and node is not above.test and not _is_main(above):
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
            if isinstance(above, ast.If) and node is not above.test and not _is_main(above):
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
            body: list[ast.stmt] = getattr(self._above.get(statement), "body", [])
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
            isinstance(above, ast.If) and (_is_main(above) or (taken and self._taken(above.test)))
        ):
            above = self._above.get(above)
        return above

    def _taken(self, test: ast.expr) -> bool:
        return self._value_of(test) not in (UNKNOWN, False)

    def statement(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, ast.stmt) and node in self._above:  # a value of the command is in no line
            node = self._above[node]
        return node


def _is_main(branch: ast.If | ast.IfExp) -> bool:
    return ast.unparse(branch.test) in _IS_MAIN
