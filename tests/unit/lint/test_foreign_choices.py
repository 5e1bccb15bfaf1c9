# ruff: noqa: E501 - the files are text
"""What a flag means to the script that has it, whatever it is to another tool; and which rows a script takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

SWIFT = "swift sft --model a/b --dataset train.jsonl --val_dataset dev_a.jsonl dev_b.jsonl --eval_steps 100 "
LOOP = "model = AutoModelForCausalLM.from_pretrained(args['model_name'])\nopt = torch.optim.AdamW(model.parameters(), lr=args['lr'])\nfor batch in DataLoader(rows, batch_size=args['batch_size']):\n    model(**batch).loss.backward(); opt.step(); opt.zero_grad()\n"
HEAD = "import torch\nfrom datasets import load_dataset\nfrom torch.utils.data import DataLoader\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
CHOOSES = "if args['dataset'] == 'sql':\n    rows = load_dataset('some/sql')['validation']\nelse:\n    rows = load_dataset('some/alpaca')['train']\nif args['train_type'] in ['lora', 'qlora']:\n    config = LoraConfig(r=args['lora_rank'], lora_alpha=16, target_modules=args['modules'])\n    net = get_peft_model(net, config)\n"
# fastcore's command, whose arguments go through two functions and a process into a mapping
STARTED = f"""\
{HEAD}import torch.multiprocessing as mp
from fastcore.script import call_parse
from peft import LoraConfig
def work(rank, world, args):
{"".join(f"    {row}" + chr(10) for row in (CHOOSES + LOOP).splitlines())}
def run(size: int = -1, model_name: str = 'x/y', dataset: str = 'alpaca', train_type: str = 'full', lora_rank: int = 4, modules: str = 'all', lr: float = 1.0, batch_size: int = 1):
    if size == -1:
        size = torch.cuda.device_count()
    args = dict(locals())
    if modules == 'all':
        args['modules'] = ['q_proj', 'v_proj']
    mp.spawn(work, args=(size, args), nprocs=2)
@call_parse()
def main(size: int = -1, model_name: str = 'c/d', dataset: str = 'alpaca', train_type: str = 'lora', lora_rank: int = 64, modules: str = 'all', lr: float = 1e-5, batch_size: int = 1):
    run(**locals())
