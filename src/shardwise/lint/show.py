"""Text of findings for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from shardwise.lint.check import Checked
from shardwise.lint.finding import SEVERITIES, Finding
from shardwise.lint.setup import READER_NAMES

KINDS = {
    "deepspeed": "DeepSpeed configuration",
    "accelerate": "accelerate configuration",
    "training": "training script or its arguments",
    "job": "job file",
}


def block(one: Finding) -> str:
    """A finding in up to four lines, in the form of shardwise's errors."""
    where = f"{one.file}:{one.line}" + (f": {one.key}" if one.key else "")
    lines = [f"{one.severity}: {one.what}  [{one.rule}]", f"  at:  {where}"]
    if one.fix:
        lines.append(f"  fix: {one.fix}")
    source = "; ".join(filter(None, (one.source, one.versions)))
    if source:
        lines.append(f"  see: {source}")
    return "\n".join(lines)


def heading(checked: Checked) -> list[str]:
    """The kind of each file."""
    setup = checked.setup
    reader = f", read by {READER_NAMES[setup.reader]}" if setup.reader else ""
    return [
        f"{document.name}: {KINDS[document.kind]}{reader if document.kind == 'deepspeed' else ''}"
        for document in setup.documents
    ]


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning`; `nothing found`."""
    numbers = Counter(one.severity for one in findings)
    words = [f"{numbers[s]} {s}{'' if numbers[s] == 1 else 's'}" for s in SEVERITIES if numbers[s]]
    return ", ".join(words) or "nothing found"
