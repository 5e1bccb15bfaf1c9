"""Names of a loop that depend on each other: each is followed a few times, not in every order."""

from __future__ import annotations

import ast

import pytest

from shardwise.lint.script_inputs import Inputs
from shardwise.lint.script_sums import UNKNOWN
from shardwise.lint.script_values import Values


def tangled(names: int) -> ast.Module:
    """A loop in which each name may be made of two others, and decides about a third."""
    lines = ["import random", *(f"v{one} = random.random()" for one in range(names)), "while v0 < 9:"]
    for one in range(names):
        a, b = (one + 1) % names, (one * 3 + 2) % names
        lines += [f"    if v{a} > v{b}:", f"        v{one} = v{a} + v{b}"]
        lines += [f"    elif v{b}:", f"        v{one} = v{b} * v{a}"]
    return ast.parse("\n".join(lines))


@pytest.mark.parametrize("names", [8, 40])
def test_a_tangle_of_names_is_read_in_few_steps(names: int) -> None:
    program = tangled(names)
    known = Values(program, Inputs())
    (loop,) = (one for one in ast.walk(program) if isinstance(one, ast.While))
    assert known.value(loop.test) == UNKNOWN
    assert known.steps < 1_000
