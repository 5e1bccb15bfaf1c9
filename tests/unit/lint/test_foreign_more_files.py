# ruff: noqa: E501 - the files are text
"""A file more for `init --from` never makes the job worse: modules with defaults, commands, what these name."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

PARSES = """\
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import SFTTrainer
from package.configs import ModelArguments, SFTConfig
from package.models import adapters, quantization, tokenizer_of
model_args, training_args = HfArgumentParser((ModelArguments, SFTConfig)).parse_yaml_file("c.yaml")
tokenizer = tokenizer_of(model_args)
quantized = quantization(model_args)
model = model_args.model_name_or_path
trainer = SFTTrainer(**dict(model=model, args=training_args, train_dataset=rows, peft_config=adapters(model_args)))
trainer.train()
"""
CONFIGS = """\
from dataclasses import dataclass, field
import trl
from transformers import HfArgumentParser
class Parser(HfArgumentParser):
    pass
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="a/old")
    lora_r: int = field(default=16, metadata={"help": "LoRA R value."})
    lora_alpha: int = 32
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    def __post_init__(self):
        if self.load_in_8bit and self.load_in_4bit:
            raise ValueError("not both")
@dataclass
class SFTConfig(trl.SFTConfig):
    use_it: bool = False
"""
MODELS = """\
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from .configs import ModelArguments
def tokenizer_of(model_args: ModelArguments):
    return AutoTokenizer.from_pretrained(model_args.model_name_or_path)
def quantization(model_args: ModelArguments):
    config = None
    if model_args.load_in_4bit:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return config
def adapters(model_args: ModelArguments):
    return LoraConfig(r=model_args.lora_r, lora_alpha=model_args.lora_alpha)
"""
LOOP = """\
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from helper import shorten
model = AutoModelForCausalLM.from_pretrained("a/b")
rows = load_dataset("json", data_files="data/rows.jsonl", split="train")
Trainer(model=model, args=TrainingArguments("o"), train_dataset=rows.map(shorten)).train()
"""
RUNS = """\
import os, sys, torch
from transformers import AutoModelForCausalLM
from torch.utils.data import DataLoader
out_dir = 'out'
max_iters = 600000
batch_size=12
eval_interval = 2000
learning_rate=6e-4 # of the first steps
grad_steps = 5
for arg in sys.argv[1:]:
    if '=' not in arg:
        exec(open(arg).read())
ddp = int(os.environ.get('RANK', -1)) != -1
if not ddp:
    grad_steps *= 8
model = AutoModelForCausalLM.from_pretrained("a/b")
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
batches = iter(DataLoader(rows, batch_size=batch_size))
for step in range(max_iters):
    for micro in range(grad_steps):
        (model(**next(batches)).loss / grad_steps).backward()
    optimizer.step()
    if step % eval_interval == 0:
        evaluate(model)
"""
VALUES = """\
# of a small model
wandb_run_name='small'
max_iters=100000
eval_interval = 1000
grad_steps = 4
"""
READ = {
    "train.steps": 100000,
    "train.eval_every": 1000,
    "train.micro_batch": 12,
    "optimizer.learning_rate": 6e-4,
}
QLORA = """\
model_name_or_path: a/new
lora_r: 64
lora_alpha: 128
load_in_4bit: true
learning_rate: 1.0e-05
"""
FILLED = {
    "model.source": "a/new",
    "model.lora.rank": 64,
    "model.lora.alpha": 128,
    "model.quantization": "nf4",
    "optimizer.learning_rate": 1e-05,
}
FACTORY = """\
model_name_or_path: a/new
stage: sft
finetuning_type: lora
template: qwen
dataset: data/train.json
learning_rate: 2.0e-5
"""
PREPARES = """\
from datasets import load_dataset
rows = load_dataset("a/raw")["train"]
rows.to_json("data/train.json")
"""
OF_FACTORY = {
    "data.train": "data/train.json",
    "data.packing": False,
    "optimizer.beta2": 0.999,
}
NOT_OF_FACTORY = ("conflict", "a/raw", "job of its own")
OF_LOOP = {"train.py": LOOP, "run.sh": "python train.py\n"}
ARGUED = """\
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Own:
    model_name: str = "a/b"
own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(own.model_name)
Trainer(model=model, args=args, train_dataset=rows).train()
"""
COMMAND = """\
EPOCHS=${EPOCHS:-1}
python t.py --learning_rate 1e-5 --model_name "$MODEL" --num_train_epochs "$EPOCHS" --weight_decay $DECAY --per_device_train_batch_size ${ROWS:-1}
"""
LOADS_VARIABLES = (
    """\
ENV_FILE="$ROOT/.env"
if [ ! -f "$ENV_FILE" ] && [ -f "$ROOT/.env.example" ]; then
    ENV_FILE="$ROOT/.env.example"
fi

if [ -f "$ENV_FILE" ]; then
    export $(grep -v '^#' "$ENV_FILE" | xargs) # all of it
fi
"""
    + COMMAND
)
VARIABLES = """\
# of the training
MODEL="a/c"
export EPOCHS=3
DECAY=0.001   # small
ROWS=4
HF_TOKEN=abc
"""
OF_VARIABLES = {
    "model.source": "a/c",
    "train.epochs": 3,
    "train.micro_batch": 4,
    "optimizer.weight_decay": 0.001,
}
COLLATES = """\
import argparse, json, os
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling
from trl import SFTConfig, SFTTrainer
class Answers(DataCollatorForLanguageModeling):
    def torch_call(self, examples):
        batch = super().torch_call(examples)
        for i in range(len(examples)):
            for at in starts(batch["labels"][i]):
                if (
                    self.response
                    == batch["labels"][i][at : at + len(self.response)].tolist()
                ):
                    batch["labels"][i, :at] = -100
        return batch
