"""Classes of the Trainer's arguments: TRL's, and a script's own, say what `TrainingArguments` says."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked

SCRIPT = """import transformers
import trl
from transformers import Seq2SeqTrainingArguments, Trainer, TrainingArguments
from trl import DPOConfig, SFTConfig, SFTTrainer


class Own(TrainingArguments):
    more: int = 3


class Again(Own):
    still: int = 4


class OfTrl(SFTConfig):
    more: int = 3


class Fp16(TrainingArguments):
    fp16: bool = True


{trainer}(model="a/b", args={called}("o", {given}deepspeed="ds.json"), train_dataset=[]).train()
"""
BF16, FP16 = '"bf16": {"enabled": true}', '"fp16": {"enabled": true}'


def differ(folder: Path, called: str, given: str, said: str) -> list[str]:
    config = f'{{"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {{"stage": 2}}, {said}}}'
    trainer = "SFTTrainer" if "Config" in called else "Trainer"
    text = SCRIPT.format(trainer=trainer, called=called, given=given)
    found = checked(folder, train_py=text, ds_json=config)
    return [one.what for one in found if one.rule == "trainer-and-file-differ"]


@pytest.mark.parametrize(
    "called",
    [
        *("TrainingArguments", "transformers.TrainingArguments", "Seq2SeqTrainingArguments"),
        *("SFTConfig", "trl.SFTConfig", "DPOConfig", "Own", "Again", "OfTrl"),
    ],
)
@pytest.mark.parametrize(("given", "said"), [("bf16=True, ", FP16), ("fp16=True, ", BF16), ("", FP16)])
def test_precision_of_one_and_of_the_file(tmp_path: Path, called: str, given: str, said: str) -> None:
    (what,) = differ(tmp_path, called, given, said)
    assert " by default, but " in what


@pytest.mark.parametrize(
    ("called", "given", "said"),
    [
        ("SFTConfig", "", BF16),  # its default since 0.20
        ("OfTrl", "", BF16),
        ("SFTConfig", "bf16=True, ", BF16),
        ("SFTConfig", "fp16=True, ", FP16),
        ("SFTConfig", "", f'{BF16}, "optimizer": {{"type": "AdamW", "params": {{"lr": 1e-6}}}}'),
        ("Fp16", "", FP16),
        ("SFTConfig", "**more, ", FP16),
    ],
)
def test_defaults_that_a_class_may_have(tmp_path: Path, called: str, given: str, said: str) -> None:
    assert differ(tmp_path, called, given, said) == []


@pytest.mark.parametrize("called", ["SFTConfig", "DPOConfig", "Own", "OfTrl"])
def test_both_formats_at_once(tmp_path: Path, called: str) -> None:
    text = SCRIPT.format(trainer="Trainer", called=called, given="bf16=True, fp16=True, ")
    assert "contradicting-arguments" in [one.rule for one in checked(tmp_path, train_py=text)]
