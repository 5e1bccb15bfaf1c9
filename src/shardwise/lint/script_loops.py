"""What the loops of a script count: epochs, steps, micro-batches, and how often they save and evaluate."""

import ast
import re
from typing import Any

from shardwise.folders import packaged
from shardwise.lint.script_inputs import name_of
from shardwise.lint.script_names import Said
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values

_ENGINE_STEPS = re.compile(packaged("lint/foreign.toml")["row_words"]["engine_steps"])
_COUNTER = re.compile(r"(?i)step|iter|update|^it$|(^|\.)i$")
_STEP = re.compile(r"(?i)\b(?!\w*(sched|lr|prof|bar|engine))\w+\.step\(")  # of an optimizer, or its scaler
_ENDS = ast.Lt | ast.Gt | ast.GtE | ast.Eq
_DOES = {name: re.compile(words) for name, words in packaged("lint/foreign.toml")["does"].items()}


def of_loop(loop: ast.For | ast.While, known: Values, *, of_a_job: bool) -> Said:
    """`for epoch in range(3)`; and, for a job, a loop over steps, or over the micro-batches of one."""
    said, text = Said(), ast.unparse(loop)
    if of_a_job and _ENGINE_STEPS.match(text):
        said["engine.step()",] = loop.lineno, True
    if of_a_job and ".backward(" in text:
        for every in _accumulates(loop)[:1]:
            said |= known.entries(every, ("accumulation",))
        said |= _after_epochs(loop, known) if _is_of_epochs(loop) else _conditions(loop, known)
        said |= {} if ("engine.step()",) in said else _ends(loop, known)
    if isinstance(loop, ast.While):
        return said
    calls = (one for one in ast.walk(known.meant(loop.iter)) if isinstance(one, ast.Call))
    counts = next((one.args for one in calls if name_of(one.func) == "range" and one.args), [])
    if not counts:
        return said
    key, end = "", counts[min(1, len(counts) - 1)]
    text = "".join(map(ast.unparse, loop.body))
    if _is_of_epochs(loop):
        key = "range(epochs)"
    elif ".backward(" in text and len(counts) == 3:  # `range(0, len(rows), size)`: batch by batch
        key, end = ("range(rows)" if ".step()" in text and "len(" in ast.unparse(end) else ""), counts[2]
    elif ".backward(" in text:
        key = "range(steps)" if ".step(" in text else "accumulation"
    if len(counts) == 2 and known.value(counts[0]) == 1:
        end = ast.BinOp(left=end, op=ast.Sub(), right=counts[0], lineno=loop.lineno)
    if key == "range(steps)" and of_a_job:
        if ".accumulate(" in text:
            return said | {(key,): (loop.lineno, UNKNOWN)}
        end = _in_steps(end, _accumulates(loop))
    return said | (known.entries(end, (key,)) if key == "range(epochs)" or (key and of_a_job) else {})


def _is_of_epochs(loop: ast.For | ast.While) -> bool:
    """Whether each turn of a loop trains on all rows."""
    if isinstance(loop, ast.While):
        return False
    inner = [ast.unparse(one) for part in loop.body for one in ast.walk(part) if isinstance(one, ast.For)]
    return "epoch" in ast.unparse(loop.target) or any(
        ".step()" in one and "backward(" in one for one in inner
    )


def _after_epochs(loop: ast.For | ast.While, known: Values) -> Said:
    """What a loop does after epochs, which a job counts in steps."""
    own = [one for one in _own_parts(loop) if isinstance(one, ast.Expr | ast.Assign) and known.runs(one)]
    found = {
        f"an {what.removeprefix('every ')} after epochs": [
            one for one in own if does.search(ast.unparse(one))
        ]
        for what, does in _DOES.items()
    }
    return {(key.replace("an s", "a s"),): (held[0].lineno, True) for key, held in found.items() if held}


def _accumulates(loop: ast.For | ast.While) -> list[ast.expr]:
    """Of how many of a loop's turns one makes a step of the optimizer: `if (i + 1) % 8 == 0`."""
    turns = _own_parts(loop)
    calls = [one for one in turns if isinstance(one, ast.Expr) and _STEP.search(ast.unparse(one))]
    last = max((one.lineno for one in calls), default=0)
    made = list[ast.expr]()
    for one in (one for one in turns if isinstance(one, ast.If)):
        skips = isinstance(one.body[-1], ast.Continue) and one.lineno < last
        if skips or _STEP.search("\n".join(map(ast.unparse, one.body))):
            sums = [part for part in ast.walk(one.test) if isinstance(part, ast.BinOp)]
            made += [part.right for part in sums if isinstance(part.op, ast.Mod)]
    return made


