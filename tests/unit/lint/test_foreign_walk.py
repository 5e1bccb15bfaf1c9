# ruff: noqa: E501 - the files are text
"""What a strict user found wrong or lost: files in, values of the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TRAINER = "import argparse, os\nfrom transformers import Trainer, TrainingArguments, AutoModelForCausalLM\n"


def with_world(world: str, before: str = "") -> str:
    """A script whose accumulation is 64 rows, over micro-batches of 4 on each of the processes."""
    return (
        f"{TRAINER}{before}world = {world}\nTrainer(model=m, args=TrainingArguments(output_dir='o', "
        "per_device_train_batch_size=4, gradient_accumulation_steps=64 // (4 * world))).train()\n"
    )


TORCHRUN = "torchrun --nproc_per_node=4 train.py\n"
WORLD = "int(os.environ.get('WORLD_SIZE', 1))"
DISTRIBUTED = "import torch.distributed as dist\n"
ACCELERATOR = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
OPEN_BATCH = (
    "its value could not be read; of a step's rows the files say",
    "write train.micro_batch, train.global_batch",
)
CASES: dict[str, Case] = {
    f"world: {name}": ({"run.sh": command, "train.py": script}, {"train.global_batch": 64}, (), ("GPUs",))
    for name, command, script in [
        ("get", TORCHRUN, with_world(WORLD)),
        ("getenv", TORCHRUN, with_world("int(os.getenv('WORLD_SIZE') or 1)")),
        ("index", TORCHRUN, with_world("int(os.environ['WORLD_SIZE'])")),
        ("local", TORCHRUN, with_world("int(os.environ.get('LOCAL_WORLD_SIZE', '1'))")),
        ("torch", TORCHRUN, with_world("dist.get_world_size()", DISTRIBUTED)),
        ("torch, whole", TORCHRUN, with_world("torch.distributed.get_world_size()", "import torch\n")),
        (
            "accelerate",
            "accelerate launch --num_processes 4 train.py\n",
            with_world("accelerator.num_processes", ACCELERATOR),
        ),
        ("two nodes", "torchrun --nproc_per_node 2 --nnodes 2 train.py\n", with_world(WORLD)),
        ("the shell has another", f"export WORLD_SIZE=2\n{TORCHRUN}", with_world(WORLD)),
        ("deepspeed", "deepspeed --num_gpus 4 train.py\n", with_world(WORLD)),
    ]
}
CASES |= {
    f"world unknown: {name}": (files, {"train.micro_batch": 4, "train.global_batch": None}, OPEN_BATCH, ())
    for name, files in {
        "no command": {"train.py": with_world(WORLD)},
        "no count": {"run.sh": "deepspeed train.py\n", "train.py": with_world(WORLD)},
        "the shell's nodes": {
            "run.sh": "torchrun --nproc_per_node 4 --nnodes $N train.py\n",
            "train.py": with_world(WORLD),
        },
        "a rank": {"run.sh": TORCHRUN, "train.py": with_world("1 + int(os.environ.get('LOCAL_RANK', 0))")},
        "the scheduler's": {
            "run.sh": TORCHRUN,
            "train.py": with_world("int(os.environ.get('SLURM_NTASKS', 1))"),
        },
        "of some": {"run.sh": TORCHRUN, "train.py": with_world("dist.get_world_size(group)", DISTRIBUTED)},
    }.items()
}

HF = """\
import sys
from dataclasses import dataclass, field
from typing import List, Optional
from peft import LoraConfig
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Own:
    model_id: str = field(default="gpt2")
    adapters: bool = False
    alpha: Optional[int] = None
    modules: List[str] = field(default_factory=lambda: ["q_proj"])
    cut: int = 512
    note: str = "n"
@dataclass
class Args(TrainingArguments):
    weight_decay: float = 0.02
def main():
    parser = HfArgumentParser((Own, Args))
    own, t = parser.parse_json_file(sys.argv[1]) if sys.argv[1:] else parser.parse_args_into_dataclasses()
    model = AutoModelForCausalLM.from_pretrained(own.model_id)
    if own.adapters:
        LoraConfig(r=8, lora_alpha=own.alpha or 32, target_modules=own.modules)
    data.map(lambda row: tokenizer(row, truncation=True, max_length=own.cut))
    Trainer(model=model, args=t).train()
