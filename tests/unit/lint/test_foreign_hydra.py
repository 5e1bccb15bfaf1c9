# ruff: noqa: E501 - the files are text
"""Settings that Hydra puts together: `defaults:` of a file, groups of files, a command that chooses among them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

SCRIPT = """\
import hydra
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
@hydra.main(config_path='conf', config_name='config', version_base=None)
def main(cfg):
    model = AutoModelForCausalLM.from_pretrained(cfg.model.name)
    ds = load_dataset(cfg.data.path, split='train')
    args = TrainingArguments('o', learning_rate=cfg.optim.lr, num_train_epochs=cfg.trainer.epochs, per_device_train_batch_size=cfg.trainer.batch)
    Trainer(model=model, args=args, train_dataset=ds).train()
main()
"""
CONFIG = "defaults:\n  - model: small\n  - data: rows\n  - override hydra/launcher: slurm\n  - _self_\ntrainer:\n  epochs: 2\n  batch: 4\noptim:\n  lr: 3e-5\n"
PARTS = {
    "conf/config.yaml": CONFIG,
    "conf/model/small.yaml": "name: a/small\nsize: 1\n",
    "conf/data/rows.yaml": "path: x/rows-of-${model.size}\n",
}
FILES = {"train.py": SCRIPT, **PARTS}
LARGE = {"conf/model/large.yaml": "defaults:\n  - small\nname: a/large\nsize: 2\n"}

CASES: dict[str, Case] = {
    "groups of files": (
        FILES,
        {"model.source": "a/small", "data.train": "x/rows-of-1", "optimizer.learning_rate": 3e-5, "train.epochs": 2, "train.micro_batch": 4},
        (),
        ("could not be read", "Hydra"),
    ),
    "a command that chooses a file, and sets a value": (
        {**FILES, **LARGE, "run.sh": "python train.py model=large optim.lr=1e-4 trainer.epochs=5\n"},
        {"model.source": "a/large", "data.train": "x/rows-of-2", "optimizer.learning_rate": 1e-4, "train.epochs": 5},
        (),
        ("could not be read", "takes another file"),
    ),
    "a file of a group that is not taken": (
        {**FILES, **LARGE},
        {"model.source": "a/small"},
        ("left out: conf/model/large.yaml: conf/config.yaml takes another file of this group",),
        (),
    ),
    "a file of a group that nobody gave": (
        {name: text for name, text in FILES.items() if "model" not in name},
        {"model.source": "fill-in-the-model", "train.epochs": 2},
        ("to do: conf/config.yaml:1: defaults: add conf/model/small.yaml to --from, a part of the settings",),
        ("launcher",),
    ),
    "a group below another name, and one at the top": (
        {
            **FILES,
            "conf/config.yaml": CONFIG.replace("  - data: rows", "  - sets@data: rows\n  - plan: fast"),
            "conf/sets/rows.yaml": "path: y/z\n",
            "conf/plan/fast.yaml": "# @package _global_\ntrainer:\n  epochs: 9\n  batch: 1\n",
        },
        {"data.train": "y/z", "train.epochs": 2, "train.micro_batch": 4},
        (),
        ("could not be read",),
    ),
    "the file's own settings first": (
        {
            **FILES,
            "conf/config.yaml": CONFIG.replace("  - _self_\n", "").replace("defaults:\n", "defaults:\n  - _self_\n  - plan: fast\n"),
            "conf/plan/fast.yaml": "# @package _global_\ntrainer:\n  epochs: 9\n",
        },
        {"train.epochs": 9, "train.micro_batch": 4},
        (),
        ("could not be read",),
    ),
    "interpolations that never end": (
        {**FILES, "conf/model/small.yaml": "name: ${model.other}\nother: ${model.name}${model.name}\n"},
        {"model.source": "fill-in-the-model", "train.epochs": 2},
        (),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_settings_are_put_together(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)


def test_settings_without_a_script_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="it is a file of Hydra, which is not read"):
        made_of(PARTS, tmp_path, monkeypatch)
