"""`shardwise check FILE...`: what is wrong with DeepSpeed and accelerate configs, scripts and job files."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from shardwise.cli.options import AsJson, write_no_more
from shardwise.cli.plan import plan_of

if TYPE_CHECKING:
    from shardwise.hardware.hardware import Hardware
    from shardwise.lint.check import Checked
    from shardwise.lint.finding import Finding
    from shardwise.lint.fit import Fit

WRONG = 2


def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="Files of one training, checked together.", show_default=False
        ),
    ],
    gpus: Annotated[
        str | None, typer.Option(metavar="GPUS", help="What it runs on: 4xRTX4080, 2x8xH100, 4x24GB.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Hub id, folder or known name; with --gpus: does it fit?"),
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=2, metavar="N", help="Tokens in a row.")] = None,
    reader: Annotated[
        Literal["trainer", "accelerate", "deepspeed"] | None,
        typer.Option(help="Who opens the DeepSpeed JSON.  [default: as the other files tell]"),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Mend the files in place, where the mend is sure.")
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Find what would fail, or silently do something else, in a training's files.

    Ends with 2 where a finding is an error, with 0 where there are only warnings.
    """
    from shardwise.lint.check import check as run_rules
    from shardwise.lint.check import load
    from shardwise.lint.model import facts_of
    from shardwise.lint.setup import Setup, deepspeed_version

    hardware = _hardware(gpus)
    documents, broken = load(files)
    setup = Setup(
        documents=documents,
        asked_reader=reader,
        asked_world_size=hardware.world_size if hardware else None,
        gpus_per_node=hardware.gpus_per_node if hardware else None,
        model=None if model is None else facts_of(model),
        deepspeed=deepspeed_version(),
    )
    fixed: tuple[Finding, ...] = ()
    if fix:
        from shardwise.lint.check import fix_files

        setup, fixed = fix_files(setup, files)
    checked = run_rules(setup, broken)
    fit = None
    if hardware is not None and model is not None and not broken:
        from shardwise.lint.fit import fit_of

        changes = [] if sequence is None else [f"data.sequence_length={sequence}"]
        fit = fit_of(checked.setup, model, changes, hardware, plan_of)
        checked = fit.applied(checked)
    with _read_as_far_as_wanted():
        if as_json:
            print(json.dumps(_to_json(checked, fixed, fit)))
        else:
            _print(checked, fixed, fit)
    return WRONG if checked.failed else 0


@contextlib.contextmanager
def _read_as_far_as_wanted() -> Iterator[None]:
    """Whoever reads stdout may stop early: the exit code still tells what was found."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        write_no_more()


def _hardware(gpus: str | None) -> Hardware | None:
    from shardwise.hardware.parse import parse_hardware

    return None if gpus is None else parse_hardware(gpus)


def _to_json(checked: Checked, fixed: tuple[Finding, ...], fit: Fit | None) -> dict[str, Any]:
    setup = checked.setup
    count = {s: sum(one.severity == s for one in checked.findings) for s in ("error", "warning", "note")}
    return {
        "schema": 1,
        "deepspeed": setup.deepspeed,
        "reader": setup.reader,
        "world_size": setup.world_size,
        "files": [{"file": document.name, "kind": document.kind} for document in setup.documents],
        "errors": count["error"],
        "warnings": count["warning"],
        "notes": count["note"],
        "findings": [one.to_json() for one in checked.findings],
        "fixed": [one.to_json() for one in fixed],
        "fit": None if fit is None else fit.to_json(),
    }


def _print(checked: Checked, fixed: tuple[Finding, ...], fit: Fit | None) -> None:
    from shardwise.lint.show import block, counted, heading

    for line in heading(checked):
        print(line)
    for one in fixed:
        print(
            f"fixed: {one.what}  [{one.rule}]\n  at:  {one.file}:{one.line}"
            + (f": {one.key}" if one.key else "")
        )
    for one in checked.findings:
        print(block(one))
    if fit is not None:
        print("\n".join(fit.lines()))
    print(counted(checked.findings))
