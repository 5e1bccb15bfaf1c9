"""Faults that a walker planted in public scripts, or that these had, each in other scripts too."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.check import check, load, unreached
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup

TRAINED = """import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = iter(DataLoader(rows, shuffle=True))
accum = 8
"""
MICRO = """for step in range(100):
    optimizer.zero_grad()
    for micro in range({count}):
        batch = next(loader)
        {zero}
        loss = model(**batch).loss{divided}
        loss.backward()
    optimizer.step()
"""


def setup_of(folder: Path, **texts: str) -> tuple[Setup, tuple[Finding, ...]]:
    """The files and all findings; `train_py` is train.py."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    documents, broken = load([folder / name.replace("_", ".") for name in texts])
    setup = Setup(documents=documents)
    return setup, check(setup, broken).findings


def of_rule(folder: Path, rule: str, **texts: str) -> list[Finding]:
    return [one for one in setup_of(folder, **texts)[1] if one.rule == rule]


def micro(count: str = "accum", divided: str = "", zero: str = "pass") -> str:
    return TRAINED + MICRO.format(count=count, divided=divided, zero=zero)


CLASS = """class Run:
    def __init__(self):
        self.model, self.micro_steps = model, 4
        self.optimizer = torch.optim.AdamW(model.parameters())
    def step(self):
        for _ in range(self.micro_steps):
            x = self.get_batch()
            self.model(**x).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
    def train(self):
        for _ in range(1000):
            self.step()
Run().train()
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (micro(), True),
        (micro("0, 4"), True),
        (TRAINED + CLASS, True),
        (micro() + "    print(loss)\n    total += loss.detach() / accum\n", True),
        (micro(divided=" / accum"), False),
        (micro("1"), False),
        (micro("n").replace("accum = 8", "n = 1"), False),
        (micro(divided="\n        loss = loss / 8"), False),
        (micro() + "for p in model.parameters():\n    p.grad /= accum\n", True),  # after the step
        (
            micro().replace(
                "    optimizer.step", "    for p in ps:\n        p.grad /= accum\n    optimizer.step"
            ),
            False,
        ),
        (micro().replace("next(loader)", "rows").replace("micro", "head").replace("accum", "heads"), False),
    ],
)
def test_the_loss_of_a_loop_of_micro_batches_is_divided(tmp_path: Path, text: str, found: bool) -> None:
    assert bool(of_rule(tmp_path, "loss-not-divided", train_py=text)) is found


@pytest.mark.parametrize(
    ("zero", "found"),
    [
        ("optimizer.zero_grad()", True),
        ("optimizer.zero_grad(set_to_none=True)", True),
        ("model.zero_grad()", True),
        ("pass", False),
        ("if micro == 0: optimizer.zero_grad()", False),
    ],
)
def test_gradients_are_not_cleared_between_the_micro_batches_of_a_step(
    tmp_path: Path, zero: str, found: bool
) -> None:
    text = micro(divided=" / accum", zero=zero)
    said = of_rule(tmp_path, "gradients-are-cleared", train_py=text)
    assert [one.severity for one in said] == ["error"] * found


def test_a_schedule_next_to_the_step_of_micro_batches_is_right(tmp_path: Path) -> None:
    made = (
        "total = len(rows) // accum\nscheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total)\n"
    )
    right = TRAINED + made + MICRO.format(count="accum", divided=" / accum", zero="pass")
    assert not of_rule(tmp_path, "schedule-per-micro-batch", train_py=right + "    scheduler.step()\n")
    wrong = right.replace("loss.backward()\n", "loss.backward()\n        scheduler.step()\n")
    assert of_rule(tmp_path, "schedule-per-micro-batch", train_py=wrong)


def test_micro_batches_of_unknown_number_are_not_judged_and_said(tmp_path: Path) -> None:
    text = micro().replace("range(accum)", "batches").replace("next(loader)", "micro")
    setup, findings = setup_of(tmp_path, train_py=text)
    assert not [one for one in findings if one.rule == "loss-not-divided"]
    assert any("the number of micro-batches in batches" in one for one in unreached(setup))


ACCELERATED = """from accelerate import Accelerator
accelerator = Accelerator()
stage = accelerator.state.deepspeed_plugin.zero_stage
model = accelerator.prepare(model)
if accelerator.is_main_process:
    {}
"""
STATE = "model.save_pretrained('o', is_main_process=True, x=accelerator.get_state_dict(model))"
ZERO_3 = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_save_16bit_model: true\n"


@pytest.mark.parametrize(
    ("body", "hangs"),
    [
        (STATE, True),
        (f"if accelerator.state.deepspeed_plugin.zero_stage != 3: {STATE}", False),
        (f"if stage == 2: {STATE}", False),
        (f"if stage in (1, 2): {STATE}", False),
        (f"if stage < 3: {STATE}", False),
        (f"if stage == 3: {STATE}", True),
        (f"if args.push: {STATE}", True),
        ("if stage != 3: accelerator.wait_for_everyone()", True),
    ],
)
def test_a_call_that_other_stages_reach_only_does_not_hang(tmp_path: Path, body: str, hangs: bool) -> None:
    said = of_rule(tmp_path, "one-process-calls-for-all", train_py=ACCELERATED.format(body), z_yaml=ZERO_3)
    assert bool(said) is hangs


def test_calls_under_one_condition_are_one_finding(tmp_path: Path) -> None:
    body = "\n".join(f"    dist.all_reduce({name})" for name in "abc")
    (one,) = of_rule(tmp_path, "one-process-calls-for-all", train_py=f"if rank == 0:\n{body}\n")
    assert "`dist.all_reduce`, `dist.all_reduce` (line 3), `dist.all_reduce` (line 4) wait for" in one.what
    apart = f"if rank == 0:\n{body}\nx = 1\nif rank == 0:\n    dist.barrier()\n"
    assert len(of_rule(tmp_path, "one-process-calls-for-all", train_py=apart)) == 2
