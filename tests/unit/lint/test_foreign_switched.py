# ruff: noqa: E501 - the files are text
"""What a seventh walk over files that nobody had read found wrong: files in, the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

FLAGS = "--model a/b --dataset d.jsonl --learning_rate 1e-4 --per_device_train_batch_size 2\n"
SWIFT = {"optimizer.beta2": 0.95, "optimizer.weight_decay": 0.1, "data.too_long": "drop", "model.lora.rank": 8}
UNREAD = ("is not there", "as the Trainer does")

CASES: dict[str, Case] = {
    **{
        f"ms-swift, started by `{start.splitlines()[-1]}`": (
            {"run.sh": f"{start} {FLAGS}"},
            SWIFT,
            ("assumed, as ms-swift 4 does",),
            UNREAD,
        )
        for start in (
            "python -m swift.cli.sft",
            "python3 /opt/ms-swift/swift/cli/sft.py",
            "torchrun --nproc_per_node 2 -m swift.cli.sft",
            "/opt/env/bin/python -m torch.distributed.run --nproc_per_node 2 -m swift.cli.sft",
            "if test $A; then\nL=torchrun\nfi\n${L} --nproc_per_node 2 -m swift.cli.sft",
            "$LAUNCHER -m swift.cli.sft",
        )
    },
    "ms-swift's pt, started as a module": (
        {"run.sh": f"torchrun --nproc_per_node 4 -m swift.cli.pt {FLAGS}"},
        {"data.format": "text", "optimizer.beta2": 0.95, "train.global_batch": 16},
        ("changed: run.sh:1: swift: pt: the job's rows are plain text",),
        UNREAD,
    ),
    "a launcher in a variable that a branch assigns": (
        {
            "run.sh": "if test $A; then\nL=torchrun\nfi\n$L --nproc_per_node 4 train.py\n",
            "train.py": "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', per_device_train_batch_size=2)).train()\n",
        },
        {"train.global_batch": 8},
        (),
        ("no file says how many",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_switched_on_is_read_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
