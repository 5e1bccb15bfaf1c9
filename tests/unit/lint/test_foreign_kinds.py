# ruff: noqa: E501 - the files are text
"""Scripts and commands of each kind that users write: files in, values of the job and sentences out.

A row of CASES: the files, the values of the job by key, and what the sentences must say. The order of the
files is that of `shardwise init --from`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign_files import made_of, value_of
from shardwise.job.source import job_values

Files = dict[str, str]

ARGPARSE = """\
import argparse, torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="gpt2")
parser.add_argument("-b", "--bs", type=int, default=1)
parser.add_argument("--learning-rate", "--lr", type=float, default=1e-3)
parser.add_argument("--wd", dest="decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--note", default="")
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model)
loader = DataLoader(rows, batch_size=args.bs)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.decay)
for epoch in range(args.epochs):
    for batch in loader:
        optimizer.step()
"""
OF_COMMAND = {
    "model.source": "a/b",
    "train.micro_batch": 4,
    "train.global_batch": 32,
    "optimizer.learning_rate": 5e-5,
    "train.epochs": 3,
}
FLAGS = "--model a/b --bs 4 --lr 5e-5 --epochs 3"
RUN = "torchrun --nproc_per_node 8 train.py"
SHELLS = {
    "plain": f"{RUN} {FLAGS}\n",
    "variables": f"M=a/b\nBS=4\nexport LR='5e-5' N=3\n{RUN} --model $M --bs ${{BS}} --lr \"$LR\" --epochs=$N\n",
    "defaults": f"BS=${{BS:-4}}\n{RUN} --model ${{MODEL:-a/b}} --bs $BS --lr ${{1:-5e-5}} --epochs ${{N-3}}\n",
    "sums": f"A=2\nB=$((A * 2))\n{RUN} --model a/b --bs $B --lr 5e-5 --epochs $(( (A+B)/2 ))\n",
    "array": f'ARGS=(\n  --model a/b  # the model\n  --bs 4\n)\nARGS+=(--lr 5e-5 --epochs 3)\n{RUN} "${{ARGS[@]}}"\n',
    "text": f'OPTS="--model a/b --bs 4"\nOPTS="$OPTS --lr 5e-5"\nOPTS+=" --epochs 3"\n{RUN} $OPTS\n',
    "lines": f"{RUN} \\\n  --model a/b \\\n  --bs 4 --lr 5e-5 \\\n  --epochs 3\n",
    "eval": f'CMD="{RUN} {FLAGS}"\necho "$CMD"\neval $CMD\n',
    "eval of parts": f'CMD="{RUN}"\nCMD="$CMD {FLAGS}"\nbash -c "$CMD"\n',
    "array of the command": f'CMD=({RUN} {FLAGS})\n"${{CMD[@]}}"\n',
    "launcher in a variable": f'LAUNCH="torchrun --nproc_per_node 8"\n$LAUNCH train.py {FLAGS}\n',
    "function": f"go() {{\n  {RUN} {FLAGS}\n}}\ngo\n",
    "slurm": "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4\n"
    f"srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE train.py {FLAGS}\n",
    "slurm tasks": "#SBATCH -N 2\n#SBATCH --ntasks-per-node=4\n" + f"srun python train.py {FLAGS}\n",
    "visible": f"CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 deepspeed train.py {FLAGS}\n",
    "include": f"deepspeed --include localhost:0,1,2,3,4,5,6,7 train.py {FLAGS}\n",
    "single quotes": f"ARGS='--model a/b --bs 4'\n{RUN} $ARGS --lr 5e-5 --epochs 3\n",
}
CASES: dict[str, tuple[Files, dict[str, Any], tuple[str, ...]]] = {
    f"shell: {name}": ({"run.sh": text, "train.py": ARGPARSE}, OF_COMMAND, ())
    for name, text in SHELLS.items()
}

# what a branch or a loop assigns is not certain
for name, text in {
    "case": 'BS=4\nwhile [[ $# -gt 0 ]]; do\n  case $1 in\n    --bs) BS="$2"; shift 2;;\n  esac\ndone\n',
    "empty": 'if [ -z "$BS" ]; then\n  BS=4\nfi\n',
}.items():
    CASES[f"shell: {name}"] = (
        {"run.sh": f"{text}{RUN} --model a/b --bs $BS --lr 5e-5 --epochs 3\n", "train.py": ARGPARSE},
        OF_COMMAND | {"train.micro_batch": None, "train.global_batch": None},
        ("its value could not be read; write train.micro_batch, train.global_batch",),
    )

# a command's flags, by each way to declare them; the job has the command's values
LOOP = """\
import torch
from torch.utils.data import DataLoader
def train(rate, rows, model):
    DataLoader(data, batch_size=rows)
    torch.optim.AdamW(model.parameters(), lr=rate)
