"""The lessons show what their commands print, and the Chinese pages follow the English ones."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]


def _load() -> ModuleType:
    return script("docs/lessons/run.py")


lessons = _load()
PAIRS = [(page, lessons.CHINESE / page.name) for page in lessons.lessons()]
PAIRS.append((ROOT / "README.md", ROOT / "README.zh.md"))


@pytest.mark.parametrize("page", lessons.lessons(), ids=lambda page: page.stem)
def test_every_number_of_a_lesson_is_in_a_command_or_its_output(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert lessons.unproven(text) == []
    assert text.count("```console") == len(lessons.commands(text)), "a block is `$ COMMAND` and its output"
    assert "" not in [output for _, output in lessons.BLOCK.findall(text)], "make lessons fills it in"


def test_a_quick_lesson_prints_what_it_shows() -> None:
    """All of them: `make docs`."""
    text = (lessons.ENGLISH / "09-energy.md").read_text(encoding="utf-8")
    shown = dict(lessons.BLOCK.findall(text))
    quick = {command: output for command, output in shown.items() if " predict " not in command}
    assert len(quick) == 2
    assert {command: lessons.run(command) for command in quick} == quick


def test_a_number_without_a_command_is_found() -> None:
    page = "```console\n$ echo 41.5\n41.5\n```\n\nFrom 41.5 to 99.9, `77.7`, 12 and 1,234.\n"
    assert lessons.unproven(page) == ["99.9", "1234"]


def test_a_failing_command_ends_with_its_message() -> None:
    with pytest.raises(SystemExit, match=r"gone\.py"):
        lessons.run("python docs/lessons/gone.py")


@pytest.mark.parametrize(("english", "chinese"), PAIRS, ids=lambda page: page.stem)
def test_a_translation_follows_its_original(english: Path, chinese: Path) -> None:
    """Translate what has changed, then write the new hash into its last line."""
    original, translated = (page.read_text(encoding="utf-8") for page in (english, chinese))
    assert lessons.outline(translated) == lessons.outline(original)
    made_from = lessons.STAMP.search(translated)
    assert made_from is not None, f"its last line is <!-- English: {lessons.stamp(original)} -->"
    assert made_from[1] == lessons.stamp(original), f"{english.name} has changed since"


def test_the_navigation_names_every_lesson_in_both_languages() -> None:
    named = set(re.findall(r"(?:zh/)?lessons/[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    files = {f"{folder}lessons/{page.name}" for page in lessons.lessons() for folder in ("", "zh/")}
    assert named == files


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("predict nomodel 4xH200 zero1", "there is no folder and no known shape 'nomodel'; "),
        ("predict tiny-llama 4xNOPE zero1", "no GPU is called 'NOPE'; "),
        ("predict tiny-llama 4xH200 zerox", "`strategy`"),
        ("states nomodel 4", "there is no folder and no known shape 'nomodel'; "),
        ("measured nope", "there is no row 'nope'"),
        ("throughput nofile x", "there is no file "),
        ("throughput 1xh200-llama-3.1-8b-lora.json x", "there is no row 'x'"),
        ("limits nope", "there is no row 'nope'"),
    ],
)
def test_a_name_that_the_tables_do_not_know(
    arguments: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script("docs/lessons/show.py").main(arguments.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"show.py: error: {line}")
    assert said.err.count("\n") == 1
