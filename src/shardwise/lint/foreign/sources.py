"""Files of variables that a launch script loads: `source .env`, `export $(grep -v '^#' .env | xargs)`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardwise.job.paths import read_bounded
from shardwise.lint.check import load
from shardwise.lint.document import Document, UnreadableError, line_at
from shardwise.lint.finding import Finding
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.read import LARGEST_FILE_BYTES, found, read
from shardwise.lint.shell_text import is_started, read_shell
from shardwise.lint.shell_values import steps

_LOADS, _NAME, _SECRET = (re.compile(TABLE["words"][f"variables_{one}"]) for one in ("load", "file", "not"))
_WRITES = re.compile(TABLE["words"]["writes"], re.MULTILINE | re.DOTALL)
VARIABLES = re.compile(r"^[\w-]*\.env(\.\w+)*$")  # the name of such a file
_RUNS = re.compile(TABLE["words"]["runs"], re.MULTILINE)
_SETS = re.compile(r"(?m)(?:^|(?<=[ \t]))(?:export[ \t]+)?([A-Z_]+=[\w./:,-]+)(?=\s)")
_PASSED = re.compile(r"""(["']?)\$(?:\{@\}|[@*])\1""")
_USE = re.compile(r"\$\{?(\w+)\}?")
_ROW = re.compile(r"(?m)^\s*(?:export\s+)?([A-Za-z_]\w*)=(.*?)\s*$")
_PLAIN = re.compile(r"""(?:"([^"$`\\]*)"|'([^'$`\\]*)'|([^\s"'$`\\;&|<>()]*))(?:\s+#.*)?$""")


def with_variables(
    command: Document, files: Sequence[Path], said: list[str], *, certain: bool = False
) -> Document:
    """The command with the variables of the files that its script loads: of those given, or near it.

    `certain`: only of files that do nothing but set them.
    """

    def assigned(loads: re.Match[str]) -> str:
        words = loads["file"] or loads["of"]
        for name in re.findall(r"\$\{?(\w+)", words):
            words += "".join(re.findall(rf"\b{name}=(\S+)", command.text))
        names = list(dict.fromkeys(_NAME.findall(words)))
        names = [part.lstrip("/") for name in names for part in (name, Path(name).name)]
        given = [one for name in names for one in files if one.name in (name, f"{name}.example")]
        folder = Path(command.name).resolve().parent
        near = [one for name in names for up in (folder, folder.parent) for one in found([name], up)]
        if not (path := next(iter(given + near), None)):
            return loads[0]
        text = read_bounded(path, LARGEST_FILE_BYTES).decode(errors="replace")
        rows = _ROW.findall(text)
        if certain and len(rows) != len(re.findall(r"(?m)^[ \t]*[^#\s]", text)):
            return loads[0]
        said.append(f"assumed: {command.name} reads {path.name}")
        made = (f"{name}={_value(value)}" for name, value in rows if not _SECRET.search(name))
        return f"export {' '.join(made)}" + "\n" * loads[0].count("\n")

    text = _LOADS.sub(assigned, command.text)
    if text == command.text:
        return command
    return replace(read_shell(text, command.name, plain=True), kind=command.kind)


def loaded(files: Sequence[Path], said: list[str]) -> tuple[tuple[Document, ...], tuple[Finding, ...]]:
    """The files and those that they name, and what is found of unreadable ones."""
    kept, passed = _passed_on(files, said)
    documents, broken = load([one for one in kept if not VARIABLES.search(one.name)], other="training")
    return tuple(passed.get(one.name, one) for one in documents), broken


def _passed_on(files: Sequence[Path], said: list[str]) -> tuple[list[Path], dict[str, Document]]:
    """The files without those that only run another script of the shell, and this with what it gets."""
    kept, made = [*files], dict[str, Document]()
    shell = [one for one in files if one.suffix in (".sh", ".bash") and one.is_file()]
    texts = {one: read_bounded(one, LARGEST_FILE_BYTES).decode(errors="replace") for one in shell}
    for one, run in ((one, run) for one, text in texts.items() for run in _RUNS.finditer(text)):
        ran = next((other for other in shell if other.name == Path(run["script"]).name), one)
        if ran is one or one not in kept or is_started(texts[one]) or not is_started(texts[ran]):
            continue
        variables = "".join(f"{word}; " for word in _SETS.findall(texts[one][: run.start("script")]))
        given = " ".join(run["given"].replace("\\\n", " ").split())
        text = variables + given.join(_PASSED.split(texts[ran])[::2])
        made[str(ran)] = read(text, str(ran), other="training")
        said.append(f"assumed: {one.name} runs {ran.name} {given}".rstrip())
        kept.remove(one)
    return kept, made


def written(command: Document) -> Iterator[Document]:
    """Files that the script of a command writes with here-documents: DeepSpeed's, and those that it names."""
    named = {Path(str(value)).name for value in command.values.values()}
    bodies = {line_at(command.text, one.start(1)): one for one in _WRITES.finditer(command.text)}
    for part, known in steps(command.text) if bodies else ():
        if one := bodies.get(part.line):
            name = known.expanded(next(filter(None, one.group("file", "to")))).strip("\"'")
            held = {} if one["quote"] else known.environment
            body = _USE.sub(lambda use, held=held: str(held.get(use[1], use[0])), one["body"])
            with suppress(UnreadableError):
                made = read(body, name, other="training" if Path(name).name in named else None)
                mine = made.kind == "deepspeed" or Path(name).name in named
                if mine and not found([name], Path(command.name).parent):
                    yield made


def _value(text: str) -> str:
    """A value as the shell's text; a command where only the shell knows it."""
    plain = _PLAIN.match(text)
    return "'" + next((one for one in plain.groups() if one), "") + "'" if plain else "$(unknown)"
