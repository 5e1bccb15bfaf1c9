"""Arguments that newer versions do not have: who takes them all the same, and for which versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.lint.check import check, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup

SFT = "SFTTrainer(model=m, args=a, tokenizer=t, max_seq_length=9)\n"
DPO = "DPOTrainer(m, args=DPOConfig(output_dir='o', max_prompt_length=9), tokenizer=t, beta=0.1)\n"
NEW, OLD = (
    "import unsloth\nfrom trl import DPOConfig, DPOTrainer, SFTTrainer\n",
    "from trl import SFTTrainer\n",
)


def removed(folder: Path, **texts: str) -> list[Finding]:
    """The findings of the rule in the scripts; `train_py` is train.py."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    return removed_in(*folder.glob("*.py"))


def removed_in(*files: Path, rule: str = "argument-was-removed") -> list[Finding]:
    documents, broken = load(files)
    findings = check(Setup(documents=documents), broken).findings
    return [one for one in findings if one.rule == rule]


@pytest.mark.parametrize(
    ("text", "severities"),
    [
        (NEW + SFT, []),
        (NEW + DPO, []),
        ("from unsloth import FastModel\nimport trl\ndef main():\n    trl." + SFT, []),
        ("from unsloth import FastModel\ndef main():\n    from trl import SFTTrainer\n    " + SFT, []),
        (OLD + "from unsloth import FastModel\n" + SFT, ["warning"]),
        (OLD + "def main():\n    import unsloth\n" + SFT, ["warning"]),
        (OLD + SFT, ["error"]),
        (OLD + "# from unsloth import FastModel\n" + SFT, ["error"]),
        ("import unsloth\nfrom transformers import Trainer\nTrainer(tokenizer=t)\n", ["error"]),
    ],
)
def test_unsloths_classes_of_trl_take_what_earlier_versions_took(
    tmp_path: Path, text: str, severities: list[str]
) -> None:
    assert [one.severity for one in removed(tmp_path, train_py=text)] == severities


@pytest.mark.parametrize(
    ("pin", "older"),
    [
        ("trl==0.15.2", True),
        ("trl>=0.7,<0.9", True),
        ("trl[peft] ~= 0.12.0", True),
        ("transformers<=4.57.1", True),
        ("trl>=0.7 <0.9", True),
        ("transformers==4.*", True),
        ("transformers~=4", False),  # no specifier
        ("trl>=0.7.", False),  # the end of a sentence
        ("trl==0." + "9" * 5_000, True),
        ("transformers==5.*", False),
        ("transformers!=5.23", False),
        ("trl~=1.10", False),
        ("trl>=0.7", False),
        ("trl>=1.0,<2", False),
        ("mytrl==0.15.2", False),
        ("trl", False),
    ],
)
@pytest.mark.parametrize("form", ["requirements_txt", "pyproject_toml"])
def test_an_earlier_version_that_a_file_pins_does_not_stop(
    tmp_path: Path, pin: str, form: str, older: bool
) -> None:
    pins = f"numpy>=1\n{pin}\n"
    pins = pins if form == "requirements_txt" else f'[project]\ndependencies = ["numpy>=1", "{pin}"]\n'
    (one,) = removed(tmp_path, train_py=OLD + SFT, **{form: pins})
    assert one.severity == ("warning" if older else "error")
    assert ("TypeError from TRL 1.16 on; " in one.what) is older


PINNED = {
    "requirements.txt": "transformers==4.44.2\ntrl==0.9.6\n",
    "setup/requirements.txt": "transformers==4.36.2\n",
    "requirements/train.txt": "trl==0.9.6\n",
    "requirements-gpu.txt": "transformers<=4.57.1\n",
    "dev_requirements.txt": "transformers~=4.40.0\n",
    "pyproject.toml": '[tool.poetry.dependencies]\ntransformers = "^4.44"\n',
    "environment.yml": "dependencies:\n  - transformers=4.31.0\n",
    "constraints.txt": "transformers @ git+https://github.com/huggingface/transformers.git@v4.49.0\n",
}
NEWER = {
    "requirements.txt": "transformers>=4.40\n",
    "pyproject.toml": '[tool.poetry.dependencies]\ntransformers = "^5.0"\ntrl = ">=0.9"\n',
    "environment.yml": "dependencies:\n  - transformers=5.23\n",
}


@pytest.mark.parametrize("name", PINNED)
@pytest.mark.parametrize("script", ["train.py", "src/train.py", "a/b/c/train.py"])
def test_pins_of_the_folders_above_a_script_count(tmp_path: Path, name: str, script: str) -> None:
    for path, text in ((name, PINNED[name]), (script, OLD + SFT)):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (one,) = removed_in(tmp_path / script)
    assert one.severity == "warning"
    assert f"{Path(name).name} asks for tr" in one.what


@pytest.mark.parametrize("name", NEWER)
def test_pins_that_newer_versions_fit_change_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(NEWER[name])
    (tmp_path / "train.py").write_text(OLD + SFT)
    (one,) = removed_in(tmp_path / "train.py")
    assert one.severity == "error"