"""
DECLARED = {
    "dataclass": "from dataclasses import dataclass\nfrom transformers import HfArgumentParser\n@dataclass\n"
    "class Own:\n    lr: float = 1e-3\n    bs: int = field(default=1)\n"
    "own, = HfArgumentParser(Own).parse_args_into_dataclasses()\ntrain(own.lr, own.bs, m)\n",
    "click": "import click\n@click.command()\n@click.option('--lr', default=1e-3)\n"
    "@click.option('--batch-size', '--bs', 'rows', default=1)\ndef main(lr, rows):\n    train(lr, rows, m)\n"
    "main()\n",
    "fire": "import fire\ndef main(lr: float = 1e-3, bs=1):\n    train(lr, bs, m)\nfire.Fire(main)\n",
    "typer": "import typer\napp = typer.Typer()\n@app.command()\n"
    "def main(lr: float = typer.Option(1e-3), bs: int = 1):\n    train(lr, bs, m)\napp()\n",
    "tyro": "import tyro\n@dataclass\nclass Args:\n    lr: float = 1e-3\n    bs: int = 1\n"
    "args = tyro.cli(Args)\ntrain(args.lr, args.bs, m)\n",
    "method": "class Config:\n    lr = 1e-3\n    bs = 1\nclass Own:\n    def __init__(self, cfg):\n"
    "        self.cfg = cfg\n    def go(self):\n        train(self.cfg.lr, self.cfg.bs, m)\n"
    "Own(parse(Config)).go()\n",
    "environment": "import os\ntrain(float(os.environ.get('LR', 1e-3)), int(os.environ['BS']), m)\n",
}
for name, text in DECLARED.items():
    shell = "export LR=3e-5\nexport BS=6\ntorchrun --nproc_per_node=2 train.py --lr $LR --bs $BS\n"
    CASES[f"flags: {name}"] = (
        {"train.py": LOOP + text, "run.sh": shell},
        {"optimizer.learning_rate": 3e-5, "train.micro_batch": 6, "train.global_batch": 12},
        (),
    )
CASES["flags: those of the Trainer, and one of the script's own"] = (
    {
        "train.py": "from transformers import HfArgumentParser, TrainingArguments, Trainer\n"
        "class ModelArguments:\n    name: str = 'x/y'\n    note: str = ''\n"
        "m, a = HfArgumentParser((ModelArguments, TrainingArguments)).parse_args_into_dataclasses()\n"
        "model = AutoModelForCausalLM.from_pretrained(m.name)\nTrainer(model, a)\n",
        "run.sh": "accelerate launch --num_processes 4 train.py --name c/d --note hi --learning_rate 1e-4 \\\n"
        "  --per_device_train_batch_size 2 --bf16 --lr_scheduler_type cosine --warmup_steps 10 --odd 1\n",
    },
    {
        "model.source": "c/d",
        "optimizer.learning_rate": 1e-4,
        "train.global_batch": 8,
        "train.precision": "bf16",
    },
    ("to do: run.sh:1: note, odd: no script of --from reads them",),
)
CASES["flags: train_batch_size of a script is not DeepSpeed's"] = (
    {
        "run.sh": "torchrun --nproc_per_node 4 train.py --train_batch_size 3\n",
        "train.py": ARGPARSE.replace('"-b", "--bs"', '"--train_batch_size"').replace(
            "args.bs", "args.train_batch_size"
        ),
    },
    {"train.micro_batch": 3, "train.global_batch": 12},
    (),
)
CASES["flags: what is computed of a flag is a to do"] = (
    {
        "run.sh": "torchrun --nproc_per_node 4 train.py --learning_rate 1e-3 --bs 2\n",
        "train.py": ARGPARSE.replace("lr=args.learning_rate", "lr=scaled(args.learning_rate)"),
    },
    {"optimizer.learning_rate": None, "train.micro_batch": 2},
    ("AdamW.lr: its value could not be read; write optimizer.learning_rate",),
)

TRAINER = """\
from dataclasses import replace
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("a/b")
"""
ARGUMENTS = 'args = TrainingArguments("out", bf16=False, learning_rate=1e-3, per_device_train_batch_size=1)\n'
LATER = {
    "attributes": ARGUMENTS
    + "args.per_device_train_batch_size = 8\nargs.bf16 = True\nargs.learning_rate = 1e-4\n",
    "setattr": ARGUMENTS
    + "setattr(args, 'per_device_train_batch_size', 8)\nargs.bf16 = True\nsetattr(args, 'learning_rate', 1e-4)\n",
    "replace": ARGUMENTS
    + "args = replace(args, per_device_train_batch_size=8, bf16=True, learning_rate=1e-4)\n",
    "main": "def main():\n    "
    + ARGUMENTS
    + "    args.per_device_train_batch_size = 2 * 4\n    args.bf16 = True\n"
    "    args.learning_rate = 1e-4\n    Trainer(model, args)\nif __name__ == '__main__':\n    main()\n",
    "in the main block": "if __name__ == '__main__':\n    "
    + ARGUMENTS
    + "    args.per_device_train_batch_size = 8\n"
    "    args.bf16 = True\n    args.learning_rate = 1e-4\n    Trainer(model, args)\n",
    "parsed": "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "args.per_device_train_batch_size = 8\nargs.bf16 = True\nargs.learning_rate = 1e-4\n",
    "dict": "c = {'lr': 1e-3}\nc['lr'] = 1e-4\nc.update(rows=8)\nc.update({'bf16': True})\n"
    "TrainingArguments('o', learning_rate=c['lr'], per_device_train_batch_size=c['rows'], bf16=c.get('bf16'))\n",
    "mapping": "c = dict(learning_rate=1e-3, bf16=True)\nc |= {}\nd = {**{'learning_rate': 1e-4}}\n"
    "d['per_device_train_batch_size'] = 8\nd.update({'bf16': True})\nTrainingArguments('o', **d)\n",
    "object": "class C:\n    lr = 1e-3\n    rows: int = 2\nconfig = C()\nconfig.lr = 1e-4\nconfig.rows = 8\n"
    "TrainingArguments('o', learning_rate=config.lr, per_device_train_batch_size=config.rows, bf16=True)\n",
    "namespace": "from types import SimpleNamespace\nconfig = SimpleNamespace(lr=1e-4, rows=8)\n"
    "TrainingArguments('o', learning_rate=config.lr, per_device_train_batch_size=config.rows, bf16=True)\n",
    "passed on": "class C:\n    lr = 1e-3\n    rows = 8\ndef go(cfg):\n    TrainingArguments('o', bf16=True,\n"
    "        learning_rate=cfg.lr, per_device_train_batch_size=cfg.rows)\nc = C()\nc.lr = 1e-4\ngo(c)\n",
    "a function's dict": "def get_config():\n    return {'train': {'lr': 1e-4, 'rows': 8, 'bf16': True}}\n"
    "config = get_config()\nt = config['train']\n"
    "TrainingArguments('o', learning_rate=t['lr'], per_device_train_batch_size=t['rows'], bf16=t['bf16'])\n",
    "a function's arguments": "def made(rows, **more):\n    return TrainingArguments('o', bf16=True, learning_rate=1e-4,\n"
    "        per_device_train_batch_size=rows)\nargs = made(rows=8)\n",
}
for name, text in LATER.items():
    CASES[f"later: {name}"] = (
        {"train.py": f"{TRAINER}{text}Trainer(model, args)\n"},
        {"optimizer.learning_rate": 1e-4, "train.micro_batch": 8, "train.precision": "bf16"},
        (),
    )
CASES["later: under a condition"] = (
    {"train.py": f"{TRAINER}{ARGUMENTS}if big:\n    args.learning_rate = 5e-5\nTrainer(model, args)\n"},
    {"optimizer.learning_rate": None},
    ("learning_rate: its value could not be read",),
)

UNSLOTH = """\
from unsloth import FastLanguageModel, is_bfloat16_supported
from trl import SFTConfig, SFTTrainer
from transformers import TrainingArguments
max_seq_length = 4096
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/Qwen3-8B", max_seq_length=max_seq_length, dtype=None, LOAD
)
model = FastLanguageModel.get_peft_model(model, r=32, lora_alpha=64, lora_dropout=0, bias="none",
    target_modules=["q_proj", "v_proj"], use_gradient_checkpointing="unsloth", random_state=3407, RANK
)
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, dataset_text_field="text",
    max_seq_length=max_seq_length, args=TrainingArguments(
        per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60,
        learning_rate=2e-4, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(),
        optim="adamw_8bit", weight_decay=0.01, lr_scheduler_type="linear", seed=3407, output_dir="outputs"))