main()
"""
YAML = "model_id: a/b\nadapters: true\nmodules: [k_proj, v_proj]\ncut: 3072\nlearning_rate: 1.0e-4\nweight_decay: 0.1\nwarmup_ratio: 0.1\nnote: x\n"
JSON = '{"model_id": "a/b", "adapters": true, "modules": ["k_proj", "v_proj"], "cut": 3072, "learning_rate": 1e-4, "weight_decay": 0.1, "note": "x"}'
OWN = {
    "model.source": "a/b",
    "model.lora.alpha": 32,
    "model.lora.targets": ["k_proj", "v_proj"],
    "data.sequence_length": 3072,
    "optimizer.learning_rate": 1e-4,
    "optimizer.weight_decay": 0.1,
}
OWN_YAML = OWN | {"optimizer.warmup_steps": 0.1}
NOT_OWN = ("conflict",)
TRL = """\
from datasets import load_dataset
from trl import ModelConfig, ScriptArguments, SFTConfig, SFTTrainer, TrlParser
def main(script_args, training_args, model_args):
    dataset = load_dataset(script_args.dataset_name, name=script_args.dataset_config)
    SFTTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=dataset[script_args.dataset_train_split]).train()
main(*TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_args_and_config())
"""
TRL_JOB = {
    "model.source": "a/b",
    "data.train": "c/d",
    "data.split": "train_sft",
    "data.subset": None,
    "optimizer.schedule": "cosine",
    "optimizer.final_fraction": 0.1,
}
SFT = "--model_name_or_path a/b --dataset_name c/d --dataset_train_split train_sft --lr_scheduler_type cosine_with_min_lr"
CASES |= {
    "parser: a YAML": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py c.yaml\n", "train.py": HF, "c.yaml": YAML},
        OWN_YAML,
        ("left out: a job has no such key: note",),
        NOT_OWN,
    ),
    "parser: a YAML that the command names": (
        {
            "run.sh": "torchrun --nproc_per_node 2 data/train.py c.yaml\n",
            "data/train.py": HF,
            "data/c.yaml": "",
            "c.yaml": YAML,
        },
        OWN,
        (),
        NOT_OWN,
    ),
    "parser: a JSON": (
        {"run.sh": "python train.py c.json\n", "train.py": HF, "c.json": JSON},
        OWN,
        (),
        NOT_OWN,
    ),
    "parser: no command": ({"train.py": HF, "c.yaml": YAML}, OWN, (), NOT_OWN),
    "parser: flags": (
        {
            "run.sh": "python train.py --model_id a/b --adapters --modules k_proj v_proj --cut 3072 --learning_rate 1e-4 --weight_decay 0.1 2>&1 | tee log\n",
            "train.py": HF,
        },
        OWN,
        (),
        NOT_OWN,
    ),
    "parser: TRL's file": (
        {
            "run.sh": "accelerate launch --num_processes 2 sft.py --config data/c.yaml --learning_rate 4e-5\n",
            "data/c.yaml": "model_name_or_path: a/b\ndataset_name: c/d\ndataset_train_split: train_sft\nlr_scheduler_type: cosine_with_min_lr\n"
            "lr_scheduler_kwargs: {min_lr_rate: 0.1}\nmax_steps: 2000\nlearning_rate: 2.0e-5\n",
            "sft.py": TRL,
        },
        TRL_JOB | {"train.steps": 2000, "optimizer.learning_rate": 4e-5},
        (),
        ("to do",),
    ),
    "parser: TRL's flags": (
        {
            "run.sh": f'torchrun --nproc_per_node 2 sft.py {SFT} --lr_scheduler_kwargs {{\\"min_lr_rate\\":0.1}}\n',
            "sft.py": TRL,
        },
        TRL_JOB,
        (),
        ("to do", "left out"),
    ),
    "parser: TRL's flags, quoted": (
        {
            "run.sh": f"torchrun --nproc_per_node 2 sft.py {SFT} --lr_scheduler_kwargs '{{\"min_lr_rate\": 0.1}}'\n",
            "sft.py": TRL,
        },
        TRL_JOB,
        (),
        ("to do",),
    ),
    "parser: a file that is not there": (
        {"run.sh": f"torchrun --nproc_per_node 2 sft.py --config c.yaml {SFT}\n", "sft.py": TRL},
        {},
        ("to do: run.sh:1: c.yaml is not there; add it to --from",),
        (),
    ),
    "a least rate": (
        {
            "c.yaml": "model_name_or_path: a/b\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\n"
        },
        {"optimizer.schedule": "cosine"},
        ("to do: c.yaml:3: lr_scheduler_kwargs.min_lr 1e-06: write optimizer.final_fraction",),
        (),
    ),
}

DICT = """\
T = {"num_train_epochs": 1, "lr_scheduler_type": "linear", "save_steps": 100, "optim": "adafactor"}
"""
USED = "Trainer(model=m, args=TrainingArguments(output_dir='o', **T)).train()\n"
CASES |= {
    "dict: |= a literal": (
        {
            "train.py": f"{TRAINER}{DICT}T |= {{'num_train_epochs': 2, 'lr_scheduler_type': 'constant'}}\n{USED}"
        },
        {"train.epochs": 2, "optimizer.schedule": "constant", "train.save_every": 100},
        ("optim (line 3) `adafactor`: trained with AdamW",),
        (),
    ),
    "dict: |= a name": (
        {"train.py": f"{TRAINER}{DICT}T |= other()\n{USED}"},
        {"train.epochs": None, "optimizer.schedule": None, "train.save_every": None},
        ("train.epochs", "train.save_every", "write optimizer.name"),
        (),
    ),
    "dict: changed by a function elsewhere": (
        {"train.py": f"{TRAINER}{DICT}change(T)\n{USED}"},
        {"train.epochs": None, "train.save_every": None},
        ("train.epochs", "train.save_every", "write optimizer.name"),
        (),
    ),
    "dict: in a branch": (
        {"train.py": f"{TRAINER}{DICT}if x:\n    T |= {{'num_train_epochs': 2}}\n{USED}"},
        {"train.epochs": None, "optimizer.schedule": None},
        ("train.epochs",),
        (),
    ),
    "dict: |= of a number": (
        {
            "train.py": f"{TRAINER}n = 1\nn |= 6\nTrainer(model=m, args=TrainingArguments(output_dir='o', num_train_epochs=n))\n"
        },
        {"train.epochs": None},
        ("write train.epochs",),
        (),
    ),
    "dict: given to main": (
        {
            "train.py": f"{TRAINER}import torch\nconfig = {{'seed': 3, 'lr': 5e-5}}\ndef main(config):\n    set_seed(config['seed'])\n    torch.optim.AdamW(p, lr=config['lr'])\nif __name__ == '__main__':\n    main(config)\n"
        },
        {"train.seed": 3, "optimizer.learning_rate": 5e-5},
        (),
        (),
    ),
    "stored by a tuple": (
        {
            "train.py": "import torch\nfrom torch.utils.data import DataLoader\nclass Data:\n    def __init__(self, name, rows):\n        self.name, self.rows = name, rows\n    def load(self):\n        return DataLoader(self.data, batch_size=self.rows)\nd = Data('x', rows=4)\n"
        },
        {"train.micro_batch": 4},
        (),
        (),
    ),
}

LOOP = """\
import argparse, torch
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=8)
p.add_argument("-s", "--seq-length", type=int, default=1024)
p.add_argument("--clip", type=float, default=None)
a = p.parse_args()
rows = [ids[i : i + a.seq_length] for i in range(0, n, a.seq_length)]
torch.utils.data.DataLoader(rows, batch_size=a.batch_size)
torch.optim.AdamW(model.parameters(), lr=1e-5)
if a.clip is not None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), a.clip)
"""
CASES |= {
    "flags: short": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py -b 2 -s 4096\n", "train.py": LOOP},
        {
            "train.micro_batch": 2,
            "data.sequence_length": 4096,
            "optimizer.clip_norm": 0,
        },
        (),
        ("flags of", "clip_norm:"),
    ),
    "flags: a default cuts the rows": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py -b 2\n", "train.py": LOOP},
        {"data.sequence_length": 1024},
        (),
        ("sequence_length 1024",),
    ),
    "flags: --seq": (
        {
            "run.sh": "python train.py\n",
            "train.py": LOOP.replace("seq-length", "seq").replace("seq_length", "seq").replace("1024", "512"),
        },
        {"data.sequence_length": 512},
        (),
        (),
    ),
    "flags: None without a command": (
        {"train.py": LOOP},
        {"optimizer.clip_norm": None},
        ("write optimizer.clip_norm",),
        (),
    ),
}
FSDP = '{"fsdp_version": 2, "reshard_after_forward": true, "transformer_layer_cls_to_wrap": ["L"], "cpu_ram_efficient_loading": true}'
CASES |= {
    "the Trainer's FSDP file": (
        {
            "run.sh": "torchrun --nproc_per_node 2 t.py --fsdp full_shard --fsdp_config f.json --bf16\n",
            "f.json": FSDP,
        },
        {"strategy": "fsdp2"},
        (),
        ("did you mean", "no such key"),
    ),
}

ENCODE = """\
IGNORE_INDEX = -100
def encode(row):
    prompt = f"### Instruction: {row['instruction']}"
    a, b = tok(prompt), tok(row["output"])
    return {"input_ids": a + b, "labels": [IGNORE_INDEX] * len(a) + b}
