"""Configurations of a user's own: dataclasses as mappings, and files under a command's settings."""

from __future__ import annotations

import pytest

from foreign_files import Case, check_case

LOOP = """\
import torch
from transformers import AutoModelForCausalLM, get_scheduler
{config}
model = AutoModelForCausalLM.from_pretrained({model}, torch_dtype=torch.bfloat16)
loader = torch.utils.data.DataLoader(rows, batch_size={batch}, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr={rate}, weight_decay=0.1)
scheduler = get_scheduler({schedule}, optimizer, num_warmup_steps=10, num_training_steps=500)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step(); scheduler.step(); optimizer.zero_grad()
"""
FIELDS = """\
from dataclasses import asdict, dataclass
from enum import Enum
class Kind(str, Enum):
    LINEAR = "linear"
@dataclass
class Config:
    name: str = "a/b"
    lr: float = 3e-4
    kind: Kind = Kind.LINEAR
    bs: int = 4
    seed: int = 7
made = asdict(Config(bs=2))
torch.manual_seed(made["seed"])"""
AS_A_MAPPING = LOOP.format(
    config=FIELDS, model='made["name"]', batch='made["bs"]', rate='made["lr"]', schedule='made["kind"].value'
)
OMEGA = """\
from omegaconf import OmegaConf
cfg = OmegaConf.merge(OmegaConf.load("conf.yaml"), OmegaConf.from_cli())"""
FROM_CLI = LOOP.format(
    config=OMEGA, model="cfg.model.path", batch="cfg.train.bs", rate="cfg.optim.lr", schedule='"cosine"'
).replace("loader =", "if cfg.model.get('ckpt', False):\n    model.gradient_checkpointing_enable()\nloader =")
CONF = """\
model: {path: a/b, ckpt: true}
data: {path: rows.jsonl, block: 512}
train: {bs: 8, accum: 1, precision: bf16}
optim: {lr: 0.001}
"""
JOINED = """\
def cut(rows):
    tokens = sum(tok(rows["text"])["input_ids"], [])
    return {"input_ids": [tokens[at : at + 512] for at in range(0, len(tokens), 512)]}
rows = rows.map(cut, batched=True)
"""
CASES: dict[str, Case] = {
    "fields as a mapping, and the value of an Enum": (
        {"train.py": AS_A_MAPPING},
        {
            "model.source": "a/b",
            "optimizer.learning_rate": 3e-4,
            "optimizer.schedule": "linear",
            "train.micro_batch": 2,
            "train.seed": 7,
        },
        (),
        ("could not be read",),
    ),
    "a file with sections named like a job's, under a command": (
        {"train.py": FROM_CLI, "conf.yaml": CONF, "run.sh": "python train.py train.bs=4 optim.lr=1e-4\n"},
        {
            "model.source": "a/b",
            "optimizer.learning_rate": 1e-4,
            "train.micro_batch": 4,
            "train.checkpointing": "full",
        },
        (),
        (),
    ),
    "the same without a command": (
        {"train.py": FROM_CLI, "conf.yaml": CONF},
        {"optimizer.learning_rate": 1e-3, "train.micro_batch": 8},
        (),
        (),
    ),
    "tokens of all rows, joined by a sum": (
        {"train.py": AS_A_MAPPING.replace("loader =", f"{JOINED}loader =")},
        {"data.packing": True},
        (),
        (),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_configurations(case: Case, tmp_path, monkeypatch) -> None:
    check_case(case, tmp_path, monkeypatch)


NANO = """\
import torch
batch_size = 12
learning_rate = 6e-4
max_iters = 600000
exec(open('configurator.py').read())
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("a/b")
loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
for step, batch in zip(range(max_iters), loader):
    model(**batch).loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
SETTINGS = "# a smaller run\nimport time\n\nlearning_rate = 3e-5  # lower\nmax_iters = 20\nout = 'a\\\\b'\n"


def test_a_file_of_settings_that_a_script_runs_comes_first(tmp_path, monkeypatch) -> None:
    files = {"train.py": NANO, "config/small.py": SETTINGS, "run.sh": "python train.py config/small.py\n"}
    check_case(
        (files, {"optimizer.learning_rate": 3e-5, "train.micro_batch": 12}, (), ()), tmp_path, monkeypatch
    )


def test_without_one_its_own_values_hold(tmp_path, monkeypatch) -> None:
    check_case(({"train.py": NANO}, {"optimizer.learning_rate": 6e-4}, (), ()), tmp_path, monkeypatch)


COUNTED = """\
import torch
from transformers import AutoModelForCausalLM
STEPS = 3000
ACCUM = 8
step = at = 0
model = AutoModelForCausalLM.from_pretrained("a/b")
loader = torch.utils.data.DataLoader(rows, batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
{head}
        (model(**batch).loss / ACCUM).backward()
{tail}
"""
IN_THE_STEP = """\
        if (at + 1) % ACCUM == 0:
            optimizer.step(); optimizer.zero_grad()
            step += 1
        at += 1"""
OUTSIDE = IN_THE_STEP.replace("            step += 1\n", "") + "\n        step += 1"
WHILE = "while step < STEPS:\n    for batch in loader:"
FOR = "for epoch in range(100):\n    for batch in loader:"
BREAK = "\n        if step >= STEPS:\n            break"


@pytest.mark.parametrize(
    ("head", "tail", "steps"),
    [
        (WHILE, IN_THE_STEP, 3000),
        (WHILE, OUTSIDE, 375),
        (FOR, IN_THE_STEP + BREAK, 3000),
        (FOR, OUTSIDE + BREAK, 375),
        (FOR, IN_THE_STEP + BREAK.replace("step >= STEPS", "patience >= 3"), None),
    ],
)
def test_a_counter_says_after_how_many_steps_a_loop_ends(head, tail, steps, tmp_path, monkeypatch) -> None:
    files = {"train.py": COUNTED.format(head=head, tail=tail)}
    check_case((files, {"train.steps": steps}, (), ()), tmp_path, monkeypatch)


def test_a_counter_of_an_engines_micro_batches_is_to_do(tmp_path, monkeypatch) -> None:
    script = """\
import deepspeed
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("a/b")
engine, _, loader, _ = deepspeed.initialize(model=model, config="ds.json", training_data=rows)
steps = 0
for batch in loader:
    loss = engine(**batch).loss
    engine.backward(loss)
    engine.step()
    steps += 1
    if steps >= 8000:
        break
"""
    said = ("engine.step() (line 6): write train.steps",)
    settings = '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}'
    files = {"train.py": script, "ds.json": settings}
    check_case((files, {"train.steps": None}, said, ()), tmp_path, monkeypatch)


def test_a_file_cut_into_rows_is_packed(tmp_path, monkeypatch) -> None:
    cut = "ids = tok(open('a.txt').read())['input_ids']\nrows = [ids[i:i+n] for i in range(0, len(ids), n)]"
    files = {"train.py": NANO.replace("loader", f"{cut}\nloader", 1)}
    check_case((files, {"data.packing": True}, (), ()), tmp_path, monkeypatch)


def test_a_generators_seed_is_not_the_runs(tmp_path, monkeypatch) -> None:
    own = "rng = torch.Generator()\nrng.manual_seed(42 + 1)\ntorch.Generator().manual_seed(3)\n"
    files = {"train.py": NANO.replace("batch_size = 12", own + "torch.manual_seed(1337)\nbatch_size = 12", 1)}
    check_case((files, {"train.seed": 1337}, (), ()), tmp_path, monkeypatch)
