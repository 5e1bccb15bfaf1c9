# ruff: noqa: E501 - the files are text
"""Loops of a script's own as nanoGPT writes them: the rate, the rows of a step, the weights at the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

MODEL = """\
import torch.nn as nn
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size)
    @classmethod
    def from_pretrained(cls, name):
        from transformers import GPT2LMHeadModel
        return GPT2LMHeadModel.from_pretrained(name)
"""
LOOP = """\
import math, os, torch
from model import GPT
init_from = 'scratch'
gradient_accumulation_steps = 40
batch_size = 12
block_size = 1024
learning_rate = 6e-4
max_iters = 6000
warmup_iters = 200
lr_decay_iters = 6000
min_lr = 6e-5
decay_lr = True
ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    world = int(os.environ['WORLD_SIZE'])
    gradient_accumulation_steps //= world
def get_batch():
    at = torch.randint(len(data) - block_size, (batch_size,))
    return torch.stack([data[i:i + block_size] for i in at])
if init_from == 'scratch':
    model = GPT(config)
elif init_from.startswith('gpt2'):
    model = GPT.from_pretrained(init_from)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
def get_lr(it):
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    if it > lr_decay_iters:
        return min_lr
    ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))
    return min_lr + coeff * (learning_rate - min_lr)
it = 0
while True:
    lr = get_lr(it) if decay_lr else learning_rate
    for group in optimizer.param_groups:
        group['lr'] = lr
    for micro_step in range(gradient_accumulation_steps):
        loss = model(get_batch())
        loss.backward()
    optimizer.step()
    it += 1
    if it > max_iters:
        break
"""
RUN = "torchrun --nproc_per_node=8 train.py\n"
COSINE = {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 200, "optimizer.final_fraction": 0.1}
OPEN_RATE = ("write optimizer.schedule, optimizer.warmup_steps",)


def loop(old: str = "", new: str = "") -> dict[str, str]:
    """The command, and the loop with another text in place of one."""
    assert old in LOOP
    return {"run.sh": RUN, "train.py": LOOP.replace(old, new, 1) if old else LOOP, "model.py": MODEL}


TWO = "    if SHAPE == 'cosine':\n        coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))\n    else:\n        coeff = 0.9 ** (100 * ratio)\n"
HYDRA = """\
import hydra, torch
@hydra.main(config_path='.', config_name='config')
def main(cfg):
    model = hydra.utils.instantiate(cfg.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for step in range(cfg.steps):
        model(next(rows)).loss.backward()
        optimizer.step()
main()
"""
LAMBDA = "import torch\nfrom torch.optim.lr_scheduler import LambdaLR\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\noptimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\nscheduler = LambdaLR(optimizer, lambda step: RATE)\nfor row in rows:\n    model(**row).loss.backward()\n    optimizer.step()\n    scheduler.step()\n"
CASES: dict[str, Case] = {
    "a warm-up and a cosine to a last rate": (loop(), COSINE, (), (*OPEN_RATE, "get_lr.end")),
    "a warm-up that counts from one": (
        loop("return learning_rate * it / warmup_iters", "return learning_rate * (it + 1) / (warmup_iters + 1)"),
        COSINE,
        (),
        OPEN_RATE,
    ),
    "a rate that stays": (
        loop("decay_lr = True", "decay_lr = False"),
        {"optimizer.warmup_steps": None, "optimizer.final_fraction": None},
        (),
        ("get_lr",),
    ),
    "a cosine that ends before the run": (
        loop("lr_decay_iters = 6000", "lr_decay_iters = 3000"),
        COSINE,
        ("changed: train.py: get_lr.end (line 28) `3000`: trained with a rate that falls until the last step",),
        (),
    ),
    "a warm-up that begins at the last rate": (
        loop("return learning_rate * it / warmup_iters", "return min_lr + (learning_rate - min_lr) * it / warmup_iters"),
        {"optimizer.schedule": None},
        OPEN_RATE,
        (),
    ),
    "another shape": (
        loop("0.5 * (1.0 + math.cos(math.pi * ratio))", "math.sqrt(1 - ratio)"),
        {"optimizer.schedule": None},
        OPEN_RATE,
        (),
    ),
    **{
        f"one shape of two: {name}": (
            loop("    coeff = 0.5 * (1.0 + math.cos(math.pi * ratio))\n", TWO.replace("SHAPE", name)),
            {"optimizer.schedule": schedule, "optimizer.final_fraction": 0.1 if schedule else None},
            () if schedule else OPEN_RATE,
            ("get_lr.end",),
        )
        for name, schedule in (("'cosine'", "cosine"), ("'exp'", None), ("chosen()", None))
    },
    "the rows of a step over processes": (
        loop(),
        {"train.micro_batch": 12, "train.global_batch": 480},
        (),
        ("could not be read; of a step's rows", "batch_size 12: not understood"),
    ),
    "a number that a loop changes": (
        loop("    gradient_accumulation_steps //= world\n", "    for _ in names():\n        gradient_accumulation_steps *= 2\n"),
        {"train.micro_batch": 12},
        ("accumulation: its value could not be read",),
        (),
    ),
    "random weights, where another branch loads some": (
        loop(),
        {"model.weights": "random"},
        ("train.py:21: own shape: the model is made of a configuration of the script's",),
        ("model.py:9",),
    ),
    "weights that the branch loads": (
        loop("init_from = 'scratch'", "init_from = 'gpt2-medium'"),
        {"model.weights": None},
        (),
        ("own shape",),
    ),
    "a class that Hydra makes": (
        {"train.py": HYDRA, "config.yaml": "model:\n  _target_: src.models.GPT\n  n_embd: 64\nlr: 1.0e-4\nsteps: 10\n"},
        {"model.weights": "random"},
        ("own shape",),
        (),
    ),
    "weights that Hydra loads": (
        {"train.py": HYDRA, "config.yaml": "model:\n  _target_: transformers.AutoModelForCausalLM.from_pretrained\nlr: 1.0e-4\nsteps: 10\n"},
        {"model.weights": None},
        (),
        ("own shape",),
    ),
    "a function that is always one": (
        {"train.py": LAMBDA.replace("RATE", "1")},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
        (),
        (*OPEN_RATE, "LambdaLR"),
    ),
    "a function of the step": (
        {"train.py": LAMBDA.replace("RATE", "0.9 ** step")},
        {"optimizer.schedule": None},
        ("LambdaLR", *OPEN_RATE),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_loop_does(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