def test_a_repository_ends_where_its_git_folder_is(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("transformers==4.44.2\n")
    (tmp_path / "mine/.git").mkdir(parents=True)
    (tmp_path / "mine/train.py").write_text(OLD + SFT)
    (one,) = removed_in(tmp_path / "mine/train.py")
    assert one.severity == "error"


@pytest.mark.parametrize("name", ["requirements.txt", "setup.py", "environment.yml", "pyproject.toml"])
def test_a_file_of_pins_that_the_command_names_counts_wherever_it_is(tmp_path: Path, name: str) -> None:
    text = "from setuptools import setup\nsetup(install_requires=['transformers==4.44.2'])\n"
    for path in ("one", "other"):
        (tmp_path / path).mkdir()
    (tmp_path / "one/train.py").write_text(OLD + SFT)
    (tmp_path / "other" / name).write_text(text if name == "setup.py" else "\r\n- transformers==4.44.2\r\n")
    files = (tmp_path / "other" / name, tmp_path / "one/train.py")
    (one,) = removed_in(*files)
    assert one.severity == "warning"
    assert not removed_in(*files, rule="unreadable")


@pytest.mark.parametrize(
    "cell",
    [
        "!pip install -q trl==0.4.7 transformers==4.31.0",
        "%pip install 'transformers==4.31.0'",
        "%%bash\npip install transformers==4.31.0",
        "%%capture\n!pip install -U \\\n  transformers==4.31.0",
        "import os\nos.system('pip install transformers==4.31.0')",
    ],
)
def test_a_notebook_says_what_it_installs(tmp_path: Path, cell: str) -> None:
    rows = [{"cell_type": "code", "source": text} for text in (cell, OLD + SFT)]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": rows}))
    (one,) = removed_in(tmp_path / "a.ipynb")
    assert (one.severity, one.cell, one.line) == ("warning", 2, 2)


@pytest.mark.parametrize("file", ["run.sh", "args.yaml"])
@pytest.mark.parametrize(("pin", "says"), [("transformers==4.28.1", True), ("transformers>=4", False)])
def test_flags_that_a_pinned_version_has_do_not_stop(tmp_path: Path, file: str, pin: str, says: bool) -> None:
    parses = "HfArgumentParser(TrainingArguments)"
    (tmp_path / "train.py").write_text(
        f"from transformers import *\np = {parses}.parse_args_into_dataclasses()\n"
    )
    (tmp_path / "run.sh").write_text("python train.py --output_dir o --evaluation_strategy steps\n")
    (tmp_path / "args.yaml").write_text(
        "model_name_or_path: a/b\noutput_dir: o\nevaluation_strategy: steps\n"
    )
    (tmp_path / "requirements.txt").write_text(pin)
    (one,) = removed_in(tmp_path / file, tmp_path / "train.py", rule="flag-was-removed")
    assert ("requirements.txt asks for transformers==4.28.1" in one.what) is says
    assert one.what.endswith("it stops") is not says


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("from transformers import is_torch_tpu_available", True),
        ("from transformers.utils import is_torch_tpu_available, logging", True),
        ("from transformers import TFAutoModel", True),
        ("from transformers.models.llama.modeling_llama import LlamaFlashAttention2", True),
        ("from transformers.trainer_utils import EvaluationStrategy", True),
        ("from transformers import AutoModel, is_torch_available", False),
        ("from transformers.models.falcon.modeling_falcon import FalconFlashAttention2", False),
        ("from peft import prepare_model_for_int8_training", True),
        ("import sys\nsys.path.append('peft/src/')\nfrom peft import prepare_model_for_int8_training", False),
        (
            "import sys\nsys.path.insert(0, '../transformers/src')\nfrom transformers import TFAutoModel",
            False,
        ),
    ],
)
def test_imports_of_names_that_are_gone(tmp_path: Path, line: str, found: bool) -> None:
    (tmp_path / "train.py").write_text(line + "\n")
    assert bool(removed_in(tmp_path / "train.py", rule="import-was-removed")) is found


def test_a_copy_of_a_library_next_to_the_script_has_what_it_imports(tmp_path: Path) -> None:
    for place in ("one/peft", "two/src/peft"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "__init__.py").touch()
    for script in ("one/train.py", "two/scripts/train.py", "three/train.py"):
        (tmp_path / script).parent.mkdir(exist_ok=True)
        (tmp_path / script).write_text("from peft import prepare_model_for_int8_training\n")
        found = removed_in(tmp_path / script, rule="import-was-removed")
        assert bool(found) is script.startswith("three")


LOCKS = {
    "uv.lock": '[[package]]\nname = "transformers"\nversion = "{}"\n',
    "poetry.lock": '[[package]]\nname = "transformers"\nversion = "{}"\ndescription = "x"\n',
    "pdm.lock": '[[package]]\nname = "transformers"\nversion = "{}"\nrequires_python = ">=3.8"\n',
    "Pipfile.lock": '{{"default": {{\n "transformers": {{\n  "hashes": ["a"],\n  "version": "=={}"\n }}}}}}',
    "Pipfile": '[packages]\ntransformers = "=={}"\n',
    "install.sh": "#!/bin/bash\npip install -q \\\n  transformers=={}\n",
    "Dockerfile": "FROM python:3.11\nRUN pip install transformers=={} trl\n",
    "Makefile": "setup:\n\tuv pip install 'transformers=={}'\n",
    "pyproject.toml": '[tool.poetry.dependencies]\ntransformers = {{version = "^{}", extras = ["torch"]}}\n',
}


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize(("version", "severity"), [("4.44.2", "warning"), ("5.23.0", "error")])
def test_lock_files_and_scripts_that_install_ask_for_a_version(
    tmp_path: Path, name: str, version: str, severity: str
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / name).write_text(LOCKS[name].format(version))
    (tmp_path / "mine/train.py").write_text("from transformers import AdamW\n")
    (one,) = removed_in(tmp_path / "mine/train.py", rule="import-was-removed")
    assert one.severity == severity
    assert (f"{name} asks for transformers" in one.what) is (severity == "warning")


def test_a_readme_asks_for_no_version(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("```\npip install transformers==4.44.2\n```\n")
    (tmp_path / "train.py").write_text("from transformers import AdamW\n")
    (one,) = removed_in(tmp_path / "train.py", rule="import-was-removed")
    assert one.severity == "error"
