"""Apply the rules to files, fix the files, and word the findings for the terminal."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile

from shardwise.errors import JobError, Problem
from shardwise.job.load import LoadedJob, load_job
from shardwise.job.schema import StrategySpec
from shardwise.job.source import to_dos
from shardwise.lint.document import Document, Kind, UnreadableError
from shardwise.lint.edit import CannotEditError, Rename, edited, in_words
from shardwise.lint.finding import SEVERITIES, Finding, Severity, finding, holds_for
from shardwise.lint.model import architecture_of
from shardwise.lint.read import (
    DEEPSPEED_YAML,
    LOADS_YAML,
    UNKNOWN,
    encoding_of,
    found,
    imported,
    read,
    referred,
    text_of,
    with_loaded,
)
from shardwise.lint.rules import RULES, versions
from shardwise.lint.rules.loaded import with_what_scripts_set
from shardwise.lint.rules.steps import not_followed
from shardwise.lint.rules.training import tool_of
from shardwise.lint.script_run import as_run
from shardwise.lint.script_text import as_older
from shardwise.lint.setup import READER_NAMES, Setup
from shardwise.lint.shell_text import NO_COMMAND, STARTS
from shardwise.models.catalog import no_tokenizer
from shardwise.space.candidates import candidates
from shardwise.space.rules import EVERY_RULE

_READS_YAML = re.compile(rf"{LOADS_YAML.pattern}|yaml\.\w+_load\(|OmegaConf\.load\(|hydra\.main")
_YAML = re.compile(r"^[^#\n]*?(?<![\w$}/.-])([\w./-]+\.ya?ml)\b", re.MULTILINE)
_TRAINS = re.compile(r"\.backward\(|Trainer\b|\.fit\(")
_OF_VERSIONS = {one.name for one in RULES if one.find.__module__ == versions.__name__}
_DONE = "do what it says, and delete this comment"
_WHERE = re.compile(r":(?P<line>\d+)(?:: (?P<key>[\w.]+))?")
KINDS = {"deepspeed": "DeepSpeed configuration", "accelerate": "accelerate configuration"}
KINDS |= {"training": "training script or its arguments", "job": "job file", "pins": "versions of packages"}
KINDS["rows"] = "data sets of LLaMA-Factory, which no rule judges"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The files that could be read, and all findings."""

    setup: Setup
    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether a finding is an error."""
        return any(one.severity == "error" for one in self.findings)


def load(
    files: Sequence[Path], *, other: Kind | None = None
) -> tuple[tuple[Document, ...], tuple[Finding, ...]]:
    """Read files and those they name; findings for unreadable ones. `other`: the kind of unknown ones."""
    documents, broken = list[Document](), list[Finding]()
    seen = {os.path.realpath(file): file for file in files}
    waiting = list(seen.values())
    while waiting:
        file = waiting.pop(0)
        try:
            text = text_of(file, "shardwise init --from" if other else "shardwise check")
            document = read(text, str(file), other=other)
        except JobError as error:
            if other:
                raise
            one = error.problems[0]
            broken.append(
                Finding(rule="unreadable", severity="error", file=str(file), what=one.what, fix=one.fix)
            )
            continue
        except UnreadableError as error:
            own = error.what in (UNKNOWN, DEEPSPEED_YAML) and file.suffix in (".yaml", ".yml")
            later = bool(other) and error.ours and file.suffix == ".py"  # its f-strings are a later Python's
            if not (own := own and _read_yaml(files)):
                broken.append(unreadable(str(file), error))
            if not own and not later:
                continue
            document = read(as_older(text), str(file), other="training")
        documents += (document, *document.inner)
        for path in found(referred(document), file.parent):
            if os.path.realpath(path) not in seen:
                seen[os.path.realpath(path)] = path
                waiting.append(path)
    if other is None:
        documents = [with_loaded(one, files) for one in documents]
    return tuple(documents), tuple(broken)


def _read_yaml(files: Sequence[Path]) -> bool:
    """Whether one of the files is a script that loads YAML by itself."""
    for one in (one for one in files if one.suffix == ".py"):
        with suppress(UnreadableError):
            if _READS_YAML.search(text_of(one, "shardwise check")):
                return True
    return False


def unreadable(name: str, error: UnreadableError) -> Finding:
    """The finding for a broken file, or one of no known kind: a note, where others could be read."""
    harmless = error.what in (UNKNOWN, NO_COMMAND) and not name.endswith(".json")
    severity: Severity = "note" if harmless else "warning" if error.ours else "error"
    found = Finding(rule="unreadable", severity=severity, file=name, what=error.what, fix=error.fix)
    return replace(found, line=error.line, cell=error.cell)


def check(setup: Setup, broken: Sequence[Finding] = ()) -> Checked:
    """Return every finding, in the order of files, severity and lines."""
    if not setup.documents:
        broken = [replace(one, severity="error") if one.severity == "note" else one for one in broken]
    order = {document.name: index for index, document in enumerate(setup.documents)}
    by = [(document.name, one) for document in setup.documents for one in _causes(document, setup)]
    own = {(one.file, one.rule, one.line) for name, one in by if one.file == name}
    away = {(one.file, one.rule, one.line): one for name, one in by if one.file != name}  # as another runs it
    findings = [*broken, *(one for name, one in by if one.file == name)]
    findings += [one for place, one in away.items() if place not in own]
    findings.sort(key=lambda one: (order.get(one.file, -1), SEVERITIES.index(one.severity), one.line))
    return Checked(setup=setup, findings=tuple(_once([*_by_file(by_cause(findings))])))


def _causes(document: Document, setup: Setup) -> Iterator[Finding]:
    """The findings of a document, without those that are gone once a misspelt key is renamed."""
    found, gone = findings_of(document, setup), list[Finding]()
    for one in found if document.syntax in ("json", "yaml") else ():
        if any(isinstance(change, Rename) for change in one.changes) and one not in gone:
            with suppress(CannotEditError, UnreadableError):
                after = edited(document, one.changes)
                left = {(other.rule, _last(other)) for other in findings_of(after, _with(setup, after))}
                gone += [o for o in found if o is not one and (o.rule, _last(o)) not in left]
    return (one for one in found if one not in gone)


def _last(one: Finding) -> str:
    return one.key.rpartition(".")[2]


def by_cause(findings: Sequence[Finding], *, fixed: bool = False) -> list[Finding]:
    """One finding for all keys of a file with the same cause and fix; `fixed`: each with its own change."""
    groups, places = dict[object, list[Finding]](), Counter[object]()
    for one in findings:
        alike = (one.file, one.rule, one.severity, one.cause, fixed or one.fix, bool(one.named))
        places[alike, one.named] += 1  # a key once more, at another place, is a finding of its own
        groups.setdefault((alike, places[alike, one.named]), []).append(one)
    return [_joined(group, fixed=fixed) if len(group) > 1 else group[0] for group in groups.values()]


def _joined(group: Sequence[Finding], *, fixed: bool) -> Finding:
    what = f"{', '.join(one.named for one in group)}: {group[0].cause}"
    fix = "; ".join(one.fix for one in group) if fixed else group[0].fix
    changes = tuple(change for one in group for change in one.changes)
    return replace(group[0], keys=tuple(one.key for one in group), what=what, fix=fix, changes=changes)


def _by_file(findings: Sequence[Finding]) -> Iterator[Finding]:
    """One finding for all names of a file that newer versions lack: a line of `fix` for each place."""
    groups = dict[object, list[Finding]]()
    for one in findings:
        rule = one.rule * (one.severity == "error")  # else an earlier version is asked for: one cause
        alike = (one.file, rule, one.severity) if one.rule in _OF_VERSIONS else id(one)
        groups.setdefault(alike, []).append(one)
    for group in groups.values():
        said = dict[str, list[str]]()  # of each class or version, the names that it does not have
        lacking = [one for one in group if " has no " in one.what]
        for who, _, names_ in (one.what.partition(", which")[0].partition(" has no ") for one in lacking):
            said[who] = [*said.get(who, []), names_.removeprefix("argument ") if who in said else names_]
        heads = [f"{who} has no {', '.join(dict.fromkeys(names_))}" for who, names_ in said.items()]
        places = (f"line {one.line}{f' of cell {one.cell}' * bool(one.cell)}: {one.fix}" for one in group)
        what = "; ".join(heads) + "".join((lacking or group)[0].what.partition(", which")[bool(lacking) :])
        keys = tuple(key for one in group for key in (one.keys or (one.key,)))
        joined = replace(group[0], what=what, fix="\n       ".join(places), keys=keys)
        yield joined if len(group) > 1 else group[0]


def _once(findings: Sequence[Finding]) -> Iterator[Finding]:
    """Say a note once, with the number of its places."""
    places = Counter((one.rule, one.key, one.what) for one in findings)
    for one in findings:
        count = 1 if one.severity != "note" else places.pop((one.rule, one.key, one.what), 0)
        if count:
            yield replace(one, what=f"{one.what}; in {count} places") if count > 1 else one


def findings_of(document: Document, setup: Setup) -> list[Finding]:
    """Return the findings of the rules for the document's kind."""
    job = [*_job_findings(document, setup), *_open_to_dos(document)] if document.kind == "job" else []
    at = next((n for n, one in enumerate(setup.documents) if one is document), None)
    setup = with_what_scripts_set(setup)
    document = document if at is None else setup.documents[at]
    mine = (one for one in RULES if one.kind == document.kind)
    held = (one for one in mine if holds_for(one.versions, "deepspeed", setup.deepspeed))
    others = [one for one in setup.of("training") if one.name != document.name]
    seen = {False: document, True: as_run(document, others) if document.syntax == "python" else document}
    found = (finding(one, seen[one.runs], hit) for one in held for hit in one.find(seen[one.runs], setup))
    once = {(one.rule, one.line, one.key, one.what): one for one in found}  # of several calls
    return [*job, *once.values()]


