"""Files of variables that a launch script loads: `source .env`, `export $(grep -v '^#' .env | xargs)`."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document, UnreadableError
from shardwise.lint.foreign.table import TABLE
from shardwise.lint.read import LARGEST_FILE_BYTES, found, read
from shardwise.lint.shell_text import read_shell

_LOADS, _NAME, _SECRET = (re.compile(TABLE["words"][f"variables_{one}"]) for one in ("load", "file", "not"))
_WRITES = re.compile(
    r"(?ms)^\s*cat\s*>\s*[\"']?([\w./-]+\.json)[\"']?\s*<<-?\s*[\"']?(\w+)[\"']?\n(.*?)^\t*\2$"
)
VARIABLES = re.compile(r"^[\w-]*\.env(\.\w+)*$")  # the name of such a file
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


def written(command: Document) -> Iterator[Document]:
    """DeepSpeed's files that the script of a command writes with here-documents."""
    for name, _, body in _WRITES.findall(command.text):
        with suppress(UnreadableError):
            if (made := read(body, name)).kind == "deepspeed" and not found(
                [name], Path(command.name).parent
            ):
                yield made


def _value(text: str) -> str:
    """A value as the shell's text; a command where only the shell knows it."""
    plain = _PLAIN.match(text)
    return "'" + next((one for one in plain.groups() if one), "") + "'" if plain else "$(unknown)"
