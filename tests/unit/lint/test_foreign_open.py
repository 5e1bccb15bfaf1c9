# ruff: noqa: E501 - the files are text
"""What of a set-up decides in place of another, and what stays open: files in, values and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise
from foreign_files import Case, check_case, made_of
from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.lint.foreign import translation

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
UNSLOTH_TEMPLATE = (
    UNSLOTH.replace(
        "rows =",
        "from unsloth.chat_templates import get_chat_template\ntokenizer = get_chat_template(tokenizer, {})\nrows =",
    )
    .replace("{0}", "FastModel")
    .replace("{1}", "")
)
OWN = "not read from the files, so shardwise's own: "
AXOLOTL = "base_model: a/b\nmicro_batch_size: 1\n"
YAML = "model_name_or_path: a/b\nper_device_train_batch_size: 2\n"
HEAD = "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
LOADER = """\
import argparse, torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM
p = argparse.ArgumentParser(); p.add_argument("--max_train_steps"); p.add_argument("--clip", type=float); args = p.parse_args()
a, m = Accelerator(gradient_accumulation_steps=8), AutoModelForCausalLM.from_pretrained("a/b")
loader = torch.utils.data.DataLoader(rows(), batch_size=2)
optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4)
# more
for batch in loader:
    a.backward(m(**batch).loss)
    if done > args.max_train_steps:
        finish()
"""
RECIPE = """\
import fire, torch
from transformers import AutoModelForCausalLM
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from configs import train_config
from loop import train
def main(**kwargs):
    update_config(train_config, **kwargs)
    model = AutoModelForCausalLM.from_pretrained("a/b", load_in_8bit=True if train_config.quantization else None)
    if train_config.use_peft:
        model = get_peft_model(model, make(kwargs))
    model = FSDP(model, sharding_strategy=train_config.sharding)
    loader = torch.utils.data.DataLoader(rows(), batch_size=train_config.batch_size_training)
    if train_config.optimizer == "other" and train_config.pure_bf16:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=train_config.lr, weight_decay=train_config.weight_decay)
    train(model, loader, optimizer, train_config.gradient_accumulation_steps, train_config)
fire.Fire(main)
"""
CONFIGS = """\
class train_config:
    batch_size_training: int = 4
    gradient_accumulation_steps: int = 2
    num_epochs: int = 3
    lr: float = 1e-4
    weight_decay: float = 0.0
    use_peft: bool = False
    quantization: bool = False
    pure_bf16: bool = False
    optimizer: str = "AdamW"
    sharding: str = ShardingStrategy.FULL_SHARD
"""
HELPER = """\
from functools import partial
READ = partial(read, max_words=512)
def train(model, loader, optimizer, gradient_accumulation_steps, train_config):
    for epoch in range(train_config.num_epochs):
        for step, batch in enumerate(loader):
            model(**batch).loss.backward()
            if (step + 1) % gradient_accumulation_steps == 0:
                optimizer.step()
"""
IDLE = (
    HEAD
    + """\
import torch
def train(model, data):
    more = TrainingArguments("o", per_device_train_batch_size=4, gradient_checkpointing=True, fp16=True, optim="adafactor")
    Trainer(model, more, train_dataset=data["train"]).train()
