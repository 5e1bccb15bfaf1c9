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


@pytest.mark.parametrize("name", CASES)
def test_what_is_easy_to_miss(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
