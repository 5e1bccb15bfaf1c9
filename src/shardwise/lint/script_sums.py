"""Values that are computed of others: arithmetic, lists, texts, conditions."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.lint.document import LONGEST_NUMBER

UNKNOWN = "..."  # a value that only a run knows

_LARGEST = 10**15
_NAMED = re.compile(r"torch\.\w+|([\w.]+\.)?[A-Z]\w*[a-z]\w*\.[A-Z][A-Z0-9_]*")  # of a library
# the sign of each sum in `ast`, and what it does in `operator`
_SIGNS = "Add:add Sub:sub Mult:mul Div:truediv FloorDiv:floordiv Mod:mod Pow:pow"
_SIGNS += " Eq:eq NotEq:ne Lt:lt LtE:le Gt:gt GtE:ge Is:eq IsNot:ne"
_SUMS: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    getattr(ast, sign): getattr(operator, does) for sign, does in (one.split(":") for one in _SIGNS.split())
}
_SUMS[ast.Div] = lambda one, by: f"{one}/{by}" if isinstance(one, str) else one / by  # also of paths
_TEXTS = ("endswith", "startswith", "lower", "upper", "strip", "replace", "split")
_PLAIN = (int, round, float, str, bool, max, min, len, list)
_SAME = {"torch.half": "torch.float16", "torch.float": "torch.float32"}
_FUNCTIONS: dict[str, Callable[..., Any]] = {one.__name__: one for one in _PLAIN}
_FUNCTIONS |= {"math.ceil": math.ceil, "tuple": list, "Path": str}
_FUNCTIONS["os.path.join"] = lambda *parts: "/".join(parts)


def computed(node: ast.AST, value_of: Callable[[ast.AST], Any]) -> Any:
    """The value of an expression of known values; UNKNOWN if one is not, or it is another expression."""
    match node:
        case ast.List(elts=items) | ast.Tuple(elts=items):
            values = [value_of(one) for one in items]
            return UNKNOWN if UNKNOWN in values else values
        case ast.IfExp(test=test, body=then, orelse=other):
            known = value_of(test)
            return UNKNOWN if known == UNKNOWN else value_of(then if known else other)
        case ast.BoolOp(op=op, values=parts):
            return _first(isinstance(op, ast.Or), [value_of(one) for one in parts])
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=inner):
            return _applied(operator.not_ if isinstance(op, ast.Not) else operator.neg, [value_of(inner)])
        case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]):
            sides = [value_of(left), value_of(right)]
            return _applied(_SUMS[type(op)], sides) if type(op) in _SUMS else UNKNOWN
        case ast.JoinedStr(values=parts):
            return _applied(lambda *texts: "".join(map(str, texts)), [value_of(one) for one in parts])
        case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=holder), last]) if holder[:1].isupper():
            return _applied(lambda text: f"{holder}.{text}", [value_of(last)])
        case ast.Call(func=ast.Attribute(value=holder, attr=method), args=args, keywords=[]) if (
            method in _TEXTS
        ):
            return _applied(getattr(str, method), [value_of(holder), *map(value_of, args)])
        case ast.Subscript(value=holder, slice=ast.Constant(int()) | ast.UnaryOp() as place):
            return _applied(operator.getitem, [value_of(holder), value_of(place)])
        case ast.FormattedValue(value=inner, format_spec=None):
            return value_of(inner)
        case ast.Call(func=called, args=args, keywords=[]) if (name := ast.unparse(called)) in _FUNCTIONS:
            return _applied(_FUNCTIONS[name], [value_of(one) for one in args])
    return UNKNOWN


def _first(either: bool, values: list[Any]) -> Any:
    """What `or` (`either`) or `and` gives; of `and` one that is false is enough, whatever the others are."""
    if not either and any(one != UNKNOWN and not one for one in values):
        return False
    for value in values[:-1]:
        if value == UNKNOWN or bool(value) is either:
            return value
    return values[-1]


def _applied(function: Callable[..., Any], values: list[Any]) -> Any:
    """What the function gives; UNKNOWN where a value is not known, or the sum is too large or fails."""
    numbers = [one for one in values if isinstance(one, int | float)]
    if UNKNOWN in values or any(abs(one) > _LARGEST for one in numbers):
        return UNKNOWN
    if function is operator.pow and (len(numbers) < 2 or abs(numbers[1]) > 64):
        return UNKNOWN
    if function in (operator.mul, operator.mod) and len(numbers) < len(values):
        return UNKNOWN  # a text or list many times, or a text that is filled in
    try:
        return function(*values)
    except (TypeError, ValueError, ArithmeticError, IndexError):
        return UNKNOWN


def holds(entries: Callable[[Any], dict[Any, Any]], node: ast.AST, value_of: Callable[[ast.AST], Any]) -> Any:
    """Whether a mapping has a key, by its `entries`: `"peft" in config`."""
    match node:
        case ast.Compare(left=one, ops=[ast.In() | ast.NotIn() as op], comparators=[held]):
            said, name = entries(held), value_of(one)
            known = said.get((), (0, UNKNOWN))[1] == {} and isinstance(name, str)
            if known and UNKNOWN not in (name, said.get((name,), (0, None))[1]):
                return ((name,) in said) is isinstance(op, ast.In)
    return UNKNOWN


def literal(node: ast.AST) -> Any:
    """The value of a literal; `torch.float16` and `SaveStrategy.STEPS` as text, not `CFG.lr`."""
    if isinstance(node, ast.Attribute) and _NAMED.fullmatch(name := ast.unparse(node)):
        held = ".".join(name.split(".")[-2:])
        return _SAME.get(held, held)
    with suppress(ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        json.dumps(value := ast.literal_eval(node))
        if not isinstance(value, int) or abs(value) < 10**LONGEST_NUMBER:
            return list(value) if isinstance(value, tuple) else value
    return UNKNOWN