def loop(model, data):
    rows = torch.utils.data.DataLoader(data["train"], batch_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    for epoch in range(8):
        for batch in rows:
            model(**batch).loss.backward()
            optimizer.step()
data = find()
{call}
"""
)
TEMPLATED = (
    HEAD
    + """\
def make(rows):
    texts = [tokenizer.apply_chat_template(one, tokenize=False){1} for one in rows[{0}]]
    return {{"text": texts}}
d = find().map(make, batched=True)
Trainer(m, TrainingArguments("o"), train_dataset=d)
"""
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CASES: dict[str, Case] = {
    "the file of --deepspeed_config_file decides": (
        {
            "run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py --output_dir o\n",
            "train.py": TRAINER,
            "data/z.json": "",
            "z.json": ZERO_3,
        },
        {"strategy.stage": 3, "optimizer.clip_norm": 0.5},
        (),
        ("conflict", "zero2", "no such key"),
    ),
    "of a file that is named alone": (
        {
            "run.sh": f"{ACCELERATE}--deepspeed_config_file z.conf train.py\n",
            "train.py": TRAINER,
            "data/x": "",
            "z.conf": ZERO_3,
        },
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
        {
            "train.py": UNSLOTH.format(
                "FastModel", ", finetune_vision_layers=False, finetune_mlp_modules=False"
            )
        },
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
        {"data.format": None, "data.loss_on": None, "data.too_long": None},
        ("no file has max_length",),
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
        {
            "run.sh": f"N=4\nSTEPS=$(expr 32 / $N / 2)\nNPROC_PER_NODE=$N {SWIFT.format('sft', 'd.jsonl')} --gradient_accumulation_steps $(expr $STEPS \\* 2)\n"
        },
        {"train.global_batch": 32},
        (),
        ("could not be read",),
    ),
    "a key that a sentence asks for is no default of shardwise's": (
        {
            "train.py": "import torch\nfrom transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
            "block_size = pick()\ntorch.optim.AdamW(m.parameters(), lr=rate())\nmax_iters = 5 * 100\n"
        },
        {"optimizer.learning_rate": None},
        (
            "write optimizer.learning_rate; until then 2e-05",
            "max_iters: not understood; write train.steps; until then one epoch",
            OWN + "data.sequence_length 1024",
        ),
        (OWN + "optimizer", "one epoch,", ", one epoch"),
    ),
    "several keys of one sentence": (
        {"train.py": f"{HEAD}Trainer(m, TrainingArguments('o', optimizers=make(), **more))\n"},
        {},
        ("until then optimizer.learning_rate 2e-05, optimizer.beta1 0.9", "one epoch"),
        (OWN + "optimizer",),
    ),
    "a default of shardwise loses to what is read": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py\n",
            "train.py": f"{HEAD}Trainer(m, TrainingArguments('o', per_device_train_batch_size=48, gradient_accumulation_steps=cfg['n']))\n",
        },
        {"train.micro_batch": 48, "train.global_batch": 96},
        (
            "could not be read; of a step's rows the files say gpus 2, micro 48; write train.micro_batch, train.global_batch",
        ),
        ("left out: train", "does not divide", "until then 16"),
    ),
    "what is known of a batch stays": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py\n",
            "train.py": f"{HEAD}Trainer(m, TrainingArguments('o', per_device_train_batch_size=4, gradient_accumulation_steps=cfg['n']))\n",
        },
        {"train.micro_batch": 4, "train.global_batch": None},
        (
            "of a step's rows the files say gpus 2, micro 4; write train.micro_batch, train.global_batch; until then 16",
        ),
        (),
    ),
    "an open accumulation is none of ms-swift's own": (
        {"run.sh": f"NPROC_PER_NODE=2 {SWIFT.format('sft', 'd.jsonl')} --gradient_accumulation_steps $N\n"},
        {"train.global_batch": None},
        ("gradient_accumulation_steps: its value could not be read",),
        ("train.global_batch=16",),
    ),
    "what changes the text comes first": (
        {
            "a.yaml": f'{YAML}chat_template: "{{% for m in messages %}}{"x" * 99}{{% endfor %}}"\neos_token: <|end|>\ndebug: true\nlogging_steps: 1\nrope_theta: 30000\n'
        },
        {"data.chat_template": None},
        (
            "to do: a.yaml: chat_template (line 3) `{% for m in",
            "...`: write data.chat_template, a file with this text",
            "eos_token (line 4) `<|end|>`: prepare a tokenizer that ends answers with it",
            "rope_theta (line 7) `30000`: prepare a model folder",
            "left out: a job has no such key: debug\nleft out: shardwise does it itself: logging_steps",
        ),
        ("x" * 80,),
    ),
    "a template of another tool": (
        {"a.yaml": f"{YAML}template: qwen\n"},
        {},
        ("changed: a.yaml: template (line 3) `qwen`: trained with the model's own chat template",),
        (),
    ),
    "tokens that a script adds": (
        {
            "train.py": f"{HEAD}t = AutoTokenizer.from_pretrained('a/b')\nt.add_special_tokens({{'additional_special_tokens': ['<a>'], 'pad_token': '<p>'}})\nTrainer(m, TrainingArguments('o'))\n"
        },
        {},
        (
            "to do: train.py: add_special_tokens.special_tokens_dict.additional_special_tokens (line 4): prepare a tokenizer with these tokens",
        ),
        ("to do: train.py: add_special_tokens.special_tokens_dict.pad_token",),
    ),
    "weights in bf16 alone": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py --model_name a/b --pure_bf16\n"},
        {"train.precision": "bf16"},
        ("changed: run.sh:1: pure_bf16: True: the weights and the moments of the optimizer stay in fp32",),
        (),
    ),
    "a loader's batch is more than DeepSpeed's file": (
        {
            "run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py --max_train_steps 9\n",
            "train.py": LOADER,
            "z.json": ZERO_3[:-1] + ', "train_micro_batch_size_per_gpu": 1}',
        },
        {"train.micro_batch": 2, "train.global_batch": 64, "train.steps": 9},
        (
            "conflict: train.py:6: DataLoader.batch_size 2 is used, not z.json:1: train_micro_batch_size_per_gpu 1",
        ),
        ("not understood",),
    ),
    "a branch with a part that is false": (
        {
            "run.sh": "python train.py --clip -1\n",
            "train.py": LOADER.replace(
                "# more", "if a.sync and args.clip > 0:\n    torch.nn.utils.clip_grad_norm_(m, args.clip)"
            ),
        },
        {"optimizer.clip_norm": 0},
        ("as a loop without a call for it does: data.packing=false, optimizer.clip_norm=0",),
        (),
    ),
    "8 bits are prepared with recomputation": (
        {
            "train.py": f"{HEAD}from peft import prepare_model_for_kbit_training\nm = AutoModelForCausalLM.from_pretrained('a/b', load_in_8bit=True)\nm = prepare_model_for_kbit_training(m)\nTrainer(m, TrainingArguments('o'))\n"
        },
        {"train.checkpointing": "full"},
        (),
        (),
    ),
    "and without": (
        {
            "train.py": f"{HEAD}from peft import prepare_model_for_kbit_training\nm = prepare_model_for_kbit_training(m, False)\nTrainer(m, TrainingArguments('o'))\n"
        },
        {"train.checkpointing": "none"},
        (),
        (),
    ),
    "fields of a class in another file": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py --batch_size_training 64 --lr 2e-5 --num_epochs 1 --pure_bf16\n",
            "train.py": RECIPE,
            "configs.py": CONFIGS,
            "loop.py": HELPER,
        },
        {
            "optimizer.learning_rate": 2e-5,
            "optimizer.weight_decay": 0,
            "model.quantization": None,
            "model.lora": None,
            "train.micro_batch": 64,
            "train.global_batch": 256,
            "train.epochs": 1,
            "strategy": "fsdp2",
        },
        (
            "loop.py:2: max_words 512: not understood; write data.sequence_length; until then 512",
            "pure_bf16: True: the weights and the moments",
        ),
        ("could not be read",),
    ),
    "a default that another class has otherwise": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py --lr 2e-5\n",
            "train.py": RECIPE,
            "configs.py": CONFIGS,
            "loop.py": "class other_config:\n    weight_decay: float = 0.5\n",
        },
        {"optimizer.weight_decay": 0},
        (),
        ("AdamW.weight_decay: its value could not be read",),
    ),
    "steps are more than epochs": (
        {"a.yaml": f"{AXOLOTL}fsdp_config: null\nmax_steps: 20\nnum_epochs: 5\n"},
        {"train.steps": 20, "train.epochs": None},
        ("left out: a.yaml: num_epochs (line 5): max_steps 20 says how long to train, whatever the epochs",),
        (),
    ),
    "also beside FSDP's settings": (
        {"a.yaml": f"{AXOLOTL}fsdp_config:\n  fsdp_version: 2\nmax_train_steps: 20\nnum_epochs: 5\n"},
        {"train.steps": 20, "train.epochs": None, "strategy.engine": "fsdp2"},
        (),
        ("conflict",),
    ),
    "numbers and letters are switches for HfArgumentParser": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py --gradient_checkpointing 1 --bf16 0 --fp16 yes --output_dir o\n",
            "train.py": TRAINER,
        },
        {"train.checkpointing": "full", "train.precision": "fp16"},
        (),
        ("nothing in a job file",),
    ),
    "and in its file": (
        {"a.yaml": f"{YAML}gradient_checkpointing: 0\npacking: t\nload_in_4bit: n\neval_strategy: 'no'\n"},
        {"train.checkpointing": "none", "data.packing": True, "model.quantization": None},
        (),
        ("nothing in a job file",),
    ),
    "an empty variable before a launcher": (
        {
            "run.sh": "WANDB_API_KEY= torchrun --nproc_per_node 4 train.py --output_dir o\n",
            "train.py": TRAINER,
        },
        {"train.global_batch": 32},
        (),
        ("no file says how many",),
    ),
    "among other variables": (
        {
            "run.sh": "HF_HOME=./c HF_TOKEN= WANDB_API_KEY= NPROC_PER_NODE=2 \\\n    "
            + SWIFT.format("sft", "d.jsonl --gradient_accumulation_steps 1")
        },
        {"train.global_batch": 2, "train.micro_batch": 1},
        (),
        ("no file says how many",),
    ),
    "a function that is not called says nothing": (
        {"train.py": IDLE.format(call="# train(m, data)\nloop(m, data)")},
        {"train.micro_batch": 1, "train.precision": "fp32", "train.epochs": 8, "train.checkpointing": None},
        ("assumed, as a loop",),
        ("conflict", "adafactor", "as the Trainer does", "not understood"),
    ),
    "one that is called does": (
        {"train.py": IDLE.format(call="train(m, data)")},
        {"train.micro_batch": 4, "train.precision": "fp16"},
        ("trained with AdamW",),
        ("conflict", "as a loop"),
    ),
    "without another training all count": (
        {"train.py": IDLE.format(call="")},
        {"train.precision": "fp16"},
        (),
        (),
    ),
    "of two Trainers the one that main has": (
        {
            "train.py": f"{HEAD}def old():\n    Trainer(m, TrainingArguments('o', learning_rate=1e-3, max_steps=9)).train()\n"
            "def main():\n    Trainer(m, TrainingArguments('o', learning_rate=1e-5)).train()\nif __name__ == '__main__':\n    main()\n"
        },
        {"optimizer.learning_rate": 1e-5, "train.steps": None},
        (),
        ("conflict", "another training"),
    ),
    "another file calls it": (
        {"start.py": "from rows import train\ntrain(m, d)\n", "rows.py": IDLE.format(call="loop(m, data)")},
        {"train.precision": "fp16"},
        ("conflict",),
        (),
    ),
    "LLaMA-Factory's rows are those of each of several datasets": (
        {"a.yaml": f"{YAML}template: llama3\ndataset: c/d,e/f\nmax_samples: 500\n"},
        {"data.train": ["c/d", "e/f"], "data.max_samples": None},
        ("to do: a.yaml:5: max_samples: 500 rows: prepare files with so many rows of each",),
        (),
    ),
    "and those of the only one": (
        {"a.yaml": f"{YAML}template: llama3\ndataset: c/d\nmax_samples: 500\n"},
        {"data.train": "c/d", "data.max_samples": 500},
        (),
        ("max_samples",),
    ),
    "rows that a function chooses": (
        {
            "train.py": f"{HEAD}def good(row):\n    return row['a'] > 1\nd = find().filter(good).filter(lambda x: x)\nTrainer(m, TrainingArguments('o'))\n"
        },
        {},
        (
            "to do: train.py: filter by",
            "filter by good (line 3)",
            "filter by a lambda (line 5)",
            "prepare a file with the rows that the function keeps",
        ),
        (),
    ),
    "a filter without a function is none of rows": (
        {"train.py": f"{HEAD}a = q.filter('x')\nb = filter(None, a)\nTrainer(m, TrainingArguments('o'))\n"},
        {},
        (),
        ("filter",),
    ),
    "a part of the rows to evaluate on": (
        {
            "train.py": f"{HEAD}eval_ds = find().select(range(256))\nTrainer(m, TrainingArguments('o', eval_strategy='steps'), eval_dataset=eval_ds)\n"
        },
        {"data.max_samples": None},
        ("to do: train.py: evaluation rows (line 3) `256`: prepare a file with these rows, and name it",),
        (),
    ),
    "a part of as many as there are": (
        {
            "train.py": f"{HEAD}ROWS = 9\nval = find()\nval = val.select(range(min(ROWS, len(val))))\nTrainer(m, TrainingArguments('o', eval_strategy='steps'), eval_dataset=val)\n"
        },
        {"data.max_samples": None},
        ("to do: train.py: evaluation rows (line 5) `9`: prepare a file with these rows",),
        (),
    ),
    "a part that is not taken": (
        {
            "run.sh": "python train.py --output_dir o\n",
            "train.py": "import argparse\n"
            + HEAD
            + "p = argparse.ArgumentParser(); p.add_argument('--most', default=None); p.add_argument('--output_dir'); args = p.parse_args()\n"
            "d = find()\nif args.most is not None:\n    d = d.select(range(min(len(d), args.most)))\nTrainer(m, TrainingArguments(args.output_dir), train_dataset=d)\n",
        },
        {"data.max_samples": None},
        (),
        ("select.range",),
    ),
    "Unsloth's template": (
        {"train.py": UNSLOTH_TEMPLATE.format("chat_template='qwen3-instruct'")},
        {},
        (
            "changed: train.py: get_chat_template.chat_template (line 7) `qwen3-instruct`: trained with the model's own chat template",
        ),
        (),
    ),
    "one of a job's": (
        {"train.py": UNSLOTH_TEMPLATE.format("'chatml'")},
        {"data.chat_template": "chatml"},
        (),
        ("get_chat_template",),
    ),
    "the template makes the text": (
        {"train.py": TEMPLATED.format("'conversations'", "")},
        {},
        (),
        ("text by", "tokenised field"),
    ),
    "of a field of its own": (
        {"train.py": TEMPLATED.format("'dialog'", "")},
        {},
        ("text by make",),
        (),
    ),
    "of more than the template": (
        {"train.py": TEMPLATED.format("'conversations'", " + '<end>'")},
        {},
        ("text by make",),
        (),
    ),
    "device_map auto is one process": (
        {
            "train.py": HEAD.replace("'a/b'", "'a/b', device_map='auto'")
            + "Trainer(m, TrainingArguments('o', per_device_train_batch_size=4))\n"
        },
        {"train.global_batch": 4},
        ("assumed, as one process with device_map does: gpus=1",),
        ("no file says how many",),
    ),
    "a sentence names its key once": (
        {"a.yaml": f"{YAML}trust_remote_code: true\n"},
        {"model.trust_remote_code": None},
        ("left out: model.trust_remote_code runs a repository's code",),
        (),
    ),
    "modules of a flag": (
        {"run.sh": "torchrun train.py --output_dir o --target_modules q_proj,k_proj\n", "train.py": TRAINER},
        {"model.lora.targets": ["q_proj", "k_proj"]},
        (),
        (),
    ),
    "clipping below zero is none": (
        {"a.yaml": f"{YAML}max_grad_norm: -1\n"},
        {"optimizer.clip_norm": 0},
        (),
        ("clip_norm",),
    ),
}

CLICK = """\
import click
from consts import RATE, DATA
from datasets import load_dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def train(*, model: str, epochs: int, lr: float, data: str = DATA):
    m, rows = AutoModelForCausalLM.from_pretrained(model), load_dataset(data)
    Trainer(m, TrainingArguments("o", num_train_epochs=epochs, learning_rate=lr)).train()
@click.command()
@click.option("--model", default="a/b")
@click.option("--epochs", type=int, default=5)
@click.option("--lr", type=float, default=RATE)
def main(**kwargs):
    train(**kwargs)
main()
"""
STREAM = """\
import argparse, torch
from transformers import AutoModelForCausalLM
p = argparse.ArgumentParser()
p.add_argument("--seq_len", type=int, default=2048); p.add_argument("--gradient_accumulation_steps", type=int, default=4)
p.add_argument("--save_every", type=int, default=9); args = p.parse_args()
class Rows(torch.utils.data.IterableDataset):
    def __init__(self, seq_len):
        self.seq_len = seq_len
    def __iter__(self):
        buffer = []
        for text in texts():
            buffer.extend(tokens(text))
            while len(buffer) >= self.seq_len:
                yield buffer[:self.seq_len]
                buffer = buffer[self.seq_len:]
m = AutoModelForCausalLM.from_pretrained("a/b")
loader = torch.utils.data.DataLoader(Rows(seq_len=args.seq_len), batch_size=8)
optimizer = torch.optim.AdamW(m.parameters(), lr=1e-4)
count, total_aux_loss, steps = 0, 0, len(loader) / 2
for batch in loader:
    m(**batch).loss.backward()
    count += 1
    if count == args.gradient_accumulation_steps:
        optimizer.step()
        count, avg_aux_loss = 0, total_aux_loss / 2
"""
CUT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
import sys
LENGTH, tokenizer = 256, AutoTokenizer.from_pretrained("a/b")
EPOCHS = 3  # or fewer
if sys.argv[1:]:
    EPOCHS = None
def encode(row):
    prompt = f"Below is an instruction that describes a task.\\n\\n### Instruction:\\n{row['instruction']}"
    return {"input_ids": tokenizer(prompt, truncation=True, max_length=LENGTH + 1)["input_ids"][:-1]}
rows = data().map(encode)
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o", num_train_epochs=EPOCHS), train_dataset=rows).train()
"""
WARMUP = '{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 2e-5, "warmup_max_lr": 2e-5, "warmup_num_steps": 0}}}'
FSDP = f"{HEAD}from accelerate import Accelerator, FullyShardedDataParallelPlugin\nAccelerator(fsdp_plugin=FullyShardedDataParallelPlugin())\n"
CASES |= {
    "options of click, and constants of another file": (
        {
            "run.sh": "deepspeed --num_gpus 2 train.py --epochs 2\n",
            "train.py": CLICK,
            "consts.py": "RATE = 3e-5\nDATA = 'c/d'\n",
        },
        {"model.source": "a/b", "train.epochs": 2, "optimizer.learning_rate": 3e-5, "data.train": "c/d"},
        (),
        ("could not be read",),
    ),
    "a stream of texts that are joined": (
        {"train.py": STREAM},
        {"data.packing": True, "data.sequence_length": 2048, "train.global_batch": 32},
        ("to do: train.py:5: save_every 9: not understood; write train.save_every; until then 100",),
        ("could not be read", "aux_loss", "data.packing=false"),
    ),
    "a token more that is cut off": (
        {"train.py": CUT},
        {"data.sequence_length": 256, "train.epochs": None},
        (
            "train.py:11: num_train_epochs (EPOCHS = 3): its value could not be read; write train.epochs; until then one epoch",
            "text by encode (line 7)",
            "write data.format alpaca, and data.chat_template alpaca if the script's text is Alpaca's",
        ),
        (),
    ),
    "a text that only a run knows": (
        {
            "train.py": f"{HEAD}rows = data().map(lambda r: {{'text': made(r).format(r)}})\nTrainer(m, TrainingArguments('o'))\n"
        },
        {},
        ("text by a lambda (line 3)", "prepare the rows in a shape of data.format"),
        ("no such key: text by",),
    ),
    "a rate that begins where it stays": (
        {"run.sh": "deepspeed train.py --deepspeed z.json\n", "train.py": TRAINER, "z.json": WARMUP},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
        (),
        ("changed",),
    ),
    "a flag of data that the script mixes": (
        {
            "run.sh": "python train.py --dataset_mixer_list c/d 1.0\n",
            "train.py": LOADER.replace('"--max_train_steps"', '"--dataset_mixer_list"').replace(
                "args.max_train_steps", "args.dataset_mixer_list"
            ),
        },
        {},
        ("run.sh:1: dataset_mixer_list c/d: not understood; write data.train",),
        ("not found in the files",),
    ),
    "sharding of one process": (
        {"run.sh": "accelerate launch --num_processes 1 train.py\n", "train.py": FSDP},
        {"strategy": "single"},
        (),
        (),
    ),
    "sharding of two processes": (
        {"run.sh": "accelerate launch --num_processes 2 train.py\n", "train.py": FSDP},
        {"strategy": "fsdp2"},
        (),
        (),
    ),
    "ms-swift 2's word for all modules": (
        {
            "run.sh": "swift sft --model_id_or_path a/b --sft_type lora --lora_target_modules ALL --dataset d.jsonl\n"
        },
        {"model.lora.targets": "all-linear"},
        (),
        (),
    ),
    "and for its own choice": (
        {
            "run.sh": "swift sft --model_id_or_path a/b --sft_type lora --lora_target_modules DEFAULT --dataset d.jsonl\n"
        },
        {"model.lora.targets": None},
        (
            "to do: run.sh: lora_target_modules (line 1) `DEFAULT`: write model.lora.targets: ms-swift 2 chooses the modules",
        ),
        (),
    ),
    "no hint where nothing is alike": (
        {
            "train.py": f"{HEAD}from trl import DataCollatorForCompletionOnlyLM\nc = DataCollatorForCompletionOnlyLM(tokenizer=t, mlm=False)\nTrainer(m, TrainingArguments('o'), data_collator=c)\n"
        },
        {"data.loss_on": "answers"},
        ("no such key: DataCollatorForCompletionOnlyLM.mlm",),
        ("did you mean",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_decides_is_taken_and_the_rest_stays_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)


def test_check_warns_of_each_open_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _ = made_of({"a.yaml": f"{YAML}dataset: c/d\nsave_steps: 0.1\n"}, tmp_path, monkeypatch)
    Path("job.yaml").write_text(text)
    found = shardwise.check("job.yaml").findings
    assert [(one.rule, one.severity, one.line) for one in found] == [
        ("job-to-do", "warning", 2),
        ("job-to-do", "warning", 3),
    ]
    assert (
        "train.save_every: a share of all steps (3 x the data's rows / 2); write train.save_every; until then"
        in found[1].what
    )
    kept = [line for line in text.splitlines(keepends=True) if not line.startswith(("# to do", "#     "))]
    Path("job.yaml").write_text("".join(kept))
    assert not shardwise.check("job.yaml").findings


@pytest.mark.parametrize("verb", ["plan", "train"])
def test_plan_and_train_warn_of_open_to_dos(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, _ = made_of({"a.yaml": f"{YAML}dataset: c/d\nsave_steps: 0.1\n"}, tmp_path, monkeypatch)
    Path("job.yaml").write_text(text)
    main([verb, "job.yaml", "--set", "train.stepz=1"])  # which ends before anything is traced
    left = "2 to dos of `shardwise init --from` left; `shardwise check job.yaml` shows each"
    assert capsys.readouterr().err.startswith(f"warning: job.yaml: {left}\n")
    Path("job.yaml").write_text(text.replace("# to do", "# done"))
    main([verb, "job.yaml", "--set", "train.stepz=1"])
    assert "warning" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["README.md", "folder"])
def test_what_is_no_file_of_a_training_is_not_for_check(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("README.md").write_text("# Read me\n")
    with pytest.raises(JobError) as error:
        translation([Path(name)])
    assert "check" not in str(error.value)
