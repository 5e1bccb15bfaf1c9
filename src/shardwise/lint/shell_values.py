"""Variables of a shell script, as far as its text shows them."""

import ast
import re
import shlex
from collections.abc import Iterator
from typing import Any

from shardwise.lint.script_sums import UNKNOWN, computed

Value = str | list[str] | None  # of a variable; a list of an array; None where only a run knows

_ASSIGNED = re.compile(
    r"(?:^|(?<=[\s;]))(\w+)(\+?)=(\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|(?:\$\(\((?:[^()]|\([^()]*\))*\)\)|"
    r"\$\((?:[^()]|\([^()]*\))*\)|\$\{[^}]*\}|\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s;'\"])*)"
)
_SUM = re.compile(r"\s*(?:\(\(|let\s+)\s*\"?(\w+)\s*=\s*([^=].*?)\"?(?:\)\))?\s*$")
_STATEMENT = re.compile(r"\s*(?:(?:export|local|readonly|declare|typeset)\s+(?:-\w+\s+)*)?(?=\w+\+?=)")
_DEFAULT = re.compile(r"\s*:\s+\"?\$\{(\w+):?=([^}]*)\}")
_OPENS = re.compile(r"\s*(if|for|while|until|case)\b")
_CLOSES = re.compile(r"(?:^|[\s;])(fi|done|esac)\b")
_IF_EMPTY = re.compile(r"-z\s+\"?\$\{?(\w+)|\"\$\{?(\w+)\}?\"\s+==?\s+(?:\"\"|'')")
_TEST = re.compile(
    r"\[\[?\s+(?:(?P<empty>-[zn])\s+\"(?P<text>[^\"]*)\"|(?P<left>\"[^\"]*\"|'[^']*'|[^\s\"']+)\s+"
    r"(?P<how>==?|!=|-eq|-ne|-lt|-le|-gt|-ge)\s+(?P<right>\"[^\"]*\"|'[^']*'|[^\s\"']+))\s+\]"
)
_ONLY_POSITIONAL = re.compile(r"\"?\$\{?[\d@*]\}?\"?$")
_POSITIONAL = re.compile(r"\"?\$\{?(\d|OPTARG|#)")
_USED = re.compile(
    r"(?P<text>'[^']*')|(?P<escaped>\\.)|\"\$\{(?P<items>\w+)\[@\]\}\"|(?P<quote>\")|\$\(\((?P<sum>[^()]*"
    r"(?:\([^()]*\)[^()]*)*)\)\)|\$\{(?P<count>#\w+)\[[@*]\]\}|\$\{(?P<array>\w+)\[(?P<index>[@*]|\d+)\]\}|"
    r"\$\{(?P<name>\w+)(?::?[-=](?P<default>(?:[^{}]|\{[^{}]*\})*))?\}|\$(?P<plain>\w+)"
)
_SBATCH = re.compile(r"^#SBATCH\s+(--?[\w-]+)[=\s]+(\S+)", re.MULTILINE)
_SLURM = {  # an option of sbatch, and the variables that it sets
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "N": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "n": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus_per_node": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "gres": ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"),
    "cpus_per_task": ("SLURM_CPUS_PER_TASK",),
    "job_name": ("SLURM_JOB_NAME",),
    "J": ("SLURM_JOB_NAME",),
}


