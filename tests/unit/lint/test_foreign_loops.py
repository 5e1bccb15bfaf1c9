# ruff: noqa: E501 - the files are text
"""What loops, masks and texts of a script say of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

LOOP = """\
import argparse, math, torch
from transformers import AutoModelForCausalLM
p = argparse.ArgumentParser()
p.add_argument("--epochs", type=float, default=3.0)
p.add_argument("--batch-size", type=int, default=32)
args = p.parse_args()
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
def lr_at(step):
    return 3e-5 * math.cos(step)
step = 0
for ep in range(math.ceil(args.epochs)):
    for i in range(0, len(train), args.batch_size):
        SET_RATE
        loss = model(**collate(train[i:i + args.batch_size])).loss
        loss.backward()
        optimizer.step()
        step += 1
"""
GROUP = "for g in optimizer.param_groups:\n            g['lr'] = lr_at(step)"
FIRST = "optimizer.param_groups[0]['lr'] = lr_at(step)"
OPEN_RATE = ("write optimizer.schedule, optimizer.warmup_steps",)
CONSTANT = {"optimizer.schedule": "constant"}

ENGINE = """\
import argparse, deepspeed
p = argparse.ArgumentParser()
p.add_argument("--max_steps", type=int, default=3000)
args = p.parse_args()
engine, *_ = deepspeed.initialize(model=model, config="ds.json")
step = 0
while step < args.max_steps:
    loss = engine(next(rows))
    engine.backward(loss)
    engine.step()
    step += 1
"""
DS = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}%s}'
MICRO_STEPS = ("engine.step() (line 7): write train.steps",)

CASES: dict[str, Case] = {
    "a loop over batches": (
        {"train.py": LOOP},
        {"train.steps": None, "train.epochs": 3, "train.global_batch": 32, "train.micro_batch": 32},
        (),
        (),
    ),
    "no rate by hand": ({"train.py": LOOP.replace("SET_RATE", "pass")}, CONSTANT, (), OPEN_RATE),
    **{
        f"a rate by hand: {name}": (
            {"train.py": LOOP.replace("SET_RATE", text)},
            {"optimizer.schedule": None},
            OPEN_RATE,
            ("schedule=constant",),
        )
        for name, text in {"each group": GROUP, "first group": FIRST}.items()
    },
    "a comment names a scheduler": (
        {"train.py": LOOP.replace("SET_RATE", "# lr_scheduler.step() would warn\n        pass")},
        CONSTANT,
        (),
        OPEN_RATE,
    ),
    "micro-steps of an engine": ({"train.py": ENGINE, "ds.json": DS % ""}, {}, MICRO_STEPS, ()),
    "steps of an engine": (
        {"train.py": ENGINE, "ds.json": DS % ', "gradient_accumulation_steps": 1'},
        {},
        (),
        MICRO_STEPS,
    ),
    "micro-steps in a range": (
        {
            "train.py": ENGINE.replace("while step < args.max_steps", "for step in range(args.max_steps)"),
            "ds.json": DS % "",
        },
        {"train.steps": 3000},
        MICRO_STEPS,
        (),
    ),
}

TRAINER = """\
import fire
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
PROMPT = "You are a doctor."
IGNORE_TOKEN_ID = -100
"""
END = """
    data = load_dataset("json", data_files="rows.jsonl")["train"].map(ROWS)
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    Trainer(model=model, args=TrainingArguments(output_dir="out"), train_dataset=data).train()
"""
FORMATS = """\
def process(row, tokenizer):
    return tokenizer(f"<|im_start|>system\\n{PROMPT}<|im_end|>\\n{row['input']}")
