"""What installs and runs the project elsewhere names things that exist."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_commands_of_this_repository(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for command in filter(None, (step.get("run") for step in job["steps"])):
            name, *arguments = command.split()
            if name == "make":
                assert set(arguments) <= targets
            else:
                assert name == "python" or os.access(ROOT / name, os.X_OK), command


def test_install_lines_name_extras_that_exist() -> None:
    files = [
        *(ROOT / "src").rglob("*.py"),
        *(ROOT / "docs").glob("*.md"),
        ROOT / "README.md",
        ROOT / "Dockerfile",
    ]
    lines = re.findall(
        r"(?:shardwise|'\.)\[([a-z,]+)\]", "".join(path.read_text(encoding="utf-8") for path in files)
    )
    assert "train" in lines
    assert {extra for line in lines for extra in line.split(",")} <= set(EXTRAS)


def test_the_extra_all_is_every_extra_but_dev_and_one_for_few_gpus() -> None:
    named = re.fullmatch(r"shardwise\[(.*)\]", EXTRAS["all"][0])
    assert named is not None
    assert set(named[1].split(",")) == set(EXTRAS) - {"all", "dev", "quant", "hopper"}, "quant is in train"
    assert set(EXTRAS["quant"]) <= set(EXTRAS["train"])
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert [extra for extra in EXTRAS if extra != "dev" and f"`{extra}`" not in page] == []


def test_the_container_copies_files_that_it_gets() -> None:
    copied = re.findall(r"^COPY (.*) \S+$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for line in copied for name in line.split()}
    kept = {
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").split() if line[0] == "!"
    }
    assert names == kept
    assert {PROJECT["readme"], *PROJECT["license-files"]} <= names
    assert all((ROOT / name).exists() for name in names)


def test_the_citation_names_the_licence_of_the_project() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == PROJECT["license"]
