"""Findings on a job file: errors of loading it, and the rules that its strategy breaks on these GPUs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from shardwise.errors import JobError, Problem
from shardwise.job.load import LoadedJob, load_job
from shardwise.job.schema import StrategySpec
from shardwise.lint.document import Document
from shardwise.lint.finding import Finding
from shardwise.lint.model import architecture_of
from shardwise.lint.setup import Setup
from shardwise.space.candidates import candidates
from shardwise.space.rules import EVERY_RULE

_WHERE = re.compile(r":(?P<line>\d+)(?:: (?P<key>[\w.]+))?")


def job_findings(document: Document, setup: Setup) -> list[Finding]:
    """Return everything that prevents the job from starting; each is an error."""
    try:
        loaded = load_job(Path(document.name))
    except JobError as error:
        return [_finding(document, "job-file", problem) for problem in error.problems]
    try:
        return list(_strategy(document, setup, loaded))
    except JobError as error:
        return [_finding(document, "job-strategy", problem) for problem in error.problems]


def _strategy(document: Document, setup: Setup, loaded: LoadedJob) -> Iterator[Finding]:
    job = loaded.job
    named = isinstance(job.strategy, StrategySpec)
    least = job.strategy.tensor_parallel if isinstance(job.strategy, StrategySpec) else 1
    world = setup.asked_world_size or least
    accepted, refused = candidates(
        job,
        world_size=world,
        gpus_per_node=setup.gpus_per_node or world,
        architecture=architecture_of(job.model.source),
    )
    if accepted:
        return
    rules = {rule.name: rule for rule in EVERY_RULE}
    for name in dict.fromkeys(one.rule for one in refused):
        one = next(one for one in refused if one.rule == name)
        rule = rules[name]
        keys = [key for key in rule.where.split(", ") if key in loaded.origins] or ["strategy"]
        problem = Problem(what=one.reason, where=loaded.where(keys[0] if named else "strategy"), fix=one.fix)
        yield _finding(document, name, problem, source=rule.source, versions=rule.versions)


def _finding(
    document: Document, rule: str, problem: Problem, *, source: str = "shardwise.job", versions: str = ""
) -> Finding:
    match = _WHERE.search(problem.where.removeprefix(document.name))
    return Finding(
        rule=rule,
        severity="error",
        file=document.name,
        line=int(match["line"]) if match else 1,
        key=(match["key"] or "") if match else "",
        what=problem.what,
        fix=problem.fix,
        source=source,
        versions=versions,
    )
