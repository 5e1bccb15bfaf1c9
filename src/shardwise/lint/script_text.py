"""Read the settings in a training script, without running anything."""

import ast
import re
from dataclasses import replace
from pathlib import Path

from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document, Mark, UnreadableError
from shardwise.lint.script_settings import Settings

_LARGEST_MODULE = 1_000_000  # bytes
UNDEFINED = "names.undefined"  # the key for the names that the script uses and nowhere defines


def is_python(text: str) -> bool:
    """Whether it is a Python program. YAML can parse as Python by chance, but has no imports."""
    return parses(text) and any(isinstance(one, ast.Import | ast.ImportFrom) for one in ast.parse(text).body)


def parses(text: str) -> bool:
    """Whether it has Python's syntax."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def read_python(text: str, file: str) -> Document:
    """Read the arguments of calls that set up a training; the first call with a key wins."""
    try:
        ast.unparse(program := ast.parse(text))  # as rules do
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        what = f"it is not Python: {getattr(error, 'msg', str(error)) or 'nested too deeply'}"
        raise UnreadableError(what, line=line, fix="correct the syntax") from None
    said = Settings(text)
    if undefined := said.known.undefined():
        said.values[UNDEFINED], said.marks[UNDEFINED,] = [*undefined], Mark(line=min(undefined.values()))
    for node in ast.walk(program):  # a class of the script's own is nobody else's Trainer
        if isinstance(node, ast.ClassDef) and not any(ast.unparse(b).endswith("Trainer") for b in node.bases):
            said.uses.discard(node.name)
        if isinstance(node, ast.ImportFrom):
            bare = [alias.name for alias in node.names if _has_no_base(alias.name, node, file)]
            said.uses -= {f"{node.module}.{name}" for name in bare}  # as `name_as_imported` calls them
    inner = tuple(replace(one, name=file, text=text) for one in said.configurations)
    found = Document(name=file, text=text, syntax="python", values=said.values, marks=said.marks)
    return replace(found, kind="training", uses=frozenset(said.uses), inner=inner)


def _has_no_base(name: str, imported: ast.ImportFrom, file: str) -> bool:
    """Whether it is a class of a module next to the script, and derived of none of a library."""
    if not name.endswith("Trainer") or not imported.module:
        return False
    path = Path(file).parent / f"{imported.module.replace('.', '/')}.py"
    try:
        text = read_bounded(path, _LARGEST_MODULE).decode(errors="replace")
    except (OSError, ValueError):
        return False
    return re.search(rf"^class {name}\s*(\(\s*\))?\s*:", text, re.MULTILINE) is not None
