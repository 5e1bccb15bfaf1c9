# ruff: noqa: E501 - the files are text
"""Notebooks, folders, and commands behind other words; names that --fix changes in scripts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.lint.check import check, correct, fix_files, load
from shardwise.lint.document import UnreadableError
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

SCRIPT = "from transformers import TrainingArguments, Trainer\n"


def test_a_notebook_is_read_as_a_script_and_places_are_those_of_its_cells(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {"cell_type": "code", "source": ["!pip install trl\n", "%load_ext x\n", SCRIPT]},
        {"cell_type": "code", "source": "%%bash\nnot python at all (\n"},
        {"cell_type": "code", "source": ["x = 1\n", "args = TrainingArguments('o', learning_rat=1)"]},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    documents, broken = load([path])
    (found,) = [one for one in check(Setup(documents=documents), broken).findings if one.severity == "error"]
    assert found.rule == "misspelt-argument"
    assert found.where.startswith(f"{path}: cell 4, line 2")
    assert (found.to_json()["cell"], found.to_json()["line"]) == (4, 2)
    with pytest.raises(UnreadableError, match="no notebook"):
        read("{}", "a.ipynb")


def test_a_folder_is_answered_with_the_files_in_it(tmp_path: Path) -> None:
    (tmp_path / "run.sh").touch()
    (tmp_path / "notes.md").touch()
    _, (one,) = load([tmp_path])
    assert (one.rule, one.severity, one.fix) == ("unreadable", "error", "name them: run.sh")


@pytest.mark.parametrize(
    "words",
    [
        "nohup",
        "time",
        "uv run",
        "conda run -n my_env",
        "env A=1",
        "numactl --cpunodebind=0 -m 0",
        "stdbuf -oL",
        "nice -n 5",
    ],
)
def test_words_before_a_launcher_do_not_hide_it(words: str) -> None:
    document = read(f"{words} torchrun --nproc_per_node 2 train.py --bf16 true\n", "run.sh")
    assert (document.get("launcher"), document.get("nproc_per_node"), document.get("bf16")) == (
        "torchrun",
        2,
        True,
    )


@pytest.mark.parametrize("name", ["a.job", "a", "a.slurm"])
def test_a_shell_script_is_known_by_its_first_line(name: str) -> None:
    text = "#!/bin/bash\n#SBATCH --nodes=1\npython train.py --learning_rate 1e-4\n"
    assert read(text, name).get("learning_rate") == 1e-4


def test_fix_gives_arguments_and_flags_their_new_names() -> None:
    text = f"{SCRIPT}# é evaluation_strategy\nTrainingArguments('é', evaluation_strategy='no', learning_rat=1e-4)\n"
    document = read(text, "train.py")
    after, fixed = correct(document, Setup(documents=(document,)))
    wanted = text.replace("evaluation_strategy='no'", "eval_strategy='no'").replace(
        "learning_rat=", "learning_rate="
    )
    assert after.text == wanted
    assert {one.rule for one in fixed} == {"misspelt-argument", "argument-was-removed"}
    command = read(
        "torchrun train.py \\\n  --evaluation_strategy steps \\\n  --my_evaluation_strategy x\n", "run.sh"
    )
    script = read(
        f"{SCRIPT}from transformers import HfArgumentParser\nHfArgumentParser(TrainingArguments)\n",
        "train.py",
    )
    after, fixed = correct(command, Setup(documents=(command, script)))
    assert after.text == command.text.replace(" --evaluation_strategy", " --eval_strategy")


def test_fix_leaves_an_argument_whose_place_is_not_its_own(tmp_path: Path) -> None:
    """Twice on one line: which one is meant is not known."""
    text = f"{SCRIPT}TrainingArguments('a', learning_rat=1); TrainingArguments('b', learning_rat=2)\n"
    document = read(text, "train.py")
    assert correct(document, Setup(documents=(document,))) == (document, [])


@pytest.mark.parametrize(
    ("head", "reader"), [("class MyTrainer:", None), ("class MyTrainer(Trainer):", "trainer")]
)
def test_a_class_beside_the_script_is_a_trainer_if_it_has_a_base(
    head: str, reader: str | None, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"import deepspeed\n{head}\n    pass\n")
    (tmp_path / "train.py").write_text("from mine import MyTrainer\nMyTrainer(model=1).train()\n")
    documents, _ = load([tmp_path / "train.py"])
    assert Setup(documents=documents).reader == reader


def test_a_recipe_that_a_command_gives_to_a_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "model_name_or_path: a/b\nlearning_rat: 1e-4\noutput_dir: o\nlora_r: 8\nbf16: true\n"
    )
    (tmp_path / "run.sh").write_text("accelerate launch sft.py --config recipe.yaml\n")
    documents, broken = load([tmp_path / "run.sh"])
    assert "misspelt-key" in {one.rule for one in check(Setup(documents=documents), broken).findings}


CLASS = """import torch
from transformers import get_scheduler
class Trainer:
    def __init__(self, model, data, args):
        self.model, self.data, self.args = model, data, args
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.total = args.epochs * len(data) // args.accumulate
        self.scheduler = get_scheduler("cosine", self.optimizer, 0, self.total)
    def micro_batch(self, batch):
        loss = self.model(batch).loss{divided}
        loss.backward()
        return loss
    def train(self):
        for i, batch in enumerate(self.data):
            self.micro_batch(batch)
            if (i + 1) % self.args.accumulate:
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            {step}
"""


@pytest.mark.parametrize(
    ("divided", "step", "rules"),
    [
        ("", "self.scheduler.step()", {"loss-not-divided"}),
        (" / self.args.accumulate", "self.scheduler.step()", set()),
        ("", "[p.grad.div_(self.args.accumulate) for p in self.model.parameters()]", set()),
    ],
)
def test_a_loop_over_the_methods_of_a_class_is_judged(divided: str, step: str, rules: set[str]) -> None:
    text = CLASS.format(divided=divided, step=step)
    found = check(Setup(documents=(read(text, "train.py"),))).findings
    assert {one.rule for one in found} == rules


def test_a_schedule_of_a_method_that_each_micro_batch_steps(tmp_path: Path) -> None:
    text = CLASS.format(divided=" / self.args.accumulate", step="pass")
    text = text.replace("loss.backward()\n", "loss.backward()\n        self.scheduler.step()\n")
    found = check(Setup(documents=(read(text, "train.py"),))).findings
    rules = {"schedule-counts-otherwise", "schedule-before-optimizer"}
    assert {(one.rule, one.line) for one in found} == {(rule, 12) for rule in rules}


def test_a_configuration_in_a_script_is_still_judged_after_the_script_was_fixed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    config = "{'zero_optimization': {'stage': 7}, 'train_micro_batch_size_per_gpu': 1}"
    path.write_text(f"{SCRIPT}TrainingArguments('o', learning_rat=1e-4, deepspeed={config})\n")
    documents, _ = load([path])
    before = {one.rule for one in check(Setup(documents=documents)).findings if one.severity == "error"}
    assert {"misspelt-argument", "out-of-bounds"} <= before
    after, fixed = fix_files(Setup(documents=documents), [path])
    assert [one.rule for one in fixed] == ["misspelt-argument"]
    left = {one.rule for one in check(after).findings if one.severity == "error"}
    assert "out-of-bounds" in left
    assert "misspelt-argument" not in left


FACTORY = (
    "model_name_or_path: a/b\nstage: sft\ntemplate: qwen\nlearning_rate: 5e-5\noverwrite_output_dir: true\n"
)


def test_llama_factory_reads_numbers_and_has_arguments_of_its_own() -> None:
    for kind in ("", "finetuning_type: lora\n"):
        found = check(Setup(documents=(read(FACTORY + kind, "a.yaml", other="training"),))).findings
        assert {one.severity for one in found} <= {"note"}, found


def test_settings_of_stage_3_stay_where_another_key_needs_stage_3(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu"}, "stage3_max_live_parameters": 1e9}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}, indent=2))
    documents, _ = load([path])
    fix_files(Setup(documents=documents), [path])
    assert "stage3_max_live_parameters" in path.read_text()


def test_a_configuration_of_a_script_is_one(tmp_path: Path) -> None:
    script, settings = tmp_path / "train.py", tmp_path / "a.yaml"
    script.write_text(
        "import torch, yaml\ncfg = yaml.safe_load(open('a.yaml'))\ntorch.optim.AdamW([], lr=cfg['lr'])\n"
    )
    settings.write_text("lr: 2e-5\nname: x\n")
    documents, broken = load([settings, script])
    assert not broken
    assert [one.rule for one in check(Setup(documents=documents)).findings] == ["number-of-yaml-is-text"]
    script.write_text(script.read_text().replace("lr=cfg['lr']", "lr=float(cfg['lr'])"))
    documents, broken = load([settings, script])
    assert not check(Setup(documents=documents), broken).findings


@pytest.mark.parametrize("name", ["shift_jis", "sjis", "latin-1"])
def test_a_script_is_read_and_written_in_the_encoding_that_it_names(tmp_path: Path, name: str) -> None:
    word = "caf\xe9" if name == "latin-1" else "\u5b66\u7fd2"
    text = f"# -*- coding: {name} -*-\n# {word}\n{SCRIPT}TrainingArguments('o', learning_rat=1)\n"
    path = tmp_path / "train.py"
    path.write_bytes(text.encode(name))
    documents, broken = load([path])
    assert not broken
    assert word in documents[0].text
    fix_files(Setup(documents=documents), [path])
    assert path.read_bytes() == text.replace("learning_rat=", "learning_rate=").encode(name)


@pytest.mark.parametrize("name", ["utf-8", "no-such", "rot13"])
def test_a_script_in_another_encoding_than_it_names_is_a_finding(tmp_path: Path, name: str) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(f"# coding: {name}\n# \u5b66\u7fd2\n".encode("shift_jis"))
    _, (one,) = load([path])
    assert one.what.startswith("it is not UTF-8 text")