parser = argparse.ArgumentParser()
parser.add_argument("--data_file", type=str)
args = parser.parse_args()
with open(os.path.join(os.path.dirname(__file__), args.data_file)) as f:
    rows = json.load(f)
model = AutoModelForCausalLM.from_pretrained("a/b")
config = SFTConfig("o", per_device_train_batch_size=1, gradient_accumulation_steps=8, deepspeed="ds.json")
SFTTrainer(model=model, args=config, train_dataset=rows, data_collator=Answers(tokenizer=tok)).train()
"""
PIECES = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("a/b")
model = AutoModelForCausalLM.from_pretrained("a/b")
def cut(rows):
    made = tokenizer(rows["text"], truncation=True, max_length=512, return_overflowing_tokens=True)
    return {"input_ids": made["input_ids"]}
Trainer(model=model, args=TrainingArguments("o"), train_dataset=rows.map(cut, batched=True)).train()
"""
CASES: dict[str, Case] = {
    "defaults of dataclasses in a module": (
        {"c.yaml": QLORA, "train.py": PARSES, "package/configs.py": CONFIGS, "package/models.py": MODELS},
        FILLED,
        (),
        ("conflict", "a/old"),
    ),
    "the file after the modules": (
        {"package/configs.py": CONFIGS, "package/models.py": MODELS, "train.py": PARSES, "c.yaml": QLORA},
        FILLED,
        (),
        ("conflict", "a/old"),
    ),
    "a command before the training": (
        {"c.yaml": FACTORY, "run.sh": "python prepare_data.py\nllamafactory-cli train c.yaml\n"},
        OF_FACTORY,
        (),
        NOT_OF_FACTORY,
    ),
    "a script that the training does not start": (
        {"c.yaml": FACTORY, "step_1.py": PREPARES, "run.sh": "llamafactory-cli train c.yaml\n"},
        OF_FACTORY,
        ("left out: step_1.py: nothing of the training starts or imports it",),
        NOT_OF_FACTORY,
    ),
    "a file of Python that the command names": (
        {"run.sh": "torchrun --nproc_per_node=2 train.py data/x.py\n", "train.py": RUNS, "data/x.py": VALUES},
        {**READ, "train.global_batch": 96},
        ("assumed: train.py reads data/x.py",),
        ("conflict", "600000"),
    ),
    "a file of Python that the command names, in --from, too": (
        {
            "run.sh": "torchrun --nproc_per_node=2 train.py config/x.py\n",
            "train.py": RUNS,
            "config/x.py": VALUES,
        },
        {**READ, "train.global_batch": 96},
        (),
        ("conflict", "600000"),
    ),
    "beginnings of the Trainer's flags": (
        {
            "run.sh": "torchrun --nproc_per_node=2 t.py --model_n a/c --per_device_train_b 4 --max_g 2\n",
            "t.py": ARGUED,
        },
        {
            "model.source": "a/c",
            "train.micro_batch": 4,
            "train.global_batch": 8,
            "optimizer.clip_norm": 2,
        },
        (),
        ("train.micro_batch=8", "per_device_train_b:"),
    ),
    "a file of variables": (
        {"run.sh": LOADS_VARIABLES, "t.py": ARGUED, ".env.example": VARIABLES},
        OF_VARIABLES,
        ("assumed: run.sh reads .env.example",),
        ("YAML", "abc"),
    ),
    "a file of variables near the script": (
        {"run.sh": "set -a; . data/.env; set +a\n" + COMMAND, "t.py": ARGUED, "data/.env": VARIABLES},
        OF_VARIABLES,
        ("assumed: run.sh reads .env",),
        ("abc",),
    ),
    "a file of variables that nobody has": (
        {"run.sh": "source .env\n" + COMMAND, "t.py": ARGUED},
        {"train.micro_batch": None, "optimizer.weight_decay": None},
        ("write optimizer.weight_decay",),
        (),
    ),
    "one process, a path from the script's folder, a collator that compares": (
        {
            "run.sh": "export CUDA_VISIBLE_DEVICES=0,1,2,3\npython sft/t.py --data_file ../rows.json\n",
            "sft/t.py": COLLATES,
            "sft/ds.json": '{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}',
        },
        {"data.train": "sft/../rows.json", "train.global_batch": 8, "data.packing": False},
        ("run.sh:2: python starts one process", "labels(-100)"),
        ("pieces()", "own_collator()"),
    ),
    "pieces of texts that are too long": (
        {"t.py": PIECES},
        {"data.packing": False, "data.sequence_length": 512},
        ("changed: t.py: overflow() (line 5): trained on the start of each long row only",),
        (),
    ),
    "a file of DeepSpeed's that the command writes": (
        {
            "c.yaml": FACTORY + "deepspeed: conf/zero3.json\n",
            "run.sh": "python3 -m venv ./v\nif [ ! -f conf/zero3.json ]; then\n    cat > conf/zero3.json << 'END'\n"
            '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}\nEND\nfi\n'
            "llamafactory-cli train c.yaml\n",
        },
        {"strategy.stage": 3, "strategy.offload_optimizer": "cpu"},
        (),
        ("is not there",),
    ),
    "a script that a training loop does not import": (
        {"prepare.py": PREPARES, **OF_LOOP},
        {"data.train": "data/rows.jsonl"},
        ("left out: prepare.py",),
        NOT_OF_FACTORY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_one_file_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
