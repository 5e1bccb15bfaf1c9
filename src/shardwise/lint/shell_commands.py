"""The commands of a shell script, in one pass over its text."""

import re
from collections.abc import Iterator
from typing import NamedTuple

_IN_QUOTES = re.compile(r"\\.|\"|`|\$\(\(|\$\(|\$\{", re.DOTALL)
_CODE = re.compile(
    r"\\.|\$'(?:\\.|[^'\\])*+'?|'[^']*+'?|[\"`}]|\$?\(\(|\$?\(|\$\{|\)\)?|(?<![^\s;&|()])#[^\n]*|<<<|"
    r"<<(?P<tabs>-?)[ \t]*[\"'\\]?(?P<end>[A-Za-z_]\w*)[\"']?|&&|\|[|&]?|;+&?|(?<![<>])&(?!>)|[ \t\r]+|\n",
    re.DOTALL,
)
_CLOSERS = {'"': '"', "`": "`", "(": ")", "$(": ")", "((": "))", "$((": "))", "${": "}"}
_SEPARATORS = ("\n", ";", "&", "|", "(", ")")  # the beginnings of what ends a command
_KEYWORD = re.compile(
    r"(?P<opens>if|while|until|for|select|case|\{)(?=\s|$)|(?P<closes>fi|done|esac|\})(?=\s|$)|"
    r"(?:then|do|else|elif|!|time|function\s+[^\s(]+)(?=\s|$)"
)
_ONCE = ("if", "case", "(")  # blocks that run at most once, at their place


class Command(NamedTuple):
    """A command without its comments and the words before it, such as `then`."""

    text: str
    line: int
    end: int  # where it ends in the script
    top: bool  # whether it is in no block
    sure: bool  # whether it also is a statement of its own: no part of `a && b` or `a | b`
    repeated: bool  # whether it is in a loop or a function, which may run later
    broken: bool  # whether a quote or bracket in it is never closed


def _tokens(text: str, at: int = 0) -> Iterator[tuple[int, int, str, int]]:
    """Yield (start, end, sign, how many brackets and quotes are open after it); `#` for what is no code."""
    stack, here = list[str](), list[re.Match[str]]()
    closed = True
    while one := (_IN_QUOTES if stack[-1:] == ['"'] else _CODE).search(text, at):
        start, at = one.span()
        sign, top = one[0], stack[-1] if stack else ""
        if sign == "))" and top != "))":
            sign, at = ")", at - 1
        if sign == top:
            stack.pop()
            sign = "closed"
        elif sign in _CLOSERS and (sign != "(" or top or text[max(0, start - 1) : start] in {*"=?*+@!"}):
            stack.append(_CLOSERS[sign])
        elif sign.startswith(("'", "$'")):
            closed = len(sign.lstrip("$")) > 1 and sign[-1] == "'"
        elif one.re is _CODE and one["end"] and top != "))":
            here.append(one)
        yield start, at, "#" if sign[0] == "#" else sign, len(stack)
        for opened in here if sign == "\n" else ():
            tabs = r"\t*" if opened["tabs"] else ""
            last = re.compile(rf"^{tabs}{opened['end']}$", re.MULTILINE).search(text, at)
            closed, start, at = last is not None, at, last.end() if last else len(text)
            yield start, at, "#", len(stack)
        here = [] if sign == "\n" else here
    if stack or here or not closed:
        yield len(text), len(text), "", 1


def uncommented(row: str) -> str:
    """A row without its comment."""
    return row[: next((start for start, _, sign, _ in _tokens(row) if sign == "#"), len(row))]


def brackets_end(text: str, start: int) -> int:
    """Where the bracket ends that opens at `start`."""
    return next((end for _, end, _, depth in _tokens(text, start) if depth == 0), len(text))


def words(text: str) -> list[str]:
    """The words of a command, with their quotes."""
    made, last = [""], 0
    for start, end, sign, depth in _tokens(text):
        if depth == 0 and sign.isspace():
            made[-1] += text[last:start]
            made.append("")
            last = end
    return [word for word in (*made[:-1], made[-1] + text[last:]) if word]


def commands(text: str) -> Iterator[Command]:
    """The commands of a script in the order of its text."""
    blocks = list[tuple[str, bool]]()  # what opens each, and whether a loop or function is around
    pieces, last, line, counted, before = list[str](), 0, 1, 0, ""
    first: int | None = None  # where the command begins
    for start, end, sign, depth in _tokens(text + "\n"):
        ends = depth == 0 and sign.startswith(_SEPARATORS)
        if sign == "#" or sign == "\\\n" or ends or not sign:
            pieces.append(text[last:start])
            if first is None and (begun := pieces[-1].lstrip()):
                first = start - len(begun)
            last = end
        if not (ends or not sign):
            continue
        code = "".join(pieces).strip()
        pieces.clear()
        while word := _KEYWORD.match(code):
            if word["opens"]:
                blocks.append((word[0], word[0] not in _ONCE or _repeated(blocks)))
            elif word["closes"] and blocks:
                blocks.pop()
            if word[0] in ("for", "select", "case"):
                break
            code = code[word.end() :].lstrip()
        if code and first is not None:
            line, counted = line + text.count("\n", counted, first), first
            sure = not blocks and before not in ("&&", "||", "|", "|&") and sign not in ("|", "|&", "&")
            yield Command(code, line, start, not blocks, sure, _repeated(blocks), not sign)
        first = None
        before = sign if code or sign != "\n" else before
        if sign == "(":
            blocks.append(("(", _repeated(blocks)))
        elif sign == ")" and blocks and blocks[-1][0] == "(":
            blocks.pop()


def _repeated(blocks: list[tuple[str, bool]]) -> bool:
    return bool(blocks) and blocks[-1][1]