def _job_findings(document: Document, setup: Setup) -> list[Finding]:
    try:
        loaded = load_job(Path(document.name))
    except JobError as error:
        return [_of_problem(document, "job-file", problem) for problem in error.problems]
    try:
        found = list(_broken_by_strategy(document, setup, loaded))
    except JobError as error:
        found = [_of_problem(document, "job-strategy", problem) for problem in error.problems]
    missing = no_tokenizer(loaded.job.model)
    problems = loaded.located(missing).problems if missing else ()
    return [*(_of_problem(document, "job-tokenizer", problem) for problem in problems), *found]


def _open_to_dos(document: Document) -> Iterator[Finding]:
    """A warning for each sentence at the head of a job that `init --from` asks the user for."""
    for line, asked in to_dos(document.text):
        what = f"open since `shardwise init --from`: {asked}"
        one = Finding(rule="job-to-do", severity="warning", file=document.name, what=what, fix=_DONE)
        yield replace(one, line=line)


def _broken_by_strategy(document: Document, setup: Setup, loaded: LoadedJob) -> Iterator[Finding]:
    job = loaded.job
    named = job.strategy if isinstance(job.strategy, StrategySpec) else None
    world = setup.asked_world_size or (named.tensor_parallel if named else 1)
    node, shape = setup.gpus_per_node or world, architecture_of(job.model.source)
    accepted, refused = candidates(job, world_size=world, gpus_per_node=node, architecture=shape)
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
    document: Document, rule: str, problem: Problem, *, source: str = "", versions: str = ""
) -> Finding:
    match = _WHERE.search(problem.where.removeprefix(document.name))
    line, key = (int(match["line"]), match["key"] or "") if match else (1, "")
    found = Finding(rule=rule, severity="error", file=document.name, what=problem.what, fix=problem.fix)
    return replace(found, line=line, key=key, source=source, versions=versions)


