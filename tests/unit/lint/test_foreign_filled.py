# ruff: noqa: E501 - the files are text
"""Files of settings that fill a script's own classes, and what loops of a script's own do now and then."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

RUN = """\
import torch
from transformers import AutoModelForCausalLM
from torch.utils.data import DataLoader
def main(cfg, rows):
    model = AutoModelForCausalLM.from_pretrained(cfg.model.model_name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.optim.lr, betas=(cfg.optim.beta1, cfg.optim.beta2), weight_decay=cfg.optim.wd)
    torch.manual_seed(cfg.train.seed)
    bar = tqdm(range(cfg.train.max_steps))
    for step in bar:
        for batch in DataLoader(rows, batch_size=cfg.train.micro):
            model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.clip)
        optimizer.step()
        if step > 0 and step % cfg.train.save_interval == 0:
            torch.save(model.state_dict(), "x.pt")
        if step % cfg.train.eval_interval == 0:
            evaluate(model)
"""
CLASSES = """\
from dataclasses import dataclass, field
import yaml
@dataclass
class ModelConfig:
    model_name: str = "a/old"
    trust: bool = True
@dataclass
class OptimConfig:
    lr: float
    wd: float = 0.5
    beta1: float = 0.8
    beta2: float = 0.9
    clip: float = 9.0
@dataclass
class TrainConfig:
    max_steps: int = 5
    seed: int = 7
    micro: int = 3
    save_interval: int = 1
    eval_interval: int = 1
@dataclass
class Config:
    model: ModelConfig
    optim: OptimConfig
    train: TrainConfig
def load(path):
    raw = yaml.safe_load(open(path))
    return Config(ModelConfig(**raw["model"]), OptimConfig(**raw["optim"]), TrainConfig(**raw["train"]))
"""
YAML = """\
model: {model_name: a/new, trust: false}
optim: {lr: 3.0e-4, wd: 0.1, beta1: 0.9, beta2: 0.95, clip: 1.0}
train: {max_steps: 150000, seed: 42, micro: 16, save_interval: 5000, eval_interval: 1000}
"""
SAID = {
    "model.source": "a/new",
    "optimizer.learning_rate": 0.0003,
    "optimizer.weight_decay": 0.1,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.clip_norm": 1,
    "train.seed": 42,
    "train.steps": 150000,
    "train.save_every": 5000,
    "train.eval_every": 1000,
    "train.micro_batch": 16,
}
FALSE = ("the only optimizer", "one epoch", "a/old", "AdamW.lr")
HF = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from .settings import Base, Tuning
class Tuner:
    def __init__(self, tuning: Tuning, model_config: Base):
        self.tuning = tuning
        self.model_config = model_config
    def run(self, rows):
        model = AutoModelForCausalLM.from_pretrained(self.model_config.model_name)
        args = TrainingArguments(output_dir="o", learning_rate=self.tuning.learning_rate, weight_decay=self.tuning.weight_decay)
        Trainer(model=model, args=args, train_dataset=rows).train()
"""
SETTINGS = """\
import json
from dataclasses import dataclass
@dataclass
class Base:
    model_name: str = "a/old"
    trust: bool = True
@dataclass
class Tuning:
    learning_rate: float = 1e-3
    weight_decay: float = 0.5
@dataclass
class DPOTuning:
    learning_rate: float = 1e-6
    weight_decay: float = 0.25
    beta: float = 0.1
def load(path):
    values = json.load(open(path))
    return Base(**values["base"]), Tuning(**values["tuning"]), DPOTuning(**values["dpo_tuning"])
"""
VALUES = '{"base": {"model_name": "a/new", "trust": true}, "tuning": {"learning_rate": 1e-5, "weight_decay": 0.02}, "dpo_tuning": {"learning_rate": 3e-6, "weight_decay": 0.3, "beta": 0.2}}'
LOOP = """\
import argparse, torch
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument("--save_model_step", type=int, default=None)
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained("a/b")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    for step, batch in enumerate(loader):
        model(**batch).loss.backward()
        if (step + 1) % args.accum == 0:
            optimizer.step()
            count += 1
            if args.save_model_step is not None and COUNTER % args.save_model_step == 0:
                ppl = evaluation(model, test)
                save_model(model, "x")
"""
OWN = {"run.sh": "python train.py --accum 4 --save_model_step 100\n"}
CASES: dict[str, Case] = {
    "sections fill classes": (
        {"train.py": "from config import load\n" + RUN, "config.py": CLASSES, "c.yaml": YAML},
        SAID,
        (),
        FALSE,
    ),
    "sections of a file whose reader is not named": (
        {"train.py": "import yaml, util\n" + RUN, "c.yaml": YAML},
        SAID,
        (),
        FALSE,
    ),
    "the types of arguments name the classes": (
        {"tune.py": HF, "settings.py": SETTINGS, "c.json": VALUES},
        {"model.source": "a/new", "optimizer.learning_rate": 1e-05, "optimizer.weight_decay": 0.02},
        (),
        ("it changes the loss", "could not be read"),
    ),
    "a file alone": (
        {"c.yaml": YAML + "output_dir: o\n"},
        {key: one for key, one in SAID.items() if key not in ("model.source", "train.micro_batch")},
        ("optim.lr 0.0003: not understood; write optimizer.learning_rate; until then 0.0003",),
        ("the only optimizer", "one epoch", "eval_every 50", "save_every 100"),
    ),
    "an argument of its own says how often a loop saves": (
        OWN | {"train.py": LOOP.replace("COUNTER", "count")},
        {"train.save_every": 100, "train.eval_every": 100},
        (),
        ("save_every 100,",),
    ),
    "micro-batches are no steps": (
        OWN | {"train.py": LOOP.replace("COUNTER", "step")},
        {"train.save_every": None, "train.eval_every": None},
        ("every save: its value could not be read; write train.save_every",),
        ("own: train.save_every", ", train.save_every 100,"),
    ),
}


