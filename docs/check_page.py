"""The page of all rules, docs/check.md: `python docs/check_page.py > docs/check.md`."""

from shardwise.lint.finding import Rule
from shardwise.lint.fit import RULE
from shardwise.lint.rules import RULES, SUBJECTS
from shardwise.lint.schema import deepspeed_schema

_HEAD = """\
# What `shardwise check` finds

Made by `python docs/check_page.py > docs/check.md`.

An **error** means that the run fails, or silently does something else than the file says: `check` then exits
with code 2. A **warning** costs speed, memory or safety; a **note** is good to know: `check` exits with code
0. The severity in the tables is the rule's worst. Rules that do not hold for the installed DeepSpeed are left
out. The sources were read in DeepSpeed {version}; `run` means that the behaviour was also tried. `--fix`
applies the unambiguous fixes of errors and warnings, and leaves the rest of the file unchanged.

There are {count} rules for configurations, scripts and jobs. A job file is also checked as `train` checks
it, with the strategy rules of `src/shardwise/space/rules.py`. `--gpus` and `--model` together add `{fit}`,
which the simulator predicts.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = _HEAD.format(version=deepspeed_schema().version, count=len(RULES), fit=RULE).splitlines()
    for module in SUBJECTS:
        subject = str(module.__doc__).partition(":")[0].rstrip(".")
        lines += ["", f"## {subject}", ""]
        lines += ["| rule | severity | what happens | holds for | source |", "|---|---|---|---|---|"]
        lines += [_row(rule) for rule in RULES if rule.find.__module__ == module.__name__]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    versions = f"`{rule.versions}`" if rule.versions else "any version"
    cells = (f"`{rule.name}`", rule.severity, rule.happens, versions, rule.source)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


if __name__ == "__main__":
    print(page(), end="")
