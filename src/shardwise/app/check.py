"""A training's configuration files and scripts, checked together."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.lint.check import Checked, fix_files, load
from shardwise.lint.check import check as run_rules
from shardwise.lint.finding import Finding
from shardwise.lint.fit import Fit, fit_of
from shardwise.lint.model import facts_of
from shardwise.lint.setup import Reader, Setup, deepspeed_version
from shardwise.planner.planning import Making, make_plan


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings, what was fixed, and whether the configuration fits."""

    checked: Checked
    fixed: tuple[Finding, ...]
    fit: Fit | None
    """None where no GPUs or no model were named."""

    @property
    def failed(self) -> bool:
        """Whether a finding is an error."""
        return self.checked.failed

    def to_json(self) -> dict[str, Any]:
        setup, findings = self.checked.setup, self.checked.findings
        count = {s: sum(one.severity == s for one in findings) for s in ("error", "warning", "note")}
        return {
            "schema": 1,
            "deepspeed": setup.deepspeed,
            "reader": setup.reader,
            "world_size": setup.world_size,
            "files": [{"file": document.name, "kind": document.kind} for document in setup.documents],
            "errors": count["error"],
            "warnings": count["warning"],
            "notes": count["note"],
            "findings": [one.to_json() for one in findings],
            "fixed": [one.to_json() for one in self.fixed],
            "fit": None if self.fit is None else self.fit.to_json(),
        }


def check(
    files: str | Path | Sequence[str | Path],
    *,
    gpus: str | Hardware | None = None,
    model: str | None = None,
    sequence: int | None = None,
    reader: Reader | None = None,
    fix: bool = False,
    making: Making = nullcontext,
) -> Report:
    """Find settings that fail or are silently ignored.

    Args:
        files: DeepSpeed JSON, Accelerate YAML, scripts and job files of one training; or one of them.
        gpus: what it runs on.
        model: a hub id, folder or known name; with `gpus` it is also planned whether it fits.
        sequence: tokens in a row.
        reader: the library that reads the DeepSpeed JSON; None: inferred from the other files.
        fix: apply unambiguous fixes in place.
        making: entered while a plan is made.
    """
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    hardware = parse_hardware(gpus) if isinstance(gpus, str) else gpus
    documents, broken = load(paths)
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
        setup, fixed = fix_files(setup, paths)
    checked = run_rules(setup, broken)
    fit = None
    if hardware is not None and model is not None and not broken:
        changes = [] if sequence is None else [f"data.sequence_length={sequence}"]
        fit = fit_of(checked.setup, model, changes, hardware, partial(make_plan, making=making))
        checked = fit.applied(checked)
    return Report(checked=checked, fixed=fixed, fit=fit)
