# ruff: noqa: E501 - the files are text
"""Files of settings that fill a script's own classes, and what loops of a script's own do now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

RUN = """\
import torch
from transformers import AutoModelForCausalLM
from torch.utils.data import DataLoader
def main(cfg, rows):
    model = AutoModelForCausalLM.from_pretrained(cfg.model.model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, betas=(cfg.optim.beta1, cfg.optim.beta2), weight_decay=cfg.optim.wd)
    torch.manual_seed(cfg.train.seed)
    bar = tqdm(range(cfg.train.max_steps))
    for step in bar:
        for batch in DataLoader(rows, batch_size=cfg.train.micro):
            model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip)
        optimizer.step()
        if step > 0 and step % cfg.train.save_interval == 0:
            torch.save(model.state_dict(), "x.pt")
        if step % cfg.train.eval_interval == 0:
            evaluate(model)
"""
CLASSES = """\
from dataclasses import dataclass, field
import yaml
@dataclass
class ModelConfig:
    model_name: str = "a/old"
    trust: bool = True
@dataclass
class OptimConfig:
    lr: float
    wd: float = 0.5
    beta1: float = 0.8
    beta2: float = 0.9
    clip: float = 9.0
@dataclass
class TrainConfig:
    max_steps: int = 5
    seed: int = 7
    micro: int = 3
    save_interval: int = 1
    eval_interval: int = 1
@dataclass
class Config:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
def load(path):
    raw = yaml.safe_load(open(path))
    return Config(ModelConfig(**raw["model"]), OptimConfig(**raw["optim"]), TrainConfig(**raw["train"]))
"""
YAML = """\
model: {model_name: a/new, trust: false}
optim: {lr: 3.0e-4, wd: 0.1, beta1: 0.9, beta2: 0.95, clip: 1.0}
train: {max_steps: 150000, seed: 42, micro: 16, save_interval: 5000, eval_interval: 1000}
"""
SAID = {
    "model.source": "a/new",
    "optimizer.learning_rate": 0.0003,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.clip_norm": 1,
    "train.seed": 42,
    "train.steps": 150000,
    "train.save_every": 5000,
    "train.eval_every": 1000,
    "train.micro_batch": 16,
}
FALSE = ("the only optimizer", "one epoch", "a/old", "AdamW.lr")
HF = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from .settings import Base, Tuning
class Tuner:
    def __init__(self, tuning: Tuning, model_config: Base):
        self.tuning = tuning
        self.model_config = model_config
    def run(self, rows):
        model = AutoModelForCausalLM.from_pretrained(self.model_config.model_name)
        args = TrainingArguments(output_dir="o", learning_rate=self.tuning.learning_rate, weight_decay=self.tuning.weight_decay)
        Trainer(model=model, args=args, train_dataset=rows).train()
"""
SETTINGS = """\
import json
from dataclasses import dataclass
@dataclass
class Base:
    model_name: str = "a/old"
    trust: bool = True
@dataclass
class Tuning:
    learning_rate: float = 1e-3
    weight_decay: float = 0.5
@dataclass
class DPOTuning:
    learning_rate: float = 1e-6
    weight_decay: float = 0.25
    beta: float = 0.1
def load(path):
    values = json.load(open(path))
    return Base(**values["base"]), Tuning(**values["tuning"]), DPOTuning(**values["dpo_tuning"])
"""
VALUES = '{"base": {"model_name": "a/new", "trust": true}, "tuning": {"learning_rate": 1e-5, "weight_decay": 0.02}, "dpo_tuning": {"learning_rate": 3e-6, "weight_decay": 0.3, "beta": 0.2}}'
LOOP = """\
import argparse, torch
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument("--save_model_step", type=int, default=None)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained("a/b")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    for step, batch in enumerate(loader):
        model(**batch).loss.backward()
        if (step + 1) % args.accum == 0:
            optimizer.step()
            count += 1
            if args.save_model_step is not None and COUNTER % args.save_model_step == 0:
                ppl = evaluation(model, test)
                save_model(model, "x")
"""
OWN = {"run.sh": "python train.py --accum 4 --save_model_step 100\n"}
CASES: dict[str, Case] = {
    "sections fill classes": (
        {"train.py": "from config import load\n" + RUN, "config.py": CLASSES, "c.yaml": YAML},
        SAID,
        (),
        FALSE,
    ),
    "sections of a file whose reader is not named": (
        {"train.py": "import yaml, util\n" + RUN, "c.yaml": YAML},
        SAID,
        (),
        FALSE,
    ),
    "the types of arguments name the classes": (
        {"tune.py": HF, "settings.py": SETTINGS, "c.json": VALUES},
        {"model.source": "a/new", "optimizer.learning_rate": 1e-05, "optimizer.weight_decay": 0.02},
        (),
        ("it changes the loss", "could not be read"),
    ),
    "a file alone": (
        {"c.yaml": YAML + "output_dir: o\n"},
        {key: one for key, one in SAID.items() if key not in ("model.source", "train.micro_batch")},
        ("optim.lr 0.0003: not understood; write optimizer.learning_rate; until then 0.0003",),
        ("the only optimizer", "one epoch", "eval_every 50", "save_every 100"),
    ),
    "an argument of its own says how often a loop saves": (
        OWN | {"train.py": LOOP.replace("COUNTER", "count")},
        {"train.save_every": 100, "train.eval_every": 100},
        (),
        ("save_every 100,",),
    ),
    "micro-batches are no steps": (
        OWN | {"train.py": LOOP.replace("COUNTER", "step")},
        {"train.save_every": None, "train.eval_every": None},
        ("every save: its value could not be read; write train.save_every",),
        ("own: train.save_every", ", train.save_every 100,"),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_files_fill_classes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
