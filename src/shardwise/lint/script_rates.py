"""The rate that a function of a script's own gives each step of a loop, as nanoGPT's does; for a job."""

import ast
import re
from collections.abc import Sequence

from shardwise.lint.script_names import Said
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values

_COSINE = re.compile(r"0\.5 \* \(1(\.0)? \+ (\w+\.)?cos\(")
_SETS = re.compile(r"\['lr'\] = ")
_ALWAYS = ("1", "1.0")  # what the function of a constant schedule gives


def of_rates(nodes: Sequence[ast.AST], known: Values) -> Said:
    """Warm-up, shape and last rate of the first function that a loop calls for its rate."""
    calls = [one for one in nodes if isinstance(one, ast.Call) and len(one.args) == 1 and known.runs(one)]
    if any(isinstance(one, ast.Assign) and _SETS.search(ast.unparse(one)) for one in nodes):
        for made in (known.meant(one.func) for one in calls):
            if isinstance(made, ast.FunctionDef) and (said := _of(made, known)):
                return said
    return {}


def is_constant(call: ast.Call) -> bool:
    """Whether it is a LambdaLR that leaves the rate as it is: `lambda step: 1`."""
    made = [one for one in call.args[1:2] if isinstance(one, ast.Lambda)]
    always = [one for one in made if ast.unparse(one.body) in _ALWAYS]
    return bool(always) and ast.unparse(call.func).endswith("LambdaLR")


def _of(function: ast.FunctionDef, known: Values) -> Said:
    """What `get_lr(step)` says, if it is a line from 0 and then a cosine; else nothing."""
    match function.body[0], function.body[-1]:
        case (
            ast.If(
                test=ast.Compare(left=ast.Name(id=step), ops=[ast.Lt()], comparators=[warmup]),
                body=[ast.Return(value=ast.expr() as ramp)],
            ),
            ast.Return(value=ast.BinOp(least, ast.Add(), ast.BinOp(right=ast.BinOp(rate, ast.Sub(), other)))),
        ) if ast.dump(least) == ast.dump(other) and _is_cosine(function, known):
            line, parts = ast.unparse(ramp), (ast.unparse(rate), step, ast.unparse(warmup))
            if not all(part in line for part in (*parts, "/")) or "-" in line or ast.unparse(least) in line:
                return {}
            said: Said = {("get_lr()",): (function.lineno, True)}
            said |= known.entries(warmup, ("get_lr", "warmup")) | known.entries(least, ("get_lr", "least"))
            for end in filter(None, map(_end, function.body)):
                said |= known.entries(end, ("get_lr", "end"))
            return said
    return {}


def _is_cosine(function: ast.FunctionDef, known: Values) -> bool:
    """Whether the line that computes the shape is a cosine, and it is certain which one runs."""
    inner = [part for one in function.body[1:] if not _end(one) for part in ast.walk(one)]
    tests = [known.value(one.test) for one in inner if isinstance(one, ast.If)]
    shape = [ast.unparse(one) for one in inner if isinstance(one, ast.Assign) and known.runs(one)]
    return UNKNOWN not in tests and any(map(_COSINE.search, shape))


def _end(line: ast.stmt) -> ast.expr | None:
    """The step after which the rate stays: `if step > last: return least`."""
    match line:
        case ast.If(test=ast.Compare(ops=[ast.Gt() | ast.GtE()], comparators=[end]), body=[ast.Return()]):
            return end
    return None
