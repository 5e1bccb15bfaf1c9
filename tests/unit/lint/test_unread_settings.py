# ruff: noqa: E501 - the files are text
"""Settings of a user's own file, and options of a parser, that no line of the scripts reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked


def unread(folder: Path, **texts: str) -> list[str]:
    """What the rule says of these files; `train_py` is train.py."""
    found = [one for one in checked(folder, **texts) if one.rule == "settings-nobody-reads"]
    return [one.what.removeprefix("no line reads ").removesuffix(": silently ignored") for one in found]


SETTINGS = """model: gpt2
training:
  learning_rate: 1.0e-4
  warmup_steps: 100
  gradient_accumulation_steps: 8
"""
SCRIPT = """import yaml
import torch
from transformers import AutoModelForCausalLM
from loop import train

def load(path):
    with open(path) as file:
        return yaml.safe_load(file)

cfg = load("settings.yaml")
model = AutoModelForCausalLM.from_pretrained(cfg["model"])
train(model, cfg{})
{}
"""
LOOP = """import torch
class Loop:
    def __init__(self, settings):
        self.settings = settings
    def run(self, model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.settings["learning_rate"])
        for _ in range(self.settings.get("warmup_steps", 10)):
            model().loss.backward()
            optimizer.step()
            {}

def train(model, cfg, **rest):
    part = cfg["training"]
    Loop(part).run(model)
"""


@pytest.mark.parametrize(
    ("given", "more", "inside", "said"),
    [
        ("", "", "pass", ["`training.gradient_accumulation_steps`"]),
        ("", "print(cfg)", "pass", ["`training.gradient_accumulation_steps`"]),  # which only shows it
        ("", "if 'seed' in cfg:\n    torch.manual_seed(cfg['seed'])", "pass", ["`training.gradient_accumulation_steps`"]),
        ("", "", "every = self.settings['gradient_accumulation_steps']", []),
        ("", "from x import note\nnote(cfg)", "pass", []),  # another's function may read all
        ("", "from x import note\nprint(note(cfg))", "pass", []),
        ("", "from x import note\nnote(**cfg['training'])", "pass", []),
        ("", "from x import note\nnote(cfg['model'])", "pass", ["`training.gradient_accumulation_steps`"]),
        ("", "for name, value in cfg.items():\n    print(name)", "pass", []),
        ("", "name = input()\nvalue = getattr(cfg, name)", "pass", []),
        ("['training'], whole=cfg", "", "pass", []),  # of `**rest` nothing is known
        ("", "", "self.settings.update(vars(model))", []),
        ("", "", "setup(self.settings)", []),
    ],
)  # fmt: skip
def test_keys_of_a_file_that_a_script_loads(
    tmp_path: Path, given: str, more: str, inside: str, said: list[str]
) -> None:
    files = {
        "settings_yaml": SETTINGS,
        "train_py": SCRIPT.format(given, more),
        "loop_py": LOOP.format(inside),
    }
    assert unread(tmp_path, **files) == said


def test_a_file_that_is_not_named_may_read_them(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP.format("pass"))
    assert unread(tmp_path, settings_yaml=SETTINGS, train_py=SCRIPT.format("", "")) == []


def test_a_launch_script_may_read_them(tmp_path: Path) -> None:
    shell = "N=$(yq .training.gradient_accumulation_steps settings.yaml)\npython train.py --n $N\n"
    files = {"settings_yaml": SETTINGS, "train_py": SCRIPT.format("", ""), "loop_py": LOOP.format("pass")}
    assert unread(tmp_path, **files, run_sh=shell) == []


def test_a_file_of_another_script_is_not_judged(tmp_path: Path) -> None:
    other = "learning_rate: 1\nseed: 2\nepochs: 3\nmodel_name_or_path: x\nnum_train_epochs: 4\nworkers: 5\n"
    files = {"other_yaml": other, "train_py": SCRIPT.format("", ""), "loop_py": LOOP.format("pass")}
    assert unread(tmp_path, **files) == []


PARSER = """import argparse
import torch
{}
def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup-steps", type=int, default=10)
    parser.add_argument("--local_rank", type=int, default=0)
    return parser.{}

def main(args):
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    for _ in range(args.steps):
        model().backward()
        optimizer.step()
    {}

{}options()
main(args)
"""


@pytest.mark.parametrize(
    ("parse", "more", "to", "said"),
    [
        ("parse_args()", "pass", "args = ", ["`warmup_steps`"]),
        ("parse_known_args()", "pass", "args, _ = ", ["`warmup_steps`"]),
        ("parse_args()", "print(vars(args))", "args = ", ["`warmup_steps`"]),
        ("parse_args()", "schedule(optimizer, args.warmup_steps)", "args = ", []),
        ("parse_args()", "schedule(optimizer, args)", "args = ", []),
        ("parse_args()", "schedule(**vars(args))", "args = ", []),
        ("parse_args()", "schedule(*vars(args).values())", "args = ", []),
        ("parse_args()", "every = [args]", "args = ", []),
        ("parse_args()", "model.args = args", "args = ", []),
    ],
)
def test_options_of_a_parser(tmp_path: Path, parse: str, more: str, to: str, said: list[str]) -> None:
    text = PARSER.format("from mine import model, schedule", parse, more, to)
    assert unread(tmp_path, train_py=text) == said
    assert unread(tmp_path, train_py=text, run_sh="torchrun train.py --warmup-steps 5\n") == said


FIELDS = """from dataclasses import dataclass, field
from transformers import HfArgumentParser, Trainer, TrainingArguments
from mine import model, rows

@dataclass
class Settings:
    lr: float = 1e-4
    output: str = "out"
    gradient_checkpointing: bool = field(default=True)

{} = HfArgumentParser(Settings).parse_args_into_dataclasses(){}
args = TrainingArguments(settings.output, learning_rate=settings.lr{})
Trainer(model, args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("to", "part", "more", "said"),
    [
        ("settings", "[0]", "", ["`gradient_checkpointing`"]),
        ("(settings,)", "", "", ["`gradient_checkpointing`"]),
        ("settings", "[0]", ", gradient_checkpointing=True", ["`gradient_checkpointing`"]),
        ("settings", "[0]", ", gradient_checkpointing=settings.gradient_checkpointing", []),
        ("settings", "[0]", ", **vars(settings)", []),
    ],
)
def test_fields_of_a_class(tmp_path: Path, to: str, part: str, more: str, said: list[str]) -> None:
    assert unread(tmp_path, train_py=FIELDS.format(to, part, more)) == said
