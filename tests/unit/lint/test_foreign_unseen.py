# ruff: noqa: E501 - the files are text
"""What a sixth walk over files that nobody had read found wrong: files in, the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

FILLED = "from transformers import HfArgumentParser, Trainer, TrainingArguments\nm, t = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\nTrainer(model=x, args=t).train()\n"
CONSTANT = "--model_name_or_path a/b --lr_scheduler_type constant --warmup_ratio 0.05 --output_dir o\n"
WARMUP = '{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}}}'

CONFIG = """\
from dataclasses import dataclass
LR, EPOCHS = 3e-4, 2
COMMON = {"weight_decay": 0.3, "seed": 7}
class CFG:
    batch = 4
    rank = 32
@dataclass
class Base:
    decay: float = 0.1
@dataclass
class Plan(Base):
    lr: float = 1e-4
    steps: int = 77
@dataclass
class Other:
    lr: float = 9e-4
    decay: float = 0.9
"""
UTILS = """\
from transformers import TrainingArguments
from peft import LoraConfig, get_peft_model
def make_args(out, lr, epochs=5, accumulation=8):
    return TrainingArguments(output_dir=out, learning_rate=lr, num_train_epochs=epochs, gradient_accumulation_steps=accumulation, per_device_train_batch_size=2)
def adapted(model, rank):
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank))
"""
HEAD = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
OPEN = ("could not be read", "not understood")
LOADED = "from transformers import AutoModelForCausalLM\nimport torch\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
OPTIMIZER = "opt = torch.optim.AdamW(m.parameters(), lr=1e-4)\n"
OWN_LOSS = "a loss of the script's own, which a job has not"
UNSLOTH = "from unsloth import FastLanguageModel\nfrom trl import SFTConfig, SFTTrainer\n"
FIELDS = "from dataclasses import dataclass\nfrom transformers import HfArgumentParser, Trainer, TrainingArguments\n@dataclass\nclass M:\n    name: str = 'a/b'\n    splits: str = 'train'\n    note: str = ''\nm, t = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\n"

CASES: dict[str, Case] = {
    "adapters of a quantized base, where all weights are to be trained": (
        {
            "a.yaml": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\nlora_rank: 8\nquantization_bit: 4\n"
        },
        {"model.lora.rank": 8, "model.quantization": "nf4"},
        ('changed: a.yaml:3: finetuning_type "full": quantized weights are frozen: trained with LoRA',),
        ("not understood", "is of no use", "assumed: LoRA", "no file has adapters"),
    ),
    "ranks of no use, where no weights are quantized": (
        {"a.yaml": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\nlora_rank: 8\n"},
        {"model.lora": None},
        ("lora_rank 8 is of no use",),
        ("quantized weights",),
    ),
    "neat_packing turns packing on": (
        {"a.yaml": "model_name_or_path: a/b\nstage: sft\npacking: false\nneat_packing: true\n"},
        {"data.packing": True},
        (),
        ("conflict",),
    ),
    "neat_packing that is off does not": (
        {"a.yaml": "model_name_or_path: a/b\nstage: sft\npacking: false\nneat_packing: false\n"},
        {"data.packing": False},
        (),
        ("conflict",),
    ),
    **{
        f"the warm-up of a schedule that a job has not: {schedule}": (
            {"a.yaml": f"model_name_or_path: a/b\nlr_scheduler_type: {schedule}\nwarmup_ratio: 0.1\n"},
            {"optimizer.warmup_steps": 0.1},
            (f"`{schedule}`: trained with another schedule",),
            ("has no warm-up",),
        )
        for schedule in ("polynomial", "cosine_with_restarts", "inverse_sqrt", "cosin")
    },
    "the warm-up of such a schedule in a script": (
        {
            "train.py": "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', lr_scheduler_type='polynomial', warmup_steps=100)).train()\n"
        },
        {"optimizer.warmup_steps": 100},
        ("trained with another schedule",),
        ("has no warm-up",),
    ),
    "such a schedule without a warm-up": (
        {"a.yaml": "model_name_or_path: a/b\nstage: sft\nlr_scheduler_type: polynomial\n"},
        {"optimizer.warmup_steps": 0},
        ("optimizer.warmup_steps=0",),
        ("has no warm-up",),
    ),
    "DeepSpeed's schedule runs, with the Trainer's warm-up": (
        {"run.sh": f"deepspeed train.py --deepspeed z.json {CONSTANT}", "train.py": FILLED, "z.json": WARMUP},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0.05},
        (),
        ("has no warm-up", "conflict"),
    ),
    "DeepSpeed's schedule, of arguments in the script": (
        {
            "train.py": "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', deepspeed='z.json', lr_scheduler_type='constant', warmup_steps=20)).train()\n",
            "z.json": WARMUP,
        },
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 20},
        (),
        ("has no warm-up",),
    ),
    "the Trainer's constant schedule alone": (
        {"run.sh": f"python train.py {CONSTANT}", "train.py": FILLED},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
        ("warmup_ratio 0.05: the constant schedule has no warm-up",),
        ("conflict",),
    ),
    "the Trainer's constant schedule, with a count": (
        {"a.yaml": "model_name_or_path: a/b\nwarmup_steps: 20\nlr_scheduler_type: constant\n"},
        {"optimizer.warmup_steps": 0},
        ("warmup_steps 20: the constant schedule has no warm-up",),
        (),
    ),
    "a function of another file makes the arguments": (
        {
            "src/train.py": f"{HEAD}from src.config import CFG, EPOCHS, LR\nfrom src.utils import adapted, make_args as made\nm = adapted(m, CFG.rank)\nTrainer(m, made('o', LR, epochs=EPOCHS)).train()\n",
            "src/config.py": CONFIG,
            "src/utils.py": UTILS,
        },
        {
            "model.lora.rank": 32,
            "model.lora.alpha": 64,
            "optimizer.learning_rate": 3e-4,
            "train.epochs": 2,
            "train.global_batch": 16,
        },
        (),
        OPEN,
    ),
    "another file has the values, which another import names": (
        {
            "train.py": f"{HEAD}import config\nfrom config import Plan\nplan = Plan()\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr, weight_decay=plan.decay, num_train_epochs=config.EPOCHS, per_device_train_batch_size=config.CFG.batch)).train()\n",
            "config.py": CONFIG,
            "utils.py": UTILS,
        },
        {
            "model.lora": None,
            "optimizer.learning_rate": 1e-4,
            "optimizer.weight_decay": 0.1,
            "train.epochs": 2,
            "train.micro_batch": 4,
        },
        (),
        OPEN,
    ),
    "a star brings the values in": (
        {
            "train.py": f"{HEAD}from config import *\ndef main():\n    plan = Plan(lr=5e-4)\n    Trainer(m, TrainingArguments('o', learning_rate=plan.lr, max_steps=plan.steps, per_device_train_batch_size=CFG.batch, **COMMON)).train()\nif __name__ == '__main__':\n    main()\n",
            "config.py": CONFIG,
        },
        {"optimizer.learning_rate": 5e-4, "train.steps": 77, "train.micro_batch": 4, "train.seed": 7},
        (),
        OPEN,
    ),
    "a file that is not there has the fields": (
        {
            "train.py": f"{HEAD}import yaml\nfrom config import Plan\nplan = Plan(**yaml.safe_load(open('gone.yaml')))\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr)).train()\n",
            "config.py": CONFIG,
        },
        {"optimizer.learning_rate": None},
        ("train.py:6: learning_rate: its value could not be read; write optimizer.learning_rate",),
        (),
    ),
    "a file that is not named makes the arguments": (
        {
            "src/train.py": f"{HEAD}from . import log\nfrom src.made import made\nTrainer(m, made()).train()\n",
            "data/log.py": "",
        },
        {"optimizer.learning_rate": None, "train.epochs": None, "train.micro_batch": None},
        ("src/train.py:5: **.TrainingArguments: its value could not be read; write",),
        ("train.epochs=3",),
    ),
    "a term is added to the loss of a loop": (
        {
            "train.py": f"{LOADED}{OPTIMIZER}for batch in loader:\n    out = m(**batch)\n    loss = out.loss + 0.1 * kl(out)\n    loss.backward()\n    opt.step()\n"
        },
        {},
        (f"to do: train.py:7: {OWN_LOSS}",),
        (),
    ),
    "a term is added in a function, and learned with a scaler": (
        {
            "train.py": f"{LOADED}def run():\n    {OPTIMIZER}    for batch in loader:\n        total = m(**batch).loss\n        total += balance(m)\n        scaler.scale(total / 4).backward()\n        opt.step()\nrun()\n"
        },
        {},
        (f"to do: train.py:8: {OWN_LOSS}",),
        (),
    ),
    "a term is added in a trainer of one's own": (
        {
            "train.py": f"{HEAD}class Mine(Trainer):\n    def compute_loss(self, model, inputs, return_outputs=False, **more):\n        out = model(**inputs)\n        loss = out.loss\n        loss = loss - self.entropy(out)\n        return (loss, out) if return_outputs else loss\nMine(m, TrainingArguments('o')).train()\n"
        },
        {"optimizer.learning_rate": 5e-5},
        (f"to do: train.py:7: {OWN_LOSS}",),
        (),
    ),
    "a step of one's own": (
        {
            "train.py": f"{HEAD}class Mine(Trainer):\n    def training_step(self, model, inputs):\n        return attacked(model, inputs)\nMine(m, TrainingArguments('o')).train()\n"
        },
        {},
        (f"to do: train.py:4: {OWN_LOSS}",),
        (),
    ),
    "a loss that is only counted": (
        {
            "train.py": f"{LOADED}{OPTIMIZER}total = 0\nfor batch in loader:\n    loss = m(**batch).loss / 4\n    accelerator.backward(loss)\n    total += loss.item()\n    opt.step()\n"
        },
        {"optimizer.learning_rate": 1e-4},
        (),
        (OWN_LOSS,),
    ),
    "a trainer's loss that is logged": (
        {
            "train.py": f"{HEAD}class Mine(Trainer):\n    def compute_loss(self, model, inputs, **more):\n        loss = super().compute_loss(model, inputs, **more)\n        self.log({{'n': loss.item() + 1}})\n        return loss\nMine(m, TrainingArguments('o')).train()\n"
        },
        {},
        (),
        (OWN_LOSS,),
    ),
    "a loss that a function of its name counts": (
        {
            "train.py": f"{HEAD}def mean_loss(rows):\n    loss = 0\n    for row in rows:\n        loss += m(**row).loss.item()\n    return loss / len(rows)\nTrainer(m, TrainingArguments('o'), compute_metrics=mean_loss).train()\n"
        },
        {},
        (),
        (OWN_LOSS,),
    ),
    "conversations by the template of the tokenizer": (
        {
            "train.py": f"{HEAD}rows = rows.map(lambda row: {{'text': tokenizer.apply_chat_template(row['messages'], tokenize=False)}})\nTrainer(m, TrainingArguments('o'), train_dataset=rows).train()\n"
        },
        {},
        (),
        ("tokenised field",),
    ),
    "flags that nobody reads": (
        {
            "run.sh": "python train.py --splits train,test --note hi --learning_rate 1e-4 --output_dir o\n",
            "train.py": f"{FIELDS}print(m.note)\nTrainer(model=make(m), args=t).train()\n",
        },
        {"optimizer.learning_rate": 1e-4},
        ("to do: run.sh:1: splits: no script of --from reads them", "a job has no such key: note"),
        (),
    ),
    "a flag of a parser in another file is read": (
        {
            "run.sh": "python train.py --rate 1e-4 --odd 1 --model_name_or_path c/d\n",
            "train.py": f"{HEAD}from made import args\nTrainer(m, TrainingArguments('o', learning_rate=args.rate)).train()\n",
            "made.py": "import argparse\np = argparse.ArgumentParser()\np.add_argument('--rate', type=float)\np.add_argument('--odd')\np.add_argument('--model_name_or_path')\nargs = p.parse_args()\n",
        },
        {"optimizer.learning_rate": 1e-4},
        ("no such key: odd",),
        ("no such key: rate", "no script of --from reads"),
    ),
    "keys of a file that the script uses": (
        {
            "train.py": f"{HEAD}import yaml\ncfg = yaml.safe_load(open('own.yaml'))\nTrainer(m, TrainingArguments('o', learning_rate=cfg['plan']['speed'], weight_decay=cfg['wd'])).train()\n",
            "own.yaml": "plan: {speed: 3.0e-5, other: 1}\nwd: 0.2\n",
        },
        {"optimizer.learning_rate": 3e-5, "optimizer.weight_decay": 0.2},
        ("left out: own.yaml: plan.other: no script reads it",),
        ("plan.speed", "wd"),
    ),
    "GPUs that share a row count once": (
        {
            "run.sh": "NPROC_PER_NODE=8 swift sft --model a/b --dataset d.jsonl --sequence_parallel_size 4 --per_device_train_batch_size 1 --gradient_accumulation_steps 8\n"
        },
        {"train.global_batch": 16, "train.micro_batch": 1},
        ("changed: a job keeps a row on one GPU; the files share it among 4",),
        ("sequence_parallel_size",),
    ),
    "GPUs that share a row, for Axolotl and Accelerate": (
        {
            "run.sh": "accelerate launch --config_file acc.yaml -m axolotl.cli.train a.yaml\n",
            "a.yaml": "base_model: a/b\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\ncontext_parallel_size: 2\nlearning_rate: 1e-5\n",
            "acc.yaml": "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n",
        },
        {"train.global_batch": 32, "train.micro_batch": 2},
        ("share it among 2",),
        (),
    ),
    "Unsloth's checkpointing, whatever the Trainer says": (
        {
            "train.py": f"{UNSLOTH}m, t = FastLanguageModel.from_pretrained('a/b', max_seq_length=2048)\nm = FastLanguageModel.get_peft_model(m, lora_alpha=32, use_gradient_checkpointing='unsloth')\nSFTTrainer(model=m, args=SFTConfig(learning_rate=1e-4, gradient_checkpointing=False)).train()\n"
        },
        {"train.checkpointing": "full", "model.lora.rank": 16, "model.lora.alpha": 32},
        (),
        ("conflict",),
    ),
    "PEFT's preparation turns checkpointing on": (
        {
            "train.py": f"{HEAD}from peft import prepare_model_for_kbit_training\nm = AutoModelForCausalLM.from_pretrained('a/b', load_in_4bit=True)\nm = prepare_model_for_kbit_training(m)\nTrainer(m, TrainingArguments('o', gradient_checkpointing=False)).train()\n"
        },
        {"train.checkpointing": "full"},
        (),
        ("conflict",),
    ),
    "neither turns checkpointing on": (
        {
            "train.py": f"{HEAD}from peft import prepare_model_for_kbit_training\nm = prepare_model_for_kbit_training(m, use_gradient_checkpointing=False)\nTrainer(m, TrainingArguments('o', gradient_checkpointing=False)).train()\n"
        },
        {"train.checkpointing": "none"},
        (),
        (),
    ),
    "adapters of one's own": (
        {"train.py": f"{HEAD}class LoRALinear:\n    pass\nTrainer(m, TrainingArguments('o')).train()\n"},
        {"model.lora": None},
        ("to do: train.py:3: lora LoRALinear: not understood; write model.lora",),
        (),
    ),
    "adapters of a file that is not named": (
        {
            "train.py": f"{HEAD}from data.own import add_lora_layers\nadd_lora_layers(m)\nTrainer(m, TrainingArguments('o')).train()\n",
            "data/own.py": "class LoRA:\n    pass\n",
        },
        {"model.lora": None},
        (
            "to do: train.py:3: lora add_lora_layers: not understood; write model.lora",
            "to do: train.py:3: add data/own.py to --from",
        ),
        (),
    ),
    "a loop over a file sets the fields": (
        {
            "train.py": f"{HEAD}import yaml\nfrom config import Plan\ndef read(path):\n    with open(path) as file:\n        return yaml.safe_load(file) or {{}}\nplan = Plan()\nfor key, value in read('own.yaml').items():\n    if hasattr(plan, key):\n        setattr(plan, key, value)\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr, max_steps=plan.steps)).train()\n",
            "config.py": CONFIG,
            "own.yaml": "lr: 0.002\n",
        },
        {"optimizer.learning_rate": 0.002, "train.steps": 77},
        (),
        ("could not be read",),
    ),
    "a loop over what nothing shows sets the fields": (
        {
            "train.py": f"{HEAD}from config import Plan\nplan = Plan()\nfor key, value in given().items():\n    setattr(plan, key, value)\nTrainer(m, TrainingArguments('o', learning_rate=plan.lr)).train()\n",
            "config.py": CONFIG,
        },
        {"optimizer.learning_rate": None},
        ("train.py:7: learning_rate: its value could not be read",),
        (),
    ),
    "keys of a file that no script reads": (
        {
            "train.py": f"{HEAD}import json\nwith open('own.json') as file:\n    cfg = json.load(file)\nTrainer(m, TrainingArguments('o', learning_rate=cfg['learning_rate'])).train()\n",
            "own.json": '{"learning_rate": 3e-5, "weight_decay": 0.2, "adam_beta2": 0.95}',
        },
        {"optimizer.learning_rate": 3e-5, "optimizer.weight_decay": None, "optimizer.beta2": 0.999},
        ("left out: own.json: adam_beta2, weight_decay: no script reads it",),
        (),
    ),
    "keys of a file that a call takes together": (
        {
            "train.py": f"{HEAD}import json\nwith open('own.json') as file:\n    cfg = json.load(file)\nTrainer(m, TrainingArguments('o', **cfg)).train()\n",
            "own.json": '{"learning_rate": 3e-5, "weight_decay": 0.2}',
        },
        {"optimizer.learning_rate": 3e-5, "optimizer.weight_decay": 0.2},
        (),
        ("no script reads it",),
    ),
    "classes in a table": (
        {
            "train.py": "from tools import table\nt = table()\nm = t['AutoModelForCausalLM'].from_pretrained('a/b')\nargs = t['SFTConfig'](output_dir='o', learning_rate=7e-5, eval_strategy='epoch')\nt['SFTTrainer'](model=m, args=args).train()\n"
        },
        {"model.source": "a/b", "optimizer.learning_rate": 7e-5, "optimizer.beta2": 0.999},
        ("to do: train.py:4: eval_strategy: which rows it takes is not known; write data.eval",),
        (),
    ),
    "one of several settings of another file": (
        {
            "run.sh": "python train.py --plan large\n",
            "train.py": f"import argparse\n{HEAD}from plans import plan_of\np = argparse.ArgumentParser()\np.add_argument('--plan', default='small')\nplan = plan_of(p.parse_args().plan)\nif 'a/' in plan['model'].lower():\n    rate = plan['rate']\nelse:\n    rate = 1\nTrainer(m, TrainingArguments('o', learning_rate=rate, max_steps=plan['steps'])).train()\n",
            "plans.py": "PLANS = {'small': {'model': 'a/b', 'rate': 1e-4, 'steps': 5}, 'large': {'model': 'A/c', 'rate': 2e-4, 'steps': 50}}\ndef plan_of(name):\n    plan = PLANS[name].copy()\n    print(plan['model'].upper())\n    return plan\nif __name__ == '__main__':\n    print(plan_of('small'))\n",
        },
        {"optimizer.learning_rate": 2e-4, "train.steps": 50},
        (),
        OPEN,
    ),
    "flags of a list that a branch adds to": (
        {
            "run.sh": 'N=8\nPY=python\nCMD=(\n  "$PY" train.py\n  --lora_r "$N"\n  --epochs 2\n)\nif [ -n "$MORE" ]; then\n  CMD+=(--more "$MORE")\nfi\n"${CMD[@]}"\n',
            "train.py": f"import fire\n{HEAD}from peft import LoraConfig\ndef train(lora_r=64, epochs=3, more=None):\n    LoraConfig(r=lora_r)\n    Trainer(m, TrainingArguments('o', num_train_epochs=epochs)).train()\nfire.Fire(train)\n",
        },
        {"model.lora.rank": 8, "train.epochs": 2},
        ("only the shell knows the flags in it",),
        (),
    ),
    "a flag that a branch may change": (
        {
            "run.sh": 'CMD=(python train.py --epochs 2)\nif [ -n "$MORE" ]; then\n  CMD+=(--epochs 4)\nfi\n"${CMD[@]}"\n',
            "train.py": f"import fire\n{HEAD}def train(epochs=3):\n    Trainer(m, TrainingArguments('o', num_train_epochs=epochs)).train()\nfire.Fire(train)\n",
        },
        {},
        ("only the shell knows the flags in it",),
        (),
    ),
    "a table of settings that is not named": (
        {
            "train.py": f"{HEAD}from data.plans import PLANS\nplan = PLANS['a']\nTrainer(m, TrainingArguments('o', learning_rate=plan.rate)).train()\n",
            "data/plans.py": "class Plan:\n    lora_r: int\n    rate: float\nPLANS = {'a': Plan()}\n",
        },
        {"optimizer.learning_rate": None},
        ("to do: train.py:3: add data/plans.py to --from",),
        (),
    ),
    "what two of three branches say": (
        {
            "train.py": f"{HEAD}kind = input()\nif kind == 'a':\n    args = TrainingArguments('o', learning_rate=3e-5)\nelif kind == 'b':\n    args = TrainingArguments('o', learning_rate=3e-5, seed=int(kind))\nelse:\n    args = made(kind)\nTrainer(m, args).train()\n"
        },
        {"optimizer.learning_rate": None},
        ("learning_rate: its value could not be read",),
        (),
    ),
    "what all three branches say": (
        {
            "train.py": f"{HEAD}kind = input()\nif kind == 'a':\n    args = TrainingArguments('o', learning_rate=3e-5)\nelif kind == 'b':\n    args = TrainingArguments('o', learning_rate=3e-5, weight_decay=0.1)\nelse:\n    args = TrainingArguments('o', learning_rate=3e-5, weight_decay=0.2)\nTrainer(m, args).train()\n"
        },
        {"optimizer.learning_rate": 3e-5, "optimizer.weight_decay": None},
        ("weight_decay: its value could not be read",),
        (),
    ),
    "a seed that only a run knows": (
        {
            "train.py": f"{UNSLOTH}m, t = FastLanguageModel.from_pretrained('a/b')\nm = FastLanguageModel.get_peft_model(m, r=8)\nSFTTrainer(model=m, args=SFTConfig(seed=int(input()))).train()\n"
        },
        {"train.seed": None},
        (),
        ("train.seed=3407",),
    ),
    "a section within a section": (
        {
            "a.yaml": "model:\n  base: x\ntraining:\n  run: 1\n  args:\n    learning_rate: 3.0e-5\n    num_train_epochs: 2\n    per_device_train_batch_size: 4\n  sft:\n    max_seq_length: 5000\n"
        },
        {
            "optimizer.learning_rate": 3e-5,
            "train.epochs": 2,
            "train.micro_batch": 4,
            "data.sequence_length": 5000,
        },
        (),
        (),
    ),
    "plans that change a section": (
        {
            "a.yaml": "training:\n  learning_rate: 3.0e-5\n  num_train_epochs: 2\n  per_device_train_batch_size: 4\nplans:\n  small:\n    training:\n      learning_rate: 9.0e-5\n      num_train_epochs: 1\n      per_device_train_batch_size: 1\n    data:\n      max_seq_length: 64\n"
        },
        {"optimizer.learning_rate": 3e-5, "train.epochs": 2},
        ("to do: a.yaml:1: training, plans.small.training: give a file with the one of these sections",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_unseen_files_are_read_right(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
