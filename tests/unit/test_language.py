"""Plain English: words that the project does not use, and sentences that are too long."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Patterns of words in older, rarer or vaguer senses than the field uses, and what to write instead.
BANNED = {
    "(fore)?told": "predicted, reported, shown",
    r"mend\w*": "fix",
    r"beside\w*": "next to, compared with, in addition to, except",
    "anew": "again, reload, rewrite",
    r"whole\w*|wholly": "entire, full, complete, unsharded, gathered",
    "likewise": "also, in the same way",
    "aftermath": "handling, recovery",
    "whereabouts": "location",
}
ANY = re.compile("|".join(BANNED), re.IGNORECASE)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")  # also the parts of snake_case and CamelCase names

PLACES = ("src", "docs", "benchmarks", "labs")
PAGES = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md", "Makefile")
TEXT = {".py", ".md", ".toml", ".yaml", ".json", ".jsonl", ".jinja", ".sh", ".svg", ".css", ".html", ".txt"}
MOST_WORDS = 45


def exempt(name: str) -> bool:
    """Example pages and recorded results: what a program printed on that day."""
    return re.fullmatch(r"docs/examples/.*\.html|(.*/)?results/.*\.jsonl?", name) is not None


def files() -> Iterator[Path]:
    found = [file for place in PLACES for file in sorted((ROOT / place).rglob("*"))]
    for path in [*found, *map(ROOT.joinpath, PAGES)]:
        if path.is_file() and path.suffix in TEXT | {""} and not exempt(path.relative_to(ROOT).as_posix()):
            yield path


def banned_words(text: str, name: str) -> list[str]:
    """`file:line:word: replacement` for each banned word of a text; line 0 is the file's own name."""
    lines = [name, *text.splitlines()]
    return [
        f"{name}:{number}:{word}: {instead}"
        for number, line in enumerate(lines)
        for word in WORD.findall(line)
        if ANY.fullmatch(word)
        for banned, instead in BANNED.items()
        if re.fullmatch(banned, word, re.IGNORECASE)
    ]


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """First line and text of every paragraph and list item, without code, tables, headings and comments."""
    code, start, block = False, 0, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        fence = stripped.startswith("```")
        other = fence or code or not stripped or re.match(r"[|#<!]", stripped) is not None
        code ^= fence
        if block and (other or re.match(r"([-*]|\d+\.) ", stripped)):
            yield start, " ".join(block)
            block = []
        if not other:
            start = start if block else number
            block.append(stripped)


def long_sentences(text: str, name: str) -> list[str]:
    """Each sentence of more than MOST_WORDS words, with its line; inline code counts as one word."""
    found = []
    for number, paragraph in paragraphs(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", paragraph))
        for sentence in re.split(r"(?<=[.!?])[)*\"]*\s+|(?<=[。！？；])", plain):
            words = len(re.findall(r"\S*\w\S*", sentence))
            if words > MOST_WORDS:
                found.append(f"{name}:{number}: {words} words: {sentence[:60]}")
    return found


def test_no_file_uses_a_banned_word() -> None:
    found = [
        one
        for file in files()
        for one in banned_words(file.read_text(encoding="utf-8"), file.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


def test_no_sentence_is_too_long() -> None:
    pages = [ROOT / page for page in PAGES if page.endswith(".md")]
    pages += [ROOT / "labs" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        one
        for page in pages
        for one in long_sentences(page.read_text(encoding="utf-8"), page.relative_to(ROOT).as_posix())
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["It was TOLD.", "def mended_file():", "class WholeParameters:", "x = besideIt"]
)
def test_a_banned_word_is_found_in_prose_and_names(text: str) -> None:
    assert [one.rsplit(":", 2)[0] for one in banned_words(f"fine\n{text}", "a.py")] == ["a.py:2"]


def test_parts_of_other_words_are_not_banned() -> None:
    assert banned_words("recommended amendment renewal stolen threshold", "a.py") == []


def test_a_file_name_is_checked() -> None:
    assert banned_words("", "docs/mend-it.md") == ["docs/mend-it.md:0:mend: fix"]


def test_a_long_sentence_is_found_and_code_and_tables_are_not() -> None:
    long = "word " * 46
    page = f"Short.\n\nOne. {long}\nend.\n\n| {long} |\n\n```\n{long}\n```\n\n- `{long}` fine.\n"
    assert long_sentences(page, "a.md") == [f"a.md:3: 47 words: {long[:60]}"]
    assert long_sentences(f"{'word ' * 44}end.", "a.md") == []
