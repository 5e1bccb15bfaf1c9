"""What a walk through public set-ups found: weights saved under another name, and severities."""

from __future__ import annotations

import json

import pytest

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

LOOP = """import torch, deepspeed
from transformers import AutoModelForCausalLM
from rows import rows, gathered
model = AutoModelForCausalLM.from_pretrained("gpt2")
engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config="ds.json")
for row in rows():
    engine.backward(engine(**row).loss)
    engine.step()
"""
TRAINER = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
def save(trainer, folder):
    state = trainer.model.state_dict()
    if trainer.args.should_save:
        on_cpu = {key: value.cpu() for key, value in state.items()}
        del state
        trainer._save(folder, state_dict=on_cpu)
args = TrainingArguments(output_dir="o", deepspeed="ds.json")
trainer = Trainer(model=AutoModelForCausalLM.from_pretrained("gpt2"), args=args)
trainer.train()
save(trainer, "o")
"""
STATE = "state = engine.module.state_dict()\n"
STAGE_3 = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
PREPARED = """import torch
from accelerate import Accelerator
from net import net, rows
accelerator = Accelerator()
model = net()
optimizer = torch.optim.AdamW(model.parameters())
{prepare}
for row in rows():
    accelerator.backward(model(row).loss)
    optimizer.step()
"""


def found(**files: str) -> list[Finding]:
    documents = tuple(read(text, name.replace("__", ".")) for name, text in files.items())
    return list(check(Setup(documents=documents)).findings)


def rules(findings: list[Finding]) -> set[str]:
    return {one.rule for one in findings}


@pytest.mark.parametrize(
    ("saving", "empty"),
    [
        (STATE + "torch.save(state, 'x')", True),
        (STATE + "x = {k: v.cpu() for k, v in state.items()}\ntorch.save(x, 'x')", True),
        ("state = gathered(engine)\ntorch.save(state, 'x')", False),
        ("state = {'step': 1}\ntorch.save(state, 'x')", False),
    ],
)
def test_a_state_has_another_name_when_it_is_saved(saving: str, empty: bool) -> None:
    findings = found(train__py=LOOP + saving + "\n", ds__json=json.dumps(STAGE_3))
    assert ("weights-are-elsewhere" in rules(findings)) == empty


def test_the_trainers_own_save_gets_a_state() -> None:
    (one,) = (
        one
        for one in found(train__py=TRAINER, ds__json=json.dumps(STAGE_3))
        if one.rule == "weights-are-elsewhere"
    )
    assert one.line == 7


@pytest.mark.parametrize(
    "prepare",
    [
        "model, optimizer = accelerator.prepare(model, optimizer)",
        "optimizer, model = accelerator.prepare(optimizer, model)",
        "optimizer = accelerator.prepare(optimizer)",
    ],
)
def test_an_optimizer_stays_one_when_it_is_prepared(prepare: str) -> None:
    assert "no-zero-grad" in rules(found(train__py=PREPARED.format(prepare=prepare)))


def test_a_small_number_in_place_of_an_integer_does_not_become_0() -> None:
    config = {"fp16": {"enabled": "auto", "min_loss_scale": 1e-10}, "train_micro_batch_size_per_gpu": 1}
    (one,) = (one for one in found(ds__json=json.dumps(config)) if one.rule == "wrong-kind-of-value")
    assert one.fix == "write 1"


@pytest.mark.parametrize(
    ("first", "severity"),
    [
        ("", "note"),
        (" # no value\n\n# more to come", "note"),
        ("last.ckpt", "error"),
        ("\n- last.ckpt", "error"),
        ("\n\n  path: last.ckpt", "error"),
    ],
)
def test_nothing_is_lost_where_the_first_of_two_keys_is_empty(first: str, severity: str) -> None:
    head = "base_model: gpt2\nsequence_len: 512\nmicro_batch_size: 1\nadapter: lora\n"
    text = f"{head}resume_from_checkpoint: {first}\nnum_epochs: 1\nresume_from_checkpoint: x\n"
    (one,) = (one for one in found(axolotl__yaml=text) if one.rule == "key-twice")
    assert one.severity == severity


@pytest.mark.parametrize(("flag", "severity"), [("--bf16 True", "error"), ("--seed 1", "warning")])
def test_a_command_with_bf16_and_a_file_with_fp16_stop_for_certain(flag: str, severity: str) -> None:
    config = json.dumps({**STAGE_3, "train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True}})
    script = "from transformers import HfArgumentParser, Trainer, TrainingArguments\n"
    script += "args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]\n"
    script += "Trainer(model=None, args=args).train()\n"
    command = f"deepspeed train.py --output_dir o {flag} --deepspeed ds.json\n"
    findings = found(run__sh=command, train__py=script, ds__json=config)
    (one,) = (one for one in findings if one.rule == "trainer-and-file-differ")
    assert one.severity == severity