"""
SEEN = {
    "model.source": "unsloth/Qwen3-8B",
    "data.sequence_length": 4096,
    "model.quantization": "nf4",
    "model.lora.rank": 32,
    "model.lora.alpha": 64,
    "model.lora.targets": ["q_proj", "v_proj"],
    "train.checkpointing": "full",
    "train.precision": "bf16",
    "train.steps": 60,
    "optimizer.name": "adamw8bit",
}
for name, load, rank, more in (
    ("4 bits", "load_in_4bit=True", "use_rslora=False", {}),
    ("the default is 4 bits", "token=t", "use_rslora=True", {"model.lora.variants": ["rslora"]}),
    ("8 bits", "load_in_4bit=False, load_in_8bit=True", "loftq_config=None", {"model.quantization": "int8"}),
    ("16 bits", "load_in_4bit=False", "max_seq_length=4096", {"model.quantization": None}),
):
    text = UNSLOTH.replace("LOAD", load).replace("RANK", rank)
    CASES[f"unsloth: {name}"] = ({"train.py": text}, SEEN | more, ("the GPUs compute in bf16",))
CASES["unsloth: its defaults"] = (
    {
        "train.py": "from unsloth import FastModel\nfrom trl import SFTTrainer, SFTConfig\nname = 'a/b'\n"
        "model, t = FastModel.from_pretrained(name, load_in_4bit=True)\nmodel = FastModel.get_peft_model(model, r=8)\n"
        "SFTTrainer(model, args=SFTConfig(max_steps=3))\n"
    },
    {"model.source": "a/b", "model.lora.rank": 8, "model.lora.alpha": 16, "train.checkpointing": "full"},
    ("assumed, as Unsloth does",),
)

FSDP = """\
import functools, torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy, CPUOffload
from torch.distributed.fsdp import fully_shard, MixedPrecisionPolicy, CPUOffloadPolicy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing, checkpoint_wrapper, CheckpointImpl)
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("a/b")
"""
HALF = "MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)"
SHARDED: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "full shard": (
        f"FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, mixed_precision={HALF})\n"
        "model.clip_grad_norm_(0.5)\n",
        {
            "strategy.engine": "fsdp2",
            "strategy.reduce_dtype": "bf16",
            "train.precision": "bf16",
            "optimizer.clip_norm": 0.5,
        },
        (),
    ),
    "shard_grad_op, by a name": (
        "how = ShardingStrategy.SHARD_GRAD_OP\nhalf = MixedPrecision(param_dtype=torch.float16)\n"
        "model = FSDP(model, sharding_strategy=how, mixed_precision=half, cpu_offload=CPUOffload(offload_params=True))\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=2.0)\n",
        {
            "strategy.engine": "fsdp2",
            "strategy.reshard": False,
            "strategy.offload_parameters": "cpu",
            "train.precision": "fp16",
            "optimizer.clip_norm": 2.0,
        },
        (),
    ),
    "a dict of strategies": (
        "kinds = {'full': ShardingStrategy.FULL_SHARD, 'grad': ShardingStrategy.SHARD_GRAD_OP}\n"
        "FSDP(model, sharding_strategy=kinds['grad'])\napply_activation_checkpointing(model, check_fn=f)\n",
        {"strategy": "fsdp2-noreshard", "train.checkpointing": "full"},
        (),
    ),
    "arguments in a mapping": (
        f"kw = dict(mixed_precision={HALF}, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)\nFSDP(model, **kw)\n",
        {"strategy.engine": "fsdp2", "strategy.reshard": False, "train.precision": "bf16"},
        (),
    ),
    "no shard": (
        "FSDP(model, sharding_strategy=ShardingStrategy.NO_SHARD)\n",
        {"strategy": "ddp"},
        (),
    ),
    "hybrid": (
        "FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)\n",
        {"strategy": "fsdp2"},
        ("write strategy.shard_group: the GPUs of a node",),
    ),
    "only a run knows": (
        "FSDP(model, sharding_strategy=pick(args))\n",
        {"strategy": "fsdp2"},
        ("FullyShardedDataParallel.sharding_strategy: its value could not be read; write strategy",),
    ),
    "fully_shard": (
        "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)\n"
        "for block in model.layers:\n    fully_shard(block, mp_policy=policy, reshard_after_forward=False)\n"
        "fully_shard(model, mp_policy=policy, reshard_after_forward=False, offload_policy=CPUOffloadPolicy())\n",
        {
            "strategy.engine": "fsdp2",
            "strategy.reshard": False,
            "strategy.reduce_dtype": "fp32",
            "strategy.offload_parameters": "cpu",
            "train.precision": "bf16",
        },
        (),
    ),
    "fully_shard with arguments": (
        "kw = {'mp_policy': MixedPrecisionPolicy(param_dtype=torch.bfloat16)}\nfully_shard(model, **kw)\n"
        "for b in model.layers:\n    checkpoint_wrapper(b)\n",
        {"strategy": "fsdp2", "train.precision": "bf16", "train.checkpointing": "full"},
        (),
    ),
    "ddp": (
        "model = DDP(model, device_ids=[0])\nwith torch.autocast('cuda', dtype=torch.bfloat16):\n    pass\n"
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        {"strategy": "ddp", "train.precision": "bf16", "optimizer.clip_norm": 1.0},
        (),
    ),
    "ddp, by its module": (
        "model = torch.nn.parallel.DistributedDataParallel(model)\nmodel.module.gradient_checkpointing_enable()\n",
        {"strategy": "ddp", "train.checkpointing": "full"},
        (),
    ),
    "two of them": (
        "if big:\n    FSDP(model)\nelse:\n    DDP(model)\n",
        {"strategy": None},
        ("to do: train.py:10: FullyShardedDataParallel(): its value could not be read; write strategy",),
    ),
}
for name, (text, expected, sentences) in SHARDED.items():
    CASES[f"sharded: {name}"] = (
        {"train.py": FSDP + text + "torch.optim.AdamW(p, lr=1e-4)\n"},
        expected,
        sentences,
    )
CASES["sharded: by the Trainer"] = (
    {"train.py": TRAINER + "TrainingArguments('o', fsdp='shard_grad_op auto_wrap offload', bf16=True)\n"},
    {"strategy.engine": "fsdp2", "strategy.reshard": False, "strategy.offload_parameters": "cpu"},
    (),
)
CASES["sharded: by accelerate's plugin"] = (
    {
        "train.py": "from accelerate import Accelerator, FullyShardedDataParallelPlugin\n"
        "p = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)\n"
        "a = Accelerator(fsdp_plugin=p, mixed_precision='bf16', gradient_accumulation_steps=4)\n"
        "DataLoader(rows, batch_size=2)\n"
    },
    {
        "strategy": "fsdp2-noreshard",
        "train.precision": "bf16",
        "train.global_batch": 8,
    },
    (),
)
CASES["sharded: by flags of accelerate"] = (
    {
        "run.sh": "accelerate launch --use_deepspeed --zero_stage 3 --offload_param_device cpu --num_processes 4 "
        "train.py --learning_rate 1e-5\n"
    },
    {"strategy": {"engine": "deepspeed", "stage": 3, "offload_parameters": "cpu"}},
    (),
)
CASES["sharded: accelerate's FSDP1"] = (
    {
        "a.yaml": "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\n"
        "fsdp_config: {fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_offload_params: true}\n",
        "train.py": TRAINER + ARGUMENTS,
    },
    {"strategy.engine": "fsdp2", "strategy.reshard": False, "strategy.offload_parameters": "cpu"},
    (),
)

LIGHTNING = """\
import lightning as L, torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, DDPStrategy
from torch.utils.data import DataLoader
class Data(L.LightningDataModule):
    def __init__(self, batch_size=1, length=512):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=self.batch_size)
