"""What a thirteenth blind walk found: settings that a file leaves out, lost updates, rows without an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.lint.check import check, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup


def found(folder: Path, **texts: str) -> list[Finding]:
    """Errors and warnings of files whose names are the words: `train_py`."""
    files = [folder / f"{name[: name.rindex('_')]}.{name[name.rindex('_') + 1 :]}" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    documents, broken = load(files)
    return [one for one in check(Setup(documents=documents), broken).findings if one.severity != "note"]


def of_rule(name: str, folder: Path, **texts: str) -> list[str]:
    return [one.severity for one in found(folder, **texts) if one.rule == name]


OWN_TRAINER = """from transformers import HfArgumentParser, Trainer, TrainingArguments
from mine import model, rows, schedule

class OwnTrainer(Trainer):
    def {method}(self, *args, **kwargs):
        self.lr_scheduler = schedule(self.optimizer)
        return self.lr_scheduler

args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
OwnTrainer(model=model, args=args, train_dataset=rows).train()
"""
WITH_FILE = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --output_dir out --learning_rate 1e-5 {}\n"
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"},
}


@pytest.mark.parametrize(
    ("method", "flags", "params", "schedule", "expected"),
    [
        ("create_scheduler", "", {"lr": "auto"}, SCHEDULE, 1),
        ("create_scheduler", "", {"lr": "auto"}, None, 0),
        ("compute_loss", "--adam_beta1 0.9 --adam_beta2 0.95", {"lr": "auto"}, None, 1),
        ("compute_loss", "--adam_beta2 0.95", {"lr": "auto", "betas": "auto"}, None, 0),
        ("compute_loss", "--adam_beta2 0.999", {"lr": "auto"}, None, 0),  # which is the default
        ("compute_loss", "--weight_decay 0.1 --adam_epsilon 1e-6", {"lr": "auto"}, None, 2),
        ("compute_loss", "--weight_decay 0.01", {"lr": "auto", "torch_adam": True}, None, 0),
        ("compute_loss", "", {"eps": 1e-8}, None, 1),  # the rate is 0.001
        ("compute_loss", "", {"eps": 1e-8}, SCHEDULE, 0),  # the schedule sets it
        ("create_optimizer", "", {"lr": "auto"}, None, 1),
    ],
)
def test_what_the_deepspeed_file_leaves_out_is_named(
    tmp_path: Path, method: str, flags: str, params: dict[str, object], schedule: object, expected: int
) -> None:
    config = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": 2}}
    config |= {"scheduler": schedule} if schedule else {}
    texts = {"train_py": OWN_TRAINER.format(method=method), "run_sh": WITH_FILE.format(flags)}
    said = of_rule("file-replaces-argument", tmp_path, **texts, ds_json=json.dumps(config))
    assert said == ["warning"] * expected