data.map(encode)
Trainer(model=m, args=TrainingArguments(output_dir='o'))
"""
AXOLOTL = "base_model: a/b\ndatasets:\n  - path: c/d\n    type: alpaca\ntrain_on_inputs: false\nmicro_batch_size: 1\n"
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: one,two\n"
INFO = '{"one": {"file_name": "1.json"}, "two": {"file_name": "2.json", "formatting": "sharegpt", "columns": {"messages": "turns"}, "tags": {"role_tag": "r"}}}'
LIGHTNING = """\
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
L.Trainer(devices=2, num_nodes=3, accumulate_grad_batches=8, callbacks=[ModelCheckpoint(every_n_train_steps=500, save_top_k=3, monitor="loss")])
"""
CASES |= {
    "text of a function": (
        {"train.py": TRAINER + ENCODE},
        {"data.loss_on": "answers"},
        ("text by encode (line 4) `f\"### Instruction: {row['instruction']}\"`: prepare the rows",),
        ("shardwise's own: data.sequence_length 1024, data.loss_on",),
    ),
    "text of a lambda": (
        {
            "train.py": f"{TRAINER}data.map(lambda r: {{'text': r['a'] + ' ' + r['b']}})\nTrainer(model=m, args=TrainingArguments(output_dir='o'))\n"
        },
        {},
        ("text by a lambda (line 3): prepare",),
        (),
    ),
    "text of a trainer's function": (
        {
            "train.py": "from trl import SFTTrainer, SFTConfig\nSFTTrainer(model='a/b', args=SFTConfig(output_dir='o'), formatting_func=elsewhere)\n"
        },
        {"model.source": "a/b"},
        ("formatting_func (line 2)",),
        (),
    ),
    "tokens of a function are no text": (
        {
            "train.py": f"{TRAINER}data.map(lambda r: tok(r['text']))\nTrainer(model=m, args=TrainingArguments(output_dir='o'))\n"
        },
        {},
        (),
        ("text by",),
    ),
    "train_on_inputs: false": ({"a.yaml": AXOLOTL}, {"data.loss_on": "answers"}, (), ("loss_on",)),
    "datasets of two shapes": (
        {"f.yaml": FACTORY, "data/dataset_info.json": INFO},
        {"data.format": None},
        ("to do: data/dataset_info.json: formatting (line 1)", "prepare rows with the fields of data.format"),
        ("dataset_info.formatting", "columns"),
    ),
    "Lightning's checkpoints and nodes": (
        {"train.py": LIGHTNING + "import torch\ntorch.utils.data.DataLoader(rows, batch_size=size())\n"},
        {"train.save_every": 500, "train.keep": 3, "train.global_batch": None},
        (
            "of a step's rows the files say gpus 2, nodes 3, accumulation 8; write",
            "ModelCheckpoint.monitor (line 3)",
        ),
        (),
    ),
    "Lightning's batch": (
        {"train.py": LIGHTNING + "import torch\ntorch.utils.data.DataLoader(rows, batch_size=4)\n"},
        {"train.global_batch": 192},
        (),
        (),
    ),
    "the rest of the train split": (
        {
            "train.py": "from trl import SFTTrainer, SFTConfig\nfrom datasets import load_dataset\nd = load_dataset('a/b', split='train[:95%]')\ne = load_dataset('a/b', split='train[95%:]')\n"
            "SFTTrainer(model='a/b', args=SFTConfig(output_dir='o', eval_strategy='steps'), train_dataset=d, eval_dataset=e)\n"
        },
        {"data.split": "train[:95%]", "data.train": "a/b"},
        ("eval_dataset: a job takes these rows from a file, or holds out a share",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_and_nothing_is_lost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
