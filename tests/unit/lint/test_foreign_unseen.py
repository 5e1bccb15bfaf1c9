# ruff: noqa: E501 - the files are text
"""What a sixth walk over files that nobody had read found wrong: files in, the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

FILLED = "from transformers import HfArgumentParser, Trainer, TrainingArguments\nm, t = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\nTrainer(model=x, args=t).train()\n"
CONSTANT = "--model_name_or_path a/b --lr_scheduler_type constant --warmup_ratio 0.05 --output_dir o\n"
WARMUP = '{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}'

CONFIG = """\
from dataclasses import dataclass
LR, EPOCHS = 3e-4, 2
COMMON = {"weight_decay": 0.3, "seed": 7}
class CFG:
    batch = 4
    rank = 32
@dataclass
class Base:
    decay: float = 0.1
@dataclass
class Plan(Base):
    lr: float = 1e-4
    steps: int = 77
@dataclass
class Other:
    lr: float = 9e-4
    decay: float = 0.9
"""
UTILS = """\
from transformers import TrainingArguments
from peft import LoraConfig, get_peft_model
def make_args(out, lr, epochs=5, accumulation=8):
    return TrainingArguments(output_dir=out, learning_rate=lr, num_train_epochs=epochs, gradient_accumulation_steps=accumulation, per_device_train_batch_size=2)
def adapted(model, rank):
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank))
"""
HEAD = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
OPEN = ("could not be read", "not understood")

CASES: dict[str, Case] = {
    "DeepSpeed's schedule runs, with the Trainer's warm-up": (
        {"run.sh": f"deepspeed train.py --deepspeed z.json {CONSTANT}", "train.py": FILLED, "z.json": WARMUP},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0.05},
        (),
        ("has no warm-up", "conflict"),
    ),
    "DeepSpeed's schedule, of arguments in the script": (
        {
            "train.py": "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', deepspeed='z.json', lr_scheduler_type='constant', warmup_steps=20)).train()\n",
            "z.json": WARMUP,
        },
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 20},
        (),
        ("has no warm-up",),
    ),
    "the Trainer's constant schedule alone": (
        {"run.sh": f"python train.py {CONSTANT}", "train.py": FILLED},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
        ("warmup_ratio 0.05: the constant schedule has no warm-up",),
        ("conflict",),
    ),
    "the Trainer's constant schedule, with a count": (
        {"a.yaml": "model_name_or_path: a/b\nwarmup_steps: 20\nlr_scheduler_type: constant\n"},
        {"optimizer.warmup_steps": 0},
        ("warmup_steps 20: the constant schedule has no warm-up",),
        (),
    ),
    "a function of another file makes the arguments": (
        {
            "src/train.py": f"{HEAD}from src.config import CFG, EPOCHS, LR\nfrom src.utils import adapted, make_args as made\nm = adapted(m, CFG.rank)\nTrainer(m, made('o', LR, epochs=EPOCHS)).train()\n",
            "src/config.py": CONFIG,
            "src/utils.py": UTILS,
        },
        {
            "model.lora.rank": 32,
            "model.lora.alpha": 64,
            "optimizer.learning_rate": 3e-4,
            "train.epochs": 2,
            "train.global_batch": 16,
        },
        (),
        OPEN,
    ),
    "another file has the values, which another import names": (
        {
            "train.py": f"{HEAD}import config\nfrom config import Plan\nplan = Plan()\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr, weight_decay=plan.decay, num_train_epochs=config.EPOCHS, per_device_train_batch_size=config.CFG.batch)).train()\n",
            "config.py": CONFIG,
            "utils.py": UTILS,
        },
        {
            "model.lora": None,
            "optimizer.learning_rate": 1e-4,
            "optimizer.weight_decay": 0.1,
            "train.epochs": 2,
            "train.micro_batch": 4,
        },
        (),
        OPEN,
    ),
    "a star brings the values in": (
        {
            "train.py": f"{HEAD}from config import *\ndef main():\n    plan = Plan(lr=5e-4)\n    Trainer(m, TrainingArguments('o', learning_rate=plan.lr, max_steps=plan.steps, per_device_train_batch_size=CFG.batch, **COMMON)).train()\nif __name__ == '__main__':\n    main()\n",
            "config.py": CONFIG,
        },
        {"optimizer.learning_rate": 5e-4, "train.steps": 77, "train.micro_batch": 4, "train.seed": 7},
        (),
        OPEN,
    ),
    "a file that is not there has the fields": (
        {
            "train.py": f"{HEAD}import yaml\nfrom config import Plan\nplan = Plan(**yaml.safe_load(open('gone.yaml')))\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr)).train()\n",
            "config.py": CONFIG,
        },
        {"optimizer.learning_rate": None},
        ("train.py:6: learning_rate: its value could not be read; write optimizer.learning_rate",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_unseen_files_are_read_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
