"""Read a launch command: the launcher's flags, the script's, and those that the shell cuts off."""

import re
import shlex
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import yaml

from shardwise.lint.document import LONGEST_NUMBER, Document, Mark, UnreadableError, line_at
from shardwise.lint.schema import accelerate_keys, as_number, names, pattern
from shardwise.lint.shell_commands import uncommented
from shardwise.lint.shell_values import Variables, steps

# bounded, and one `srun`: else a row of many takes long
_S = r"(?:[ \t]|\\\n)"  # between words
_STOP = r"(?!deepspeed|torchrun|accelerate|python|srun|\w+=)"
_PREFIX = r"(?:exec|nohup|time|env|(?:uv|poetry|pipenv|conda)[ \t]+run|numactl|stdbuf|setsid|nice|timeout)"
_OPTIONS = rf"(?:[ \t]++(?:-\S++(?:[ \t]++{_STOP}(?!-)[\w.:,-]++(?=[ \t]))?|\d\w*+))*+"  # of a prefix
_WRAP = r"sbatch[ \t][^\n]{0,2000}?--wrap[ \t=]+[\"']"
_BEFORE = rf"^{_S}*+(?:(?:\w++=\S*+|{_PREFIX}{_OPTIONS}){_S}++)*+(?:{_WRAP})?(?:srun\b[^\n]{{0,2000}}?{_S})?"
_BEFORE += r"(?:(?:/bin/)?(?:ba)?sh[ \t]+-l?c[ \t]+[\"'])?"
_RUN = r"(?:[\w.~/-]{0,200}/)?python3?[ \t]+(?:-u[ \t]+)?-m[ \t]+torch\.distributed\.(?:run|launch)"
_COMMAND = re.compile(
    rf"{_BEFORE}(deepspeed|torchrun|accelerate[ \t]+launch|{_RUN})(?=[ \t\\])", re.MULTILINE
)
# what starts a training without a launcher, for `shardwise init --from`
_PLAIN = pattern("python")
_TRAINING = r"[\w./-]*(?<![a-z])(?:pre|fine_?)?(?:train|tune|sft|dpo)\w*\.py"  # the name of a script
_TOOLS = r"(?:(?:llamafactory-cli|axolotl)[ \t]+train|(?:swift|trl)[ \t]+(?:sft|pt|rlhf|dpo|grpo|kto))"
_SWIFT = re.compile(r"(?:^|/)swift[./]cli[./](\w+?)(?:\.py)?$")  # the module behind `swift sft`
_EVALUATES = re.compile(r"(?:.*\s)?(?:eval|(?:ba)?sh\s+-c)\s+(?=\S)")
_STARTS = re.compile("deepspeed|torchrun|launch|python|llamafactory|axolotl|tune|swift|trl|lightning|fabric")
_PYTHON = re.compile(r"(?i)^([\"']?)\$\{?\w*PYTHON\w*(?::-[^{}\s]*)?\}?\1(?=\s)")  # `$PYTHON_BIN train.py`
_DEEPSPEED = re.compile(r"(?i)^([\"']?)\$\{?\w*DEEPSPEED(_?(BIN|CMD|EXE\w*|PATH|LAUNCHER))?\}?\1(?=\s+-)")
_HELD = r"^([\"']?)\$\{?\w+\}?\1(?=\s[^\n]*"  # a launcher in a variable, which the words after it show
_TORCHRUN, _MODULE = re.compile(_HELD + r"--nproc[_-]per[_-]node)"), re.compile(_HELD + r"-m\s+swift\.cli\.)")
_OTHER, _PREPARES = pattern("started_scripts"), pattern("prepares")
_NO_RUN = re.compile(r"(?:export\s+)?\w+\+?=|echo\b")
_ENDS = re.compile(r"[|;&]|\d?>")  # of a command
_FLAG = re.compile(r"--?[a-zA-Z]")
_ARGUMENT = re.compile(r"\$\{?[\d@*]")  # of the shell's script, which has none when it runs as it is
_IF_SET = re.compile(r"\$\{(\w+):?\+\s*(--[\w-]+)(?:[ =][^{}]*)?\}")  # `${LR:+--lr $LR}`
NO_COMMAND = "no command in it starts a training"
_COMMANDS = "deepspeed, torchrun, accelerate launch, trl, llamafactory-cli, axolotl, swift, python"
UNKNOWN_FLAG = "launcher.unknown"  # the key for a flag that the launcher does not have: its text
LOST_FLAGS = "launcher.lost"  # the key for flags below the command's end: how it ends, and the first of them
MORE = "launcher.more"  # the key for another command below, which is not read
STARTS = "launcher.starts"  # the key for scripts that a script without a command of its own starts
MORE_FLAGS = "launcher.more_flags"  # the key for words after the script that may hold any flags of it
OPEN = "launcher.open"  # the key that says that the command has words which only the shell knows


