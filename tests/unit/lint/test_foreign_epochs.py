# ruff: noqa: E501 - the files are text
"""What a loop of a script's own does after epochs, what its optimizer gets, and what it leaves out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

HEAD = "import torch\nfrom accelerate import Accelerator\nfrom datasets import load_dataset\nfrom torch.utils.data import DataLoader\nfrom transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\nloader = DataLoader(load_dataset('x/y', split='train'), batch_size=4)\n"
ADAM = "opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)\n"
LOOP = "for epoch in range(3):\n    for batch in loader:\n        model(**batch).loss.backward()\n        opt.step(); opt.zero_grad()\n"
PREPARED = (
    f"{HEAD}{ADAM}acc = Accelerator()\nsched = get_cosine_schedule_with_warmup(opt, num_warmup_steps=WARM, num_training_steps=TOTAL)\nmodel, opt, loader, sched = acc.prepare(model, opt, loader, sched)\n"
    + LOOP.replace("model(**batch).loss.backward()", "acc.backward(model(**batch).loss)").replace(
        "opt.step();", "opt.step(); sched.step();"
    )
)
FOUR = "accelerate launch --num_processes 4 train.py\n"
LIGHTNING = """\
import torch, lightning as L
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained('a/b')
    def training_step(self, batch, i):
        return self.model(**batch).loss
    def configure_optimizers(self):
        groups = [
            {'params': [p for n, p in self.named_parameters() if 'norm' in n], 'weight_decay': 0.0},
            {'params': [p for n, p in self.named_parameters() if 'norm' not in n], 'weight_decay': 0.1},
            MORE
        ]
        return torch.optim.AdamW(groups, lr=1e-4)
trainer = L.Trainer(max_epochs=2, devices=2, precision='bf16-mixed')
trainer.fit(Lit(), DataLoader(load_dataset('x/y', split='train'), batch_size=8))
"""


def prepared(warm: str, total: str) -> str:
    return PREPARED.replace("WARM", warm).replace("TOTAL", total)


CASES: dict[str, Case] = {
    "a save and an evaluation at the end of each epoch": (
        {"train.py": HEAD + ADAM + LOOP + "    model.save_pretrained(f'out/{epoch}')\n    evaluate(model)\n"},
        {"train.save_every": None, "train.eval_every": None, "data.eval_fraction": 0},
        (
            "changed: train.py: a save after epochs (line 13): train.save_every counts steps; until then 100",
            "an evaluation after epochs (line 14): train.eval_every counts steps",
            "to do: train.py:14: an evaluation after epochs: which rows it takes is not known; write data.eval",
        ),
        ("evaluates on no rows", "own: data.sequence_length 1024, data.loss_on answers, train.save_every"),
    ),
    "a save after every second epoch": (
        {"train.py": HEAD + ADAM + LOOP + "    if (epoch + 1) % 2 == 0:\n        model.save_pretrained(f'out/{epoch}')\n"},
        {"train.save_every": None},
        ("a save after epochs (line 14)",),
        (),
    ),
    "a save after every tenth step": (
        {"train.py": HEAD + ADAM + "for step, batch in enumerate(loader):\n    model(**batch).loss.backward()\n    opt.step(); opt.zero_grad()\n    if step % 10 == 0:\n        model.save_pretrained('out')\n"},
        {"train.save_every": 10},
        (),
        ("after epochs",),
    ),
    "a loop without clipping, with an optimizer of a file that is not there": (
        {"train.py": "from own.optim import make\nfrom transformers import AutoModelForCausalLM\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\nopt = make(model)\nfor step in range(9):\n    loss = model(**batch(step)).loss\n    loss.backward()\n    opt.step()\n"},
        {"optimizer.clip_norm": 0, "train.steps": 9},
        (),
        (),
    ),
    "a schedule that Accelerate steps for each process": (
        {"train.py": prepared("100", "1000"), "run.sh": FOUR},
        {"optimizer.warmup_steps": 25, "train.epochs": 3},
        (),
        (),
    ),
    "one that the script multiplies": (
        {"train.py": prepared("100 * acc.num_processes", "1000 * acc.num_processes"), "run.sh": FOUR},
        {"optimizer.warmup_steps": 100},
        (),
        (),
    ),
    "one that Accelerate steps once": (
        {"train.py": prepared("100", "1000").replace("Accelerator()", "Accelerator(step_scheduler_with_optimizer=False)"), "run.sh": FOUR},
        {"optimizer.warmup_steps": 100},
        (),
        (),
    ),
    "one process": (
        {"train.py": prepared("100", "1000"), "run.sh": FOUR.replace("4", "1")},
        {"optimizer.warmup_steps": 100},
        (),
        (),
    ),
    "groups with and without decay": (
        {"train.py": LIGHTNING.replace("MORE", "")},
        {"optimizer.weight_decay": 0.1, "optimizer.learning_rate": 1e-4, "optimizer.clip_norm": 0},
        (),
        ("own groups",),
    ),
    "a group with another rate": (
        {"train.py": LIGHTNING.replace("MORE", "{'params': self.model.lm_head.parameters(), 'lr': 1e-5, 'weight_decay': 0.1}")},
        {"optimizer.weight_decay": 0.1, "optimizer.learning_rate": 1e-4},
        ("changed: train.py: own groups (line 17): trained with one rate and one decay",),
        (),
    ),
    "a rate for each block": (
        {"train.py": HEAD + "opt = torch.optim.AdamW([{'params': b.parameters(), 'lr': 1e-4 * 0.9 ** i} for i, b in enumerate(model.model.layers)], lr=1e-4)\n" + LOOP},
        {},
        ("own groups (line 8): trained with one rate",),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_loop_does(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
