"""Arguments that newer versions do not have: who takes them all the same, and for which versions."""

from __future__ import annotations

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
    documents, broken = load([*folder.glob("*.py")])
    findings = check(Setup(documents=documents), broken).findings
    return [one for one in findings if one.rule == "argument-was-removed"]


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
    assert one.what.endswith("TypeError from TRL 1.16 on" if older else "had: TypeError")
