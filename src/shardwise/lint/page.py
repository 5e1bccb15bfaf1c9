"""The page of all rules, docs/check.md: `python -m shardwise.lint.page > docs/check.md`."""

from __future__ import annotations

from itertools import groupby

from shardwise.lint.finding import Rule
from shardwise.lint.fit import RULE
from shardwise.lint.rules import RULES
from shardwise.lint.schema import deepspeed_schema

_SUBJECTS = {
    "reader": "How the file is written, and who reads it",
    "keys": "Names of keys, kinds of values",
    "batch": "Batch sizes",
    "zero": "ZeRO",
    "offload": "Offloading",
    "precision": "Number formats",
    "optimizer": "Optimizer, clipping, schedule",
    "parallel": "Tensor parallelism, groups, experts",
    "sections": "Other sections",
    "accelerate": "Accelerate's file",
    "fsdp": "FSDP in Accelerate's file",
    "training": "Scripts, arguments, launch commands",
}


_HEAD = """\
# What `shardwise check` finds

Made by `python -m shardwise.lint.page > docs/check.md`.

An **error** is a run that would fail, or silently do something else than the file says: `check` then ends
with 2. A **warning** costs speed, memory or safety; a **note** is good to know: `check` ends with 0. A rule's
severity here is its worst. A rule that does not hold for the installed DeepSpeed is left out. The sources
were read in DeepSpeed {version}; where they say `run`, it was. `--fix` mends errors and warnings where only
one mend is possible, and leaves the rest of the file as it is.

There are {count} rules for configurations and scripts. A job file is checked as `train` checks it, with the
rules for strategies of `src/shardwise/space/rules.py`. `--gpus` and `--model` together add `{fit}`,
by the simulator.
"""


def page() -> str:
    """All of it, as Markdown."""
    head = _HEAD.format(version=deepspeed_schema().version, count=len(RULES), fit=RULE)
    lines = head.splitlines()
    for subject, rules in groupby(RULES, key=_subject):
        lines += ["", f"## {_SUBJECTS[subject]}", ""]
        lines += ["| rule | severity | what happens | holds for | source |", "|---|---|---|---|---|"]
        lines += [_row(rule) for rule in rules]
    return "\n".join(lines) + "\n"


def _subject(rule: Rule) -> str:
    return rule.find.__module__.rpartition(".")[2]


def _row(rule: Rule) -> str:
    versions = f"`{rule.versions}`" if rule.versions else "any version"
    cells = (f"`{rule.name}`", rule.severity, rule.happens, versions, rule.source)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