"""
TEXT = ("text by", "prepare the rows in a shape of data.format")


def with_rows(rows: str, before: str = FORMATS) -> dict[str, str]:
    return {"train.py": TRAINER + before + "def main():" + END.replace("ROWS", rows) + "main()\n"}


CASES |= {
    f"text {name}": (files, {}, TEXT, ())
    for name, files in {
        "of a lambda's function": with_rows("lambda row: process(row, tokenizer)"),
        "of a partial": with_rows("functools.partial(process, tokenizer=tokenizer)"),
        "of a function in a function": with_rows(
            "encode", FORMATS + "def encode(row):\n    return {'ids': process(row, tokenizer)}\n"
        ),
        "of a comprehension": {
            "train.py": TRAINER
            + FORMATS
            + "def main():\n    rows = Dataset.from_list([process(r, tokenizer) for r in read()])"
            + END.replace(".map(ROWS)", "")
            + "main()\n"
        },
        "of messages with a system's": with_rows(
            "process",
            "def process(row):\n    chat = [{'role': 'system', 'content': PROMPT}, {'role': 'user', 'content': row['q']}]\n"
            "    return tokenizer(tokenizer.apply_chat_template(chat, tokenize=False))\n",
        ),
        "of a constant and a field": with_rows(
            "process", "def process(row):\n    return tokenizer(PROMPT + row['input'])\n"
        ),
    }.items()
}
NO_TEXT = ("text by",)
CASES |= {
    f"no text {name}": (files, {}, (), NO_TEXT)
    for name, files in {
        "of the chat template alone": with_rows(
            "process",
            "def process(row):\n    log.info(f'{row}')\n    for one in row['messages']:\n        if one['role'] == 'user':\n"
            "            n = 1\n    return tokenizer(tokenizer.apply_chat_template(row['messages'], tokenize=False))\n",
        ),
        "of a field": with_rows("lambda row: tokenizer(row['text'])", ""),
        "of what is generated": with_rows(
            "lambda row: tokenizer(row['text'])",
            "def answer(model, q):\n    return model.generate(tokenizer(f'### Instruction:\\n{q}'))\n",
        ),
        "where only the parts are named": {
            "train.py": TRAINER
            + "def main():"
            + END.replace("ROWS", "tokenize")
            + "    train_on_responses_only(trainer, instruction_part='<|im_start|>user\\n')\nmain()\n"
        },
    }.items()
}

LABELS = """\
def train(train_on_inputs: bool = True):
    def encode(row):
        made = tokenizer(row["text"])
        target_ids = made["input_ids"].copy()
        MASK
        made["labels"] = target_ids
        return made
"""
MASKS = ("labels(-100)",)


def with_mask(mask: str, more: str = "") -> dict[str, str]:
    return {
        "train.py": f"{TRAINER}{LABELS.replace('MASK', mask)}{END.replace('ROWS', 'encode')}{more}fire.Fire(train)\n"
    }


CASES |= {
    f"labels: {name}": (with_mask(text), {"data.loss_on": expected}, said, never)
    for name, text, expected, said, never in [
        ("padding", "target_ids[target_ids == tokenizer.pad_token_id] = IGNORE_TOKEN_ID", "all", (), MASKS),
        ("attention", "target_ids[made['attention_mask'] == 0] = -100", "all", (), MASKS),
        ("a comment", "# -100 for none", "all", (), MASKS),
        ("a prompt", "target_ids[:n] = IGNORE_TOKEN_ID", None, MASKS, ()),
        ("by a switch", "if not train_on_inputs: target_ids[:n] = [-100] * len(prompt)", "all", (), MASKS),
        ("by a list", "target_ids = [-100 for _ in range(len(prompt))] + answer", "answers", (), MASKS),
    ]
}
CASES["labels: made again"] = (
    with_mask("target_ids[:n] = -100", "DataCollatorForLanguageModeling(tokenizer, mlm=False)\n"),
    {"data.loss_on": "all"},
    (),
    MASKS,
)
CASES["labels: by a flag"] = (
    with_mask("if not train_on_inputs: target_ids[:n] = [-100] * len(prompt)")
    | {"run.sh": "python train.py --train_on_inputs False\n"},
    {"data.loss_on": "answers"},
    (),
    (),
)

TURNS = """\
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
for step in range(4000):
    loss = model(**next(rows)).loss / 8
    loss.backward()
    STEP
    if step % 800 == 0:
        model.save_pretrained("out")
"""
BY_EIGHT = {"train.steps": 500, "train.save_every": 100}
EVERY_TURN = {"train.steps": 4000, "train.save_every": 800}
CASES |= {
    f"turns of a loop over steps: {name}": ({"train.py": TURNS.replace("STEP", step)}, values, to_do, ())
    for name, (step, values, to_do) in {
        "each": ("optimizer.step()", EVERY_TURN, ()),
        "each, and a rate's every 10": (
            "optimizer.step()\n    if step % 10 == 0:\n        scheduler.step()",
            EVERY_TURN,
            (),
        ),
        "one of eight": ("if (step + 1) % 8 == 0:\n        optimizer.step()", BY_EIGHT, ()),
        "one of eight, by a scaler": (
            "if (step + 1) % 8 == 0:\n        scaler.step(optimizer)\n        scaler.update()",
            BY_EIGHT,
            (),
        ),
        "seven skipped": ("if (step + 1) % 8:\n        continue\n    optimizer.step()", BY_EIGHT, ()),
        "those of accelerate": (
            "with accelerator.accumulate(model):\n        optimizer.step()",
            {"train.steps": None},
            ("write train.steps",),
        ),
    }.items()
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_script_does_with_rows_and_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
