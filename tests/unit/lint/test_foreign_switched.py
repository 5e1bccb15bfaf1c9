# ruff: noqa: E501 - the files are text
"""What a seventh walk over files that nobody had read found wrong: files in, the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

FLAGS = "--model a/b --dataset d.jsonl --learning_rate 1e-4 --per_device_train_batch_size 2\n"
SWIFT = {
    "optimizer.beta2": 0.95,
    "optimizer.weight_decay": 0.1,
    "model.lora.rank": 8,
}
ZERO = '{"zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW", "params": {"lr": 9e-4}}, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}'
AXOLOTL = "base_model: a/b\nmicro_batch_size: 2\nlearning_rate: 1e-4\nlr_scheduler: cosine\nbf16: true\n"
FILLED = "from transformers import HfArgumentParser, Trainer, TrainingArguments\nm, t = HfArgumentParser((M, TrainingArguments)).parse_args_into_dataclasses()\nTrainer(model=x, args=t).train()\n"
SWITCH = "import argparse\nfrom transformers import Trainer, TrainingArguments\np = argparse.ArgumentParser()\np.add_argument('--use_deepspeed', action='store_true')\np.add_argument('--json', default='z.json')\na = p.parse_args()\nd = a.json if a.use_deepspeed else None\nTrainer(m, TrainingArguments('o', learning_rate=1e-4, lr_scheduler_type='cosine', deepspeed=d)).train()\n"
ACCELERATE = "accelerate launch --mixed_precision bf16 --deepspeed_config_file z.json {}train.py --model_name_or_path a/b --learning_rate 1e-4 --lr_scheduler_type cosine --output_dir o\n"
NOT_ON = "left out: z.json: nothing switches it on"
OFF = {"strategy": None, "optimizer.learning_rate": 1e-4, "optimizer.schedule": "cosine"}
ROWS = "class Rows(Dataset):\n    def __getitem__(self, at):\n        ids = []\n        for one in parts:\n            ids += one\n"
TRAINED = "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o'), train_dataset=Rows()).train()\n"
MASKED = "import torch\nfrom transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\nopt = torch.optim.AdamW(m.parameters(), lr=1e-4)\nids = tok(rows, max_length=50, padding=True)\nlabels = ids['input_ids']\n"
AUTO = '{"zero_optimization": {"stage": 2}, "fp16": {"enabled": "auto"}}'
HALF = "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', learning_rate=1e-4"
GIVEN = "deepspeed train.py --deepspeed z.json --model_name_or_path a/b --output_dir o"
UNREAD = ("is not there", "as the Trainer does")

CASES: dict[str, Case] = {
    **{
        f"ms-swift, started by `{start.splitlines()[-1]}`": (
            {"run.sh": f"{start} {FLAGS}"},
            SWIFT,
            ("assumed, as ms-swift 4 does",),
            UNREAD,
        )
        for start in (
            "python -m swift.cli.sft",
            "python3 /opt/ms-swift/swift/cli/sft.py",
            "torchrun --nproc_per_node 2 -m swift.cli.sft",
            "/opt/env/bin/python -m torch.distributed.run --nproc_per_node 2 -m swift.cli.sft",
            "if test $A; then\nL=torchrun\nfi\n${L} --nproc_per_node 2 -m swift.cli.sft",
            "$LAUNCHER -m swift.cli.sft",
        )
    },
    "ms-swift's pt, started as a module": (
        {"run.sh": f"torchrun --nproc_per_node 4 -m swift.cli.pt {FLAGS}"},
        {"data.format": "text", "optimizer.beta2": 0.95, "train.global_batch": 16},
        ("changed: run.sh:1: swift: pt: the job's rows are plain text",),
        UNREAD,
    ),
    "Axolotl's empty `deepspeed:`": (
        {"a.yml": f"{AXOLOTL}deepspeed:\n", "z.json": ZERO},
        OFF,
        (f"{NOT_ON} (a.yml:6: deepspeed is empty)",),
        ("conflict",),
    ),
    "Axolotl's empty `deepspeed:`, with a section that it does not read": (
        {"a.yml": f"{AXOLOTL}deepspeed: \ndeepspeed_config:\n  zero_stage: 3\n", "z.json": ZERO},
        {**OFF, "train.precision": "bf16"},
        (NOT_ON, "left out: a.yml: deepspeed_config: nothing switches it on"),
        ("conflict",),
    ),
    "Axolotl's command gives the file": (
        {
            "a.yml": f"{AXOLOTL}deepspeed:\n",
            "run.sh": "axolotl train a.yml --deepspeed z.json\n",
            "z.json": ZERO,
        },
        {"strategy.stage": 2},
        (),
        ("nothing switches",),
    ),
    "accelerate without --use_deepspeed": (
        {"run.sh": ACCELERATE.format(""), "train.py": FILLED, "z.json": ZERO},
        {**OFF, "train.precision": "bf16"},
        (f"{NOT_ON} (run.sh:1: no --use_deepspeed)",),
        ("conflict",),
    ),
    "accelerate with --use_deepspeed": (
        {"run.sh": ACCELERATE.format("--use_deepspeed "), "train.py": FILLED, "z.json": ZERO},
        {"strategy.stage": 2},
        (),
        ("nothing switches",),
    ),
    "accelerate whose own file asks for DeepSpeed": (
        {
            "run.sh": ACCELERATE.format("--config_file c.yaml "),
            "c.yaml": "distributed_type: DEEPSPEED\n",
            "train.py": FILLED,
            "z.json": ZERO,
        },
        {"strategy.stage": 2},
        (),
        ("nothing switches",),
    ),
    "a script's switch, off by default": (
        {"train.py": SWITCH, "z.json": ZERO},
        OFF,
        (f"{NOT_ON} (train.py:8: deepspeed is None)",),
        ("conflict",),
    ),
    "a script's switch, off in its command": (
        {"train.py": SWITCH, "run.sh": "torchrun --nproc_per_node 2 train.py\n", "z.json": ZERO},
        OFF | {"strategy": "ddp"},
        (NOT_ON,),
        ("conflict",),
    ),
    "a script's switch, on in its command": (
        {
            "train.py": SWITCH,
            "run.sh": "torchrun --nproc_per_node 2 train.py --use_deepspeed\n",
            "z.json": ZERO,
        },
        {"strategy.stage": 2},
        (),
        ("nothing switches",),
    ),
    "a row that is cut at its end is not packed": (
        {
            "train.py": "from transformers import TrainingArguments\nfrom own import OwnTrainer\nfrom rows import Rows\nOwnTrainer(model=m, args=TrainingArguments('o', learning_rate=1e-4), train_dataset=Rows()).train()\n",
            "own.py": "from transformers import Trainer\nclass OwnTrainer(Trainer):\n    pass\n",
            "rows.py": f"{ROWS}        return ids[:self.max_length]\n",
        },
        {"data.packing": False},
        (),
        (),
    ),
    "a row that is cut from its start is not packed": (
        {"train.py": f"{ROWS}        return {{'input_ids': ids[0:self.max_length]}}\n{TRAINED}"},
        {"data.packing": False},
        (),
        (),
    ),
    "rows that are cut again and again are packed": (
        {
            "train.py": f"{ROWS}        return [ids[i : i + self.block] for i in range(0, len(ids), self.block)]\n{TRAINED}"
        },
        {"data.packing": True},
        (),
        (),
    ),
    "a buffer that is cut while it lasts is packed": (
        {
            "train.py": f"{ROWS}        while ids:\n            yield ids[:self.block]\n            ids = ids[self.block:]\n{TRAINED}"
        },
        {"data.packing": True},
        (),
        (),
    ),
    "a loss times a mask": (
        {"train.py": f"{MASKED}loss = loss * loss_mask\nloss.mean().backward()\n"},
        {"data.loss_on": None},
        (
            "to do: train.py:7: loss_mask(): the loss is multiplied by a mask, which decides which tokens count; write data.loss_on",
        ),
        ("without padding", "data.loss_on=all"),
    ),
    "a sum of losses times a mask": (
        {"train.py": f"{MASKED}(torch.sum(losses.view(-1) * mask.float()) / mask.sum()).backward()\n"},
        {"data.loss_on": None},
        ("write data.loss_on",),
        ("without padding", "data.loss_on=all"),
    ),
    "a loss without its padding": (
        {"train.py": f"{MASKED}(loss * attention_mask).mean().backward()\n"},
        {"data.loss_on": "all"},
        (),
        ("write data.loss_on",),
    ),
    "a script without fp16, which DeepSpeed's file leaves to it": (
        {"train.py": f"{HALF}, deepspeed='z.json')).train()\n", "z.json": AUTO},
        {"train.precision": "fp32", "strategy.stage": 2},
        (),
        (),
    ),
    "a command without --fp16, which DeepSpeed's file leaves to it": (
        {"train.py": FILLED, "run.sh": GIVEN, "z.json": AUTO},
        {"train.precision": "fp32", "strategy.stage": 2},
        (),
        (),
    ),
    "a command with --fp16": (
        {"train.py": FILLED, "run.sh": f"{GIVEN} --fp16\n", "z.json": AUTO},
        {"train.precision": "fp16"},
        (),
        (),
    ),
    "a script whose fp16 only a run knows": (
        {"train.py": f"{HALF}, fp16=ask(), deepspeed='z.json')).train()\n", "z.json": AUTO},
        {"train.precision": "fp16"},
        (),
        (),
    ),
    "a file of rows that the script's own code reads": (
        {
            "train.py": f"import json\nwith open('conf.json') as f:\n    c = json.load(f)\nwith open('./data/rows.jsonl') as f:\n    rows = [json.loads(one) for one in f]\n{TRAINED}"
        },
        {},
        ("to do: train.py:4: open ./data/rows.jsonl: not understood; write data.train",),
        ("not found in the files; write it in place of fill-in-the-data",),
    ),
    "rows of the script's own class, and those that it writes or evaluates on": (
        {
            "train.py": f"open('out.json', 'w')\nheld = Rows('eval.json')\nrows = OwnDataset('data.csv', tok)\n{TRAINED}"
        },
        {},
        ("to do: train.py:3: OwnDataset data.csv: not understood; write data.train",),
        ("eval.json", "out.json"),
    ),
    "a launcher in a variable that a branch assigns": (
        {
            "run.sh": "if test $A; then\nL=torchrun\nfi\n$L --nproc_per_node 4 train.py\n",
            "train.py": "from transformers import Trainer, TrainingArguments\nTrainer(m, TrainingArguments('o', per_device_train_batch_size=2)).train()\n",
        },
        {"train.global_batch": 8},
        (),
        ("no file says how many",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_switched_on_is_read_right(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
