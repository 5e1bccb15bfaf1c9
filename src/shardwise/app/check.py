"""A training's configuration files and scripts, checked together."""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.app import jobs
from shardwise.diagnosis.child import children
from shardwise.errors import JobError, MachineError, printable
from shardwise.hardware.hardware import Hardware
from shardwise.hardware.parse import parse_hardware
from shardwise.job.schema import Job
from shardwise.launch.local import worker_environment
from shardwise.lint.check import Checked, block, counted, fix_files, headings, load, unreached, unreadable
from shardwise.lint.check import check as run_rules
from shardwise.lint.document import Document, UnreadableError
from shardwise.lint.finding import SEVERITIES, Finding
from shardwise.lint.fit import Fit, fit_of, fit_of_job
from shardwise.lint.model import facts_of
from shardwise.lint.read import read
from shardwise.lint.setup import Reader, Setup, deepspeed_version
from shardwise.lint.tiny import Tiny, tiny_of
from shardwise.planner.plan import Plan
from shardwise.planner.planning import Making, make_plan

TINY_SECONDS = 120.0  # of silence: importing torch and DeepSpeed on a busy machine takes a good part of it
_OF_DEFAULTS = ("throughput-timer", "clipping-default")  # which nearly every file has: others come first


@dataclass(frozen=True, kw_only=True)
class Report(Checked):
    """Findings, what was fixed, and whether the configuration fits."""

    fixed: tuple[Finding, ...]
    fits: tuple[Fit, ...]
    """One for each job file, else one; none where no GPUs or no model were named."""
    tiny: Tiny | None = None
    """None where no tiny run was asked for."""
    fixing: bool = False  # whether fixes were to be applied

    @property
    def fit(self) -> Fit | None:
        """The first that does not fit, or the first; None where there is none."""
        return min(self.fits, key=lambda one: one.fits, default=None)

    def __repr__(self) -> str:
        return self.text()

    def text(self, *, errors_only: bool = False) -> str:
        """What `shardwise check` prints: the kind of each file, then the findings, errors first."""
        kinds = headings(self)
        below = "\n" + " " * len("fixed: ")
        blocks = [
            f"fixed: {one.file}: {one.fix.replace('; ', below)}  [{one.rule}]\n"
            f"  at:  {one.where}\n  was: {one.what}"
            for one in self.fixed
        ]
        found = sorted(self.findings, key=lambda one: SEVERITIES.index(one.severity))
        serious = any(one.severity != "note" for one in found)
        of_defaults = [one for one in found if one.rule in _OF_DEFAULTS and serious]
        shown = [one for one in found if one not in of_defaults]
        blocks += [block(one) for one in shown if one.severity == "error" or not errors_only]
        several = len(self.fits) > 1
        last = ["\n".join(one.lines(f"fit of {one.file}" if several else "fit")) for one in self.fits]
        last += ["\n".join(self.tiny.lines())] if self.tiny is not None else []
        rules = ", ".join(dict.fromkeys(one.rule for one in of_defaults))
        hidden = rules and not errors_only
        last += [f"not shown: {rules}, which nearly every file has; --json has them"] * bool(hidden)
        last += [counted(self.findings)]
        last += [f"not judged: {one}" for one in unreached(self.setup)]
        if self.fixing:
            left = [one for one in self.findings if one.severity != "note"]
            count = sum(len(one.keys) or 1 for one in self.fixed)
            done = f"--fix made {count} change{'s' * (count > 1)}" if count else "--fix changed nothing"
            last.append(done + f"; left for you to fix: {counted(left)}" * bool(left))
        files = dict.fromkeys([*(one.file for one in found if one.file not in kinds), *kinds])
        paragraphs = ["\n".join(kinds.get(file, file) for file in files), *blocks, "\n".join(last)]
        return printable("\n\n".join(paragraphs))

    def to_json(self) -> dict[str, Any]:
        setup, findings = self.setup, self.findings
        return {
            "schema": 1,
            "deepspeed": setup.deepspeed,
            "reader": setup.reader,
            "world_size": setup.world_size,
            "files": [{"file": document.name, "kind": document.kind} for document in setup.documents],
            **{f"{name}s": sum(one.severity == name for one in findings) for name in SEVERITIES},
            "findings": [one.to_json() for one in findings],
            "not_judged": unreached(setup),
            "fixed": [one.to_json() for one in self.fixed],
            "fit": None if self.fit is None else self.fit.to_json(),
            "fits": [one.to_json() for one in self.fits],
            "tiny": None if self.tiny is None else asdict(self.tiny),
        }


