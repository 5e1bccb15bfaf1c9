# ruff: noqa: E501 - the files are text
"""What looks like a setting, and that another line, file or split takes away or decides otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

HEAD = (
    "import torch\nfrom transformers import AutoModelForCausalLM, TrainingArguments, Trainer\n"
    "from trl import SFTTrainer, SFTConfig, DataCollatorForCompletionOnlyLM\n"
    "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
)
SFT = HEAD + (
    "marks = DataCollatorForCompletionOnlyLM('### A:', tokenizer=tok)\n"
    "SFTTrainer(model, args=SFTConfig('out', dataset_text_field='text'), train_dataset=ds{}).train()\n"
)
MASKED = HEAD + (
    "class Marks:\n    def __call__(self, rows):\n        label = [-100] * len(prompt) + ids[len(prompt):]\n"
    "        {}\n        return dict(labels=label)\n"
    "Trainer(model, TrainingArguments('out'), train_dataset=ds, data_collator=Marks()).train()\n"
)
KBIT = HEAD + (
    "from peft import prepare_model_for_kbit_training\nmodel = prepare_model_for_kbit_training(model)\n"
    "Trainer(model, TrainingArguments('out'), train_dataset=ds).train()\n"
)
AXOLOTL = (
    "base_model: a/b\ndatasets:\n  - path: c/d\n    split: train\n    type: alpaca\n"
    "test_datasets:\n  - path: {}\n    split: {}\n    type: alpaca\n"
)
FACTORY = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ntemplate: llama3\ndataset: {}\n"
OPENRLHF = (
    "deepspeed --module openrlhf.cli.train_sft --pretrain a/b --dataset c/d --max_len 64"
    " --micro_train_batch_size 1 --train_batch_size 8{}\n"
)
ENGINE = (
    "import json, deepspeed, torch\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('a/b')\nds = json.load(open(where['ds']))\n{}\n"
    "engine, *_ = deepspeed.initialize(model=model, config=ds)\n"
    "for row in rows:\n    engine.backward(engine(row).loss)\n    engine.step()\n"
)
DS = (
    '{"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},'
    ' "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 10000}}}'
)
TRAIN = "Trainer(model, TrainingArguments('out'), train_dataset=ds).train()\n"
RUN = (
    "#!/bin/bash\ndeepspeed --module openrlhf.cli.train_sft --max_len 64 --learning_rate $RATE"
    ' --micro_train_batch_size 1 --train_batch_size 8 "$@"\n'
)
BY_NAME = (
    "read -r -d '' words <<EOF\nopenrlhf.cli.train_sft --pretrain a/b \\\n  --dataset c/d --max_len 64 \\\n"
    "  --micro_train_batch_size 1 --train_batch_size 8\nEOF\n"
    'DEEPSPEED_BIN="${HERE}/bin/deepspeed"\n"$DEEPSPEED_BIN" --num_gpus 8 \\\n  --module $words\n'
)
LOOP = (
    "import torch\nfrom model.net import Net\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
    "opt = torch.optim.{}(model.parameters(), lr=1e-3, betas=(0.8, 0.9))\n"
    "for row in rows:\n    model(row).loss.backward()\n    opt.step()\n"
)


def engine(line: str) -> dict[str, str]:
    return {"train.py": ENGINE.format(line), "ds.json": DS}


WARMUP = "ds['scheduler']['params']['warmup_num_steps'] = "
ASKS_LOSS = "write data.loss_on"
CASES: dict[str, Case] = {
    "a collator that nothing takes": ({"t.py": SFT.format("")}, {"data.loss_on": "all"}, (), ("finds the answers",)),
    "one that is handed on": (
        {"t.py": SFT.format(", data_collator=marks")},
        {"data.loss_on": "answers"},
        (),
        ("nothing takes it",),
    ),
    "labels by a number of each token": (
        {"t.py": MASKED.format("label[losses > self.most] = -100")},
        {},
        (ASKS_LOSS,),
        (),
    ),
    "and with a function": (
        {"t.py": MASKED.format("label = torch.where(losses >= 2.5, -100, label)")},
        {},
        (ASKS_LOSS,),
        (),
    ),
    "in a file of its own": (
        {
            "t.py": HEAD + "from rows_of import marks\nds = ds.map(marks)\nTrainer(model, TrainingArguments('out'), train_dataset=ds).train()\n",
            "rows_of.py": "def marks(rows):\n    label[scores < 0.1] = -100\n    return label\n",
        },
        {},
        ("rows_of.py:2: labels by value: a number of each token", ASKS_LOSS),
        (),
    ),
    "labels by their place": (
        {"t.py": MASKED.format("label[torch.arange(9) < 3] = -100")},
        {},
        (),
        ("labels by value",),
    ),
    "weights that are not quantized": ({"t.py": KBIT}, {"train.checkpointing": None}, (), ()),
    "weights that are": (
        {"t.py": KBIT.replace("'a/b'", "'a/b', load_in_4bit=True")},
        {"train.checkpointing": "full"},
        (),
        (),
    ),
    "a model of quantized weights": (
        {"t.py": KBIT.replace("'a/b'", "'a/b-GPTQ'")},
        {"train.checkpointing": "full"},
        (),
        (),
    ),
    "another split to evaluate on": (
        {"a.yaml": AXOLOTL.format("c/d", "validation")},
        {"data.train": "c/d", "data.eval": None, "data.eval_fraction": None},
        ("to do: a.yaml:6: c/d, split validation: a job has one split for all data; write data.eval",),
        (),
    ),
    "the same split": ({"a.yaml": AXOLOTL.format("e/f", "train")}, {"data.eval": "e/f"}, (), ("one split for all",)),
    "a split of OpenRLHF's": (
        {"t.sh": OPENRLHF.format(" --eval_split test")},
        {"data.eval_fraction": None},
        ("write data.eval, a file with the rows of this split",),
        (),
    ),
    "no split of OpenRLHF's": ({"t.sh": OPENRLHF.format("")}, {"data.eval_fraction": 0}, (), ("data.eval,",)),
    "a split of other rows": (
        {"t.sh": OPENRLHF.format(" --eval_split test --eval_dataset e/f")},
        {"data.eval": ["e/f"]},
        (),
        ("write data.eval",),
    ),
    "a name that the list of datasets has not": (
        {"a.yaml": FACTORY.format("c/d"), "data/dataset_info.json": '{"other": {"file_name": "o.json"}}'},
        {"data.train": "fill-in-the-data.jsonl"},
        ("dataset: c/d: files that data/dataset_info.json should name; write data.train",),
        (),
    ),
    "no list of datasets": ({"a.yaml": FACTORY.format("c/d")}, {"data.train": "c/d"}, (), ()),
    "a sum over DeepSpeed's file": (
        engine(WARMUP + "int(len(rows) * share)"),
        {"optimizer.warmup_steps": None, "train.steps": 10000},
        ("scheduler.params.warmup_num_steps: its value could not be read; write optimizer.warmup_steps",),
        (),
    ),
    "a number over it": (
        engine(WARMUP + "30"),
        {"optimizer.warmup_steps": 30},
        ("assumed: train.py:5 writes over scheduler.params.warmup_num_steps of ds.json",),
        ("could not be read; write optimizer",),
    ),
    "in a branch": (engine(f"if len(rows) > 9:\n    {WARMUP}30"), {"optimizer.warmup_steps": None}, (), ()),
    "another mapping": (
        engine("rows['train_micro_batch_size_per_gpu'] = 9"),
        {"train.micro_batch": 2, "optimizer.warmup_steps": 10},
        (),
        ("writes over",),
    ),
    "rows in a file that no job reads": (
        {"t.sh": OPENRLHF.replace("c/d", "c/d.h5").format("")},
        {"data.train": "fill-in-the-data.jsonl"},
        ("save the rows as jsonl or parquet, and name that in data.train",),
        (),
    ),
    "a script of the shell that runs another": (
        {
            "launch.sh": "export NPROC=4\nRATE=3e-4 bash scripts/run.sh --pretrain a/b \\\n    --dataset c/d\n",
            "scripts/run.sh": RUN,
        },
        {"model.source": "a/b", "data.train": "c/d", "optimizer.learning_rate": 3e-4},
        ("assumed: launch.sh runs run.sh --pretrain a/b --dataset c/d",),
        (),
    ),
    "DeepSpeed in a variable": (
        {"t.sh": BY_NAME},
        {"model.source": "a/b", "data.train": "c/d", "data.sequence_length": 64},
        (),
        (),
    ),
    "a model that also writes text": (
        {"t.py": LOOP.format("AdamW"), "model/net.py": "class Net:\n    def say(self):\n        self.generate(1)\n        return self.generate(2)\n"},
        {"optimizer.learning_rate": 1e-3},
        (),
        (),
    ),
    "an optimizer that is no AdamW": (
        {"t.py": LOOP.format("RAdam").replace("from model.net import Net\n", "")},
        {"optimizer.learning_rate": 1e-3, "optimizer.beta2": 0.9},
        ("changed: t.py: RAdam() (line 4)", "trained with AdamW"),
        (),
    ),
    "one of another library": (
        {"t.py": LOOP.format("Muon").replace("from model.net import Net\n", "")},
        {},
        ("Muon() (line 4)", "trained with AdamW"),
        (),
    ),
    "a conversation of another library": (
        {"t.py": HEAD + f"conv = get_conv_template('vicuna')\n{TRAIN}"},
        {},
        ("to do: t.py: conversation template (line 5): write data.chat_template",),
        (),
    ),
    "a share that slices hold out": (
        {"t.py": HEAD + f"cut = int(len(rows) * 0.8)\ntrain_rows, val_rows = rows[:cut], rows[cut:]\n{TRAIN}"},
        {"data.eval_fraction": 0.2, "train.eval_every": 0},
        (),
        ("evaluates on no rows",),
    ),
    "and the first part": (
        {"t.py": HEAD + f"n = int(0.05 * len(rows))\nval = rows[:n]\ntrain = rows[n:]\n{TRAIN}"},
        {"data.eval_fraction": 0.05},
        (),
        (),
    ),
    "a count that slices hold out": (
        {"t.py": HEAD + f"n = len(rows) - 100\nval = rows[n:]\ntrain = rows[:n]\n{TRAIN}"},
        {},
        ("rows held out: its value could not be read; write data.eval_fraction",),
        (),
    ),
    "slices of something else": (
        {"t.py": HEAD + f"n = int(0.5 * len(rows))\nfirst, rest = rows[:n], rows[n:]\n{TRAIN}"},
        {"data.eval_fraction": 0},
        (),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_away_decides_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
