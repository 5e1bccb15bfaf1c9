"""Apply the rules to files, fix the files, and word the findings for the terminal."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.errors import JobError, Problem
from shardwise.job.load import LoadedJob, load_job
from shardwise.job.schema import StrategySpec
from shardwise.lint.document import Document, Kind, UnreadableError
from shardwise.lint.edit import CannotEditError, edited
from shardwise.lint.finding import SEVERITIES, Finding, finding, holds_for
from shardwise.lint.model import architecture_of
from shardwise.lint.read import found, read, referred, text_of
from shardwise.lint.rules import RULES
from shardwise.lint.setup import READER_NAMES, Setup
from shardwise.space.candidates import candidates
from shardwise.space.rules import EVERY_RULE

_WHERE = re.compile(r":(?P<line>\d+)(?:: (?P<key>[\w.]+))?")
KINDS = {
    "deepspeed": "DeepSpeed configuration",
    "accelerate": "accelerate configuration",
    "training": "training script or its arguments",
    "job": "job file",
}
_UNREADABLE = Finding(rule="unreadable", severity="error", file="", what="", fix="")


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The files that could be read, and all findings."""

    setup: Setup
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        return any(one.severity == "error" for one in self.findings)


def load(
    files: Sequence[Path], *, other: Kind | None = None
) -> tuple[tuple[Document, ...], tuple[Finding, ...]]:
    """Read the files, and the DeepSpeed files that they name; return a finding for each unreadable one.

    `other`: the kind of a file that is of no known one. JobError if a file does not exist or is not text.
    """
    documents: list[Document] = []
    broken: list[Finding] = []
    seen = {os.path.realpath(file): file for file in files}
    waiting = list(seen.values())
    while waiting:
        file = waiting.pop(0)
        try:
            document = read(text_of(file), str(file), other=other)
        except UnreadableError as error:
            broken.append(unreadable(str(file), error))
            continue
        documents.append(document)
        for path in found(referred(document), file.parent):
            if os.path.realpath(path) not in seen:
                seen[os.path.realpath(path)] = path
                waiting.append(path)
    return tuple(documents), tuple(broken)


def unreadable(name: str, error: UnreadableError) -> Finding:
    """The finding for a file of no known kind, or a broken one."""
    return replace(_UNREADABLE, file=name, line=error.line, what=error.what, fix=error.fix)


def check(setup: Setup, broken: Sequence[Finding] = ()) -> Checked:
    """Return every finding, in the order of files, severity and lines."""
    order = {document.name: index for index, document in enumerate(setup.documents)}
    findings = [*broken, *(one for document in setup.documents for one in findings_of(document, setup))]
    findings.sort(key=lambda one: (order.get(one.file, -1), SEVERITIES.index(one.severity), one.line))
    return Checked(setup=setup, findings=tuple(_once(findings)))


def _once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Say a note once, with the number of its places."""
    places = Counter((one.rule, one.key, one.what) for one in findings)
    for one in findings:
        count = 1 if one.severity != "note" else places.pop((one.rule, one.key, one.what), 0)
        if count:
            yield replace(one, what=f"{one.what}; in {count} places") if count > 1 else one


def findings_of(document: Document, setup: Setup) -> list[Finding]:
    """Return the findings of the rules for the document's kind."""
    if document.kind == "job":
        return _job_findings(document, setup)
    return [
        finding(rule, document, hit)
        for rule in RULES
        if rule.kind == document.kind and holds_for(rule.versions, "deepspeed", setup.deepspeed)
        for hit in rule.find(document, setup)
    ]


def _job_findings(document: Document, setup: Setup) -> list[Finding]:
    try:
        loaded = load_job(Path(document.name))
    except JobError as error:
        return [_of_problem(document, "job-file", problem) for problem in error.problems]
    try:
        return list(_broken_by_strategy(document, setup, loaded))
    except JobError as error:
        return [_of_problem(document, "job-strategy", problem) for problem in error.problems]