def correct(document: Document, setup: Setup) -> tuple[Document, list[Finding]]:
    """Apply every fix of an error or warning that helps and adds no error.

    Return also what was fixed; the `fix` of such a finding says the change: key, old and new value.
    """
    fixed: list[Finding] = []
    tried: set[tuple[str, str, str]] = set()
    while True:
        open_ = findings_of(document, _with(setup, document))
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
        worse, before = ([one.severity for one in found].count("error") for found in (again, open_))
        if _id(candidate) in map(_id, again) or worse > before:
            continue
        fixed.append(replace(candidate, fix=in_words(document, candidate.changes)))
        document = after


def fix_files(setup: Setup, files: Sequence[Path]) -> tuple[Setup, tuple[Finding, ...]]:
    """Fix these files on disk, not jobs and notebooks; return the setup then, and what was fixed."""
    fixed: list[Finding] = []
    names = {str(file) for file in files}
    for document in setup.documents:
        editable = document.kind != "job" and not document.bare and not document.cells
        if document.name not in names or not editable:
            continue
        corrected, done = correct(document, setup)
        if done:
            write(corrected, document)
            setup = _with(setup, corrected)
            fixed += by_cause(done, fixed=True)
    return setup, tuple(fixed)


def _id(one: Finding) -> tuple[str, str, str]:
    return one.rule, one.key, repr(one.changes)


