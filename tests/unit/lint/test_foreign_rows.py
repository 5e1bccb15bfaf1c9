# ruff: noqa: E501 - the files are text
"""Which rows a script takes, on how many GPUs, and which of its adapters a job has not: files in, job out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

HEAD = "from datasets import Dataset\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
LOADS = "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
FILES = "TRAIN = 'data/train.json'\nVAL_PATH = 'data/held.json'\nrows, others = Dataset.from_json(TRAIN), Dataset.from_json(VAL_PATH)\n"
BOTH = "Trainer(model, TrainingArguments('o', eval_strategy='steps'), train_dataset=rows, eval_dataset=others).train()\n"
ONE = "Trainer(model, TrainingArguments('o'), train_dataset=rows).train()\n"
PATHS = "from pathlib import Path\nDATA = Path('data') / 'sft'\nrows = Dataset.from_parquet(str(DATA / 'rows.parquet'))\n"
FIELDS = """\
from dataclasses import dataclass, field
from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments
@dataclass
class DataArguments:
    train_data_path: str = field()
    eval_data_path: str = field(default=None)
def parts(args):
    rows = load_jsonl(args.train_data_path)
    others = load_jsonl(args.eval_data_path) if args.eval_data_path else None
    return {'train': Rows(rows), 'eval': Rows(others) if others else None}
data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
module = parts(data_args)
Trainer(AutoModelForCausalLM.from_pretrained('a/b'), training_args, train_dataset=module['train'], eval_dataset=module['eval']).train()
"""
COMMAND = "torchrun --nproc_per_node 2 train.py --train_data_path d/a.jsonl --eval_data_path d/b.jsonl --eval_strategy steps --output_dir o\n"
MANY = "write it where there are several"


def placed(where: str) -> dict[str, str]:
    """A script that places its model there."""
    return {
        "train.py": f"{HEAD}model = AutoModelForCausalLM.from_pretrained('a/b', device_map={where})\n{ONE}"
    }


CASES: dict[str, Case] = {
    "files of a Dataset": (
        {"train.py": HEAD + FILES + LOADS + BOTH},
        {"data.train": "data/train.json", "data.eval": ["data/held.json"]},
        (),
        ("not understood",),
    ),
    "a path in parts": (
        {"train.py": HEAD + PATHS + LOADS + ONE},
        {"data.train": "data/sft/rows.parquet"},
        (),
        (),
    ),
    "a file that only a run knows": (
        {"train.py": HEAD + "rows = Dataset.from_json(chosen())\n" + LOADS + ONE},
        {"data.train": "fill-in-the-data.jsonl"},
        ("to do: train.py:3: from_json: its value could not be read; write data.train",),
        (),
    ),
    "`from_json` of another class": (
        {"train.py": HEAD + "shape = Shape.from_json('data/shape.json')\n" + LOADS + ONE},
        {"data.train": "fill-in-the-data.jsonl"},
        (),
        ("from_json: its value",),
    ),
    "files of flags that a function loads": (
        {"run.sh": COMMAND, "train.py": FIELDS},
        {"data.train": "d/a.jsonl", "data.eval": "d/b.jsonl"},
        (),
        ("a job takes these rows from a file",),
    ),
    **{
        f"one GPU: {where}": (placed(where), {"train.global_batch": 8}, ("gpus=1",), (MANY,))
        for where in ("'cuda:0'", "{'': 0}", "'auto'")
    },
    **{
        f"GPUs unknown: {where}": (placed(where), {"train.global_batch": 8}, (MANY,), ("gpus=1",))
        for where in ("{'': local_rank}", "None")
    },
    "a file of a folder that only a run knows": (
        {"train.py": HEAD + "from pathlib import Path\ncorpus_file = Path(where()) / 'rows_all.jsonl'\nrows = load(corpus_file)\n" + LOADS + ONE},
        {"data.train": "fill-in-the-data.jsonl"},
        ("to do: train.py:4: corpus_file rows_all.jsonl: not understood; write data.train",),
        (),
    ),
    "the tokens of a model's config": (
        {"train.py": HEAD + LOADS + ONE, "small.json": '{"model_type": "llama", "eos_token_id": 1, "hidden_size": 64}'},
        {"model.source": "a/b"},
        ("eos_token_id (line 1): the tokenizer and the model's config.json say it",),
        ("prepare a tokenizer",),
    ),
    "adapters of experts": (
        {"train.py": HEAD + LOADS + "from peft import LoraConfig, get_peft_model\nconfig = LoraConfig(r=8, target_modules='all-linear', target_parameters=['7.mlp.experts.down_proj'])\nmodel = get_peft_model(model, config)\n" + ONE},
        {"model.lora.targets": "all-linear"},
        ("changed: train.py: target_parameters (line 5): trained without these adapters",),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_which_rows_it_takes(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
