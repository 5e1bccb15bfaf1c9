# ruff: noqa: E501 - the files are text
"""Settings over a script's globals, a trainer's text field, models of pictures, adapters on a head."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

GLOBALS = """\
import torch
from model import GPT, GPTConfig
eval_interval = 2000
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 4
learning_rate = 6e-4
max_iters = 600000
beta2 = 0.95
exec(open('configurator.py').read())
def get_batch(split):
    at = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i:i + block_size] for i in at]), torch.stack([data[i + 1:i + 1 + block_size] for i in at])
model = GPT(GPTConfig(block_size=block_size))
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, beta2))
iter_num = 0
while True:
    if iter_num % eval_interval == 0:
        estimate_loss()
    for micro_step in range(gradient_accumulation_steps):
        x, y = get_batch('train')
        loss = model(x, y) / gradient_accumulation_steps
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    iter_num += 1
    if iter_num > max_iters:
        break
"""
MODEL = "from dataclasses import dataclass\nimport torch.nn as nn\n@dataclass\nclass GPTConfig:\n    block_size: int = 1024\nclass GPT(nn.Module):\n    def __init__(self, config):\n        self.pos = nn.Embedding(config.block_size, 8)\n"
FLAGS = "python train.py config/small.py --block_size=64 --learning_rate=5e-4 --beta2=0.98 --compile=False\n"
SMALL = "eval_interval = 250\nlearning_rate = 1e-3\nmax_iters = 5000\n"
TEXT = "from datasets import load_dataset\nfrom transformers import AutoModelForCausalLM\nfrom trl import SFTConfig, SFTTrainer\nds = load_dataset('a/alpaca', split='train')\nSFTTrainer(model='x/y', args=SFTConfig('o', dataset_text_field='text'), train_dataset=ds).train()\n"
ADAPTED = "from peft import LoraConfig, get_peft_model\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('NAME')\nc = LoraConfig(r=8, target_modules=TARGETS)\nTrainer(get_peft_model(m, c), TrainingArguments('o')).train()\n"


def adapted(name: str, targets: str) -> str:
    return ADAPTED.replace("NAME", name).replace("TARGETS", targets)


CASES: dict[str, Case] = {
    "a command's flags over globals, and over a file of settings": (
        {"run.sh": FLAGS, "train.py": GLOBALS, "data/../config/small.py": SMALL},
        {"data.sequence_length": 64, "optimizer.learning_rate": 5e-4, "optimizer.beta2": 0.98, "train.steps": 5000, "train.eval_every": 250},
        (),
        ("no script of --from reads", "conflict", "learning_rate 0"),
    ),
    "a file of settings that the command names": (
        {"run.sh": FLAGS, "train.py": GLOBALS, "data/config/small.py": SMALL},
        {"data.sequence_length": 64},
        ("to do: run.sh:1: config/small.py is not there; add it to --from",),
        (),
    ),
    "a flag whose value only the shell knows": (
        {"run.sh": "python train.py --max_iters=$STEPS\n", "train.py": GLOBALS},
        {"train.steps": None, "optimizer.learning_rate": 6e-4},
        ("range(steps): its value could not be read; write train.steps",),
        (),
    ),
    "a default of a class that another script fills": (
        {"run.sh": FLAGS, "train.py": GLOBALS, "model.py": MODEL},
        {"data.sequence_length": 64},
        (),
        ("conflict",),
    ),
    "a trainer of the field `text`": (
        {"train.py": TEXT},
        {"data.format": "text"},
        ("assumed, as a trainer of the field `text` does: data.format=text",),
        (),
    ),
    "rows that a script makes of chats": (
        {"train.py": TEXT.replace("SFTTrainer(model", "ds = ds.map(lambda r: {'text': tok.apply_chat_template(r['messages'], tokenize=False)})\nSFTTrainer(model")},
        {"data.format": None},
        (),
        ("data.format=text",),
    ),
    "a model that reads pictures, too": (
        {"c.yaml": "model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct\nfinetuning_type: full\ndataset_dir: d\nfreeze_vision_tower: true\nlearning_rate: 1e-4\n"},
        {"model.source": "Qwen/Qwen2.5-VL-7B-Instruct"},
        ("to do: c.yaml:1: model_name_or_path", "shardwise trains models of text alone; write model.source"),
        (),
    ),
    "a model of text": (
        {"c.yaml": "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nfinetuning_type: full\ndataset_dir: d\nlearning_rate: 1e-4\n"},
        {},
        (),
        ("pictures",),
    ),
    "adapters on a head": (
        {"train.py": adapted("meta-llama/Llama-2-7b-hf", "['q_proj', 'lm_head', 'embed_tokens']")},
        {"model.lora.targets": ["q_proj"]},
        ("changed: train.py:4: target_modules: lm_head, embed_tokens: trained without an adapter there",),
        ("in no block of",),
    ),
    "adapters on a head of an unknown model": (
        {"train.py": adapted("own/model", "['wqkv', 'lm_head']")},
        {"model.lora.targets": ["wqkv"]},
        ("lm_head: trained without an adapter there",),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_settings_over_globals(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "data").mkdir()
    check_case(case, tmp_path, monkeypatch)
