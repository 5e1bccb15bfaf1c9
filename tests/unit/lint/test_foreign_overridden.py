"""Values that another place gives: Hydra's command, a module, a batch system, a branch not taken."""

from __future__ import annotations

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

HYDRA = """\
import hydra
import torch
from datasets import load_dataset
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler
@hydra.main(config_path=".", config_name="conf", version_base="1.3")
def main(cfg):
    t = cfg.train
    c = OmegaConf.to_container(cfg, resolve=True)
    torch.manual_seed(t["seed"])
    tok = AutoTokenizer.from_pretrained(cfg.model_id)
    model = AutoModelForCausalLM.from_pretrained(cfg.model_id)
    rows = load_dataset("json", data_files=c["data"]["file"], split="train")
    rows = rows.map(lambda row: tok(row["text"], truncation=True, max_length=c["data"]["block"]))
    loader = torch.utils.data.DataLoader(rows, batch_size=t.bs, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.train.lr)
    scheduler = get_scheduler(t.sched, optimizer, num_warmup_steps=10, num_training_steps=500)
    for batch in loader:
        model(**batch).loss.backward()
        optimizer.step(); scheduler.step(); optimizer.zero_grad()
main()
"""
CONF = """\
model_id: a/b
data: {file: rows.jsonl, block: 700}
train: {bs: 8, lr: 1.0e-4, seed: 3, sched: cosine}
"""
COMMAND = "python train.py train.lr=2e-4 ++train.sched=linear train.seed=5 data.block=800\n"
LOOP = """\
import torch
import torch.distributed as dist
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from ours.rows import make_collator
rank = dist.get_rank()
seed = 1337 + rank
torch.manual_seed(seed)
tok = AutoTokenizer.from_pretrained("a/b")
model = AutoModelForCausalLM.from_pretrained("a/b", torch_dtype=torch.bfloat16)
parts = load_dataset("json", data_files="rows.jsonl", split="train").train_test_split(test_size=0.05)
loader = torch.utils.data.DataLoader(parts["train"], batch_size=(bs := 6), collate_fn=make_collator(tok))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
SHOWN = """\
def make_collator(tok):
    def collate(rows):
        b = tok([row["text"] for row in rows], padding=True, truncation=True, max_length=300)
        b["labels"] = b["input_ids"].masked_fill(b["attention_mask"] == 0, -100)
        return b
    return collate
"""
TRL = """\
from dataclasses import dataclass, field
from datasets import load_dataset
from transformers import TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTTrainer, TrlParser
@dataclass
class Own:
    model_id: str = field(default=None)
    task: str = field(default="sft")
    beta: float = field(default=0.1)
    max_seq_length: int = field(default=512)
own, args = TrlParser((Own, TrainingArguments)).parse_args_and_config()
rows = load_dataset("json", data_files="rows.jsonl", split="train")
if own.task == "dpo":
    DPOTrainer(own.model_id, args=DPOConfig(output_dir="o", beta=own.beta), train_dataset=rows).train()
else:
    trainer = SFTTrainer(own.model_id, args=args, train_dataset=rows, max_seq_length=own.max_seq_length)
    trainer.train()
"""
ARGUMENTS = """\
model_id: a/b
max_seq_length: 3072
output_dir: out
learning_rate: 0.0002
per_device_train_batch_size: 1
fsdp: "full_shard auto_wrap offload"
fsdp_config: {backward_prefetch: backward_pre}
"""
STREAM = """\
def packed(rows):
    left = []
    for row in rows:
        left.extend(tok(row["text"]).input_ids)
        while len(left) >= cfg.ctx:
            yield torch.tensor(left[:cfg.ctx])
            left = left[cfg.ctx:]
loader ="""
HELD_OUT = """\
torchrun --nproc_per_node 2 run_clm.py --model_name_or_path a/b --dataset_name c/d --block_size 512 \\
  --validation_split_percentage 10 --per_device_train_batch_size 8 --eval_strategy no --output_dir out
"""
CASES: dict[str, Case] = {
    "Hydra's file": (
        {"train.py": HYDRA, "conf.yaml": CONF},
        {
            "optimizer.learning_rate": 1e-4,
            "optimizer.schedule": "cosine",
            "train.seed": 3,
            "train.micro_batch": 8,
            "data.sequence_length": 700,
            "data.train": "rows.jsonl",
        },
        (),
        ("could not be read",),
    ),
    "Hydra's file under a command": (
        {"train.py": HYDRA, "conf.yaml": CONF, "run.sh": COMMAND},
        {
            "optimizer.learning_rate": 2e-4,
            "optimizer.schedule": "linear",
            "train.seed": 5,
            "data.sequence_length": 800,
        },
        (),
        ("could not be read",),
    ),
    "a seed of each process, rows that nothing reads, and a collator that no file shows": (
        {"train.py": LOOP},
        {"train.seed": 1337, "train.micro_batch": 6, "data.eval_fraction": 0.05, "train.eval_every": 0},
        ("no file of --from has makes the tokens; add its file; write data.loss_on, data.sequence_length",),
        ("eval_every 50",),
    ),
    "the same collator shown, and rows that are evaluated": (
        {
            "train.py": LOOP + "for batch in parts['test']:\n    model(**batch)\n",
            "ours/rows.py": SHOWN,
        },
        {"data.loss_on": "all", "data.sequence_length": 300, "train.eval_every": None},
        (),
        ("no file of --from has",),
    ),
    "arguments with FSDP's, over a field's default; another method's beta": (
        {
            "train.py": TRL,
            "conf.yaml": ARGUMENTS,
            "run.sh": "torchrun --nproc_per_node=4 train.py --config conf.yaml\n",
        },
        {
            "data.sequence_length": 3072,
            "strategy.engine": "fsdp2",
            "strategy.offload_parameters": "cpu",
            "model.source": "a/b",
        },
        (),
        ("512", "beta 0.1"),
    ),
    "a buffer that is cut again and again": (
        {
            "train.py": LOOP.replace("loader =", STREAM).replace(
                'parts["train"], b', 'packed(parts["train"]), b'
            )
        },
        {"data.packing": True},
        (),
        (),
    ),
    "rows held out where evaluation is off": (
        {"run.sh": HELD_OUT},
        {"train.eval_every": 0, "data.eval_fraction": None},
        ("write data.eval_fraction",),
        ("eval_every 50",),
    ),
    "tasks that srun starts": (
        {
            "train.py": LOOP,
            "run.sh": "#SBATCH --nodes=1\nsrun --gpus-per-node=4 --ntasks-per-node=4 python train.py\n",
        },
        {"train.global_batch": 24, "train.micro_batch": 6},
        (),
        ("GPUs; no file says",),
    ),
    "the rows of a step over all GPUs": (
        {"run.sh": "torchrun --nproc_per_node 8 own.py --micro-batch-size 4 --global-batch-size 64\n"},
        {"train.global_batch": 64, "train.micro_batch": 4},
        (),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_overridden(case: Case, tmp_path, monkeypatch) -> None:
    check_case(case, tmp_path, monkeypatch)


def test_a_tool_that_is_not_read_is_named(tmp_path, monkeypatch) -> None:
    command = "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 4 --lr-decay-style cosine\n"
    with pytest.raises(JobError, match="Megatron-LM"):
        made_of({"run.sh": command}, tmp_path, monkeypatch)