"""
PLAIN = "p = argparse.ArgumentParser()\np.add_argument('--train_type')\np.add_argument('--dataset')\nargs = p.parse_args()\n"
OTHER = f"{HEAD}import argparse\nfrom own import adapted, built\n{PLAIN}rows = built(args.dataset)\nmodel = adapted(AutoModelForCausalLM.from_pretrained('a/b'), args.train_type == 'lora')\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\nfor batch in DataLoader(rows, batch_size=2):\n    model(**batch).loss.backward(); opt.step()\n"
EMPTY = f"{HEAD}from accelerate import init_empty_weights\nname = 'e/f'\nconfig = AutoConfig.from_pretrained(name)\nwith init_empty_weights():\n    model = AutoModelForCausalLM.from_config(config)\nload(model, name)\n"


def rows(select: str) -> str:
    return f"{HEAD}from transformers import Trainer, TrainingArguments\nds = load_dataset('a/rows', split='train')\n{select}\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\nTrainer(model=model, args=TrainingArguments('o'), train_dataset=ds).train()\n"


CASES: dict[str, Case] = {
    "ms-swift's files for evaluation, next to a share of 0": (
        {"run.sh": f"{SWIFT}--split_dataset_ratio 0\n"},
        {"data.eval": ["dev_a.jsonl", "dev_b.jsonl"], "data.eval_fraction": None, "train.eval_every": 100},
        (),
        ("both say what is held out",),
    ),
    "ms-swift's files for evaluation turn its share off": (
        {"run.sh": f"{SWIFT}--split_dataset_ratio 0.1\n"},
        {"data.eval": ["dev_a.jsonl", "dev_b.jsonl"], "data.eval_fraction": None},
        (),
        ("both say what is held out",),
    ),
    "a share of 0 alone": (
        {"run.sh": "swift sft --model a/b --dataset train.jsonl --split_dataset_ratio 0\n"},
        {"data.eval": None, "data.eval_fraction": 0},
        (),
        (),
    ),
    "a command's arguments as one mapping, in processes of their own": (
        {"run.sh": "python train.py --dataset sql --train_type qlora --batch_size 4\n", "train.py": STARTED},
        {"model.source": "c/d", "model.lora.rank": 64, "model.lora.targets": ["q_proj", "v_proj"], "optimizer.learning_rate": 1e-5, "train.micro_batch": 4, "data.train": "some/sql", "data.split": "validation"},
        (),
        ("args", "no such key: batch_size", "could not be read"),
    ),
    "an argument that a function sets again": (
        {"train.py": f"{HEAD}def run(lr: float = 1.0, model_name: str = 'c/d', batch_size: int = 2):\n    lr = lr * scale()\n    args = dict(locals())\n    rows = load_dataset('a/rows')['train']\n" + "".join(f"    {row}\n" for row in LOOP.splitlines()) + "run(lr=1e-4)\n"},
        {"optimizer.learning_rate": None, "train.micro_batch": 2, "model.source": "c/d"},
        ("AdamW.lr: its value could not be read",),
        (),
    ),
    "ms-swift's word as a flag of the script's own, and a choice among its data sets": (
        {"run.sh": "python train.py --train_type lora --dataset sql\n", "train.py": OTHER.replace("built(args.dataset)", "built('x') if args.dataset == 'sql' else built('y')")},
        {"model.lora.rank": None, "data.train": "fill-in-the-data.jsonl", "model.source": "a/b"},
        ("train_type lora: not understood; write model.lora", "dataset sql: not understood; write data.train"),
        ("model.lora.rank=8",),
    ),
    "a data set that the script takes by its name": (
        {"run.sh": "python train.py --dataset imdb\n", "train.py": OTHER},
        {"data.train": "imdb"},
        (),
        (),
    ),
    "LLaMA-Factory's word without its scripts": (
        {"run.sh": "llamafactory-cli train --stage sft --model_name_or_path a/b --finetuning_type lora --dataset x/y --template qwen --output_dir o\n"},
        {"model.lora.rank": 8},
        (),
        (),
    ),
    "a model that is made empty has the weights of its name": (
        {"train.py": EMPTY},
        {"model.source": "e/f", "model.weights": None},
        (),
        ("random",),
    ),
    "rows by number, from the first": (
        {"train.py": rows("ds = ds.select(range(0, 500))")},
        {"data.max_samples": 500},
        (),
        ("rows by number",),
    ),
    "at most so many rows": (
        {"train.py": rows("ds = ds.shuffle(seed=1).select(range(min(700, len(ds))))")},
        {"data.max_samples": 700},
        (),
        ("could not be read",),
    ),
    "rows by number, from a later one": (
        {"train.py": rows("ds = ds.select(range(1000, 2000))")},
        {"data.max_samples": None},
        ("to do: train.py: rows by number (line 7) `range(1000, 2000)`: prepare a file with these rows",),
        (),
    ),
    "rows for evaluation by number": (
        {"train.py": rows("val = ds.select(range(0, len(ds) // 10))\nds = ds.select(range(len(ds) // 10, len(ds)))")},
        {"data.max_samples": None},
        ("rows by number", "evaluation rows"),
        (),
    ),
    "the first rows of a list": (
        {"train.py": rows("import json\nds = json.load(open('d.json'))[:400]")},
        {"data.max_samples": 400},
        (),
        (),
    ),
    "the first rows, as another file's call says": (
        {
            "train.py": rows("from parts import made\nds = made('d.jsonl', 500)"),
            "parts.py": "import json\ndef made(path, n):\n    data = [json.loads(row) for row in open(path)]\n    return data[:n]\n",
        },
        {"data.max_samples": 500},
        (),
        (),
    ),
    "the first rows for evaluation": (
        {"train.py": rows("val_data = list(ds)\nval_data = val_data[:50]")},
        {"data.max_samples": None},
        ("evaluation rows (line 8) `50`: prepare a file with these rows",),
        (),
    ),
    "a share of the rows, and the first characters of a text": (
        {"train.py": rows("rows_ = list(ds)\ndata = rows_\nn = int(0.9 * len(data))\nds = data[:n]\ntext = 'abc'[:2]\nids = tok(text)[:128]")},
        {"data.max_samples": None},
        (),
        ("data.max_samples",),
    ),
    "a rest of the rows that is left out": (
        {"train.py": rows("ds = ds.select(range(0, len(ds) - len(ds) % 8))")},
        {"data.max_samples": None},
        (),
        ("rows by number", "data.max_samples"),
    ),
}  # fmt: skip


def test_the_first_rows_of_a_script_that_trains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="none of its settings is one of a job"):
        made_of(
            {"ask.py": "import json\nrows = json.load(open('d.json'))[:32]\nprint(ask(rows))\n"},
            tmp_path,
            monkeypatch,
        )


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_flag_means_to_its_script(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
