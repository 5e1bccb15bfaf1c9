"""What every lab has, and that the notebooks are those of the scripts. `make labs` runs them."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]
LABS = sorted((ROOT / "labs").glob("[0-9][0-9]-*.py"))
SECTIONS = ("Goal", "Guess", "Run", "Plot", "Predicted and measured", "Exercises", "Answers")


def load() -> ModuleType:
    return script("labs/notebooks.py")


notebooks = load()


def parts(lab: Path, kind: str) -> list[str]:
    return [text for what, text in notebooks.cells(lab.read_text(encoding="utf-8")) if what == kind]


def test_there_are_nine_labs_and_each_has_a_row() -> None:
    page = (ROOT / "labs" / "README.md").read_text(encoding="utf-8")
    assert [int(lab.name[:2]) for lab in LABS] == list(range(1, 10))
    assert [lab.stem for lab in LABS if f"({lab.stem}.ipynb)" not in page] == []


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_a_lab_has_every_section(lab: Path) -> None:
    headings = re.findall(r"^## (.+)$", "\n\n".join(parts(lab, "markdown")), re.MULTILINE)
    found = [next((name for name in SECTIONS if heading.startswith(name)), None) for heading in headings]
    assert list(dict.fromkeys(name for name in found if name)) == list(SECTIONS), "all, in this order"


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_every_exercise_has_an_answer(lab: Path) -> None:
    prose = "\n\n".join(parts(lab, "markdown"))
    exercises, answers = prose.split("## Exercises")[1].split("## Answers")
    numbers = [re.findall(r"^(\d)\. ", text, re.MULTILINE) for text in (exercises, answers)]
    assert numbers[0] == numbers[1]
    assert len(numbers[0]) >= 3


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_a_lab_uses_the_python_api(lab: Path) -> None:
    """No shell, guesses that are compared later, and a plot."""
    code = "\n".join(parts(lab, "code"))
    tree = ast.parse(code)  # `!ls` and `%cd` are no Python
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported & {"subprocess", "os"} == set()
    assert "get_ipython" not in code
    assert "plt.show()" in code
    guesses = set(re.findall(r"^(my_\w+) = ", code, re.MULTILINE))
    assert guesses
    assert [name for name in guesses if len(re.findall(rf"\b{name}\b", code)) < 2] == []


@pytest.mark.parametrize("lab", LABS, ids=lambda lab: lab.stem)
def test_the_notebook_is_that_of_the_script(lab: Path) -> None:
    committed = lab.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert committed == notebooks.text_of(lab), "make notebooks"


def test_cells_are_read_from_a_script() -> None:
    script = "# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1  # %% no cell\n"
    assert notebooks.cells(script) == [("markdown", "# A\n\nb"), ("code", "x = 1  # %% no cell")]


@pytest.mark.parametrize("lab", LABS, ids=lambda path: path.stem)
def test_what_a_lab_imports_of_a_benchmark_is_there(lab: Path) -> None:
    """`make labs` takes minutes and is not part of `make test`: a module that was renamed is found here."""
    text = lab.read_text(encoding="utf-8")
    folders = [
        ROOT / "labs",
        *(ROOT / "benchmarks" / name for name in re.findall(r'"benchmarks" / "(\w+)"', text)),
    ]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module and "." not in node.module:
            files = [file for folder in folders if (file := folder / f"{node.module}.py").is_file()]
            if files:
                defined = files[0].read_text(encoding="utf-8")
                assert [one.name for one in node.names if not re.search(rf"\b{one.name}\b", defined)] == []
            else:
                assert find_spec(node.module) is not None, node.module
