"""Literal values that a script spells in other ways than as the argument of a call."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import check_case

ARGUMENTS = "learning_rate={}, per_device_train_batch_size={}, num_train_epochs={}"
START = "import argparse\nfrom transformers import Trainer, TrainingArguments, AutoModelForCausalLM\n"
MODEL = "model = AutoModelForCausalLM.from_pretrained('a/b')\n"
FIELDS = "    lr: float = 1e-4\n    size: int = 3\n    epochs: int = 7\n"
OF_C = ARGUMENTS.format("c.lr", "c.size", "c.epochs")
DICT = "{'per_device_train_batch_size': 3, 'num_train_epochs': 7}"
PARSER = "p = argparse.ArgumentParser()\n"
FLAGS = PARSER + "p.add_argument('--lr', type=float)\np.add_argument('--size', type=int, default=None)\n"
DEFAULTS = (
    PARSER + "p.add_argument('--lr', default=3e-4)\np.add_argument('--size', default=3)\n"
    "p.add_argument('--epochs', default=7)\n"
)
SPELLINGS = {
    "a class by place": (f"@dataclass\nclass C:\n{FIELDS}c = C(3e-4)\n", OF_C),
    "a class whose __init__ takes a place": (
        "class C:\n    def __init__(self, rate, size=3):\n        self.lr = rate\n        self.size = size\n"
        "        self.epochs = 7\nc = C(3e-4)\n",
        OF_C,
    ),
    "pydantic": (
        "class C(BaseModel):\n    lr: float = Field(3e-4)\n    size: int = Field(3, ge=1)\n"
        "    epochs: int = Field(default=7)\nc = C()\n",
        OF_C,
    ),
    "an item of a list": ("rates = [1e-5, 3e-4]\n", ARGUMENTS.format("rates[1]", "[3, 4][0]", "[7][-1]")),
    "or": (f"{FLAGS}a = p.parse_args()\n", ARGUMENTS.format("a.lr or 3e-4", "a.size or 3", "7")),
    "if": (
        f"{FLAGS}a = p.parse_args()\n",
        ARGUMENTS.format("a.lr if a.lr else 3e-4", "3 if a.size is None else a.size", "7"),
    ),
    "vars of a parser": (
        f"{DEFAULTS}a = vars(p.parse_args())\n",
        ARGUMENTS.format("a['lr']", "a.get('size')", "a['epochs']"),
    ),
}
VALUES = {"optimizer.learning_rate": 3e-4, "train.micro_batch": 3, "train.epochs": 7}


def script(before: str, given: str) -> str:
    """A training whose arguments are these."""
    args = f"TrainingArguments('out', {given})"
    return f"{START}{MODEL}{before}Trainer(model=model, args={args}, train_dataset=rows).train()\n"


@pytest.mark.parametrize("name", SPELLINGS)
def test_a_literal_is_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"run.sh": "python train.py\n"} if name in ("or", "if") else {}  # else a command may give them
    case = (run | {"train.py": script(*SPELLINGS[name])}, VALUES, (), ("could not be read; write optimizer",))
    check_case(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["or", "if", "vars of a parser"])
def test_a_command_counts_more(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"run.sh": "python train.py --lr 0.002\n", "train.py": script(*SPELLINGS[name])}
    check_case((files, VALUES | {"optimizer.learning_rate": 0.002}, (), ()), tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("before", "rate"),
    [
        (f"{PARSER}p.add_argument('--lr', required=True)\na = p.parse_args()\n", "a.lr or 3e-4"),
        ("import os\nrate = os.environ['RATE']\n", "rate or 3e-4"),
        ("@dataclass\nclass C:\n    lr: float = 1e-4\nc = C(*rates)\n", "c.lr"),
        ("x = found()\n", "[3e-4, x][1]"),
    ],
)
def test_what_only_a_run_knows_stays_open(
    before: str, rate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.py": script(before, f"learning_rate={rate}")}
    case = (files, {"optimizer.learning_rate": None}, ("write optimizer.learning_rate",), ())
    check_case(case, tmp_path, monkeypatch)


def test_a_line_of_another_script_is_none_of_a_short_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a long script sets on its arguments is marked in each module, of which this one has four lines."""
    loop = (
        "def main(args):\n    accelerator = Accelerator(gradient_accumulation_steps=4)\n"
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)\n"
        "    loader = torch.utils.data.DataLoader(rows, batch_size=2, collate_fn=Collator())\n"
        "    args.max_train_steps = count(args)\n    for step in range(args.max_train_steps):\n"
        "        accelerator.backward(model(batch).loss)\n        optimizer.step()\n"
    )
    head = "import torch\nfrom accelerate import Accelerator\nfrom helper import Collator\n"
    helper = "class Collator:\n    def __call__(self, rows):\n        return rows\n"
    files = {"main.py": head + "\n" * 40 + loop, "helper.py": helper}
    check_case((files, {"optimizer.learning_rate": 1e-4}, (), ()), tmp_path, monkeypatch)
