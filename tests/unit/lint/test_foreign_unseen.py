# ruff: noqa: E501 - the files are text
"""What a sixth walk over files that nobody had read found wrong: files in, the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

FILLED = "from transformers import HfArgumentParser, Trainer, TrainingArguments\nm, t = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\nTrainer(model=x, args=t).train()\n"
CONSTANT = "--model_name_or_path a/b --lr_scheduler_type constant --warmup_ratio 0.05 --output_dir o\n"
WARMUP = '{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}'

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
}


@pytest.mark.parametrize("name", CASES)
def test_unseen_files_are_read_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
