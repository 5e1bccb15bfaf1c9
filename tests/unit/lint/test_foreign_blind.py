"""What a walker found who had read only the README: branches, packages, prompts, splits, notebooks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from foreign_files import Case, check_case

CASES: dict[str, Case] = {}

BRANCHES = """\
import argparse
from coati.models.bloom import BLOOMLM
from coati.models.gpt import GPTLM
from coati.trainer import SFTTrainer
from coati.dataset import ITDataset, SFTDataset
from torch.optim import Adam
from torch.utils.data import DataLoader
from transformers import BloomTokenizerFast
from transformers.models.gpt2.tokenization_gpt2 import GPT2Tokenizer
from colossalai.nn.optimizer import HybridAdam

def train(args):
    if args.model == 'bloom':
        model = BLOOMLM(pretrained=args.pretrain)
    elif args.model == 'gpt2':
        model = GPTLM(pretrained='gpt2')
    if args.model == 'gpt2':
        tokenizer = GPT2Tokenizer.from_pretrained('gpt2')
    elif args.model == 'bloom':
        tokenizer = BloomTokenizerFast.from_pretrained(args.pretrain)
    for name, param in model.named_parameters():
        sub_module = model.get_submodule(name)
        setattr(sub_module, name.split('.')[-1], param)
    if args.strategy.startswith('colossalai'):
        optim = HybridAdam(model.parameters(), lr=args.lr, weight_decay=1e-5, clipping_norm=1.0)
    else:
        optim = Adam(model.parameters(), lr=args.lr)
    if args.it:
        rows = ITDataset(tokenizer, args.max_len)
    else:
        rows = SFTDataset(tokenizer, args.max_len, data_path=args.data_path)
    loader = DataLoader(rows, batch_size=args.batch_size)
    trainer = SFTTrainer(model, optim, loader, max_epochs=args.max_epochs, accumulation=args.accumulation)
    trainer.fit()

if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--strategy', default='colossalai_zero2')
    parser.add_argument('--model', default='bloom')
    parser.add_argument('--pretrain', type=str, default=None)
    parser.add_argument('--data_path', type=str, default=None)
    parser.add_argument('--max_epochs', type=int, default=1)
    parser.add_argument('--batch_size', type=int, default=4)
    parser.add_argument('--max_len', type=int, default=512)
    parser.add_argument('--lr', type=float, default=5e-6)
    parser.add_argument('--accumulation', type=int, default=8)
    parser.add_argument('--it', action='store_true')
    train(parser.parse_args())
"""
OWN_TRAINER = """\
from abc import ABC
from transformers.trainer import get_scheduler
from colossalai.utils.common import clip_grad_norm

class SFTTrainer(ABC):
    def __init__(self, model, optim, loader, max_epochs: int = 2, accumulation: int = 8):
        self.model, self.optim, self.loader = model, optim, loader
        self.epochs = max_epochs
        self.accumulation = accumulation
        self.scheduler = get_scheduler('cosine', optim, num_warmup_steps=0, num_training_steps=len(loader))

    def fit(self):
        for epoch in range(self.epochs):
            for at, batch in enumerate(self.loader):
                loss = self.model(**batch).loss / self.accumulation
                loss.backward()
                if (at + 1) % self.accumulation == 0:
                    clip_grad_norm(self.model.parameters(), 1.0)
                    self.optim.step()
                    self.scheduler.step()
                    self.optim.zero_grad()
"""
OWN_ROWS = """\
from datasets import load_dataset
from torch.utils.data import Dataset

def chats(rows, tokenizer, max_length: int = 512):
    return [tokenizer(row['text'], max_length=max_length, truncation=True) for row in rows]

def belle(path, tokenizer, max_length: int = 512):
    return chats(load_dataset(path, split='train'), tokenizer, max_length)

class ITDataset(Dataset):
    def __init__(self, tokenizer, max_length: int = 512):
        self.rows = belle('BelleGroup/train_2M_CN', tokenizer, max_length)

class SFTDataset(Dataset):
    def __init__(self, tokenizer, max_length: int = 512, data_path=None):
        self.rows = chats(jload(data_path), tokenizer, max_length)
"""
COMMAND = """\
torchrun --standalone --nproc_per_node=4 train_sft.py --pretrain bigscience/bloom-1b7 --model bloom \\
    --data_path rows.json --batch_size 3 --accumulation 10 --lr 2e-5 --max_len 1024 --max_epochs 3
"""
LOOP = """\
import torch
from torch.utils.data import DataLoader
from transformers import AutoTokenizer
from mylib import build, {imports}

tokenizer = AutoTokenizer.from_pretrained('gpt2')
model = build()
optim = {optim}
for epoch in range(3):
    for batch in DataLoader(rows, batch_size=8):
        model(**batch).loss.backward()
        {clip}
        optim.step()
        optim.zero_grad()