PARSED = """\
import argparse, yaml
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
p = argparse.ArgumentParser()
p.add_argument("--config", default="c.yaml")
p.add_argument("--model_name", default="a/old")
p.add_argument("--learning_rate", type=float, default=1e-3)
p.add_argument("--weight_decay", type=float, default=0.5)
args = p.parse_args()
FILLED
model = AutoModelForCausalLM.from_pretrained(args.model_name)
Trainer(model=model, args=TrainingArguments("o", learning_rate=args.learning_rate, weight_decay=args.weight_decay)).train()
"""
CASES |= {
    f"a file fills a parser's arguments: {filled}": (
        {
            "run.sh": "python train.py --weight_decay 0.1\n",
            "train.py": PARSED.replace("FILLED", filled),
            "c.yaml": "model_name: a/new\nlearning_rate: 3.0e-4\n",
        },
        {"model.source": "a/new", "optimizer.learning_rate": 0.0003, "optimizer.weight_decay": 0.1},
        (),
        ("conflict",),
    )
    for filled in (
        "vars(args).update(yaml.safe_load(open(args.config)))",
        "p.set_defaults(**yaml.safe_load(open(args.config)))",
        "args.__dict__.update(yaml.safe_load(open(args.config)))",
        "args = argparse.Namespace(**{**vars(args), **yaml.safe_load(open(args.config))})",
    )
}
COLLATED = """\
import transformers, trl
model = transformers.AutoModelForCausalLM.from_pretrained("a/b")
collator = trl.DataCollatorForCompletionOnlyLM(response_template="### Answer:", tokenizer=tokenizer)
"""
IN_TEXT = ("DataCollatorForCompletionOnlyLM(): it finds the answers in a text, and a job counts all",)
CASES |= {
    f"answers in a text: {name}": ({"train.py": COLLATED + more, **files}, {}, said, never)
    for name, more, files, said, never in [
        (
            "an attribute",
            "args.dataset_text_field = 'text'\ntrl.SFTTrainer(model, args=args, data_collator=collator).train()\n",
            {},
            IN_TEXT,
            (),
        ),
        (
            "an argument",
            "trl.SFTTrainer(model, args=trl.SFTConfig('o', dataset_text_field='text'), data_collator=collator).train()\n",
            {},
            IN_TEXT,
            (),
        ),
        (
            "a function of the field",
            "def text_of(row):\n    return row['text']\ntrl.SFTTrainer(model, formatting_func=text_of, data_collator=collator).train()\n",
            {},
            IN_TEXT,
            (),
        ),
        (
            "messages",
            "trl.SFTTrainer(model, train_dataset=rows, data_collator=collator).train()\n",
            {},
            (),
            IN_TEXT,
        ),
    ]
}
PLAIN = """\
import torch
from itertools import chain
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("a/b")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
PACKS
for step in range(9):
    model(batch()).loss.backward()
    optimizer.step()
"""
PACKED = {
    "a chain that is cut": "rows = rows.map(lambda x: {'input_ids': [(ids := list(chain(*x['input_ids'])))[i : i + 512] for i in range(0, 9999, 512)]})",
    "a chain in a function": "def pack(text_ids):\n    joined = list(chain.from_iterable(text_ids))\n    return [joined[i: i + size] for i in range(0, len(joined), size)]\nrows = pack(rows)",
    "a buffer that is viewed": "def batch():\n    buf = tokens[at : at + B * T + 1]\n    return buf[:-1].view(B, T)",
    "a map of memory": "data = np.memmap('train.bin', dtype='uint16')\ndef batch():\n    return data[i : i + block_size]",
    "random places": "def batch():\n    ix = torch.randint(len(data) - block_size, (8,))\n    return torch.stack([data[i : i + block_size] for i in ix])",
    "a name": "from mine import PackedTokenDataset\nrows = PackedTokenDataset('train.bin', 1024)",
}
CASES |= {
    f"packed: {name}": (
        {"train.py": PLAIN.replace("PACKS", lines)},
        {"data.packing": True},
        (),
        ("packing=false",),
    )
    for name, lines in PACKED.items()
}
CASES |= {
    "perhaps packed": (
        {"train.py": PLAIN.replace("PACKS", "def batch():\n    return tokens[at : at + seq_len]")},
        {"data.packing": None},
        ("pieces(): the script cuts pieces out of a list of tokens, of one text or of several",),
        ("packing=false",),
    ),
    "labels are no pieces": (
        {"train.py": PLAIN.replace("PACKS", "target[at : at + inst_len] = -100")},
        {"data.packing": False},
        (),
        ("pieces()",),
    ),
}
NET = """\
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
    @classmethod
    def from_pretrained(cls, kind):
        from transformers import GPT2LMHeadModel
        return GPT2LMHeadModel.from_pretrained(kind)
"""
STEPS = """\
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(9):
    model(batch()).loss.backward()
    optimizer.step()
"""
SCRATCH = {
    "own class": f"{NET}model = Net(Config(n_layer=12))\n# model = Net.from_pretrained('gpt2')\nmodel.to('cuda')\n{STEPS}",
    "a class that is not named": f"import torch\nfrom mine import Net\nmodel = Net(d_model=8, n_layers=2).to('cuda')\n{STEPS}",
    "a library's class": f"import torch\nfrom transformers import LlamaConfig, LlamaForCausalLM\nmodel = LlamaForCausalLM(LlamaConfig(hidden_size=64))\n{STEPS}",
}
CASES |= {
    f"from scratch: {name}": (
        {"train.py": text},
        {"model.weights": "random", "model.source": "fill-in-the-model"},
        ("the model is made of a configuration of the script's, with random weights",),
        ("model_name_or_path: its value", "until then {}"),
    )
    for name, text in SCRATCH.items()
}
CASES |= {
    "from scratch, of a model's configuration": (
        {
            "train.py": f"import torch\nfrom transformers import AutoConfig, AutoModelForCausalLM\nconfig = AutoConfig.from_pretrained('a/b')\nmodel = AutoModelForCausalLM.from_config(config)\n{STEPS}"
        },
        {"model.weights": "random", "model.source": "a/b"},
        (),
        ("own shape",),
    ),
    "weights of the class that is called": (
        {"train.py": f"{NET}model = Net.from_pretrained('gpt2')\n{STEPS}"},
        {"model.weights": None},
        ("model_name_or_path: its value could not be read; write model.source",),
        ("random weights",),
    ),
}
DATACLASSES = """\
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class Mine(TrainingArguments):
    adam_beta2: float = 0.95
    PLAIN
    report_to: str = "wandb"
@dataclass
class Model:
    model: str = field(default="a/b")
model_args, args = HfArgumentParser((Model, WHICH)).parse_args_into_dataclasses()
Trainer(AutoModelForCausalLM.from_pretrained(model_args.model), args).train()
"""
CASES |= {
    f"fields of a dataclass: {which}{plain[:4]}": (
        {
            "run.sh": "python train.py --learning_rate 1e-5\n",
            "train.py": DATACLASSES.replace("WHICH", which).replace("PLAIN", plain),
        },
        {"optimizer.beta2": beta2, "train.keep": keep, "tracking": tracking},
        (),
        (),
    )
    for which, plain, beta2, keep, tracking in [
        ("TrainingArguments", "save_total_limit: int = 5", 0.999, None, None),
        ("Mine", "save_total_limit: int = 5", 0.95, 5, ["wandb"]),
        ("Mine", "save_total_limit = 5", 0.95, None, ["wandb"]),
    ]
}
EVERY = """\
import argparse
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
@dataclass
class Idle(TrainingArguments):
    save_steps: int = field(default=700)
parser = argparse.ArgumentParser()
parser.add_argument("--save_steps", type=int, default=500)
parser.add_argument("--eval_steps", type=int, default=50)
args = parser.parse_args()
rows = held_out(args)
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o", eval_strategy="steps", EVERY), eval_dataset=rows).train()
"""
CASES |= {
    f"steps on a condition: {every}": (
        {
            "run.sh": "python train.py --eval_steps 100 --save_steps 200\n",
            "train.py": EVERY.replace("EVERY", every),
        },
        {"train.save_every": save, "train.eval_every": evaluate},
        said,
        (),
    )
    for every, save, evaluate, said in [
        (
            "save_steps=args.eval_steps if rows else args.save_steps",
            None,
            100,
            ("save_steps: its value could not be read",),
        ),
        ("eval_steps=args.eval_steps if rows else None, save_steps=args.save_steps", 200, 100, ()),
        ("save_steps=args.save_steps", 200, 100, ()),
    ]
}
AXOLOTL = (
    "base_model: a/b\ndatasets:\n  - path: d/e\n    type: alpaca\nmicro_batch_size: 2\nlearning_rate: 1e-4\n"
)
SCHEDULER = '{"train_micro_batch_size_per_gpu": 2, "scheduler": {"type": "TYPE", "params": {"warmup_num_steps": 9MORE}}}'
LOGARITHMIC = "its warm-up is logarithmic"
CASES |= {
    "constant has no warm-up": (
        {"a.yaml": f"{AXOLOTL}lr_scheduler: constant\nwarmup_steps: 10\n"},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 0},
        ("warmup_steps 10: the constant schedule has no warm-up",),
        (),
    ),
    "constant with warm-up has": (
        {"a.yaml": f"{AXOLOTL}lr_scheduler: constant_with_warmup\nwarmup_steps: 10\n"},
        {"optimizer.schedule": "constant", "optimizer.warmup_steps": 10},
        (),
        ("has no warm-up",),
    ),
    "cosine has": (
        {
            "a.yaml": f"{AXOLOTL}lr_scheduler: cosine\nwarmup_steps: 10\nevals_per_epoch: 0\noptim_args:\n  eps: 1e-8\n"
        },
        {"optimizer.schedule": "cosine", "optimizer.warmup_steps": 10, "optimizer.epsilon": 1e-8},
        (),
        ("has no warm-up", "evals_per_epoch", "optim_args"),
    ),
}
CASES |= {
    f"a warm-up of DeepSpeed: {kind}{more}": (
        {"ds.json": SCHEDULER.replace("TYPE", kind).replace("MORE", more)},
        {"optimizer.schedule": schedule},
        said,
        never,
    )
    for kind, more, schedule, said, never in [
        (
            "WarmupDecayLR",
            "",
            "linear",
            (f"changed: ds.json:1: scheduler.type: WarmupDecayLR: {LOGARITHMIC}",),
            (),
        ),
        ("WarmupLR", "", "constant", (f"scheduler.type: WarmupLR: {LOGARITHMIC}",), ()),
        ("WarmupLR", ', "warmup_type": "linear"', "constant", (), (LOGARITHMIC,)),
    ]
}
HALF = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nmodel = AutoModelForCausalLM.from_pretrained('a/b'LOADED)\nTrainer(model, TrainingArguments('o'GIVEN)).train()\n"
CASES |= {
    f"neither half: {given}{loaded}": (
        {"train.py": HALF.replace("GIVEN", given).replace("LOADED", loaded)},
        {"train.precision": precision},
        (),
        ("precision bf16",) if precision else (),
    )
    for given, loaded, precision in [
        (", fp16=False, bf16=False", "", "fp32"),
        (", fp16=False, bf16=False", ", torch_dtype='bfloat16'", "bf16"),
        (", fp16=False", "", "fp32"),
    ]
}
CASES |= {
    "a loop of the shell over one word": (
        {
            "run.sh": "for lr in 0.0003\ndo\n  for ep in 1; do\n    python train.py --lr $lr --epochs $ep\n  done\ndone\n",
            "train.py": "import argparse\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\np = argparse.ArgumentParser()\np.add_argument('--lr', type=float)\np.add_argument('--epochs', type=int)\na = p.parse_args()\nTrainer(AutoModelForCausalLM.from_pretrained('a/b'), TrainingArguments('o', learning_rate=a.lr, num_train_epochs=a.epochs)).train()\n",
        },
        {"optimizer.learning_rate": 0.0003, "train.epochs": 1},
        (),
        ("could not be read",),
    ),
    "a module that is not there, and a file in a section": (
        {
            "run.sh": "deepspeed --num_gpus=8 --module training.tune --config c.yaml\n",
            "data/ds.json": '{"zero_optimization": {"stage": 3}}',
            "c.yaml": "sft: {num_train_epochs: 2, learning_rate: 1e-5, per_device_train_batch_size: 1, deepspeed: data/ds.json}\n",
        },
        {"strategy.stage": 3},
        ("training/tune.py is not there; add it to --from",),
        (),
    ),
    "one to do for the rows of a step": (
        {
            "run.sh": "torchrun --nproc_per_node $(nvidia-smi -L | wc -l) train.py\n",
            "train.py": HALF.replace("LOADED", "").replace("GIVEN", ", per_device_train_batch_size=2"),
        },
        {"train.micro_batch": 2},
        (
            "nproc_per_node: its value could not be read; of a step's rows the files say micro 2; write train.micro_batch, train.global_batch",
        ),
        ("another factor",),
    ),
    "LLaMA-Factory's own script": (
        {
            "run.sh": "accelerate launch lib/LLaMA-Factory/src/train.py c.yaml\n",
            "c.yaml": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\nlearning_rate: 1e-5\n",
        },
        {"model.source": "a/b"},
        (),
        ("src/train.py is not there",),
    ),
}
SYSTEM = ("write data.system, this text, where the rows have none",)
CASES |= {
    f"a system prompt: {name}": ({"train.py": PLAIN.replace("PACKS", lines)}, {}, said, never)
    for name, lines, said, never in [
        (
            "in a method",
            "class Rows:\n    def tokens(self, row):\n        sys_prompt = 'You are helpful.'\n        return self.ids('system', sys_prompt) + self.ids('user', row['q'])",
            SYSTEM,
            (),
        ),
        (
            "a constant",
            "SYSTEM_PROMPT = 'You are a doctor.'\ndef ids(row):\n    return join(SYSTEM_PROMPT, row)",
            SYSTEM,
            (),
        ),
        ("in brackets", "system_message = (\n    'You are a judge.'\n)", SYSTEM, ()),
        ("of the rows", "system_prompt = row['system']", (), SYSTEM),
    ]
}
CUT = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
class Rows:
    def __init__(self, tokenizer, max_length=2048):
        self.tokenizer = tokenizer
        self.max_length = max_length
    def make(self, row):
        most = min(self.max_length, 2048)
        return self.tokenizer(row["text"], truncation=True, max_length=most)
rows = data.map(Rows(tokenizer, max_length=LENGTH).make)
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o"), train_dataset=rows).train()
"""
CASES |= {
    f"a length that is cut again: {length}": (
        {"train.py": CUT.replace("LENGTH", length)},
        {"data.sequence_length": cut},
        (),
        (),
    )
    for length, cut in [("8192", 2048), ("512", 512), ("4096", 2048)]
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_files_fill_classes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
