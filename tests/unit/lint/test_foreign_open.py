# ruff: noqa: E501 - the files are text
"""What of a set-up decides in place of another, and what stays open: files in, values and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TRAINER = (
    "from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments\n"
    "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "Trainer(model=AutoModelForCausalLM.from_pretrained('a/b'), args=args, train_dataset=rows()).train()\n"
)
ZERO_3 = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "gradient_clipping": 0.5}'
ACCELERATE = "accelerate launch --num_processes 4 --use_deepspeed "
SWIFT = "swift {} --model a/b --train_type full --dataset {} --per_device_train_batch_size 1"
UNSLOTH = """\
from trl import SFTConfig, SFTTrainer
from unsloth import {0}
from datasets import load_dataset
model, tokenizer = {0}.from_pretrained("a/b")
model = {0}.get_peft_model(model, r=16{1})
rows = load_dataset("json", data_files=find(), split="train")
SFTTrainer(model=model, args=SFTConfig("o"), train_dataset=rows).train()
"""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CASES: dict[str, Case] = {
    "the file of --deepspeed_config_file decides": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py --output_dir o\n", "train.py": TRAINER, "data/z.json": "", "z.json": ZERO_3},
        {"strategy.stage": 3, "optimizer.clip_norm": 0.5},
        (),
        ("conflict", "zero2", "no such key"),
    ),
    "of a file that is named alone": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.conf train.py\n", "train.py": TRAINER, "data/x": "", "z.conf": ZERO_3},
        {"strategy.stage": 3},
        (),
        ("zero2",),
    ),
    "flags alone": (
        {"run.sh": f"{ACCELERATE}--zero_stage 3 train.py --output_dir o\n", "train.py": TRAINER},
        {"strategy": "zero3"},
        (),
        (),
    ),
    "a file that is not there": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py\n", "train.py": TRAINER},
        {"strategy": None},
        ("to do: run.sh:1: z.json is not there; add it to --from",),
        ("zero2",),
    ),
    "Unsloth's modules are all of them": (
        {"train.py": UNSLOTH.format("FastModel", "")},
        {"model.lora.targets": "all-linear"},
        ("as Unsloth does",),
        ("q_proj",),
    ),
    "FastLanguageModel's modules are all of them": (
        {"train.py": UNSLOTH.format("FastLanguageModel", "")},
        {"model.lora.targets": "all-linear", "data.eval_fraction": 0},
        ("write data.train",),
        ("q_proj", "data.eval,", "train.eval_every"),
    ),
    "Unsloth's switches choose the modules": (
        {"train.py": UNSLOTH.format("FastModel", ", finetune_vision_layers=False, finetune_mlp_modules=False")},
        {"model.lora.targets": ATTENTION},
        (),
        ("finetune_",),
    ),
    "ms-swift's pt learns all of a text": (
        {"run.sh": SWIFT.format("pt", "d.jsonl")},
        {"data.format": "text", "data.loss_on": "all", "data.too_long": None},
        ("changed: run.sh:1: swift: pt: the job's rows are plain text",),
        ("too_long",),
    ),
    "ms-swift's sft says neither": (
        {"run.sh": SWIFT.format("sft", "d.jsonl")},
        {"data.format": None, "data.loss_on": None, "data.too_long": "drop"},
        (),
        ("swift:",),
    ),
    "rows of an id": (
        {"run.sh": SWIFT.format("sft", "swift/self-cognition#1000")},
        {"data.train": "swift/self-cognition", "data.max_samples": 1000},
        (),
        ("#",),
    ),
    "rows of several ids": (
        {"run.sh": SWIFT.format("sft", "'a/b#10' c/d")},
        {"data.train": ["a/b", "c/d"], "data.max_samples": None},
        ("dataset: 10 rows: prepare files with so many rows of each",),
        (),
    ),
    "a sum of expr": (
        {"run.sh": f"N=4\nSTEPS=$(expr 32 / $N / 2)\nNPROC_PER_NODE=$N {SWIFT.format('sft', 'd.jsonl')} --gradient_accumulation_steps $(expr $STEPS \\* 2)\n"},
        {"train.global_batch": 32},
        (),
        ("could not be read",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_decides_is_taken_and_the_rest_stays_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