"""
CASES |= {
    "a package's trainer, its branches and its rows": (
        {"train.sh": COMMAND, "train_sft.py": BRANCHES, "sft.py": OWN_TRAINER, "sft_dataset.py": OWN_ROWS},
        {
            "model.source": "bigscience/bloom-1b7",
            "data.train": "rows.json",
            "data.sequence_length": 1024,
            "optimizer.learning_rate": 2e-5,
            "optimizer.weight_decay": 1e-5,
            "optimizer.clip_norm": 1,
            "optimizer.schedule": "cosine",
            "train.epochs": 3,
            "train.micro_batch": 3,
            "train.global_batch": 120,
        },
        (),
        ("gpt2", "could not be read", "BelleGroup", "clip_norm=0", "conflict"),
    ),
    "a tokenizer names no model": (
        {
            "a.py": LOOP.format(
                imports="clip_by_global_norm",
                optim="torch.optim.AdamW(model.parameters(), lr=1e-4)",
                clip="clip_by_global_norm(model, 0.5)",
            )
        },
        {"model.source": "fill-in-the-model", "optimizer.clip_norm": None},
        (
            "to do: a.py:12: clip_by_global_norm(: write optimizer.clip_norm",
            "to do: model.source: not found in the files",
        ),
        ("clip_norm=0",),
    ),
    "arguments of an optimizer that is not PyTorch's": (
        {
            "b.py": LOOP.format(
                imports="CPUAdam",
                optim="CPUAdam(model.parameters(), lr=1e-4, weight_decay=0.2, max_grad_clip=2.0)",
                clip="pass",
            )
        },
        {"optimizer.weight_decay": 0.2, "optimizer.clip_norm": None, "optimizer.learning_rate": 1e-4},
        ("write optimizer.clip_norm",),
        ("clip_norm=0", "weight_decay=0.01"),
    ),
}

AXOLOTL = (
    "base_model: {}\nmicro_batch_size: 1\nlearning_rate: 0.0002\ndatasets:\n  - path: c/d\n    type: {}\n"
)
SENTENCE = "the job's template has no sentence above the first instruction"
CASES |= {
    "Axolotl's alpaca": (
        {
            "a.yml": AXOLOTL.format("mistralai/Mistral-7B-v0.1", "alpaca")
            + "special_tokens:\n  eos_token: </s>\n"
        },
        {"data.format": "alpaca", "data.chat_template": "alpaca"},
        (f"changed: a.yml:6: datasets.0.type: alpaca: {SENTENCE}",),
        ("eos_token",),
    ),
    "two of Axolotl's alpaca": (
        {
            "a.yml": AXOLOTL.format("a/b", "alpaca")
            + "  - path: e/f\n    type: alpaca\nchat_template: chatml\nspecial_tokens:\n  eos_token: </s>\n"
        },
        {"data.format": "alpaca", "data.chat_template": "alpaca"},
        (SENTENCE, "eos_token"),
        ("conflict",),
    ),
    "another of Axolotl's types": (
        {"a.yml": AXOLOTL.format("a/b", "alpaca_w_system.load_open_orca")},
        {"data.format": None, "data.chat_template": None},
        (
            "to do: a.yml: datasets.0.type (line 6) `alpaca_w_system.load_open_orca`: prepare the rows",
            "data.chat_template",
        ),
        (),
    ),
    "oasst": (
        {"a.yml": AXOLOTL.format("a/b", "oasst")},
        {"data.format": None},
        ("to do: a.yml: datasets.0.type (line 6) `oasst`: prepare the rows in a shape of data.format",),
        ("left out: a.yml: datasets.0.type",),
    ),
    "sharegpt without a template": (
        {"a.yml": AXOLOTL.format("a/b-Instruct", "sharegpt")},
        {"data.format": "sharegpt"},
        ("to do: datasets.0.type: sharegpt: no file names a template", "write data.chat_template"),
        (),
    ),
    "a base model's template": (
        {"a.yml": AXOLOTL.format("mistralai/Mistral-7B-v0.1", "chat_template")},
        {},
        ("to do: datasets.0.type: chat_template: no file names a template", "write data.chat_template"),
        (),
    ),
    "a template that is named": (
        {"a.yml": AXOLOTL.format("a/b", "chat_template") + "chat_template: chatml\n"},
        {"data.chat_template": "chatml"},
        (),
        ("no file names a template",),
    ),
    "an instructed model's template": (
        {"a.yml": AXOLOTL.format("a/b-Instruct", "chat_template")},
        {},
        (),
        ("no file names a template",),
    ),
}

PROMPTER = """\
import json, os

class Prompter(object):
    def __init__(self, template_name: str = ""):
        with open(os.path.join("templates", f"{template_name or 'alpaca'}.json")) as file:
            self.template = json.load(file)

    def generate_prompt(self, instruction, label=None):
        return self.template["prompt_no_input"].format(instruction=instruction) + (label or "")
