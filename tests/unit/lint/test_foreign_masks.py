# ruff: noqa: E501 - the files are text
"""Which tokens a script's loss counts, and scripts that this Python cannot read in full."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foreign_files import Case, check_case

START = (
    "import torch\nfrom transformers import AutoModelForCausalLM, TrainingArguments, Trainer\n"
    "from transformers import DataCollatorForLanguageModeling\nfrom trl import SFTTrainer, SFTConfig\n"
    "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
)
MAPPED = (
    "def rows_of(r):\n    n = len(r['p'])\n    labels = {}\n    return dict(ids=r['ids'], labels=labels)\n"
)
MAPPED += "ds = ds.map(rows_of)\n"
TRAINER = "Trainer(model, TrainingArguments('out'), train_dataset=ds, data_collator={}).train()\n"
SFT = "SFTTrainer(model, args=SFTConfig('out'), train_dataset=ds).train()\n"
ALL = "DataCollatorForLanguageModeling(tok, mlm=False)"
ANSWERS, NOT_SAID = {"data.loss_on": "answers"}, {"data.loss_on": None}
MASKS = "labels(-100) (line"
LOOP = (
    "import torch\nimport torch.nn.functional as F\nfrom transformers import AutoModelForCausalLM\n"
    "model = AutoModelForCausalLM.from_pretrained('a/b')\nopt = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
    "for step in range(9):\n    each = F.cross_entropy(model(ids).logits.view(-1, 9), ids.view(-1), {})\n"
    "    loss = (each * region).sum() / region.sum()\n    loss.backward()\n    opt.step()\n"
)


def mapped(labels: str, train: str) -> dict[str, str]:
    return {"train.py": START + MAPPED.format(labels) + train}


CASES: dict[str, Case] = {
    "as many as a number": (mapped("[-100] * n_prompt + r['ids'][n_prompt:]", SFT), ANSWERS, (), ()),
    "as many as a length": (mapped("[-100] * (seq_len - 1) + r['ids'][seq_len - 1:]", SFT), ANSWERS, (), ()),
    "padding": (
        mapped("r['ids'] + [-100] * (max_len - len(r['ids']))", TRAINER.format("None")),
        {},
        (),
        ("masked()",),
    ),
    "rows without answers": (
        {"train.py": START + "ds = ds.filter(lambda r: any(t != -100 for t in r['labels']))\n" + SFT},
        {},
        (),
        (MASKS,),
    ),
    "a list of each": (
        mapped("[t if i >= n else -100 for i, t in enumerate(r['input_ids'])]", TRAINER.format("None")),
        NOT_SAID,
        (MASKS,),
        ("own_collator()",),
    ),
    "TRL counts no masked token": (
        mapped("[t if i >= n else -100 for i, t in enumerate(r['ids'])]", SFT),
        NOT_SAID,
        (MASKS,),
        ("data.loss_on=all",),
    ),
    "a collator that makes labels of its own": (
        mapped("[-100] * len(r['p']) + r['ids']", TRAINER.format(ALL)),
        {"data.loss_on": "all"},
        (),
        ("conflict",),
    ),
    "a loss of each token": (
        {"train.py": LOOP.format("reduction='none'")},
        NOT_SAID,
        ("loss_mask(): the loss is multiplied by a mask",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_masked_prompt_is_never_counted_in_silence(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it reads these f-strings")
def test_a_script_of_a_later_python_is_read_without_its_f_strings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = "TrainingArguments('out', learning_rate=RATE)"
    later = 'from conf import RATE\nprint(f"{row["a"]} of {row["b"].split("#")}")\n'
    later += """print(f"<s>{"".join(f"{names[(by := x['from'])]}{x['value']}" for x in rows)}")\n"""
    later += 'rate = RATE if f"{RATE}" else 1.0\n'
    named = 'model = AutoModelForCausalLM.from_pretrained(f"{row["org"]}/b")\n'
    script = START.replace("model = AutoModelForCausalLM.from_pretrained('a/b')\n", later + named)
    files = {"train.py": f"{script}Trainer(model, {args}).train()\n", "conf.py": "RATE = 3e-4\n"}
    said = (
        "to do: train.py:6: Python 3.11, which runs init, stops",
        "run a newer Python",
        "write model.source",
    )
    check_case((files, {"optimizer.learning_rate": 3e-4}, said, ("check",)), tmp_path, monkeypatch)
