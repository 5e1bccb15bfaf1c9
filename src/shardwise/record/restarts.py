"""`supervise.jsonl` of a run folder: what `train --supervise` did, and what that cost."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.record.read import text_of

LOG = "supervise.jsonl"
BEGAN, FAILED, ENDED = "began", "failed", "ended"
"""Its events: ranks are started; they ended with an error; they ended without."""


def read_restarts(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of the log; none for a run without supervision. A line that is no JSON is left out."""
    found: list[dict[str, Any]] = []
    with suppress(OSError):
        for text in text_of(run_dir / LOG, errors="replace").splitlines():
            with suppress(ValueError):
                line = json.loads(text)
                found += [line] if isinstance(line, dict) and "at" in line else []
    return found


def restarts_of(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Failures and ETTR, the effective training time ratio; None for a run without supervision.

    ETTR is the seconds of steps and evaluations in the record, where each step stands once, over the seconds
    from the first start to the last line: starting, saving, lost steps and waiting count as lost (as in
    "Revisiting Reliability in Large-Scale Machine Learning Research Clusters", arXiv 2410.21680).
    """
    lines = read_restarts(run_dir)
    if not lines:
        return None
    productive = sum(float(event["seconds"]) for event in events if event.get("kind") in ("step", "eval"))
    wall = float(lines[-1]["at"]) - float(lines[0]["at"])
    failures = [str(line.get("error")) for line in lines if line.get("event") == FAILED]
    ettr = min(1.0, productive / wall) if wall > 0 else None
    return {"failures": failures, "productive_seconds": productive, "wall_seconds": wall, "ettr": ettr}