def is_command(text: str) -> bool:
    """Whether a line of the text starts processes."""
    return _COMMAND.search(text) is not None


def is_started(text: str) -> bool:
    """Whether a script of the shell starts a training by itself."""
    return (_command(text, _COMMAND) or _command(text, _PLAIN)) is not None


def read_shell(text: str, name: str, *, plain: bool = False, starts: bool = False) -> Document:
    """Read the flags of the first launch command, both the launcher's and the script's.

    `plain`: also those of a command without a launcher, such as `python train.py`. `starts`: without a
    command, the scripts that it starts.
    """
    found = _command(text, _COMMAND) or (_command(text, _PLAIN) if plain else None)
    others = _OTHER.findall(text.replace("\\\n", " ")) if starts and found is None else []
    if others:
        at, held = Mark(line=line_at(text, text.index(others[0]))), {STARTS: others}
        read = Document(name=name, text=text, syntax="shell", values=held, marks={(STARTS,): at})
        return replace(read, kind="training")
    if found is None:
        fix = f"name the file with the command that does; these are read: {_COMMANDS}"
        raise UnreadableError(NO_COMMAND, line=1, fix=fix)
    first, rows, word, known, quoted, final = found
    # the shell joins the next row where the last character is a backslash outside a comment
    ends = (i for i, row in enumerate(rows, 1) if not (row.endswith("\\") and uncommented(row) == row))
    count = next(ends, len(rows))
    launcher = "torchrun" if "torch" in word else word.split()[0]
    lost = () if quoted else _lost(rows, count, first)
    lines = enumerate((row.rstrip().removesuffix("\\") for row in rows[:count]), first)
    rows_ = ((row if final else known.expanded(_IF_SET.sub(r"\2 $\1", row)), at) for at, row in lines)
    words = deque((word, at) for row, at in rows_ for word in _split(row))
    if launcher == "trl":
        launcher, words = "accelerate", deque(_of_trl(words))
    values, marks, flags = dict[str, Any](), dict[tuple[str, ...], Mark](), set[str]()
    own = set[str]()  # keys that the script's flags gave: of two, its argparse takes the last
    for key, value, line in (("launcher", launcher, first), *lost, *_parsed(words, launcher, flags)):
        if key not in values or key in own:
            values[key], marks[key,] = value, Mark(line=line)
            own |= {key} & flags
    rest, same = "\n".join(rows[count:]), re.escape(str(values.get("script")))
    again = rf"^[^#\n]*(python3?[ \t](?:[^#\n]*[ \t/])?(?:{same}|{_TRAINING})|{_TOOLS})(?!\S)"
    below = plain and (_COMMAND.search(rest) or re.search(again, rest, re.MULTILINE))
    if below:
        line = first + count + rest.count("\n", 0, below.start())
        values[MORE], marks[MORE,] = below[1], Mark(line=line)
    document = Document(name=name, text=text, syntax="shell", values=values, marks=marks, kind="training")
    return replace(document, flags=frozenset(flags), environment=known.environment)


def _command(text: str, pattern: re.Pattern[str]) -> tuple[int, list[str], str, Variables, bool, bool] | None:
    """The line of the first command that does not only prepare data, its rows, launcher, and variables there.

    Also whether it is in quotes, and whether its variables have their values already, which is so where a
    variable holds it: `eval "$CMD"`, `$LAUNCHER train.py`.
    """
    text = text.replace("\r\n", "\n")
    trains = (one for one in pattern.finditer(text) if not _PREPARES.match(text, one.end(1)))
    if start := next(trains, pattern.search(text)):
        quoted = text.count('"', 0, start.start()) % 2 == 1  # within a text that joins its lines itself
        quote = text[start.start(1) - 1 : start.start(1)]
        end = text.find(quote, start.end()) if quote in ("'", '"') else -1  # of `bash -c '...'`
        before = text[start.start() : start.start(1)].replace("\\\n", " ")  # variables on lines of their own
        rows = (_variables(before) + text[start.end(1) : len(text) if end < 0 else end]).split("\n")
        held = (known for command, known in steps(text + "\n:") if command.end > start.start(1))
        if (known := next(held, None)) is None:  # the lines of a `<<EOF` that is never closed
            return None
        return line_at(text, start.start(1)), rows, start[1], known, quoted, False
    for command, known in steps(text):
        if "$" not in command.text or _NO_RUN.match(command.text):
            continue
        statement = _PYTHON.sub("python", known.expanded(_DEEPSPEED.sub("deepspeed", command.text)))
        statement = _MODULE.sub("python", _TORCHRUN.sub("torchrun", statement))
        if not _STARTS.search(statement):
            continue
        evaluates = _EVALUATES.match(statement)
        made = _split(statement[evaluates.end() :] if evaluates else statement)
        row = " ".join(made) if evaluates else shlex.join(made)  # `eval` reads its text once more
        if start := pattern.search(row):
            row = _variables(row[: start.start(1)]) + row[start.end(1) :]
            return command.line, [row], start[1], known, False, True
    return None


