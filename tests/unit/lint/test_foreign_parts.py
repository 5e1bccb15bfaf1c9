# ruff: noqa: E501 - the files are text
"""What a run takes from a part that is easy to miss: sbatch's options, no evaluation, a row's two fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TRAIN = """\
from datasets import load_dataset
from trl import SFTTrainer, SFTConfig
rows = load_dataset("json", data_files="d.jsonl", split="train")
cfg = SFTConfig("o", per_device_train_batch_size=2, gradient_accumulation_steps=2)
SFTTrainer(model="gpt2", args=cfg, train_dataset=rows).train()
"""
STARTED = {
    "sbatch and a launcher": (
        'sbatch --nodes=1 --gres=gpu:4 --wrap "torchrun --nproc_per_node=4 train.py"\n',
        16,
    ),
    "sbatch and srun": (
        'sbatch -N 2 --gpus-per-node=4 --ntasks-per-node=4 --wrap="srun python train.py"\n',
        32,
    ),
    "as many as Slurm's": (
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=4\nsrun torchrun --nnodes=$SLURM_JOB_NUM_NODES --nproc_per_node=gpu train.py\n",
        32,
    ),
}
CASES: dict[str, Case] = {
    f"started by {name}": ({"run.sh": command, "train.py": TRAIN}, {"train.global_batch": rows}, (), ())
    for name, (command, rows) in STARTED.items()
}

FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: d.json\nval_size: 0.1\neval_steps: 500\n"
HELD_OUT = """\
from dataclasses import dataclass
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Data:
    validation_split_percentage: int = 5
data, args = HfArgumentParser((Data, TrainingArguments)).parse_args_into_dataclasses()
rows = split(data.validation_split_percentage)
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), args, train_dataset=rows).train()
"""
CASES |= {
    "LLaMA-Factory does not evaluate": (
        {"sft.yaml": FACTORY},
        {"data.eval_fraction": 0.1, "train.eval_every": 0},
        (),
        (),
    ),
    "LLaMA-Factory evaluates": (
        {"sft.yaml": f"{FACTORY}eval_strategy: steps\n"},
        {"data.eval_fraction": 0.1, "train.eval_every": 500},
        (),
        (),
    ),
    "rows held out and not evaluated": (
        {"train.py": HELD_OUT, "run.sh": "python train.py --output_dir o --do_train\n"},
        {"train.eval_every": 0},
        ("write data.eval_fraction",),
        (),
    ),
}

MAPPED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from helper import encode
tok = AutoTokenizer.from_pretrained("a/b")
rows = load_dataset("json", data_files="d.jsonl", split="train").map(encode)
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o"), train_dataset=rows).train()
"""
ENCODE = """\
def encode(row):
    first, last = tok(row["FIRST"])["input_ids"], tok(row["LAST"])["input_ids"]
    return {"input_ids": first + last, "labels": [-100] * len(first) + last}
"""


def encoded(first: str, last: str) -> dict[str, str]:
    return {"train.py": MAPPED, "helper.py": ENCODE.replace("FIRST", first).replace("LAST", last)}


CASES |= {
    "a prompt and a completion": (
        encoded("prompt", "completion"),
        {"data.loss_on": "answers"},
        (),
        ("tokenised field", "text by"),
    ),
    "two other fields": (
        encoded("question", "reply"),
        {"data.loss_on": "answers"},
        ("text by encode (line 1) `question + reply`",),
        ("tokenised field",),
    ),
}

NESTED = """\
import torch, tyro
from dataclasses import dataclass, field
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_scheduler
@dataclass
class Optim:
    lr: float = 5e-6
    warmup: int = 20
@dataclass
class Config:
    context: int = 768
    updates: int = 1500
    optim: Optim = field(default_factory=Optim)
def main(cfg):
    accelerator = Accelerator(gradient_accumulation_steps=4)
    def group(batch):
        ids = sum((tok(t).input_ids for t in batch["text"]), [])
        return {"input_ids": [ids[i : i + cfg.context] for i in range(0, len(ids), cfg.context)]}
    rows = load_dataset("json", data_files="d.jsonl", split="train").map(group, batched=True)
    loader = torch.utils.data.DataLoader(rows, batch_size=2)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr)
    each = accelerator.num_processes
    sched = get_scheduler("cosine", optimizer, num_warmup_steps=cfg.optim.warmup * each, num_training_steps=cfg.updates * accelerator.num_processes)
    PREPARE
    done = 0
    while done < cfg.updates:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                optimizer.step(); sched.step(); optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
main(tyro.cli(Config))
"""
PREPARE = "model, optimizer, loader, sched = accelerator.prepare(model, optimizer, loader, sched)"
LAUNCH = "accelerate launch --num_processes 4 train.py --optim.lr 1e-5 --updates 3000\n"
CASES |= {
    "a field of a field, by a command": (
        {"train.py": NESTED.replace("PREPARE", PREPARE), "run.sh": LAUNCH},
        {
            "optimizer.learning_rate": 1e-5,
            "optimizer.warmup_steps": 20,
            "train.steps": 3000,
            "data.sequence_length": 768,
        },
        (),
        ("conflict",),
    ),
    "a schedule that Accelerate does not step": (
        {"train.py": NESTED.replace("PREPARE", "pass"), "run.sh": LAUNCH},
        {"optimizer.warmup_steps": 80},
        (),
        (),
    ),
}