def _broken_by_strategy(document: Document, setup: Setup, loaded: LoadedJob) -> Iterator[Finding]:
    job = loaded.job
    named = job.strategy if isinstance(job.strategy, StrategySpec) else None
    world = setup.asked_world_size or (named.tensor_parallel if named else 1)
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
        yield _of_problem(document, name, problem, source=rule.source, versions=rule.versions)


def _of_problem(
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


def correct(document: Document, setup: Setup) -> tuple[Document, list[Finding]]:
    """Apply every fix that helps: a fix that adds an error, or fixes nothing, is left out.

    Only errors and warnings are fixed: the setting of a note works. Return also what was fixed.
    """
    fixed: list[Finding] = []
    tried: set[tuple[str, str, str]] = set()
    while True:
        current = _with(setup, document)
        open_ = findings_of(document, current)
        worth = (one for one in open_ if one.fixable and one.severity != "note")
        candidate = next((one for one in worth if _id(one) not in tried), None)
        if candidate is None:
            return document, fixed
        tried.add(_id(candidate))
        try:
            after = edited(document, candidate.changes)
        except (CannotEditError, UnreadableError):
            continue
        again = findings_of(after, _with(setup, after))
        if _id(candidate) in map(_id, again) or _errors(again) > _errors(open_):
            continue
        document = after
        fixed.append(candidate)


def fix_files(setup: Setup, files: Sequence[Path]) -> tuple[Setup, tuple[Finding, ...]]:
    """Fix these JSON and YAML files on disk; return the setup after that, and what was fixed.

    Scripts, job files, and files that are only named by other files stay unchanged.
    """
    fixed: list[Finding] = []
    names = {str(file) for file in files}
    for document in setup.documents:
        editable = document.syntax in ("json", "yaml") and document.kind != "job" and not document.bare
        if document.name not in names or not editable:
            continue
        corrected, done = correct(document, setup)
        if done:
            write(corrected)
            setup = _with(setup, corrected)
            fixed += done
    return setup, tuple(fixed)


def _id(one: Finding) -> tuple[str, str, str]:
    return one.rule, one.key, repr(one.changes)


def _errors(findings: Sequence[Finding]) -> int:
    return sum(one.severity == "error" for one in findings)


def _with(setup: Setup, document: Document) -> Setup:
    """The setup with this document instead of the one of the same name."""
    others = (document if other.name == document.name else other for other in setup.documents)
    return replace(setup, documents=tuple(others))


def write(document: Document) -> None:
    """Replace the file atomically by the document's text, and keep its permissions."""
    path = Path(document.name).resolve()  # a link stays a link
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(document.text, encoding="utf-8-sig" if document.marked else "utf-8")
        partial.chmod(path.stat().st_mode & 0o7777)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def block(one: Finding) -> str:
    """A finding in up to four lines, in the form of shardwise's errors."""
    lines = [f"{one.severity}: {one.what}  [{one.rule}]", f"  at:  {one.where}"]
    if one.fix:
        lines.append(f"  fix: {one.fix}")
    source = "; ".join(filter(None, (one.source, one.versions)))
    if source:
        lines.append(f"  see: {source}")
    return "\n".join(lines)


def headings(checked: Checked) -> dict[str, str]:
    """The kind of each file that could be read, by its name."""
    setup = checked.setup
    reader = f", read by {READER_NAMES[setup.reader]}" if setup.reader else ""
    kinds = KINDS | {"deepspeed": KINDS["deepspeed"] + reader}
    return {document.name: f"{document.name}: {kinds[document.kind]}" for document in setup.documents}


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning`; `nothing found`."""
    numbers = Counter(one.severity for one in findings)
    words = [f"{numbers[s]} {s}{'' if numbers[s] == 1 else 's'}" for s in SEVERITIES if numbers[s]]
    return ", ".join(words) or "nothing found"