def _variables(before: str) -> str:
    """The variables that words before a command set for it, and a blank."""
    return " ".join([*re.findall(r"\b[A-Z_]+=\S+", before), ""])


def _of_trl(words: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """`trl sft ARGS` as the words after `accelerate launch`, with which it starts trl/scripts/sft.py.

    That has all flags but those of the launcher alone (trl/cli/commands/training.py).
    """
    given, after = deque(words), list[tuple[str, int]]()
    while given and not _ENDS.match(given[0][0]):
        word, line = given.popleft()
        flag, equals, value = word.replace("-", "_").lstrip("_").partition("=")
        value = value if equals or not given else given[0][0]
        in_file = flag == "accelerate_config" and value.endswith((".yaml", ".yml"))  # else TRL's own, by name
        if not word.startswith("--") or not (in_file or flag in _launch_flags()):
            method = all("=" in one for one, _ in after) and "=" not in word  # after the shell's variables
            after.append((f"trl/scripts/{word}.py" if method else word, line))
            continue
        yield (f"--config_file={value}" if in_file else word), line
        if not equals and given and (in_file or _takes_value("accelerate", flag)):
            held = given.popleft()
            yield from () if in_file else (held,)
    yield from (*after, *given)


def _launch_flags() -> set[str]:
    """The flags of `accelerate launch` that no script of TRL's takes."""
    known = {*names("accelerate_flags"), *names("accelerate_switches")}.union(*accelerate_keys()[1:])
    return known - {*names("trainer_arguments")}


def _parsed(words: deque[tuple[str, int]], launcher: str, flags: set[str]) -> Iterator[tuple[str, Any, int]]:
    """Yield (key, value, line), as argparse would find them: first the launcher's, then the script's.

    `flags` gets the keys of the script's.
    """
    before_script, known, more = True, True, list[tuple[str, int, bool]]()
    while words and not _ENDS.match(words[0][0]):
        word, line = words.popleft()
        if word.startswith("$"):
            known = False  # what follows may be the script's
            more += [(word, line, before_script)] * (_ARGUMENT.match(word) is None)
            yield OPEN, word, line
        assigned = re.fullmatch(
            r"([A-Z_]+)=(.*)" if before_script else r"\+{0,2}([A-Za-z_][\w.]*)=(.*)", word
        )
        if assigned:
            flags |= set() if before_script else {assigned[1]}
            if not word.endswith(";"):  # else it is a command of its own
                yield assigned[1], _scalar(assigned[2]), line
        elif _FLAG.match(word):
            flag, equals, value = word.lstrip("-").partition("=")
            takes = _takes_value(launcher, flag) if before_script else None
            if before_script and known and takes is None:
                yield UNKNOWN_FLAG, word.partition("=")[0], line
            if not equals:
                value = words[0][0] if words else "--"
                if takes is None:
                    takes = _fits(flag, value) and not (before_script and value.endswith(".py"))
                value = words.popleft()[0] if takes and value != "--" and not _FLAG.match(value) else "true"
            flag = _full(launcher, flag) if before_script else flag
            flags |= set() if before_script else {flag.replace("-", "_")}
            given = [_scalar(value)]
            while takes and not before_script and _more(words, flag, given[-1]):
                given.append(_scalar(words.popleft()[0]))
            yield flag.replace("-", "_"), given if len(given) > 1 else given[0], line
        else:
            if word.endswith((".yaml", ".yml", ".json")) and not before_script:
                yield "arguments", word, line
            script, swift = word.endswith(".py"), _SWIFT.search(word)
            key = "swift" * bool(swift or (launcher == "swift" and not script)) or "script" * script
            if before_script and key:
                yield key, swift[1] if swift else word, line  # `pt` of `swift pt`
            before_script = before_script and word.startswith("$") and not script
    # The words that may hold flags of the script: all, unless it began after some, the launcher's.
    held = [(word, line) for word, line, before in more if before_script or not before]
    yield from ((MORE_FLAGS, [word for word, _ in held], line) for _, line in held[:1])


def flags_within(command: Document) -> Iterator[str]:
    """The flags that the words of a command may hold which only the shell knows; `*` stands for any.

    A variable that the script sets has flags of the script's text.
    """
    for word in command.get(MORE_FLAGS) or ():
        name = re.search(r"[A-Za-z_]\w*", word)
        own = name and re.search(rf"(?m)(?:^|[\s;]){name[0]}\+?=", command.text)
        named = re.findall(r"(?<![\w-])--([\w-]+)", command.text) if own else ["*"]
        yield from (one.replace("-", "_") for one in named)


def _more(words: deque[tuple[str, int]], flag: str, last: Any) -> bool:
    """Whether the next word is one more value of a flag: `--modules q_proj v_proj`, `--betas 0.9 0.95`."""
    word = r"(?!-)[\w./#:-]+" if flag.endswith("dataset") else r"[A-Za-z_][\w-]*"
    word = word if isinstance(last, str) else r"\d[\d.]*(e-?\d+)?"
    return bool(words) and re.fullmatch(word, words[0][0]) is not None


def _lost(rows: list[str], count: int, first: int) -> Iterator[tuple[str, str, int]]:
    """Yield flags below the last of `count` rows, which is where the shell ends the command."""
    last, after = rows[count - 1], [(i, row) for i, row in enumerate(rows[count:], count) if _split(row)]
    meant = last.rstrip().endswith("\\")  # the next row was to be joined, whatever it is
    without = not re.search(r"\.py\b|\s-m\s", " ".join(rows[:count]))  # the script is below
    lost = r"\s*--?[a-zA-Z]" + (r"|\s*\S+\.py$" if meant else r"|\s+\S+\.py\b" if without else "")
    if after and re.match(lost, after[0][1]):
        why = "is a comment, which hides its backslash" if meant else "has no backslash at its end"
        why = "ends in a space" if last != last.rstrip() else why
        what = f"line {first + count - 1}, which {why}: `{after[0][1].split()[0]}`"
        yield LOST_FLAGS, what, first + after[0][0]


def _split(row: str) -> list[str]:
    code = re.sub("`#[^`]*`", "", uncommented(row))  # a command that is a comment, and yields nothing
    try:
        return shlex.split(code)
    except ValueError:
        return code.split()


def _fits(flag: str, value: str) -> bool:
    """Whether a word after a script's flag is its value."""
    if flag == "deepspeed":
        return value.endswith(".json") or "$" in value or re.match("(default-)?zero[0-3]", value) is not None
    return flag not in ("bf16", "fp16") or re.fullmatch("(?i)true|false|yes|no|[tfyn01]", value) is not None


def _full(launcher: str, flag: str) -> str:
    """The name of a torchrun flag: argparse takes its beginning, such as `--nnode`."""
    key = flag.replace("-", "_")
    known = (*names("torchrun_switches"), *names("torchrun_flags")) if launcher == "torchrun" else ()
    meant = [] if key in known else [one for one in known if one.startswith(key)]
    return meant[0] if len(meant) == 1 else flag


def _takes_value(launcher: str, flag: str) -> bool | None:
    """Whether the launcher's flag has a value; None if the launcher has no such flag."""
    key = flag if launcher == "deepspeed" else flag.replace("-", "_")
    if launcher not in ("deepspeed", "torchrun", "accelerate", "colossalai"):
        return False
    switches, flags = names(f"{launcher}_switches"), names(f"{launcher}_flags")
    if launcher == "accelerate":
        flags = (*flags, *accelerate_keys()[1], *accelerate_keys()[2])
    if key in (*switches, *flags):
        return key in flags
    if launcher == "accelerate" and key.startswith(names("accelerate_families")):
        return True
    meant = [one for one in (*switches, *flags) if one.startswith(key)]  # argparse accepts a beginning
    return meant[0] in flags if meant else None


def _scalar(text: str) -> Any:
    """The value as argparse gives it: `010` is ten, `1:30` and `no` are text; a mapping of JSON."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if re.fullmatch(r"\{[^{}&*]*\}", text):  # the shell takes JSON's quotes away
        with suppress(yaml.YAMLError, ValueError):
            return yaml.safe_load(re.sub(r"([\w\"']):(?=[^\s/])", r"\1: ", text))
    number = as_number(text) if len(text) <= LONGEST_NUMBER and text.isascii() else None
    return text if number is None else int(text) if re.fullmatch(r"[-+]?\d+", text) else number
