"""What one process of a training does, and what the others do."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.rules.program import tree_of, values_of
from shardwise.lint.schema import names
from shardwise.lint.script_values import Values

_ONE = re.compile("|".join(names("on_one_process")))
_ALONE = re.compile("is_initialized|is_available|(world_size|WORLD_SIZE).* (==|<=) '?1")  # of one process


def spelled_out(test: ast.expr, known: Values, deep: int = 5) -> ast.expr:
    """A condition with what its names hold in their place: `i % 8 == 0` for `last` of `last = i % 8 == 0`."""
    match test:
        case ast.BoolOp(op=op, values=parts):
            return ast.BoolOp(op, [spelled_out(one, known, deep) for one in parts])
        case ast.UnaryOp(op=ast.Not() as op, operand=part):
            return ast.UnaryOp(op, spelled_out(part, known, deep))
        case ast.Call(func=ast.Name(id="bool"), args=[part]):
            return spelled_out(part, known, deep)
        case ast.Compare(left=left, ops=ops, comparators=others):
            rest = known.meant(left)  # `rest = i % 8; if rest == 0`
            modulo = isinstance(rest, ast.BinOp) and isinstance(rest.op, ast.Mod)
            return ast.Compare(rest, ops, others) if modulo and isinstance(rest, ast.BinOp) else test
    held = known.meant(test) if deep else test
    plain = isinstance(held, ast.Compare | ast.UnaryOp | ast.Attribute | ast.BoolOp)
    return spelled_out(held, known, deep - 1) if plain and held is not test else test  # type: ignore[arg-type]


def members_of(loop: ast.For, name: str, known: Values) -> list[str]:
    """What a name of a loop over a list, or over `zip` of lists, stands for in its turns."""
    lists, targets = [loop.iter], [loop.target]
    if isinstance(loop.iter, ast.Call) and ast.unparse(loop.iter.func) == "zip":
        lists, targets = loop.iter.args, getattr(loop.target, "elts", [])
    pairs = zip(targets, map(known.meant, lists), strict=False)
    found = (made for target, made in pairs if ast.unparse(target) == name)
    return [ast.unparse(one) for made in found for one in getattr(made, "elts", [])]


def on_one(test: ast.expr, known: Values) -> bool:
    """Whether a condition holds in one process only. `known`: what names mean, `is_main = rank == 0`."""
    return _on_one(spelled_out(test, known), known)


def _on_one(test: ast.expr, known: Values) -> bool:
    """The same of a condition that is spelled out."""
    text = ast.unparse(test)
    if isinstance(test, ast.BoolOp):
        parts = [_on_one(one, known) for one in test.values if not _ALONE.search(ast.unparse(one))]
        return any(parts) and (isinstance(test.op, ast.And) or all(parts))
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):  # `not rank`
        inner = ast.unparse(test.operand)
        text = "" if _ONE.search(inner) else f"{inner} == 0"
    elif isinstance(test, ast.Compare) and isinstance(left := known.meant(test.left), ast.Call):
        text = text.replace(ast.unparse(test.left), ast.unparse(left), 1)  # `self.gpu == 0`
    elif isinstance(test, ast.Compare) and ast.unparse(test.left) == "0":
        text = " ".join(reversed(text.split(" ", 2)))
    return _ONE.search(text) is not None


def _opposite(test: ast.expr) -> ast.expr:
    """`rank == 0` for `rank != 0`, `rank > 0` and `rank`."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotEq | ast.Gt):
        return ast.Compare(test.left, [ast.Eq()], test.comparators)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def branches(document: Document) -> Iterator[tuple[str, list[ast.stmt], list[ast.stmt]]]:
    """Each `if`: where one process is alone, in words, what it does there, and what the others do."""
    known, blocks = values_of(document), ("body", "orelse", "finalbody")
    for block in (getattr(node, name, None) for node in ast.walk(tree_of(document)) for name in blocks):
        for at, branch in enumerate(items := block if isinstance(block, list) else []):
            if not isinstance(branch, ast.If):
                continue
            left = not branch.orelse and isinstance(branch.body[-1], ast.Return | ast.Continue)
            rest = items[at + 1 :] if left else branch.orelse
            said = f"`if {ast.unparse(branch.test)}` (line {document.at(branch.lineno)})"
            if on_one(branch.test, known):
                yield said, branch.body, rest
            elif on_one(_opposite(branch.test), known):
                yield f"what follows {said}" if left else f"the `else` of {said}", rest, branch.body
            else:
                words = " ".join(ast.unparse(known.meant(one)) for one in ast.walk(branch.test))
                yield said, [], [branch] if re.search("rank|RANK|process", words) else []