CLI = """\
import torch
import lightning as L
from lightning.pytorch.cli import LightningCLI
from transformers import AutoModelForCausalLM, AutoTokenizer
class Net(L.LightningModule):
    def __init__(self, name: str = "gpt2", lr: float = 5e-5):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(name)
    def training_step(self, batch, _):
        return self.model(**batch).loss
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
class Rows(L.LightningDataModule):
    def __init__(self, size: int = 8):
        super().__init__()
        self.save_hyperparameters()
    def train_dataloader(self):
        return torch.utils.data.DataLoader(rows, batch_size=self.hparams.size)
LightningCLI(Net, Rows)
"""
LIGHTNING = (
    "seed_everything: 21\ntrainer: {devices: 4, precision: bf16-mixed, max_epochs: 2, accumulate_grad_batches: 2, "
    "gradient_clip_val: 0.7, strategy: STRATEGY}\nmodel: {name: a/b, lr: 2.0e-4}\ndata: {size: 6}\n"
)
WITH_CLASS = (
    "{class_path: lightning.pytorch.strategies.FSDPStrategy, init_args: {sharding_strategy: FULL_SHARD}}"
)
BY_CLI = {
    "model.source": "a/b",
    "optimizer.learning_rate": 1e-4,
    "optimizer.clip_norm": 0.7,
    "train.epochs": 3,
    "train.seed": 21,
    "train.precision": "bf16",
    "train.global_batch": 48,
    "train.micro_batch": 6,
}
CASES |= {
    f"LightningCLI with {name}": (
        {
            "train.py": CLI,
            "conf.yaml": LIGHTNING.replace("STRATEGY", strategy),
            "run.sh": "python train.py fit --config conf.yaml --trainer.max_epochs 3 --model.lr 1e-4\n",
        },
        BY_CLI | {"strategy": spread},
        (),
        ("conflict", "not understood", "model.lr"),
    )
    for name, strategy, spread in [
        ("a word", "ddp", "ddp"),
        ("a class", WITH_CLASS, "fsdp2"),
    ]
}
CASES["pieces of a length that only a run knows"] = (
    {"train.py": NESTED.replace("PREPARE", PREPARE).replace("768", "make()"), "run.sh": LAUNCH},
    {"data.sequence_length": None},
    (),
    ("[i:i+n]",),
)
CASES["LightningCLI without a file"] = ({"train.py": CLI}, {}, ("gives it arguments",), ())

OMEGA = """\
import sys, torch
from omegaconf import OmegaConf
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from transformers import AutoModelForCausalLM
cfg = OmegaConf.merge(OmegaConf.load(sys.argv[1]), OmegaConf.from_cli(sys.argv[2:]))
torch.manual_seed(cfg["run"]["seed"] + rank)
model = AutoModelForCausalLM.from_pretrained("gpt2")
loader = torch.utils.data.DataLoader(rows, batch_size=8)
optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
ramp = LinearLR(optimizer, FIRST, 1.0, total_iters=RAMP)
schedule = SequentialLR(optimizer, [ramp, CosineAnnealingLR(optimizer, T_max=len(loader))], milestones=[50])
for epoch in range(2):
    for i, batch in enumerate(loader):
        (model(**batch).loss / cfg.train.accum).backward()
        if (i + 1) % cfg.train.accum:
            continue
        optimizer.step(); schedule.step(); optimizer.zero_grad()
"""
RUN = {
    "c.yaml": "run: {seed: 3}\ntrain: {lr: 1.0e-4, accum: 4}\n",
    "run.sh": "torchrun --nproc_per_node 2 train.py c.yaml train.lr=2e-4\n",
}
OF_OMEGA = {"train.seed": 3, "optimizer.learning_rate": 2e-4, "train.global_batch": 64}
ANOTHER = "trained with another schedule"


def ramped(first: str, steps: str) -> dict[str, str]:
    return RUN | {"train.py": OMEGA.replace("FIRST", first).replace("RAMP", steps)}


CASES |= {
    "a ramp before a cosine": (
        ramped("0.01", "50"),
        OF_OMEGA | {"optimizer.warmup_steps": 50},
        (),
        (ANOTHER, "understood"),
    ),
    "a ramp from a half": (ramped("0.5", "50"), {"optimizer.warmup_steps": 50}, (ANOTHER,), ()),
    "a ramp that only a run knows": (
        ramped("0.01", "warm()"),
        {"optimizer.warmup_steps": None},
        ("write optimizer.warmup_steps",),
        (),
    ),
}

CASES["rows of a flag that a class of the script's opens"] = (
    {
        "train.py": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--train_path', default='data/rows.jsonl')\n"
        "args = p.parse_args()\n"
        + OMEGA.replace("batch_size=8", "batch_size=8, shuffle=True").replace(
            "(rows,", "(Rows(args.train_path),"
        )
    },
    {},
    ("train_path data/rows.jsonl: not understood; write data.train",),
    ("data.train: not found in the files",),
)

ENUM = (
    "import torch\nfrom enum import Enum\nclass Kind(Enum):\n    HALF = torch.bfloat16\n    FULL = torch.float32\n"
    "kind = Kind.HALF\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('gpt2')\n"
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\nmicro_bs = 6\nfor step in range(9):\n"
    "    with torch.autocast('cuda', dtype=kind.value):\n        loss = model(**take(micro_bs)).loss\n"
    "    loss.backward()\n    optimizer.step()\n"
)
CASES["a number type of an Enum, and rows of a batch by a short name"] = (
    {"train.py": ENUM},
    {"train.precision": "bf16", "train.micro_batch": 6},
    ("micro_bs 6: not understood; write train.micro_batch",),
    (),
)


@pytest.mark.parametrize("name", CASES)
def test_what_is_easy_to_miss(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
