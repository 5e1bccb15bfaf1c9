# ruff: noqa: E501 - the files are text
"""Spellings of real files that rules did not read, or read as something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked

PARSED = "from transformers import HfArgumentParser, TrainingArguments\nparser = HfArgumentParser(TrainingArguments)\n"
YAML = "model_name_or_path: m\noutput_dir: o\nwarmup_ratio: 0.1\nlearning_rate: 1.0e-5\n"


def of(folder: Path, rule: str, **texts: str) -> list[str]:
    """The severities of what a rule finds; `train_py` is train.py."""
    return [one.severity for one in checked(folder, **texts) if one.rule == rule]


@pytest.mark.parametrize(
    ("name", "text", "severity"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["transformers (==4.48.1)"]\n', "warning"),
        ("pyproject.toml", '[project]\ndependencies = ["transformers[torch] (>=4.40,<5.0)"]\n', "warning"),
        ("pyproject.toml", '[project]\ndependencies = ["transformers (>=5.20)"]\n', "error"),
        ("requirement.txt", "torch\ntransformers==4.49.0\n", "warning"),
        (
            "reqirements.txt",
            "# pins\n-f https://x.org\ntransformers[torch]==4.49.0 ; python_version>'3.8'\n",
            "warning",
        ),
        ("story.txt", "transformers are robots\ntransformers==4.49.0\n", "error"),
        ("words.txt", "transformers\ntorch\n", "error"),
    ],
)
def test_pins_with_brackets_and_in_files_of_other_names(
    tmp_path: Path, name: str, text: str, severity: str
) -> None:
    (tmp_path / name).write_text(text)
    assert of(tmp_path, "flag-was-removed", train_py=PARSED, a_yaml=YAML) == [severity]


@pytest.mark.parametrize(("extra", "severity"), [(", allow_extra_keys=True", "warning"), ("", "error")])
def test_a_parser_that_leaves_out_what_it_does_not_know_does_not_stop(
    tmp_path: Path, extra: str, severity: str
) -> None:
    script = f"{PARSED}a = parser.parse_yaml_file('a.yaml'{extra})\n"
    found = [one for one in checked(tmp_path, train_py=script, a_yaml=YAML) if one.rule == "flag-was-removed"]
    assert [one.severity for one in found] == [severity]
    assert ("it stops" in found[0].what) is not bool(extra)


LOOP = """from accelerate import Accelerator, DeepSpeedPlugin
plugin = DeepSpeedPlugin(zero_stage=3)
accelerator = Accelerator({})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAUNCH = "accelerate launch --mixed_precision=bf16 {} train.py\n"


@pytest.mark.parametrize(
    ("given", "flag", "severity"),
    [
        ("deepspeed_plugin=plugin", "", ["error"]),
        ("", "--use_deepspeed", ["error"]),
        ("", "--multi_gpu", []),  # bf16 scales no loss
    ],
)
def test_deepspeed_of_a_plugin_or_a_flag_takes_the_step(
    tmp_path: Path, given: str, flag: str, severity: list[str]
) -> None:
    files = {"train_py": LOOP.format(given), "run_sh": LAUNCH.format(flag)}
    assert of(tmp_path, "backward-outside-accelerator", **files) == severity