def check(
    files: str | Path | Sequence[str | Path],
    *,
    gpus: str | Hardware | None = None,
    model: str | None = None,
    sequence: int | None = None,
    reader: Reader | None = None,
    fix: bool = False,
    tiny: bool = False,
    making: Making = nullcontext,
) -> Report:
    """Find settings that fail or are silently ignored.

    Args:
        files: DeepSpeed JSON, Accelerate YAML, scripts and job files of one training; or one of them.
        gpus: what it runs on.
        model: a hub id, folder or known name; with `gpus` it is also planned whether it fits. A job file
            names its own.
        sequence: tokens in a row.
        reader: the library that reads the DeepSpeed JSON; None: inferred from the other files.
        fix: apply unambiguous fixes in place.
        tiny: also run the DeepSpeed configuration for three steps of a tiny model on the CPU.
        making: entered while a plan is made.

    Raises JobError with `tiny` where none is a DeepSpeed configuration.
    """
    paths = [Path(file) for file in ([files] if isinstance(files, str | Path) else files)]
    hardware = parse_hardware(gpus) if isinstance(gpus, str) else gpus
    documents, broken = load(paths)
    named = model or Setup(documents=documents).named_model
    setup = Setup(
        documents=documents,
        asked_reader=reader,
        asked_world_size=hardware.world_size if hardware else None,
        gpus_per_node=hardware.gpus_per_node if hardware else None,
        gpu=hardware.gpu.name if hardware else "",
        model=None if named is None else facts_of(named),
        deepspeed=deepspeed_version(),
    )
    fixed: tuple[Finding, ...] = ()
    if fix:
        setup, fixed = fix_files(setup, paths)
    checked = run_rules(setup, broken)
    fits = list[Fit]()
    own = [one.name for one in setup.of("job")]
    if hardware and (model is not None or own) and all(one.severity == "note" for one in broken):
        changes = [] if sequence is None else [f"data.sequence_length={sequence}"]
        planner = partial(make_plan, making=making)
        if model is not None and not own:
            fits = [fit_of(checked.setup, model, changes, hardware, planner)]
        changes += [f"model.source={model}"] if model else []
        fits += [_fit_of_job(job, changes, hardware, planner) for job in own]
    elif hardware and model is None and named is not None and not own:
        fits = [Fit(unavailable=f"`--model {named}` plans whether it fits")]
    for fit in fits[::-1]:
        checked = fit.applied(checked)
    tried = run_tiny(checked.setup) if tiny else None
    findings = (*(tried.findings() if tried else ()), *checked.findings)
    return Report(
        setup=checked.setup, findings=findings, fixed=fixed, fits=tuple(fits), tiny=tried, fixing=fix
    )


def _fit_of_job(
    file: str, changes: Sequence[str], hardware: Hardware, planner: Callable[[Job, Hardware], Plan]
) -> Fit:
    """Whether a job of shardwise's own fits; the findings say what is wrong with it."""
    try:
        job = jobs.read(file, changes, needs_data=False).job
    except JobError:
        return Fit(file=file, unavailable=f"{file} is no job that can run")
    return fit_of_job(job, file, hardware, planner)


def run_tiny(setup: Setup, *, processes: int = 2) -> Tiny:
    """Run the setup's DeepSpeed configuration in processes that meet over gloo, and end with the call."""
    tiny = tiny_of(setup)
    where = "shardwise check --run-tiny"
    if tiny is None:
        what, fix = "no file is a DeepSpeed configuration", "name the JSON, or accelerate's file"
        raise JobError(what, where=where, fix=fix)
    if find_spec("deepspeed") is None:
        raise MachineError("deepspeed is not installed", where=where, fix="pip install 'shardwise[train]'")
    with tempfile.TemporaryDirectory() as folder, children(limit_seconds=TINY_SECONDS) as family:
        path = Path(folder) / "deepspeed.json"
        path.write_text(json.dumps(tiny.config), encoding="utf-8")
        shared = worker_environment(processes=processes, folder=Path(folder))
        shared |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "SHARDWISE_TINY": str(path)}
        ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
        asked = family.ask_together("tiny", ranks, TINY_SECONDS)
        family.wait()
    answers = [child.answers["tiny"] for child in asked]
    failed = [one for one in answers if one.facts is None]
    refused = [one for one in failed if not one.busy and not one.failure.startswith("hung")]
    if failed and not refused:  # silence says nothing about the file
        what, fix = f"the tiny run gave no answer: {failed[0].why}", "try again when the machine is less busy"
        raise MachineError(what, where=where, fix=fix)
    refusal = refused[0].why if refused else ""
    return replace(tiny, refusal=refusal, losses=(answers[0].facts or {}).get("losses", ()))


def check_texts(texts: Mapping[str, str]) -> Checked:
    """Findings on texts by their file names; no file is read. JobError for a job, which names other files."""
    documents, broken = list[Document](), list[Finding]()
    for name, text in texts.items():
        try:
            documents += (one := read(text, name), *one.inner)
        except UnreadableError as error:
            broken.append(unreadable(name, error))
    job = next((document.name for document in documents if document.kind == "job"), None)
    if job is not None:
        raise JobError(f"{job} is a job file, which names other files", fix=f"shardwise check {job}")
    return run_rules(Setup(documents=tuple(documents), deepspeed=deepspeed_version()), broken)