"""
TEMPLATE = json.dumps(
    {
        "prompt_no_input": "Below is an instruction that describes a task.\n\n{instruction}",
        "response_split": "x",
    }
)
MAPPED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from datasets import load_dataset
from utils.prompter import Prompter

prompter = Prompter("alpaca")
model = AutoModelForCausalLM.from_pretrained("a/b")

def tokenise(row):
    text = prompter.generate_prompt(row["instruction"], row["output"])
    return tokenizer(text, truncation=True, max_length=512)

rows = load_dataset("c/d")["train"].map(tokenise)
Trainer(model=model, args=TrainingArguments(output_dir="o"), train_dataset=rows).train()
"""
IN_CLASS = """\
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from prompts import build_example

class Rows(Dataset):
    def __getitem__(self, at):
        return self.tokenizer(self.text(self.rows[at]))

    def text(self, row):
        return build_example(question=row["input"], answer=row["output"])

model = AutoModelForCausalLM.from_pretrained("a/b")
Trainer(model=model, args=TrainingArguments(output_dir="o"), train_dataset=Rows()).train()
"""
CASES |= {
    "a prompter of a file that is not named": (
        {"train.py": MAPPED},
        {},
        ("text by tokenise (line 8) `prompter.generate_prompt(row['instruction'], row['output'])`",),
        (),
    ),
    "a prompter and its template": (
        {"train.py": MAPPED, "utils/prompter.py": PROMPTER, "templates/alpaca.json": TEMPLATE},
        {},
        ("text by tokenise (line 8)", "write data.format alpaca, and data.chat_template alpaca"),
        (),
    ),
    "an imported function that makes prompts": (
        {"train.py": IN_CLASS},
        {},
        ("text by text (line 9) `build_example(question=row['input'], answer=row['output'])`",),
        (),
    ),
}

PLAIN = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import load_dataset
{rows}
model = AutoModelForCausalLM.from_pretrained("a/b")
Trainer(model=model, args=TrainingArguments(output_dir="o"), train_dataset=train, eval_dataset=held).train()
"""
CHAINED = """\
first = load_dataset("c/d")["train"].train_test_split(test_size=0.2, seed=42)
rest = first["train"]
second = rest.train_test_split(test_size=0.2, seed=42)
train, held = second["train"], second["test"]
"""
OF_THE_TEST = """\
data = load_dataset("c/d", split="train").train_test_split(test_size=0.2)
halves = data["test"].shuffle(seed=1).train_test_split(test_size=0.5)
train, held = data["train"], halves["train"]
"""
OF_FRAMES = """\
from sklearn.model_selection import train_test_split
train, rest = train_test_split(frame, test_size=0.3, random_state=1)
held, test = train_test_split(rest, test_size=0.5, random_state=1)
"""
ONCE = """\
data = load_dataset("c/d", split="train").train_test_split(test_size=0.1)
other = load_dataset("e/f", split="train").train_test_split(test_size=0.5)
train, held = data["train"], data["test"]
"""
CASES |= {
    name: (
        {"a.py": PLAIN.format(rows=rows)},
        {},
        (f"to do: a.py: split within a split (line {line}) `{shares}`: prepare files with these shares",),
        (),
    )
    for name, rows, line, shares in (
        ("a split of the rows that are trained on", CHAINED, 5, "64%, 16%, 20%"),
        ("a split of the rows that are held out", OF_THE_TEST, 4, "80%, 10%, 10%"),
        ("a split of frames", OF_FRAMES, 5, "70%, 15%, 15%"),
    )
}
CASES["two splits of other rows"] = {"a.py": PLAIN.format(rows=ONCE)}, {}, (), ("split within",)


def notebook(*cells: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": [cell]} for cell in cells]})


CASES |= {
    "a cell with a placeholder": (
        {
            "a.ipynb": notebook(
                PLAIN.format(rows="train = load_dataset('c/d')"), "hf_name = <hf-username>\nhf_id = hf_name"
            )
        },
        {"model.source": "a/b", "data.train": "c/d"},
        ("left out: a.ipynb:7: a cell with a placeholder is no Python",),
        (),
    ),
    "a cell with a placeholder as an argument": (
        {"a.ipynb": notebook("login(<YOUR TOKEN>)", PLAIN.format(rows="train = load_dataset('c/d')"))},
        {"model.source": "a/b"},
        ("left out: a.ipynb:1: a cell with a placeholder is no Python",),
        (),
    ),
}

QLORA = """\
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.{})
model = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=bits)
Trainer(model=model, args=TrainingArguments(output_dir="o", {}=True)).train()
"""
PRODUCTS = "trained with products in train.precision"
CASES |= {
    f"products in {products}, {precision}": ({"a.py": QLORA.format(products, precision)}, {}, said, never)
    for products, precision, said, never in (
        ("float16", "fp16", (), (PRODUCTS,)),
        ("bfloat16", "bf16", (), (PRODUCTS,)),
        ("float16", "bf16", (PRODUCTS,), ()),
        ("bfloat16", "fp16", (PRODUCTS,), ()),
    )
}


@pytest.mark.parametrize("name", CASES)
def test_a_set_of_files_is_read_as_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
