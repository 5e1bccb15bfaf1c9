# ruff: noqa: E501 - the files are text
"""What no key says: a tool's own precision and length, and words that say what is so anyway."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TRAINS = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nimport torch\nfrom datasets import load_dataset\n{before}model = AutoModelForCausalLM.from_pretrained('gpt2'{loaded})\nrows = load_dataset('json', data_files='r.jsonl')['train']\nTrainer(model=model, args=TrainingArguments('o'{given}), train_dataset=rows).train()\n"


def script(given: str = "", loaded: str = "", before: str = "") -> str:
    return TRAINS.format(given=given, loaded=loaded, before=before)


FIELDS = "from dataclasses import dataclass, field\nimport pandas as pd\nimport torch\nfrom datasets import Dataset\nfrom transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments\n\n\n@dataclass\nclass Own:\n    model_path: str = field(default='./base')\n\n\nif {test}:\n    own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()\n    df = pd.read_json('./rows.json')\n{change}    ds = Dataset.from_pandas(df)\n    model = AutoModelForCausalLM.from_pretrained(own.model_path, torch_dtype={dtype})\n    Trainer(model=model, args=args, train_dataset=ds).train()\n"
COMMAND = "deepspeed --num_gpus 1 train.py --output_dir o --learning_rate 1e-4 --save_on_each_node True\n"
AXOLOTL = "base_model: a/b\ndatasets:\n  - path: r.jsonl\n    type: chat_template\n    roles:\n      user: [{user}]\n      assistant: [assistant]\n      system:\n        - system\nsequence_len: 512\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nlearning_rate: 1e-5\nnum_epochs: 1\n"
OWN_LOOP = "import argparse, json, deepspeed\nfrom transformers import AutoModelForCausalLM\ncfg = json.load(open('ds.json'))\nmodel = AutoModelForCausalLM.from_pretrained('gpt2')\nrows = [json.loads(row) for row in open('rows.jsonl')]\nengine, *_ = deepspeed.initialize(model=model, config=cfg)\nfor batch in rows:\n    engine.backward(engine(**batch).loss)\n    engine.step()\n"
DEEPSPEED = (
    '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
)
PARSED = (
    "import argparse\np = argparse.ArgumentParser()\np.add_argument('--r_name')\np.add_argument('--lr', type=float)\nargs = p.parse_args()\n"
    + script(", learning_rate=args.lr")
)

CASES: dict[str, Case] = {
    "a Trainer with neither format": (
        {"train.py": script()},
        {"train.precision": "fp32"},
        ("as the Trainer without bf16 and fp16 does: train.precision=fp32",),
        ("own: train.precision",),
    ),
    "one of them off": ({"train.py": script(", fp16=False")}, {"train.precision": "fp32"}, (), ()),
    "weights in halves": (
        {"train.py": script(loaded=", torch_dtype=torch.half")},
        {"train.precision": "fp16"},
        (),
        ("could not be read",),
    ),
    "bf16 weights": (
        {"train.py": script(loaded=", torch_dtype=torch.bfloat16")},
        {"train.precision": "bf16"},
        (),
        ("fp32",),
    ),
    "the format of the files": (
        {"train.py": script(loaded=", torch_dtype='auto'")},
        {"train.precision": None},
        (),
        ("fp32",),
    ),
    "a launcher that may have a format of its own": (
        {"train.py": script(), "run.sh": "accelerate launch --num_processes 2 train.py\n"},
        {"train.precision": None},
        (),
        ("fp32",),
    ),
    "halves around the Trainer": (
        {"train.py": script(before="torch.set_default_dtype(torch.bfloat16)\n")},
        {"train.precision": None},
        (),
        ("fp32",),
    ),
    "fields, a frame, and the other order of a comparison": (
        {
            "run.sh": COMMAND,
            "train.py": FIELDS.format(test="'__main__' == __name__", dtype="torch.half", change=""),
        },
        {
            "model.source": "./base",
            "train.precision": "fp16",
            "data.train": "./rows.json",
            "optimizer.learning_rate": 1e-4,
        },
        (),
        ("could not be read", "read_json", "no script of --from reads them"),
    ),
    "a frame that is changed": (
        {
            "run.sh": COMMAND,
            "train.py": FIELDS.format(
                test="__name__ == '__main__'",
                dtype="torch.half",
                change="    df['text'] = df['a'] + df['b']\n",
            ),
        },
        {"data.train": "fill-in-the-data.jsonl"},
        ("read_json ./rows.json: not understood; write data.train",),
        (),
    ),
    "a configuration that is opened, and rows": (
        {"train.py": OWN_LOOP, "ds.json": DEEPSPEED},
        {"data.train": "fill-in-the-data.jsonl"},
        ("open rows.jsonl: not understood; write data.train",),
        ("open ds.json",),
    ),
    "roles by their own names": (
        {"a.yaml": AXOLOTL.format(user="user, human")},
        {"data.train": "r.jsonl"},
        (),
        ("roles",),
    ),
    "roles by others": (
        {"a.yaml": AXOLOTL.format(user="asker")},
        {},
        ("datasets.0.roles.user",),
        ("roles.system", "roles.assistant"),
    ),
    "a flag that a parser reads": (
        {"run.sh": "python train.py --r_name x --lr 1e-4 --other 3\n", "train.py": PARSED},
        {"optimizer.learning_rate": 1e-4},
        ("other: no script of --from reads them",),
        ("r_name: no script", "r_name, "),
    ),
    "ms-swift without a length": (
        {"run.sh": "swift sft --model a/b --dataset c/d\n"},
        {"data.too_long": None},
        ("to do: no file has max_length, and ms-swift then takes the model's own",),
        ("too_long=drop",),
    ),
    "ms-swift with a length": (
        {"run.sh": "swift sft --model a/b --dataset c/d --max_length 512\n"},
        {"data.too_long": "drop"},
        (),
        ("no file has",),
    ),
    "ms-swift 2 without a length": (
        {"run.sh": "swift sft --model_id_or_path a/b --dataset c/d\n"},
        {"data.sequence_length": 2048, "data.too_long": "drop"},
        (),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_the_tools_do_themselves(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
