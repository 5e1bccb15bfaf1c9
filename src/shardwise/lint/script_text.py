"""Read the settings in a training script, without running anything."""

import ast
import re
from dataclasses import replace
from pathlib import Path
from sys import version_info

from shardwise.job.paths import read_bounded
from shardwise.lint.document import Document, Mark, UnreadableError
from shardwise.lint.script_settings import Settings

_LARGEST_MODULE = 1_000_000  # bytes
UNDEFINED = "names.undefined"  # the key for the names that the script uses and nowhere defines


def _f_strings(deep: int = 3) -> str:
    """A pattern for f-strings on a line that hold others, as Python allows since 3.12."""
    inner = f"{_f_strings(deep - 1)}|" if deep else ""
    held = rf"""\{{(?:{inner}"[^"\n]*+"|'[^'\n]*+'|\{{[^{{}}\n]*+\}}|[^{{}}"'\n])*+\}}"""
    quoted = (rf"{one}(?!{one}{one})(?:\{{\{{|{held}|[^{one}\n{{])*+{one}" for one in "\"'")
    return rf"(?<!\w)[fF](?:{'|'.join(quoted)})"


_F_STRING = re.compile(_f_strings())
_TYPED = re.compile(r"(?m)^(\s*(?:async )?(?:def|class) \w+)\[.*?\](?=[(:])|^(\s*)type (?=\w+.*=)")


def as_older(text: str) -> str:
    """A script without parameters of types, and `f"{...}"` for f-strings, that this Python cannot parse."""
    return _TYPED.sub(r"\1\2", _F_STRING.sub(lambda one: one[0] if parses(one[0]) else 'f"{...}"', text))


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


def without_classes(text: str, kinds: re.Pattern[str]) -> str:
    """A script's text without the bodies of classes that are named, or derived, like this."""
    rows = text.split("\n")
    made = [one for one in ast.parse(text).body if isinstance(one, ast.ClassDef)] if parses(text) else []
    for one in made:
        first = min(part.lineno for part in ast.walk(one.body[0]) if hasattr(part, "lineno")) - 1
        if first >= one.lineno and any(map(kinds.search, [one.name, *map(ast.unparse, one.bases)])):
            rest = (one.end_lineno or first) - first - 1
            rows[first : first + 1 + rest] = [f"{' ' * one.body[0].col_offset}pass", *[""] * rest]
    return "\n".join(rows)


def read_python(text: str, file: str) -> Document:
    """Read the arguments of calls that set up a training; the first call with a key wins."""
    try:
        ast.unparse(program := ast.parse(text))  # as rules do
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        why = getattr(error, "msg", str(error)) or "nested too deeply"
        newer = version_info < (3, 12) and parses(as_older(text))
        mine = f"Python 3.{version_info[1]}"
        who = f"{mine}, which runs check, {'stops' if newer else 'cannot read it'}"
        own = "a newer Python, such as the script's own"
        fix = "nest less deeply" if isinstance(error, RecursionError | MemoryError) else "correct it"
        fix = own if newer else f"{fix}; or run check with {own}"
        raise UnreadableError(f"{who}: {why}", line=line, fix=fix, ours=newer) from None
    said = Settings(text)
    if undefined := said.known.undefined():
        said.values[UNDEFINED], said.marks[UNDEFINED,] = [*undefined], Mark(line=min(undefined.values()))
    for node in ast.walk(program):  # a class of the script's own is nobody else's Trainer
        if isinstance(node, ast.ClassDef) and not any(ast.unparse(b).endswith("Trainer") for b in node.bases):
            said.uses.discard(node.name)
        if isinstance(node, ast.ImportFrom):
            for name in (alias.name for alias in node.names if f"{node.module}.{alias.name}" in said.uses):
                if (bases := _bases(name, node, file)) is not None:  # `name_as_imported` calls it so
                    said.uses -= {f"{node.module}.{name}"}
                    said.uses |= {name} if bases else set()
    inner = tuple(replace(one, name=file, text=text) for one in said.configurations)
    found = Document(name=file, text=text, syntax="python", values=said.values, marks=said.marks)
    return replace(found, kind="training", uses=frozenset(said.uses), inner=inner)


def _bases(name: str, imported: ast.ImportFrom, file: str) -> str | None:
    """What a Trainer of a module next to the script is derived of; None of other names and modules."""
    if not name.endswith("Trainer") or not imported.module:
        return None
    path = Path(file).parent / f"{imported.module.replace('.', '/')}.py"
    try:
        text = read_bounded(path, _LARGEST_MODULE).decode(errors="replace")
    except (OSError, ValueError):
        return None
    found = re.search(rf"^class {name}\s*(?:\(([^()]*)\))?\s*:", text, re.MULTILINE)
    return (found[1] or "").strip() if found else None
