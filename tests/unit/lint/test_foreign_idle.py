# ruff: noqa: E501 - the files are text
"""What looks like a setting and decides nothing, and what a tool does in its place: files in, job out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments, set_seed\n"
BITS = "bits = BitsAndBytesConfig(load_in_8bit=True)\n"
MODEL = "model = AutoModelForCausalLM.from_pretrained('a/b', dtype=torch.bfloat16)\n"
QUANTIZED = "model = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=bits)\n"
TRAIN = "Trainer(model, TrainingArguments('o')).train()\n"
ADAPTER = "from peft import LoraConfig\nadapter = LoraConfig(r=32, lora_alpha=64)\n"
TRL = "from transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
FSDP = "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\nnum_processes: 2\n"
SWIFT = "swift sft --model a/b --dataset d.jsonl --num_train_epochs 1"
PARSED = "from transformers import HfArgumentParser\n(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\nset_seed(args.seed)\nTrainer(model, args).train()\n"
CASES: dict[str, Case] = {
    "a quantisation that nothing takes": (
        {"train.py": HEAD + BITS + MODEL + TRAIN},
        {"model.quantization": None},
        ("left out: train.py: idle BitsAndBytesConfig (line 3): the script makes it, and nothing takes it",),
        (),
    ),
    "a quantisation that the model takes": (
        {"train.py": HEAD + BITS + QUANTIZED + TRAIN},
        {"model.quantization": "int8"},
        (),
        ("idle",),
    ),
    "a quantisation that another file takes": (
        {"bits.py": f"from transformers import BitsAndBytesConfig\n{BITS}", "train.py": f"{HEAD}from bits import bits\n{QUANTIZED}{TRAIN}"},
        {"model.quantization": "int8"},
        (),
        ("idle",),
    ),
    "adapters that nothing takes": (
        {"train.py": HEAD + ADAPTER + MODEL + TRAIN},
        {"model.lora": None},
        ("idle LoraConfig",),
        (),
    ),
    "arguments that no trainer takes": (
        {"train.py": f"{TRL}args = SFTConfig('o', learning_rate=1e-6)\nSFTTrainer(model=model, args=SFTConfig('p', learning_rate=1e-4)).train()\n"},
        {"optimizer.learning_rate": 1e-4},
        ("idle SFTConfig",),
        (),
    ),
    "TRL's precision, where accelerate's file says none": (
        {"fsdp.yaml": FSDP, "train.py": f"{TRL}SFTTrainer(model=model, args=SFTConfig('o')).train()\n"},
        {"train.precision": "bf16"},
        ("as TRL since 0.22 does: train.checkpointing=full, train.precision=bf16",),
        (),
    ),
    "TRL's precision off": (
        {"fsdp.yaml": FSDP, "train.py": f"{TRL}SFTTrainer(model=model, args=SFTConfig('o', bf16=False)).train()\n"},
        {"train.precision": "fp32"},
        (),
        (),
    ),
    "the format of the model's files": (
        {"fsdp.yaml": FSDP, "train.py": HEAD + MODEL.replace("torch.bfloat16", "'auto'") + TRAIN},
        {"train.precision": None},
        (),
        (),
    ),
    "the Trainer's precision, where accelerate's file says none": (
        {"fsdp.yaml": FSDP, "train.py": "from transformers import Trainer, TrainingArguments\nTrainer('a/b', TrainingArguments('o')).train()\n"},
        {"train.precision": "fp32"},
        (),
        (),
    ),
    "ms-swift evaluates when it saves": (
        {"run.sh": f"{SWIFT} --template qwen3 --split_dataset_ratio 0.1 --save_steps 200\n"},
        {"train.eval_every": 200, "data.eval_fraction": 0.1},
        ("assumed, as ms-swift 4 does: train.eval_every=200",),
        (),
    ),
    "ms-swift's own steps between evaluations": (
        {"run.sh": f"{SWIFT} --template qwen3 --val_dataset e.jsonl --eval_steps 30 --save_steps 200\n"},
        {"train.eval_every": 30, "data.eval": "e.jsonl"},
        (),
        (),
    ),
    "ms-swift's usual steps between evaluations": (
        {"run.sh": f"{SWIFT} --val_dataset e.jsonl\n"},
        {"train.eval_every": 500},
        (),
        (),
    ),
    "ms-swift evaluates after epochs": (
        {"run.sh": f"{SWIFT} --val_dataset e.jsonl --save_strategy epoch\n"},
        {"train.eval_every": None, "data.eval": "e.jsonl"},
        ("evaluated after epochs, as ms-swift saves: train.eval_every counts steps",),
        (),
    ),
    "ms-swift without saves evaluates nothing": (
        {"run.sh": f"{SWIFT} --val_dataset e.jsonl --save_strategy no\n"},
        {"data.eval": None},
        (),
        (),
    ),
    "OpenRLHF's rows without padding": (
        {"run.sh": "python -m openrlhf.cli.train_sft --pretrain a/b --dataset c/d --packing_samples --train_batch_size 8 --micro_train_batch_size 2\n"},
        {"data.packing": False, "train.global_batch": 8},
        (),
        (),
    ),
    "ms-swift's rows without padding": (
        {"run.sh": f"{SWIFT} --padding_free true\n"},
        {"data.packing": False},
        (),
        ("padding_free",),
    ),
    "a seed that the Trainer sets again": (
        {"train.py": f"{HEAD}set_seed(7)\n{MODEL}{TRAIN}"},
        {"train.seed": None},
        ("set_seed.seed 7: the Trainer sets its own seed (42) when it is made",),
        (),
    ),
    "a seed of the Trainer's arguments": (
        {"train.py": f"{HEAD}set_seed(7)\n{MODEL}Trainer(model, TrainingArguments('o', seed=5)).train()\n"},
        {"train.seed": 5},
        ("the Trainer sets its own seed (5)",),
        ("conflict",),
    ),
    "a seed that a parser fills in": (
        {"run.sh": "python train.py --output_dir o --seed 9\n", "train.py": HEAD + MODEL + PARSED},
        {"train.seed": 9},
        (),
        ("its own seed",),
    ),
    "a number next to a parser": (
        {"run.sh": "python train.py --output_dir o\n", "train.py": HEAD + MODEL + PARSED.replace("args.seed", "1234")},
        {"train.seed": None},
        ("its own seed (42)",),
        (),
    ),
    "a seed of a loop": (
        {"train.py": f"{HEAD}set_seed(7)\n{MODEL}optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\nfor row in rows:\n    model(**row).loss.backward()\n    optimizer.step()\n"},
        {"train.seed": 7},
        (),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_decides_nothing(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
