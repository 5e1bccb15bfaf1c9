"""What the papers of the house say is true of the house."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts import script
from shardwise.job.load import load_job

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "shardwise"


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_architecture_names_every_package_and_module_beside_them() -> None:
    tree = re.search(r"```\nsrc/shardwise/\n(.*?)```", read("ARCHITECTURE.md"), re.DOTALL)
    assert tree is not None
    named = {line.split()[0] for line in tree[1].splitlines()}
    packages = {f"{path.parent.name}/" for path in SOURCE.glob("*/__init__.py")}
    modules = {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    assert named == packages | modules


def test_the_layers_in_the_architecture_are_those_import_linter_holds() -> None:
    contracts = tomllib.loads(read("pyproject.toml"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    drawn = re.search(r"```\n(cli\n.*?)```", read("ARCHITECTURE.md"), re.DOTALL)
    assert drawn is not None
    assert drawn[1].split("\n")[:-1] == layers[1:], "the first layer is __main__"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_stay_readable(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, "split it"
    assert not text or text.startswith('"""'), "a file says what it is for"


def test_the_source_stays_within_its_budget() -> None:
    """Blank lines and comments count; only a decision record may raise it (docs/decisions/0113)."""
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCE.rglob("*.py"))
    assert lines <= 64564


def test_packages_that_promise_it_load_without_torch() -> None:
    """import-linter sees import statements; this sees what really happens."""
    packages = (
        "app",
        "board",
        "trials",
        "emit",
        "engines/__init__.py",
        "engines/deepspeed/spec.py",
        "engines/fsdp2/spec.py",
        "engines/single/spec.py",
        "errors.py",
        "folders.py",
        "patch.py",
        "screen.py",
        "units.py",
        "web.py",
        "diagnosis",
        "hardware",
        "job",
        "launch",
        "lint",
        "planner",
        "power",
        "record",
        "report",
        "simulate",
        "space",
        "strategy.py",
        "energy.py",
        "cli",
    )
    files = [path for name in packages for path in [SOURCE / name, *sorted((SOURCE / name).rglob("*.py"))]]
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in files
        if path.suffix == ".py" and path.parent.name != "probes"  # what the doctor runs in child processes
    ]
    script = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n" + (
        "sys.exit(str({'torch', 'transformers', 'datasets', 'deepspeed', 'pandas'} & set(sys.modules) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert done.stderr.strip() == ""


def test_everything_the_project_needs_is_pinned() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *extras["train"], *extras["dev"], *extras["labs"]]
    lines = [line for line in read("constraints.txt").splitlines() if not line.startswith("#")]
    pins = dict(line.lower().replace("_", "-").split("==") for line in lines)
    names = [re.split(r"[<>=~;\[ ]", requirement)[0].lower().replace("_", "-") for requirement in needed]
    assert [name for name in names if name not in pins] == []
    assert pins["torch"] == "2.13.0"


def test_no_file_names_a_package_index() -> None:
    for name in ("pyproject.toml", "constraints.txt", "Makefile", ".ci/run", "README.md", "CONTRIBUTING.md"):
        assert not re.search(r"index-url|find-links|pypi\.|whl/cu|download\.", read(name)), name


def test_the_readme_names_targets_and_verbs_that_exist() -> None:
    from shardwise.cli import app

    papers = read("README.md") + read("CONTRIBUTING.md")
    targets = set(re.findall(r"^([a-z]+):", read("Makefile"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z]+)\b", papers)) <= targets
    verbs = {command.callback.__name__ for command in app.registered_commands if command.callback}
    assert set(re.findall(r"(?<!from )\bshardwise ([a-z]+)\b(?!\.)", papers)) - {"and"} <= verbs


def test_the_readme_job_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = re.search(r"```yaml\n(.*?)```", read("README.md"), re.DOTALL)
    assert example is not None
    Path("job.yaml").write_text(example[1])
    Path("my-data.jsonl").write_text("{}\n")
    assert load_job("job.yaml").job.name == "first"


def test_decisions_are_numbered_dated_and_at_most_a_page() -> None:
    records = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [int(path.name[:4]) for path in records] == list(range(1, len(records) + 1))
    for path in records:
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {path.name[:4]}: "), path.name
        assert re.search(
            r"^Date: \d{4}-\d\d-\d\d\. Status: (accepted|superseded by \d{4})\.$", text, re.MULTILINE
        )
        assert len(text.splitlines()) <= 60, path.name


@pytest.mark.parametrize("page", ["throughput.md", "mamba.md"])
def test_a_page_shows_the_committed_throughput(page: str) -> None:
    """Made anew by `python benchmarks/peers/table.py`."""
    table = script("benchmarks/peers/table.py")
    text = read(f"docs/{page}")
    assert text == table.filled(text)


@pytest.mark.parametrize("readme", ["README.md", "README.zh.md"])
def test_the_readme_shows_only_measured_speeds(readme: str) -> None:
    speeds = re.findall(r"\d+,\d{3}", read(readme))
    assert speeds
    assert [speed for speed in speeds if speed not in read("docs/throughput.md")] == []
