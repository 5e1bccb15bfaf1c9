"""`shardwise check FILE...`: what is wrong with DeepSpeed and accelerate configs, scripts and job files."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardwise.cli.options import AsJson, RowLength, planning, write_no_more

WRONG = 2

_FILES = "Files of one training, checked together; its requirements.txt, too, if it is in another folder."
FILES = typer.Argument(metavar="FILE...", help=_FILES, show_default=False)
GPUS = typer.Option(metavar="GPUS", help="What it runs on: 4xRTX4080, 2x8xH100, 4x24GB.")
MODEL = typer.Option(metavar="MODEL", help="Hub id, folder or known name; with --gpus: does it fit?")
READER = typer.Option(help="Library that reads the DeepSpeed JSON.  [default: inferred from the other files]")
FIX = typer.Option("--fix", help="Apply unambiguous fixes in place.")
TINY = typer.Option("--run-tiny", help="Also run the DeepSpeed file: 3 steps, tiny model, CPU.")
STRICT = typer.Option("--strict", help="Also end with 2 where there are only warnings.")
ERRORS_ONLY = typer.Option("--errors-only", help="Print only errors; the rest is counted.")


def check(
    files: Annotated[list[Path], FILES],
    gpus: Annotated[str | None, GPUS] = None,
    model: Annotated[str | None, MODEL] = None,
    sequence: RowLength = None,
    reader: Annotated[Literal["trainer", "accelerate", "deepspeed"] | None, READER] = None,
    fix: Annotated[bool, FIX] = False,
    run_tiny: Annotated[bool, TINY] = False,
    errors_only: Annotated[bool, ERRORS_ONLY] = False,
    strict: Annotated[bool, STRICT] = False,
    as_json: AsJson = False,
) -> int:
    """Find settings that fail or are silently ignored.

    Ends with 2 where a finding is an error, with 0 where there are only warnings; --strict: also 2.
    """
    from shardwise.app.check import check as run

    asked: dict[str, Any] = {"sequence": sequence, "reader": reader, "fix": fix, "tiny": run_tiny}
    report = run(files, gpus=gpus, model=model, making=planning, **asked)
    try:
        if as_json:
            print(json.dumps(report.to_json()))
        else:
            print(report.text(errors_only=errors_only))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads stdout may stop early: the exit code still tells what was found
        write_no_more()
    warned = any(one.severity == "warning" for one in report.findings)
    return WRONG if report.failed or (strict and warned) else 0
