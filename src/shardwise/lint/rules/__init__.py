"""All rules, by subject. A rule is a function with the decorator `finding.rule`."""

from shardwise.lint.finding import Rule  # noqa: I001
from shardwise.lint.rules import (
    accelerate, arguments, batch, devices, ends, families, fsdp, keys, launch, loop, mistakes, offload,
    optimizer, parallel, precision, ranks, reader, rows, sections, steps, tools, training, unread,
    values, versions, zero, zeus,
)  # fmt: skip

SUBJECTS = [reader, keys, batch, zero, offload, precision, optimizer, parallel, sections, accelerate]
SUBJECTS += [fsdp, training, arguments, values, versions, families, rows, mistakes, tools, launch, devices]
SUBJECTS += [loop, steps, ranks, ends, unread, zeus]
"""The modules of rules, in the order of the page of all rules; a docstring begins with its subject."""

RULES = tuple(one for module in SUBJECTS for one in vars(module).values() if isinstance(one, Rule))