class Variables:
    """The variables where a line of a script runs."""

    def __init__(self, text: str, end: int) -> None:
        self._known = dict[str, Value]()
        for option, value in _SBATCH.findall(text):
            name = option.lstrip("-").replace("-", "_")
            count = value.rpartition(":")[2] if name in ("gpus_per_node", "gres") else value
            self._known |= dict.fromkeys(_SLURM.get(name, ()), count)
        blocks = list[tuple[str, bool | None]]()  # the line that opens each, and whether it runs, if known
        for _, row in statements(text[:end]):
            if opened := _OPENS.match(row):
                blocks.append((row, self._holds(row) if opened[1] == "if" else None))
                if opened[1] == "for" and (name := re.match(r"\s*for\s+(\w+)", row)):
                    self._known[name[1]] = None
            elif blocks and re.match(r"\s*el(se|if)\b", row):
                blocks[-1] = self._next_branch(row, blocks[-1][1])
            self._assign(row, blocks)
            for _ in _CLOSES.findall(row)[: len(blocks)]:
                blocks.pop()

    @property
    def environment(self) -> dict[str, str]:
        """The variables that hold one text that is known."""
        return {name: v for name, v in self._known.items() if isinstance(v, str) and "$" not in v}

    def expanded(self, text: str) -> str:
        """The text with what is known of its variables."""
        quoted, made, last = False, "", 0
        for one in _USED.finditer(text):
            found = one[0]
            quoted ^= one["quote"] is not None
            if one["text"] is None or quoted:
                known = self._used(one)
                found = found if known is None else known
            made, last = made + text[last : one.start()] + found, one.end()
        return made + text[last:]

    def _used(self, one: re.Match[str]) -> str | None:
        """What a use of a variable stands for; None where that is not known."""
        if one["items"] or one["array"]:
            return self._array(one["items"] or one["array"], one["index"] or "@")
        if one["sum"] is not None:
            return self._sum(one["sum"])
        if one["count"]:
            held = self._known.get(one["count"][1:])
            return str(len(held)) if isinstance(held, list) else None
        name = one["name"] or one["plain"]
        if name is None:
            return None
        value = self._known.get(name)
        if value is None and name not in self._known and one["default"] is not None:
            value = self.expanded(_unquoted(one["default"]))
        return value[0] if isinstance(value, list) and value else value if isinstance(value, str) else None

    def _array(self, name: str, index: str) -> str | None:
        held = self._known.get(name)
        if not isinstance(held, list):
            return None
        if index.isdigit():
            return held[int(index)] if int(index) < len(held) else ""
        return shlex.join(held).replace("'$", "$").replace("}'", "}")

    def _sum(self, text: str) -> str | None:
        """The number that `$((...))` is."""
        plain = re.sub(r"[$\"{}]", "", self.expanded(text)).replace("/", "//").strip()

        def value_of(node: ast.AST) -> Any:
            if isinstance(node, ast.Name):
                held = self._known.get(node.id)
                return int(held) if isinstance(held, str) and held.isdigit() else UNKNOWN
            return node.value if isinstance(node, ast.Constant) else computed(node, value_of)

        try:
            made = value_of(ast.parse(plain, mode="eval").body)
        except SyntaxError:
            return None
        return str(made) if isinstance(made, int) else None

    def _next_branch(self, row: str, taken: bool | None) -> tuple[str, bool | None]:
        """The test that opens an `else` or `elif`, and whether it runs."""
        if taken is not False:
            return "", False if taken else None
        return row, self._holds(row) if "elif" in row else True

    def _holds(self, row: str) -> bool | None:
        """Whether a test of two texts or numbers holds; None where that is not known."""
        one = _TEST.search(self.expanded(row))
        if one is None or "$" in one[0]:
            return None
        if one["empty"]:
            return (one["empty"] == "-z") is not bool(one["text"])
        left, right = one["left"].strip("\"'"), one["right"].strip("\"'")
        if one["how"] in ("=", "==", "!=", "-eq", "-ne"):
            return (left == right) is (one["how"] in ("=", "==", "-eq"))
        if not (left.isdigit() and right.isdigit()):
            return None
        low, same = int(left) < int(right), left == right
        return {"-lt": low, "-le": low or same, "-gt": not (low or same), "-ge": not low}[one["how"]]

    def _assign(self, row: str, blocks: list[tuple[str, bool | None]]) -> None:
        if any(runs is False for _, runs in blocks):
            return
        certain = all(runs for _, runs in blocks)
        if default := _DEFAULT.match(row):
            self._known.setdefault(default[1], self.expanded(_unquoted(default[2])))
        row = re.sub(r"^\s*(then|else|do|if|while|elif)\b", "", row) if blocks else row
        if sum_ := _SUM.match(row):
            made = self._sum(sum_[2])
            self._known[sum_[1]] = made if certain else None
            return
        start = _STATEMENT.match(row)
        if start is None:
            return
        for name, more, text in _ASSIGNED.findall(row[start.end() :]):
            if not certain and _POSITIONAL.match(text):
                continue  # what the script's own arguments say; without them the value before holds
            if _ONLY_POSITIONAL.match(text):
                self._known.pop(name, None)
                continue
            value = self._value(text)
            if more:
                value = _joined(self._known.get(name, ""), value)
            empty = {one for test, _ in blocks for names in _IF_EMPTY.findall(test) for one in names}
            if not certain and name in empty:
                self._known.setdefault(name, value)
            else:
                self._known[name] = value if certain or self._known.get(name) == value else None

    def _value(self, text: str) -> Value:
        if re.search(r"\$\((?!\()|`", text):
            return None  # what a command prints
        if text.startswith("("):
            rows = (re.sub(r"(^|\s)#.*", "", row) for row in text[1:-1].split("\n"))
            return _words(self.expanded("\n".join(rows)))
        return _unquoted(text if text.startswith("'") else self.expanded(text))


def _joined(before: Value, more: Value) -> Value:
    if isinstance(before, list) and isinstance(more, list):
        return before + more
    return before + more if isinstance(before, str) and isinstance(more, str) else None


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Lines with those that a backslash, a quote or a bracket joins to them, and the number of the first."""
    held, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        if not held:
            first = number
            if line.lstrip().startswith("#"):
                continue
        held += line
        if held.endswith("\\"):
            held = held[:-1] + " "
        elif _open(held):
            held += "\n"
        else:
            yield from ((first, part) for part in _parts(held))
            held = ""
    if held:
        yield first, held


def _parts(row: str) -> Iterator[str]:
    """The commands of a row between `;` and `&&` outside quotes and brackets."""
    start = 0
    for one in re.finditer(r"\\.|\"(?:\\.|[^\"\\])*\"|'[^']*'|\$?\([^()]*\)|(;;?|&&)", row):
        if one[1]:
            yield row[start : one.start()]
            start = one.end()
    yield row[start:]


def _open(text: str) -> bool:
    """Whether a quote or the bracket of an array goes on in the next line."""
    plain = re.sub(r"\\.|'[^']*'|(?:(?<=\s)|^)#.*", "", text)
    if plain.count('"') % 2:
        return True
    plain = re.sub(r'"[^"]*"', "", plain)
    return re.search(r"\w\+?=\(", plain) is not None and plain.count("(") > plain.count(")")


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1].replace("\\\n", " ").replace('\\"', '"')
    return re.sub(r"[\"']", "", text)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()