class Model(L.LightningModule):
    def __init__(self, name="a/b", lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.model = AutoModelForCausalLM.from_pretrained(self.hparams.name)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
"""
FITTED = "L.Trainer(STRATEGY, precision='bf16-mixed', accumulate_grad_batches=4, gradient_clip_val=1.0, " + (
    "max_steps=500, devices=4, num_nodes=2).fit(Model(lr=2e-5), Data(batch_size=8))\n"
)
OF_LIGHTNING = {
    "train.micro_batch": 8,
    "train.global_batch": 256,
    "optimizer.learning_rate": 2e-5,
    "optimizer.clip_norm": 1.0,
    "train.steps": 500,
    "model.source": "a/b",
    "train.precision": "bf16",
}
for given, strategy in (
    ("strategy='deepspeed_stage_2'", "zero2"),
    ("strategy='deepspeed_stage_3_offload'", "zero3-offload"),
    ("strategy='ddp'", "ddp"),
    ("strategy='fsdp'", "fsdp2"),
    ("strategy=DeepSpeedStrategy()", "zero2"),
    (
        "strategy=DeepSpeedStrategy(stage=3, offload_optimizer=True)",
        "zero3-offload-optimizer",
    ),
    ("strategy=DeepSpeedStrategy(stage=2, offload_optimizer=True)", "zero2-offload"),
    (
        "strategy=FSDPStrategy(sharding_strategy='SHARD_GRAD_OP', cpu_offload=True)",
        {"engine": "fsdp2", "reshard": False, "offload_parameters": "cpu"},
    ),
    ("strategy=FSDPStrategy()", "fsdp2"),
    ("strategy=DDPStrategy(find_unused_parameters=False)", "ddp"),
):
    CASES[f"lightning: {given}"] = (
        {"train.py": LIGHTNING + FITTED.replace("STRATEGY", given)},
        OF_LIGHTNING | {"strategy": strategy},
        (),
    )
CASES["lightning: a dict of settings"] = (
    {
        "train.py": LIGHTNING
        + FITTED.replace("STRATEGY", "strategy=DeepSpeedStrategy(config={'zero_optimization': {'stage': 1}})")
    },
    OF_LIGHTNING | {"strategy.engine": "deepspeed", "strategy.stage": 1},
    (),
)
CASES["lightning: a data module of another file"] = (
    {
        "train.py": "import pytorch_lightning as pl\nfrom own import TextDataModule, Model\n"
        "dm = TextDataModule(batch_size=16, max_length=256)\ntrainer = pl.Trainer(devices=2, precision=16)\n"
        "trainer.fit(Model(), dm)\n"
    },
    {
        "train.micro_batch": 16,
        "train.global_batch": 32,
        "data.sequence_length": 256,
        "train.precision": "fp16",
    },
    (),
)
ENGINE = "import json, yaml, deepspeed\nfrom transformers import AutoModelForCausalLM\n"
ENGINE += "m = AutoModelForCausalLM.from_pretrained('a/b')\n"
JSON = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
LOADED = {
    "open": "c = json.load(open('ds.json'))\n",
    "with": "with open('ds.json') as f:\n    c = json.load(f)\n",
    "path": "from pathlib import Path\nc = json.loads(Path('ds.json').read_text())\n",
    "function": "def load(path):\n    with open(path) as f:\n        return json.load(f)\nc = load('ds.json')\n",
    "built": "def build(stage):\n    c = {'zero_optimization': {'stage': 2}, 'bf16': {'enabled': True}}\n"
    "    return c\nc = build(3)\n",
}
for name, text in LOADED.items():
    changed = "c['train_micro_batch_size_per_gpu'] = 4\nc['zero_optimization']['stage'] = 3\n"
    CASES[f"loaded: {name}"] = (
        {"train.py": f"{ENGINE}{text}{changed}deepspeed.initialize(model=m, config=c)\n", "ds.json": JSON},
        {"train.micro_batch": 4, "strategy.stage": 3, "train.precision": "bf16"},
        (),
    )
del CASES["loaded: built"][0]["ds.json"]
CASES["loaded: a YAML of one's own"] = (
    {
        "train.py": "import yaml\nfrom transformers import TrainingArguments\n"
        "cfg = yaml.safe_load(open('data/c.yaml'))\nTrainingArguments('o', **cfg['training'])\n",
        "data/c.yaml": "training:\n  learning_rate: 0.0001\n  bf16: true\n",
    },
    {"optimizer.learning_rate": 1e-4, "train.precision": "bf16"},
    (),
)
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ntemplate: qwen\ndataset: one, two\n"
for name, rows, expected, sentences in (
    (
        "subset, split and columns of messages",
        '{"one": {"hf_hub_url": "x/y", "subset": "s", "split": "v", "formatting": "sharegpt", "columns": '
        '{"messages": "messages"}, "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", '
        '"assistant_tag": "assistant"}}}',
        {"data.train": "x/y", "data.subset": "s", "data.split": "v", "data.format": "messages"},
        (),
    ),
    (
        "columns of its own",
        '{"one": {"file_name": "one.json", "columns": {"prompt": "frage", "query": "", "response": "antwort"}}}',
        {"data.format": {"instruction": "frage", "output": "antwort"}},
        (),
    ),
    (
        "columns that a job does not read",
        '{"one": {"file_name": "one.json", "columns": {"prompt": "frage", "response": "antwort", "images": "bild"}}}',
        {"data.format": None},
        ("columns.prompt (line 1) `frage`", "prepare rows with the fields of data.format"),
    ),
    (
        "a column alone",
        '{"one": {"file_name": "one.json", "columns": {"prompt": "content"}}}',
        {"data.format": None},
        ("columns.prompt (line 1) `content`", "prepare rows with the fields of data.format"),
    ),
    (
        "two with columns that differ",
        '{"one": {"file_name": "1.json", "columns": {"prompt": "a", "response": "b"}}, '
        '"two": {"file_name": "2.json", "columns": {"prompt": "c", "response": "b"}}}',
        {"data.format": None},
        ("columns",),
    ),
    (
        "pairs",
        '{"one": {"file_name": "one.json", "columns": {"prompt": "prompt", "response": "completion"}}}',
        {"data.format": "prompt-completion"},
        (),
    ),
    (
        "two that differ",
        '{"one": {"file_name": "1.json", "formatting": "sharegpt"}, "two": {"file_name": "2.json"}}',
        {"data.format": None, "data.train": ["data/1.json", "data/2.json"]},
        ("formatting (line 1)",),
    ),
    (
        "images",
        '{"one": {"file_name": "1.json", "num_samples": 50, "images": "x"}}',
        {"data.max_samples": 50},
        ("images (line 1)",),
    ),
):
    names = "one, two" if '"two"' in rows else "one"
    CASES[f"dataset_info: {name}"] = (
        {"f.yaml": FACTORY.replace("one, two", names), "data/dataset_info.json": rows},
        expected,
        sentences,
    )
CASES |= {
    "walk: flags that a branch of a script adds": (
        {
            "run.sh": 'LORA=${LORA:-0}\nARGS=(--bs 2)\nif [[ "$LORA" == "1" ]]; then\n  ARGS+=(--bs 9)\nelse\n'
            '  ARGS+=(--epochs 4)\nfi\ntorchrun --nproc_per_node 2 train.py "${ARGS[@]}"\n',
            "train.py": ARGPARSE,
        },
        {"train.micro_batch": None, "train.epochs": None, "optimizer.learning_rate": 1e-3},
        ("to do: run.sh:8: ${ARGS[@]}: only the shell knows the flags in it; write what they say",),
    ),
    "walk: a condition that only the shell knows": (
        {
            "run.sh": 'ARGS="--bs 2"\nif [ -f there ]; then ARGS="$ARGS --bs 3"; fi\n'
            "torchrun --nproc_per_node 2 train.py $ARGS\n",
            "train.py": ARGPARSE,
        },
        {"optimizer.learning_rate": 1e-3},
        ("run.sh:3: $ARGS: only the shell knows the flags in it",),
    ),
    "walk: a flag whose value only the shell knows": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py --lr $(cat lr) --bs $BS\n", "train.py": ARGPARSE},
        {"train.micro_batch": None, "train.global_batch": None},
        ("DataLoader.batch_size: its value could not be read",),
    ),
    "walk: srun and bash -c": (
        {
            "run.sh": '#SBATCH -N 2\nL="python -u -m torch.distributed.run --nproc_per_node 4 \\\n  --nnodes $SLURM_NNODES"\n'
            'export CMD="$L train.py --bs 3"\nsrun --jobid $SLURM_JOBID bash -c "$CMD" 2>&1 | tee log\n',
            "train.py": ARGPARSE,
        },
        {"train.micro_batch": 3, "train.global_batch": 24},
        (),
    ),
    "walk: one line": (
        {"run.sh": f'N=8; CMD="{RUN} {FLAGS}"; echo $CMD; eval $CMD\n', "train.py": ARGPARSE},
        OF_COMMAND,
        (),
    ),
    "walk: hydra": (
        {
            "run.sh": "torchrun --nproc_per_node 8 main.py lr=1e-5 +bs=4 model.name=a/b\n",
            "main.py": "import hydra\n@hydra.main(config_name='c')\ndef main(cfg):\n"
            "    AutoModelForCausalLM.from_pretrained(cfg.model.name)\n    TrainingArguments('o', fsdp='full_shard auto_wrap',\n"
            "        learning_rate=cfg.lr, per_device_train_batch_size=cfg.bs)\nmain()\n",
        },
        {
            "model.source": "a/b",
            "optimizer.learning_rate": 1e-5,
            "train.global_batch": 32,
            "strategy": "fsdp2",
        },
        (),
    ),
    "walk: a Trainer of one's own, and a branch that is not taken": (
        {
            "train.py": "import os, torch\nclass Trainer:\n    def __init__(self, model, clip=1.0):\n        self.clip = clip\n"
            "    def go(self):\n        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)\n"
            + ARGPARSE
            + "if os.environ.get('BIG'):\n    args.bs = 9\nTrainer(model, clip=0.25).go()\n"
        },
        {"optimizer.clip_norm": 0.25, "train.micro_batch": 1, "train.epochs": 1},
        (),
    ),
    "walk: micro-batches of a loop over steps": (
        {
            "train.py": ARGPARSE.partition("for epoch")[0]
            + "for step in range(700):\n    for micro in range(2 * 3):\n"
            "        loss.backward()\n    optimizer.step()\n    for group in optimizer.param_groups:\n"
            "        group['lr'] = rate(step)\n"
        },
        {"train.steps": 700, "train.global_batch": 6, "optimizer.schedule": None},
        ("write optimizer.schedule",),
    ),
    "walk: Unsloth trains on answers only": (
        {
            "train.py": UNSLOTH.replace("LOAD", "load_in_4bit=True").replace("RANK", "use_rslora=False")
            + "trainer = train_on_responses_only(trainer, response_part='x')\n"
        },
        {"data.loss_on": "answers"},
        (),
    ),
    "walk: changes on LLaMA-Factory's command line": (
        {
            "f.yaml": "model_name_or_path: a/b\nfinetuning_type: lora\nlora_rank: 8\nlearning_rate: 1.0e-4\n"
            "per_device_train_batch_size: 2\n",
            "run.sh": "CUDA_VISIBLE_DEVICES=0,1 FORCE_TORCHRUN=1 llamafactory-cli train f.yaml lora_rank=32\n",
        },
        {"model.lora.rank": 32, "train.global_batch": 4},
        ("conflict: run.sh:1: lora_rank 32 is used, not f.yaml:3: lora_rank 8",),
    ),
    "walk: a branch without LoRA": (
        {
            "train.py": "from peft import LoraConfig\n" + TRAINER + "p = argparse.ArgumentParser()\n"
            "p.add_argument('--lora', action='store_true')\na = p.parse_args()\nif a.lora:\n    LoraConfig(r=4)\n"
            "Trainer(model, TrainingArguments('o', max_steps=5))\n"
        },
        {"model.lora": None, "train.steps": 5},
        (),
    ),
    "walk: groups of parameters": (
        {
            "train.py": ARGPARSE.replace(
                "model.parameters(), lr=args.learning_rate, weight_decay=args.decay",
                "[{'params': a, 'weight_decay': 0.3}, {'params': b, 'weight_decay': 0.0}], lr=1e-4",
            )
        },
        {"optimizer.weight_decay": 0.3, "optimizer.learning_rate": 1e-4},
        (),
    ),
    "walk: an argument that a job has not": (
        {"train.py": TRAINER + "Trainer(model, TrainingArguments('o', ddp_bucket_cap_mb=size()))\n"},
        {"name": "o"},
        ("left out: a job has no such key: ddp_bucket_cap_mb",),
    ),
}
CASES |= {
    "walk: sums as commands, and srun": (
        {
            "run.sh": "#SBATCH --nodes 4\nBS=2; T=256\nW=$(($SLURM_NNODES * 8))\n((ACC = T / (W * BS)))\nlet E=1+1\n"
            "srun --kill=1 accelerate launch --num_processes $W --use_deepspeed --zero_stage=3 \\\n"
            "  sft.py --per_device_train_batch_size $BS --gradient_accumulation_steps $ACC --num_train_epochs $E\n"
        },
        {"train.global_batch": 256, "train.micro_batch": 2, "train.epochs": 2, "strategy": "zero3"},
        ("to do: run.sh:7: sft.py is not there",),
    ),
    "walk: a file named by a flag, changed by another": (
        {
            "run.sh": "torchrun --nproc_per_node 8 train.py --config data/c.yaml --bs 6\n",
            "data/c.yaml": "model: a/b\nbatch_size: 2\nlr: 0.0002\nstrategy: SHARD_GRAD_OP\n",
            "train.py": FSDP
            + "import argparse, yaml\np = argparse.ArgumentParser()\np.add_argument('--config')\n"
            "p.add_argument('--bs', type=int)\ncli = p.parse_args()\nwith open(cli.config) as f:\n"
            "    c = yaml.safe_load(f)\nif cli.bs is not None:\n    c['batch_size'] = cli.bs\nns = SimpleNamespace(**c)\n"
            "FSDP(model, sharding_strategy=getattr(ShardingStrategy, ns.strategy))\n"
            "DataLoader(rows, batch_size=ns.batch_size)\ntorch.optim.AdamW(p, lr=ns.lr)\n",
        },
        {"train.global_batch": 48, "optimizer.learning_rate": 2e-4, "strategy": "fsdp2-noreshard"},
        (),
    ),
    "walk: one of several strategies": (
        {
            "train.py": LIGHTNING + "S = {'a': DDPStrategy(), 'b': DeepSpeedStrategy(stage=3)}\n"
            "L.Trainer(strategy=S['b'], devices=2).fit(Model(), Data())\n"
        },
        {"strategy": "zero3"},
        (),
    ),
    "walk: settings by arguments of a function": (
        {
            "train.py": ENGINE
            + "def made(stage=2, offload=False, rows=4):\n    c = {'zero_optimization': {'stage': stage},\n"
            "         'train_micro_batch_size_per_gpu': rows}\n    if offload:\n"
            "        c['zero_optimization']['offload_optimizer'] = {'device': 'cpu'}\n    return c\n"
            "c = made(stage=3, offload=True)\nc['gradient_clipping'] = 0.5\ndeepspeed.initialize(model=m, config=c)\n"
        },
        {"strategy.stage": 3, "strategy.offload_optimizer": "cpu", "optimizer.clip_norm": 0.5},
        (),
    ),
}
CASES |= {
    "walk: Lightning's Fabric": (
        {
            "train.py": "import lightning as L\ndevices, micro, accum, lr = 4, 2, 8, 3e-4\n"
            "fabric = L.Fabric(devices=devices, strategy=FSDPStrategy(activation_checkpointing_policy={B}), precision='bf16-true')\n"
            "opt = torch.optim.AdamW(model.parameters(), lr=lr)\nDataLoader(rows, batch_size=micro)\n"
            "for i, b in enumerate(loader):\n    if (i + 1) % accum == 0:\n"
            "        fabric.clip_gradients(model, opt, max_norm=0.5)\n        opt.step()\n"
        },
        {
            "train.global_batch": 64,
            "train.precision": "bf16",
            "train.checkpointing": "full",
            "optimizer.clip_norm": 0.5,
        }
        | {"strategy": "fsdp2", "optimizer.learning_rate": 3e-4},
        (),
    ),
    "walk: one of two optimizers": (
        {
            "train.py": "import torch\nfrom accelerate import Accelerator\nacc = Accelerator()\n"
            "made = torch.optim.AdamW if acc.state.plugin is None else DummyOptim\nmade(model.parameters(), lr=7e-5)\n"
        },
        {"optimizer.learning_rate": 7e-5},
        (),
    ),
    "walk: Axolotl's FSDP2": (
        {
            "a.yaml": "base_model: a/b\nmicro_batch_size: 1\nlora_r: 8\nfsdp_version: 2\nfsdp_config:\n  offload_params: true\n"
            "  reshard_after_forward: false\n  activation_checkpointing: true\n"
        },
        {"strategy.reshard": False, "strategy.offload_parameters": "cpu", "train.checkpointing": "full"},
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_job_is_what_the_files_say(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected, sentences = CASES[name]
    text, said = made_of(files, tmp_path, monkeypatch)
    values = job_values(text)
    assert {key: value_of(values, key) for key in expected} == expected, "\n".join(said)
    for sentence in sentences:
        assert sentence in "\n".join(said)
