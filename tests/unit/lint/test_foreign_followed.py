# ruff: noqa: E501 - the files are text
"""Values that a script hands on before it uses them, and what is not followed: files in, job out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

HEAD = "import torch\nfrom transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
COLLATOR = """\
def get_collator(tokenizer, max_length):
    def collator(batch):
        batch = [{key: value[:max_length] for key, value in row.items()} for row in batch]
        return tokenizer.pad(batch)
    return collator
Trainer(model, TrainingArguments('o'), train_dataset=rows, data_collator=get_collator(tok, LENGTH)).train()
"""
ROWS = "def encode(row):\n    ids = tok(row['text']).input_ids\n    return {'input_ids': ids[:512], 'labels': ids[:MOST]}\nTrainer(model, TrainingArguments('o'), train_dataset=rows.map(encode)).train()\n"
FLAGS = "torchrun --nproc_per_node 2 train.py --lr 1e-3 --betas 0.9 0.98 --num_training_steps 20000 --batch_size 4\n"
LOOP = """\
import argparse, torch
from transformers import AutoModelForCausalLM
parser = argparse.ArgumentParser()
parser.add_argument('--lr', type=float)
parser.add_argument('--betas', nargs='+', type=float, default=[0.9, 0.999])
parser.add_argument('--num_training_steps', type=int, default=10)
parser.add_argument('--batch_size', type=int)
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained('a/b')
loader = torch.utils.data.DataLoader(rows, batch_size=args.batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=args.betas)
step = 0
for at, batch in enumerate(loader):
    if step > args.num_training_steps:
        break
    (model(**batch).loss / 8).backward()
    if at % 8 != 0:
        continue
    optimizer.step()
    step += 1
"""
SHAPE = "from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments\nconfig = AutoConfig.from_pretrained('configs/small.json')\nmodel = AutoModelForCausalLM.from_config(config)\nTrainer(model, TrainingArguments('o')).train()\n"
FIELDS = """\
from dataclasses import dataclass, field
from typing import Any
import trl
@dataclass
class ScriptArguments(trl.ScriptArguments):
    dataset_name: str | None = field(default=None)
    mixture: dict[str, Any] | None = field(default=None)
    def __post_init__(self):
        if self.dataset_name is None and self.mixture is None:
            raise ValueError('none')
"""
PARSES = """\
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser
from configs import ScriptArguments
from rows import get_dataset
def main(script_args, training_args, model_args):
    dataset = get_dataset(script_args)
    SFTTrainer(model=model_args.model_name_or_path, args=training_args, train_dataset=dataset['train']).train()
if __name__ == '__main__':
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig))
    main(*parser.parse_args_and_config())
"""
YAML = "model_name_or_path: a/b\ndataset_name: open/thoughts\nlearning_rate: 1.0e-5\nmax_length: 2048\noutput_dir: o\n"
WATCHES = """\
from transformers import TrainerCallback
class Shows(TrainerCallback):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
    def on_step_end(self, args, state, control, **kwargs):
        rows = self.tokenizer('a text', max_length=64, truncation=True, return_tensors='pt')
        loss = self.model(**rows, labels=rows['input_ids']).loss
"""
TRAINS = "from trl import SFTConfig, SFTTrainer\nfrom watch import Shows\nSFTTrainer(model='a/b', args=SFTConfig('o', max_length=1024), train_dataset=rows, callbacks=[Shows(tok)]).train()\n"
CASES: dict[str, Case] = {
    "a length in a collator's call": (
        {"train.py": HEAD + COLLATOR.replace("LENGTH", "2048")},
        {"data.sequence_length": 2048},
        (),
        ("data.sequence_length 1024",),
    ),
    "a length that only a run knows": (
        {"train.py": HEAD + COLLATOR.replace("LENGTH", "longest(rows)")},
        {"data.sequence_length": None},
        ("to do: train.py:6: [:n]: its value could not be read; write data.sequence_length",),
        ("not read from the files, so shardwise's own: data.sequence_length",),
    ),
    "one length of all slices": (
        {"train.py": f"MAX_LENGTH = 512\n{HEAD}{ROWS.replace('512', 'MAX_LENGTH').replace('MOST', 'MAX_LENGTH')}"},
        {"data.sequence_length": 512},
        (),
        (),
    ),
    "two lengths of slices": (
        {"train.py": f"MAX_LENGTH = 512\nMAX_TOKENS = 256\n{HEAD}{ROWS.replace('512', 'MAX_LENGTH').replace('MOST', 'MAX_TOKENS')}"},
        {"data.sequence_length": None},
        ("[:n]: its value could not be read",),
        (),
    ),
    "a slice that is filled in": (
        {"train.py": HEAD + "seq_len = 162\nids = tok(text).input_ids\nids[:seq_len] = [0] * seq_len\nTrainer(model, TrainingArguments('o'), train_dataset=rows).train()\n"},
        {},
        (),
        ("[:n]",),
    ),
    "several numbers of a flag, and steps that a counter ends": (
        {"run.sh": FLAGS, "train.py": LOOP},
        {"optimizer.beta1": 0.9, "optimizer.beta2": 0.98, "train.steps": 20000, "optimizer.learning_rate": 1e-3},
        (),
        ("one epoch", "no such key: AdamW.betas"),
    ),
    "a file with a model's shape": (
        {"train.py": SHAPE},
        {"model.source": "fill-in-the-model", "model.weights": "random"},
        ("`configs/small.json`: prepare a folder with this file as its config.json, and name it in model.source",),
        ("model.source: not found",),
    ),
    "a YAML's data set under a field's default": (
        {"config.yaml": YAML, "train.py": PARSES, "configs.py": FIELDS},
        {"data.train": "open/thoughts", "data.sequence_length": 2048},
        (),
        ("data.train: not found",),
    ),
    "a module of fields without values is no missing file": (
        {"config.yaml": YAML, "train.py": PARSES, "data/../configs.py": FIELDS},
        {"data.train": "open/thoughts"},
        (),
        ("to --from",),
    ),
    "a callback is no missing file": (
        {"train.py": TRAINS, "data/../watch.py": WATCHES},
        {"data.sequence_length": 1024},
        (),
        ("to --from",),
    ),
    "a callback's tokens and labels": (
        {"train.py": TRAINS, "watch.py": WATCHES},
        {"data.sequence_length": 1024, "data.loss_on": "all"},
        (),
        ("conflict", "64"),
    ),
    "rows that a call of the script's own loads": (
        {"train.py": HEAD + "rows = load_my_rows_data(folder())\nTrainer(model, TrainingArguments('o'), train_dataset=rows).train()\n"},
        {"data.train": "fill-in-the-data.jsonl"},
        ("to do: data.train: not found in the files; train.py:4: load_my_rows_data() was not followed; write it",),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_followed(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
