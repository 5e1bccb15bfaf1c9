"""What a script gives an optimizer: groups of weights, and a schedule that Accelerate steps; for a job."""

import ast
import re
from collections.abc import Mapping
from typing import Any

from shardwise.lint.script_names import Said
from shardwise.lint.script_values import Values

# Accelerate steps a schedule that it prepares once for each process (accelerate/scheduler.py)
BY_STEP = re.compile(
    r"(?is)^(?!.*(split_batches=True|step_scheduler_with_optimizer=False)).*\.prepare\([^)]*sched"
)
OWN_GROUPS = ("own groups",)
_OF_PROCESS = re.compile(r"(?i)rank|proc(ess|id)|seed_offset")  # names of what each process has of its own


def of_groups(given: ast.expr, call: Said, known: Values) -> Said:
    """The rate and the decay of an optimizer's groups of weights, which count more than its `call`'s.

    Usually one group has no decay: that of norms and biases, as in a job.
    """
    groups, said = known.meant(given), Said()
    made = (
        groups.elts
        if isinstance(groups, ast.List)
        else [groups.elt]
        if isinstance(groups, ast.ListComp)
        else []
    )
    rows = [known.entries(one) for one in made if known.entries(one).get((), (0, 0))[1] == {}]
    for name in ("lr", "weight_decay"):
        values = [row.get((name,), call.get((name,))) for row in rows]
        kept = [one for one in values if name == "lr" or one is None or one[1] != 0] or values
        first = next((one for one in kept if one), None)
        said |= {(name,): first} if first else {}
        several = len({repr(one and one[1]) for one in kept}) > 1
        each = isinstance(groups, ast.ListComp) and any((name,) in row for row in rows)
        said |= {OWN_GROUPS: (given.lineno, True)} if several or each else {}
    return said


def of_all(number: ast.expr, known: Values) -> ast.expr:
    """A number without what each process adds to it: `1337 + rank`, `steps * num_processes`."""
    match made := known.meant(number):
        case ast.BinOp(left=one, op=ast.Add() | ast.Mult(), right=other):
            texts = {part: ast.unparse(part) + ast.unparse(known.meant(part)) for part in (one, other)}
            kept = [part for part, text in texts.items() if not _OF_PROCESS.search(text)]
            return kept[0] if len(kept) == 1 else made
    return number


def prepared(number: ast.expr, name: str, known: Values, environment: Mapping[str, Any]) -> Said:
    """A number of the steps of a schedule that each process steps, as one of the optimizer's steps."""
    said = known.entries(own := of_all(number, known), (name,))
    line, value = said[name,]
    count = str(environment.get("WORLD_SIZE", ""))
    if own is number and count.isdecimal() and isinstance(value, int):
        return {(name,): (line, -(-value // int(count)))}
    return said