def _accumulates_inside(loop: ast.For | ast.While, count: ast.AST) -> bool:
    """Whether a loop inside is over the micro-batches of one step, and the count is outside of it."""
    inner = [one for one in ast.walk(loop) if isinstance(one, ast.For) and one is not loop]
    micro = [one for one in inner if ".backward(" in ast.unparse(one)]
    return bool(micro) and not any(count in ast.walk(one) or _STEP.search(ast.unparse(one)) for one in micro)


def _own_parts(loop: ast.For | ast.While) -> list[ast.AST]:
    """The parts of a loop that are in no loop inside it."""
    parts = [*ast.walk(loop)]
    inner = {part for one in parts[1:] if isinstance(one, ast.For | ast.While) for part in ast.walk(one)}
    return [one for one in parts if one not in inner]


def _in_steps(count: ast.expr, every: list[ast.expr]) -> ast.expr:
    """A count of micro-batches as one of steps."""
    return ast.BinOp(left=count, op=ast.FloorDiv(), right=every[0], lineno=count.lineno) if every else count


def _ends(loop: ast.For | ast.While, known: Values) -> Said:
    """After how many steps a counter ends a loop over batches, by the loop's condition or by a `break`."""
    parts = [*ast.walk(loop)]
    inner = [one for one in parts if isinstance(one, ast.If)]
    tests: list[Any] = [one.test for one in inner if any(isinstance(part, ast.Break) for part in one.body)]
    tests += [loop.test] if isinstance(loop, ast.While) else []
    stepping = [one for one in inner if ".step()" in "".join(map(ast.unparse, one.body))]
    sums = [part for one in stepping for part in ast.walk(one.test) if isinstance(part, ast.BinOp)]
    every = [one.right for one in sums if isinstance(one.op, ast.Mod)]
    for test in tests:
        ends = isinstance(test, ast.Compare) and isinstance(test.ops[0], _ENDS)
        adds = [one for one in parts if isinstance(one, ast.AugAssign) and ast.unparse(one.value) == "1"]
        adds = [one for one in adds if ends and ast.unparse(one.target) == ast.unparse(test.left)]
        if len(adds) != 1 or not _COUNTER.search(ast.unparse(adds[0].target)):
            continue
        synced = [one for one in inner if "sync_gradients" in ast.unparse(one.test)]  # Accelerate's
        end, inside = test.comparators[0], any(adds[0] in ast.walk(one) for one in stepping + synced)
        skips = [one for one in inner if isinstance(one.body[-1], ast.Continue) and _accumulates(loop)]
        inside |= any("%" in ast.unparse(one.test) and one.lineno < adds[0].lineno for one in skips)
        if not inside and len(every) == 1:  # it counts micro-batches
            end = ast.BinOp(left=end, op=ast.FloorDiv(), right=every[0], lineno=test.lineno)
        elif (
            not inside
            and (stepping or "accum" in ast.unparse(loop))
            and not _accumulates_inside(loop, adds[0])
        ):
            continue
        return known.entries(end, ("range(steps)",), test.lineno)
    return {}


def _conditions(loop: ast.For | ast.While, known: Values) -> Said:
    """How often a loop saves and evaluates; not known where it counts batches, several of a step."""
    said, batch, turn = Said(), "", ast.unparse(loop.target) if isinstance(loop, ast.For) else "(?!)"
    turns = _accumulates(loop)
    if isinstance(loop, ast.For) and "enumerate(" in ast.unparse(loop.iter) and "accum" in ast.unparse(loop):
        batch = ast.unparse(loop.target)
    for part in _own_parts(loop):
        if isinstance(part, ast.If) and known.runs(part):
            sums = [one for one in ast.walk(part.test) if isinstance(one, ast.BinOp)]
            text = "\n".join(map(ast.unparse, part.body))  # a condition further inside counts more
            for one in [one for one in sums if isinstance(one.op, ast.Mod)][:1]:
                micro = re.search(rf"\b{ast.unparse(one.left)}\b", batch)
                for key in (key for key, does in _DOES.items() if does.search(text)):
                    micro_batches = turns if re.search(rf"\b{turn}\b", ast.unparse(one.left)) else []
                    every = known.entries(_in_steps(one.right, micro_batches), (key,), part.lineno)
                    said |= {(key,): (part.lineno, UNKNOWN)} if micro else every
    return said
