"""Schedules next to an Accelerator: what their numbers of steps count, and how often they advance."""

import ast
import re
from collections.abc import Iterator

from shardwise.lint.document import Document
from shardwise.lint.finding import Hit
from shardwise.lint.rules.loop import stepped
from shardwise.lint.rules.program import calls, code_of, tree_of, values_of, walk, within
from shardwise.lint.schema import pattern

_SCHEDULES, _COUNTS_ALL = map(pattern, ("schedules", "counts_all"))
_DIVIDES = re.compile(r" //? |(?i:accum)|steps_per_epoch")  # as ast.unparse writes it


def prepares(node: ast.expr) -> bool:
    """Whether an Accelerator gives back what was made before."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".prepare", ".prepare_scheduler"))


def ends_early(document: Document, given: dict[str, ast.expr]) -> Iterator[Hit]:
    """A schedule that an Accelerator steps once for each process, and that counts one process's batches."""
    flow, preparing = values_of(document).flow, [*_prepares(document)]
    if "Accelerator" not in document.uses or _COUNTS_ALL.search(document.text):
        return
    rows_of = [(call, one) for call in preparing for one in call.args]
    first = {ast.unparse(one): call for call, one in reversed(rows_of)}
    for call, one in rows_of:
        made = given.get(ast.unparse(one), one)
        plan = isinstance(made, ast.Call) and _SCHEDULES.search(ast.unparse(made.func))
        for name in re.findall(r"\blen\(([\w.]+)\)", " ".join(followed(made, given))) if plan else ():
            rows = first.get(name, call)
            counts = [n for n in calls(document, "len") if ast.unparse(n) == f"len({name})"]
            same = [*flow.scopes(rows)] == [*flow.scopes(made)]
            if rows is not call and same and all(rows.lineno < n.lineno for n in counts):
                what = f"`{name}` is prepared by then: it has the batches of one process, and the prepared "
                what += "schedule takes a step for each process: it ends at 1/processes of the run"
                fix = "its number of steps * accelerator.num_processes; or do not prepare the schedule"
                yield Hit((), what, fix, severity="warning", line=made.lineno)
                return


def followed(made: ast.expr, given: dict[str, ast.expr], deep: int = 4) -> Iterator[str]:
    """The text of an expression, and of what the names in it were given."""
    yield ast.unparse(made)
    for one in ast.walk(made):
        held = given.get(ast.unparse(one)) if isinstance(one, ast.Name | ast.Attribute) else None
        if held is not None and held is not made and deep and "(" not in ast.unparse(one):
            yield from followed(held, given, deep - 1)


def never_ends(document: Document, given: dict[str, ast.expr]) -> Iterator[Hit]:
    """A schedule of micro-batches that advances at steps, or one of steps that no `prepare` slows down."""
    program, known = tree_of(document), values_of(document)
    words = [word for call in calls(document, "Accelerator") for word in call.keywords]
    counts = [known.value(one.value) for one in words if one.arg == "gradient_accumulation_steps"]
    if len(counts) != 1 or type(counts[0]) is not int or counts[0] < 2:
        return
    prepared = {ast.unparse(one): call.lineno for call in _prepares(document) for one in call.args}
    if "step_scheduler_with_optimizer" in document.text:
        prepared = {}
    nodes = [*ast.walk(program)]
    waits = [one for one in nodes if isinstance(one, ast.If) and "sync_gradients" in ast.unparse(one.test)]
    synced = {part for one in waits for row in one.body for part in ast.walk(row)}
    loops = [one for one in nodes if isinstance(one, ast.For)]
    for call in calls(document, "step"):
        made = given.get(name := stepped(call))
        if not isinstance(made, ast.Call) or not _SCHEDULES.search(ast.unparse(made.func)):
            continue
        texts = " ".join(followed(made, given))
        above = [one for one in loops if call in {*ast.walk(one)}]
        loads = {part.id for one in above for part in ast.walk(one.iter) if isinstance(part, ast.Name)}
        counts_all = any(re.search(rf"\blen\({one}\)", texts) for one in loads)
        waiting = call in synced or prepared.get(name, 0) > made.lineno
        if counts_all and waiting and not _DIVIDES.search(texts):
            what = f"the schedule counts micro-batches, and advances at steps: 1/{counts[0]} of it is used"
            yield Hit((), what, f"its number of steps / {counts[0]}", severity="warning", line=made.lineno)
            return
        if _of_steps(texts, counts[0], code_of(document)) and _each(program, call, {*prepared}):
            what = f"the schedule is not prepared, and advances {counts[0]} times a step of the optimizer"
            fix = f"`if accelerator.sync_gradients: {ast.unparse(call)}`"
            yield Hit((), what, fix, severity="warning", line=call.lineno)
            return


def _of_steps(texts: str, count: int, code: str) -> bool:
    """Whether the numbers of a schedule count the optimizer's steps: no batches, no turns, no multiples."""
    every = rf"\(?([\w.]*accum\w*|(?<![\w.]){count}\b)"
    if re.search(rf"\* *{every}|{every}\)? *\*", texts):
        return False
    turns = "|".join(map(re.escape, re.findall(r"[\w.]*steps\w*|\d{3,}", texts))) or "(?!)"
    turns = rf"([<>]=? |range\()({turns})\b"  # of a loop that may count micro-batches
    other = re.search(r"(?i)\blen\(|micro|iter|batch|steps_per", texts) or re.search(turns, code)
    return not other or re.search(rf"//? *{every}", texts) is not None


def _each(program: ast.Module, call: ast.Call, prepared: set[str]) -> bool:
    """Whether a call runs at each micro-batch below `accumulate`, next to a prepared optimizer's step."""
    for one in walk(program, ast.With):
        if ".accumulate(" in ast.unparse(one.items[0]) and call in (held := {*ast.walk(one)}):
            blocks = [part for part in held if isinstance(part, ast.If | ast.For | ast.While | ast.Continue)]
            waits = any(isinstance(part, ast.Continue) or call in {*ast.walk(part)} for part in blocks)
            others = re.search(r"(?i)sched|\*", " ".join(prepared))
            return not (waits or others) and any(stepped(part) in prepared for part in within(one))
    return False


def _prepares(document: Document) -> Iterator[ast.Call]:
    return calls(document, "prepare", "prepare_scheduler")
