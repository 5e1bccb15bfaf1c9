"""`shardwise report RUN...`: what runs did, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardwise.cli.options import AsJson


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Show what runs did: losses, speed, memory."""
    from shardwise.report.compare import summary
    from shardwise.report.terminal import show

    if as_json:
        print(json.dumps({"runs": [summary(run) for run in runs]}))
    else:
        show(runs)