def _with(setup: Setup, document: Document) -> Setup:
    """The setup with this document instead of the one of the same name; a script may hold another kind."""
    mine = (document.name, document.kind)
    others = (document if (other.name, other.kind) == mine else other for other in setup.documents)
    return replace(setup, documents=tuple(others))


def write(document: Document, before: Document) -> None:
    """Replace the file atomically by the document's text, and keep its permissions.

    JobError if it is read-only, or no longer has the text of `before`.
    """
    path = Path(document.name).resolve()  # a link stays a link
    mode = path.stat().st_mode
    own = encoding_of(raw := path.read_bytes(), path)
    if not mode & 0o222 or not os.access(path, os.W_OK):
        raise JobError("the file is read-only", where=document.name, fix="allow writing, or leave out --fix")
    if raw != before.text.encode("utf-8-sig" if before.marked else own):
        what = "the file was changed after shardwise read it"
        raise JobError(what, where=document.name, fix="run the command again")
    with NamedTemporaryFile(
        dir=path.parent, prefix=f".{path.name}.", suffix=".partial", delete=False
    ) as file:
        file.write(document.text.encode("utf-8-sig" if document.marked else own))
    partial = Path(file.name)
    try:
        partial.chmod(mode & 0o7777)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def block(one: Finding) -> str:
    """A finding in up to four lines, in the form of shardwise's errors."""
    lines = [f"{one.severity}: {one.what}  [{one.rule}]", f"  at:  {one.where}"]
    if one.fix:
        lines.append(f"  fix: {one.fix}")
    own = one.source.startswith("shardwise.")  # a module of ours, where nobody looks things up
    source = "; ".join(filter(None, ("" if own else one.source, one.versions)))
    if source:
        lines.append(f"  see: {source}")
    return "\n".join(lines)


def headings(checked: Checked) -> dict[str, str]:
    """The kind of each file that could be read, by its name."""
    setup = checked.setup
    reader = f", read by {READER_NAMES[setup.reader]}" if setup.reader else ""
    kinds, said = KINDS | {"deepspeed": KINDS["deepspeed"] + reader}, dict[str, str]()
    for document in setup.documents:  # a script, and then what it writes
        kind = "launch command" if document.syntax == "shell" else kinds[document.kind]
        tool = tool_of(document) if document.kind == "training" else ""
        kind = f"settings of {tool}" if tool else kind
        before = said.get(document.name)
        said[document.name] = f"{before}, with a" if before else f"{document.name}:"
        said[document.name] += f" {kind}"
    return said


def unreached(setup: Setup) -> list[str]:
    """What rules on loops, processes and models did not see of the scripts."""
    said, named = list[str](), {os.path.realpath(one.name) for one in setup.documents}
    scripts = setup.of("training", "python")
    for one in scripts:
        if unread := [str(path) for path in imported(one) if os.path.realpath(path) not in named]:
            said.append(f"what {one.name} imports of {', '.join(unread)}: name these files, too")
        run = as_run(one, [other for other in setup.of("training") if other.name != one.name])
        for line, open_ in not_followed(run):
            file, at = run.place(line)
            are = f"{', '.join(open_)} {'is' if len(open_) == 1 else 'are'} not followed"
            where = f"{file}:{run.at(line) if run.cells else at}"
            said.append(f"the loop at {where} ({are}): zero_grad, sampler, loss division")
    for one in setup.of("training", "shell"):
        there = {*map(os.path.basename, named)}
        away = [name for name in one.get(STARTS) or () if Path(name).name not in there]
        if away:
            said.append(f"what {one.name} starts: {', '.join(away)} is not here; name that file, too")
        away = [name for name in _YAML.findall(one.text) if Path(name).name not in there]
        if files := ", ".join(dict.fromkeys(away)):
            said.append(f"the settings in {files} of {one.name}: no such file was read")
    if scripts and not _TRAINS.search(setup.scripts):
        files = ", ".join(one.name for one in scripts)
        said.append(f"a training loop: {files} has no backward pass and no Trainer")
    return said


def counted(findings: Sequence[Finding]) -> str:
    """`2 errors, 1 warning`; `nothing found`."""
    numbers = Counter(one.severity for one in findings)
    words = [f"{numbers[s]} {s}{'' if numbers[s] == 1 else 's'}" for s in SEVERITIES if numbers[s]]
    return ", ".join(words) or "nothing found"
