"""Whose weights a script saves, and for which stages."""

import ast
import re

from shardwise.lint.schema import pattern
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values

_NEGATES = pattern("no_stage_3")


def state_of(node: ast.AST, known: Values, deep: int = 3) -> str:
    """The call of `state_dict` whose tensors a name holds, also copied one by one; empty if it has none."""
    meant = known.meant(node) if isinstance(node, ast.Name) else None
    match meant:
        case ast.Call(func=called) if name_of(called).endswith("state_dict"):
            return ast.unparse(meant)
        case ast.DictComp(generators=[ast.comprehension(iter=ast.Call(func=ast.Attribute(value=held)))]):
            return state_of(held, known, deep - 1) if deep else ""
    return ""


def elsewhere(test: ast.expr, held: bool, known: Values) -> bool:
    """Whether a branch is for another stage than 3, or for weights that were not gathered before."""
    places = (one for one in ast.walk(test) if isinstance(one, ast.Name | ast.Attribute))
    meant = " ".join([said := ast.unparse(test), *(ast.unparse(known.meant(one)) for one in places)])
    about = known.value(test) == UNKNOWN and bool(re.search("(?i)state_dict|zero|stage", meant))
    return about and held is (_NEGATES.search(said) is not None)
