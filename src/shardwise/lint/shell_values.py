"""Variables of a shell script whose values are certain.

Certain is what a plain statement of the top level assigns, the last one before the command. What a branch, a
loop, a function, `read` or `source` may assign is unknown: it stays `$NAME`.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

from shardwise.lint.document import line_at
from shardwise.lint.schema import pattern, table
from shardwise.lint.script_sums import UNKNOWN, computed
from shardwise.lint.shell_commands import Command, brackets_end, commands, words

Value = str | list[str] | None  # of a variable; a list of an array; None where it is not certain

_LONGEST = 10_000  # characters of a value, so that `A=$A$A` ends
_LARGEST = 10**12
_ASSIGNED = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.ASCII | re.DOTALL)
_DECLARES = re.compile(r"(?:export|readonly|declare|typeset)\s(?:\s*-[xrga]+\s)*(?!\s*[-+])")
_TOUCHES = ("export", "readonly", "declare", "typeset", "local", "read", "mapfile", "getopts", "unset")
_ANY_NAME = re.compile(r"(?:let|eval|printf\s+-v)\s|\(\(.*(?:[^=<>!]=[^=]|\+\+|--)", re.DOTALL)
_UNREAD = pattern("unread_by_shell")
_ARGUMENTS = re.compile(r"shift\b|set\s+(?:--|[^-+\s])")
_LAUNCHERS = re.compile(r"(?:SLURM|PBS|LSB|OMPI|PMI|MASTER)_|(?:\w+_)?(?:RANK|WORLD_SIZE)$")
_SUM = re.compile(r"(?:\(\(\s*|let\s+\"?)([A-Za-z_]\w*)\s*=(?!=)([^=\"]*?)(?:\)\)|\"?)")
_DEFAULT = re.compile(r":\s+\"?\$\{(\w+):?=([^{}\"]*)\}\"?")
_PIECE = re.compile(
    r"\\.|'[^']*'|\"\$\{\w+\[@\]\}\"|\"|\$(?:\d|[A-Za-z_]\w*)|\$\(\(|\$[({]|`", re.ASCII | re.DOTALL
)
# `read -r -d '' NAME <<EOF` and `NAME=$(cat <<EOF`, and the lines down to the word
_HERE = re.compile(
    r"(?:\bread\b[^\n<;|&]{0,200}?\s(?P<read>\w+)|(?<!\w)(?P<set>\w+)=\"?\$\(\s{0,9}cat)[ \t]*<<-?[ \t]*"
    r"(?P<quote>[\"'\\]?)(?P<end>\w+)[\"']?[^\n]*\n"
)
_MOST_HERE = 100  # of these in a script that are read
_BRACES = re.compile(r"(#?)(\w+)(?:\[([@*]|\d{1,4})\])?(?:(:?-)(.*))?", re.ASCII | re.DOTALL)
_EXPR = re.compile(r"\$\(\s*expr\s+([^()`;|&]*)\)")
_SBATCH = re.compile(r"^#SBATCH[ \t](.*?)(?:[ \t]#.*)?$", re.MULTILINE)
_SRUN = re.compile(
    r"^[^#\n]{0,200}?\b(?:srun|sbatch)[ \t]((?:\\\n|[^\\\n]){0,1000}?)\b(?:python3?|torchrun|accelerate)\s",
    re.MULTILINE,
)
_OPTION = re.compile(r"(?<!\S)(?:--([a-z-]+)(?:=|\s+)|-([NpCGnJ])[\s=]*)(?!-)(\S+)")
_LONG = {"N": "nodes", "p": "partition", "C": "constraint", "G": "gpus", "n": "ntasks", "J": "job-name"}
_SLURM = table("slurm")


def header(text: str) -> dict[str, str]:
    """What a script asks of Slurm, by the long names of the options."""
    return _options(_SBATCH.findall(text))


def _options(rows: list[str]) -> dict[str, str]:
    return {long or _LONG[short]: value for row in rows for long, short, value in _OPTION.findall(row)}


def steps(text: str) -> Iterator[tuple[Command, "Variables"]]:
    """The commands of a script, and the variables before each: one object, which changes."""
    read = list(commands(text))
    known = Variables(text, read)
    for place, command in enumerate(read):
        known.top, known.place = command.top, place if command.repeated else len(read)
        if command.broken:
            known.forget()
        yield command, known
        known.run(command)


class Variables:
    """The variables before a command of a script."""

    def __init__(self, text: str, read: list[Command]) -> None:
        self._known = dict[str, Value]()
        started = _SRUN.findall(text)  # whose options count more than the head's
        for name, value in (header(text) | _options(started if len(started) == 1 else [])).items():
            count = value.rpartition(":")[2] if name in ("gpus-per-node", "gres") else value
            self._known |= dict.fromkeys(_SLURM.get(name, ()), count)
        self._here = dict[int, tuple[re.Match[str], str]]()
        for one in islice(_HERE.finditer(text), _MOST_HERE):
            if last := re.compile(rf"^\t*{one['end']}$", re.MULTILINE).search(text, one.end()):
                self._here[line_at(text, one.start())] = one, text[one.end() : last.start()]
        later = [one.text for one in read if one.repeated]
        self._never = {name for one in later for name in _touched(one)}
        self._last = {name: place for place, one in enumerate(read) for name in _touched(one.text)}
        self._lost = any(_UNREAD.match(one) and not one.startswith("eval") for one in later)
        self._arguments = not any(_ARGUMENTS.match(one.text) for one in read)
        self._all_read = True  # whether all that may have assigned a variable was read
        self.top = True  # whether the command is in no block
        self.place = len(read)  # of the command; a function or loop may also run after the last one

    @property
    def environment(self) -> dict[str, str]:
        """The variables that hold one text that is known."""
        held = {name: self._held(name) for name in self._known}
        return {name: value for name, value in held.items() if isinstance(value, str) and "$" not in value}

    def _held(self, name: str) -> Value:
        return None if self._last.get(name, 0) > self.place else self._known.get(name)

    def forget(self) -> None:
        """Know nothing of what was assigned so far."""
        self._known = dict.fromkeys(self._known)
        self._all_read = False

    def run(self, command: Command) -> None:
        """Take over what a command assigns."""
        text, sure = command.text, command.sure
        if _UNREAD.match(text):
            self.forget()
        self._lost |= sure and re.match(r"exit(?:\s|$)", text) is not None  # what follows does not run
        parts = words(text) if "=" in text or text.startswith(tuple(_TOUCHES)) else []
        declares = _DECLARES.match(text) is not None
        given = [found for part in parts if (found := _ASSIGNED.fullmatch(part))]
        here, body = self._here.get(command.line, (None, ""))
        if here and (here["set"] or "read" in words(text)):
            lines = body if here["quote"] else self.expanded(body)
            self._set(here["read"] or here["set"], lines.replace("\\\n", " "), sure)
        elif (default := _DEFAULT.fullmatch(text)) and default[1] not in self._known:
            self._set(default[1], self._use(f"${{{default[1]}:-{default[2]}}}"), sure)
        elif found := _SUM.fullmatch(text):
            self._set(found[1], self._sum(found[2]), sure)
        elif declares or (parts and len(given) == len(parts)):
            values = ((one, self._value(one[4])) for one in given)
            for one, value in list(values) if declares else values:  # `export` reads all words first
                name, index, more, _ = one.groups()
                before = self._known.get(name)
                script = [at for at, word in enumerate(before or [], 1) if word.endswith(".py")]
                if more and not sure and isinstance(before, list) and script:  # a branch may add flags
                    same = {*before} & {word for word in value or () if word.startswith("-")}
                    self._set(name, [*before[: script[0] if same or not value else None], f"${name}"], True)
                    continue
                self._set(name, None if index else self._joined(name, value) if more else value, sure)
            self._known |= dict.fromkeys(_within(text))
        else:
            self._known |= dict.fromkeys(_touched(text))
            if only := re.fullmatch(r"for\s+(\w+)\s+in\s+([\w./+:-]+)", text):  # a loop over one word
                self._known[only[1]] = only[2]

    def _set(self, name: str, value: Value, sure: bool) -> None:
        same = name in self._known and self._known[name] == value
        too_long = sum(map(len, value or "")) > _LONGEST
        never = too_long or self._lost or name in self._never or not (sure or same)
        self._known[name] = None if never else value

    def _joined(self, name: str, more: Value) -> Value:
        before = self._known.get(name, [] if isinstance(more, list) else "")
        if name not in self._known and not self._may_default(name):
            return None
        if isinstance(before, list) and isinstance(more, list):
            return before + more
        return before + more if isinstance(before, str) and isinstance(more, str) else None

    def _value(self, raw: str) -> Value:
        code = re.sub(r"'[^']*'|\"[^\"]*\"", "", raw)
        printed = re.search(r"\$\((?!\()|`|\$'", _EXPR.sub("", raw))
        if printed or re.search(r"(?<!\$)\{[^{}]*(?:,|\.\.)", code):
            return None  # what a command prints; `{1,2}`, which may be two words
        if not raw.startswith("("):
            return self.expanded(raw, bare=True)
        with suppress(ValueError):
            items = shlex.split(self.expanded(raw[1:-1]))
            return None if any(re.match(r"\[.*\]=", one) for one in items) else items
        return None

    def expanded(self, text: str, *, bare: bool = False) -> str:
        """The text with what is certain of its variables; `bare`: also without its quotes."""
        made, at, quoted, room = list[str](), 0, False, 10 * _LONGEST
        while one := _PIECE.search(text, at):
            made.append(text[at : one.start()])
            piece, at = one[0], one.end()
            if quoted and piece[0] in "'\"":
                piece, at = piece[0], one.start() + 1
            if piece == '"':
                quoted, piece = not quoted, "" if bare else piece
            elif piece[0] == '"':
                items = self._held(piece[3:-5])
                if isinstance(items, list):
                    piece = " ".join(items) if bare else shlex.join(items)
            elif piece[0] == "'":
                piece = piece[1:-1] if bare and not quoted else piece
            elif piece[0] == "\\":
                piece = piece[1:] if bare and (not quoted or piece[1] in '"\\$`') else piece
            else:
                at = at if piece[-1].isalnum() or piece[-1] == "_" else brackets_end(text, one.start())
                piece = text[one.start() : at]
                value = self._use(piece) if len(piece) < 300 and room > 0 else None
                room -= len(value or "")
                if value is not None:
                    piece = value if bare else _inserted(value, quoted)
            made.append(piece)
        return "".join(made) + text[at:]

    def _use(self, use: str) -> str | None:
        """What `$A`, `${A:-b}` or `$((A + 1))` stands for; None where that is not certain."""
        if use.startswith("$(("):
            return self._sum(use[3:-2])
        if expr := _EXPR.fullmatch(use):
            return self._sum(expr[1].replace("\\*", "*"))
        found = _BRACES.fullmatch(use[2:-1] if use.startswith("${") else use[1:])
        if found is None or use.startswith(("$(", "`")):
            return None
        count, name, index, how, default = found.groups()
        value = self._held(name)
        if count or index:
            return " ".join(value) if isinstance(value, list) and index in ("@", "*") and not count else None
        if how == ":-" and value == "":
            return self.expanded(default, bare=True)
        if how and name not in self._known:
            return self.expanded(default, bare=True) if self._may_default(name) else None
        return value if isinstance(value, str) else None

    def _may_default(self, name: str) -> bool:
        """Whether a variable that the script does not assign is not set when it runs as it is."""
        if name.isdigit():
            return self._arguments and self.top
        later = name in self._never or self._last.get(name, 0) > self.place
        return self._all_read and not later and not _LAUNCHERS.match(name)

    def _sum(self, text: str) -> str | None:
        """The number that `$((...))` is."""
        plain = self.expanded(text, bare=True)
        for name in set(re.findall(r"[A-Za-z_]\w*", plain)):
            plain = re.sub(rf"\b{name}\b", str(self._held(name)), plain)
        if len(plain) > 200 or not re.fullmatch(r"(?:[0-9\s()]|[-+*/](?!\s*[-+*/]))+", plain):
            return None
        with suppress(SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return str(_number(ast.parse(plain.strip(), mode="eval").body))
        return None


def _number(node: ast.AST) -> int:
    """A sum as a shell computes it, which divides towards zero; ValueError if it is too large."""
    made: Any = node.value if isinstance(node, ast.Constant) else computed(node, _number)
    if made == UNKNOWN or abs(made) >= _LARGEST:
        raise ValueError(made)
    return int(made)


def _touched(text: str) -> set[str]:
    """The names that a command may assign."""
    parts = words(text)
    given = list(takewhile(_ASSIGNED.fullmatch, parts))
    rest = parts[len(given) :]
    if rest and rest[0] in ("for", "select", *_TOUCHES):
        given += rest[1:2] if rest[0] in ("for", "select") else rest[1:]
    elif rest and re.match(r"[A-Za-z_./~-]", rest[0]):
        given = []  # they hold for this one command
    return _within(text) | {found[0] for one in given if (found := re.match(r"[A-Za-z_]\w*", one))}


def _within(text: str) -> set[str]:
    """The names that an expression such as `${A:=b}` or `((A++))` may assign."""
    every = re.findall(r"[A-Za-z_]\w*", text) if _ANY_NAME.search(text) else ()
    return {*every, *re.findall(r"\$\{(\w+):?=", text)}


def _inserted(value: str, quoted: bool) -> str:
    """A value as text of a command: within quotes as it is, else split at white space."""
    if quoted:
        return re.sub(r'(["\\])', r"\\\1", value)
    return re.sub(r"\S+", lambda word: shlex.quote(word[0]), value)
