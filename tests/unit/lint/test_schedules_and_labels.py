# ruff: noqa: E501 - the files are text
"""Schedules under an Accelerator that accumulates, and labels that a script shifts."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked

LOOP = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
acc = Accelerator(gradient_accumulation_steps={every})
model = AutoModelForCausalLM.from_pretrained("a/b")
dl = DataLoader(rows(), batch_size=4, shuffle=True)
opt = torch.optim.AdamW(model.parameters(), lr=3e-5)
steps = {steps}
sched = get_cosine_schedule_with_warmup(opt, 20, steps)
{prepared}
for epoch in range(3):
    for batch in dl:
        with acc.accumulate(model):
            acc.backward(model(**batch).loss)
            opt.step()
{advance}
            opt.zero_grad()
acc.save_model(model, "out")
"""
SYNCED = "            if acc.sync_gradients:\n                sched.step()"
EACH = "            sched.step()"
PLAIN, ALL = (
    "model, opt, dl = acc.prepare(model, opt, dl)",
    "model, opt, dl, sched = acc.prepare(model, opt, dl, sched)",
)


@pytest.mark.parametrize(
    ("every", "steps", "prepared", "advance", "found"),
    [
        ("8", "3 * len(dl)", PLAIN, SYNCED, True),
        ("8", "3 * len(dl)", ALL, EACH, True),
        ("8", "3 * len(dl) // 8", PLAIN, SYNCED, False),
        ("8", "3 * len(dl) // acc.gradient_accumulation_steps", ALL, EACH, False),
        ("8", "3 * len(dl)", PLAIN, EACH, False),
        ("1", "3 * len(dl)", PLAIN, SYNCED, False),
        ("8", "1000", PLAIN, SYNCED, False),
        ("8", "3 * len(dl)", ALL + "\nsched.step_scheduler_with_optimizer = False", EACH, False),
    ],
)
def test_a_schedule_of_micro_batches(
    tmp_path: Path, every: str, steps: str, prepared: str, advance: str, found: bool
) -> None:
    text = LOOP.format(every=every, steps=steps, prepared=prepared, advance=advance)
    said = [one.what for one in checked(tmp_path, train_py=text) if one.rule == "schedule-counts-otherwise"]
    assert [one for one in said if one.endswith("1/8 of it is used")] == said
    assert bool(said) is found


UNDER = EACH.replace(" sched", " if i % 8 == 0: sched")


@pytest.mark.parametrize(
    ("every", "steps", "prepared", "advance", "found"),
    [
        ("8", "1000", PLAIN, EACH, True),
        ("8", "3 * len(dl) // 8", PLAIN, EACH, True),
        ("8", "3 * len(dl) // acc.gradient_accumulation_steps", PLAIN, EACH, True),
        ("8", "args.max_train_steps", PLAIN, EACH, True),
        ("1", "1000", PLAIN, EACH, False),
        ("8", "1000", PLAIN, SYNCED, False),
        ("8", "1000", PLAIN, UNDER, False),
        (
            "8",
            "1000",
            PLAIN,
            "            if not acc.sync_gradients:\n                continue\n" + EACH,
            False,
        ),
        ("8", "1000", ALL, EACH, False),
        ("8", "1000", PLAIN + "\nsched = acc.prepare(sched)", EACH, False),
        ("8", "1000", "opt, sched = acc.prepare(opt, *more)", EACH, False),
        ("8", "1000", "model, dl = acc.prepare(model, dl)", EACH, False),  # its steps are not held back
        ("8", "3 * len(dl)", PLAIN, EACH, False),
        ("8", "1000 * 8", PLAIN, EACH, False),
        ("8", "args.steps * acc.gradient_accumulation_steps", PLAIN, EACH, False),
        (
            "8",
            "1000",
            PLAIN,
            EACH + "\n            if done >= 1000: break",
            False,
        ),  # they may be micro-batches
        ("8", "1000", PLAIN, "        sched.step()", False),  # not followed there
    ],
)
def test_a_schedule_that_no_prepare_slows_down(
    tmp_path: Path, every: str, steps: str, prepared: str, advance: str, found: bool
) -> None:
    text = LOOP.format(every=every, steps=steps, prepared=prepared, advance=advance)
    if not advance.startswith("    " * 3):
        text = text.replace(
            f"{advance}\n            opt.zero_grad()", f"            opt.zero_grad()\n{advance}"
        )
    said = [one.what for one in checked(tmp_path, train_py=text) if one.rule == "schedule-counts-otherwise"]
    assert [one for one in said if "is not prepared, and advances 8 times a step" in one] == said
    assert bool(said) is found


LOADED = """from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
acc = Accelerator({split})
model = AutoModelForCausalLM.from_pretrained("a/b")
{made}
model, dl = acc.prepare(model, dl)
for batch in dl:
    acc.backward(model(**batch).loss)
"""
FILE = '{"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: ds.json}\n"


@pytest.mark.parametrize(
    ("made", "split", "file", "found"),
    [
        ("dl = DataLoader(rows, batch_size=8, shuffle=True)", "", FILE, True),
        ("dl = DataLoader(rows, 8)\neval_dl = DataLoader(held, 4)", "", FILE, True),
        ("dl = DataLoader(rows, batch_size=4)\nval = DataLoader(held, batch_size=16)", "", FILE, False),
        ("dl = DataLoader(rows, batch_size=8)", "", FILE.replace("4", '"auto"', 1), False),
        ("dl = DataLoader(rows, batch_size=8)", "split_batches=True", FILE, False),
        ("dl = DataLoader(rows, batch_size=args.rows)", "", FILE, False),
        ("dl = DataLoader(rows, batch_sampler=of_rows)", "", FILE, False),
        ("dl = DataLoader(rows, 8)\nother = DataLoader(rows, 2)", "", FILE, False),
    ],
)
def test_rows_of_a_loader_that_the_file_counts_otherwise(
    tmp_path: Path, made: str, split: str, file: str, found: bool
) -> None:
    text = LOADED.replace("{split}", split).replace("{made}", made)
    said = checked(tmp_path, ds_json=file, a_yaml=LAUNCH, train_py=text)
    what = [one.what for one in said if one.rule == "loader-and-file-differ"]
    assert len(what) == found
    assert all("8 rows at a time, and " in one and one.endswith("counts 4") for one in what)


ROWS = "from transformers import AutoModelForCausalLM, AutoTokenizer\ntok = AutoTokenizer.from_pretrained('a/b')\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\ndef collate(b):\n    x = tok(b, truncation=True, max_length=128, return_tensors='pt')\n{body}    return x\nfor batch in rows():\n    loss = {loss}\n    loss.backward()\n"
SHIFTED = "    x['labels'] = x['input_ids'][:, 1:]{}\n"
LOSS = "model(**collate(batch)).loss"


@pytest.mark.parametrize(
    ("body", "loss", "found"),
    [
        (SHIFTED.format(".clone()"), LOSS, True),
        (SHIFTED.format(""), LOSS, True),
        ("    x['labels'] = x.input_ids[..., 1:].contiguous()\n", LOSS, True),
        (SHIFTED.format("") + "    x['input_ids'] = x['input_ids'][:, :-1]\n", LOSS, False),
        ("    x['labels'] = x['input_ids'].clone()\n", LOSS, False),
        (SHIFTED.format(""), "torch.nn.functional.cross_entropy(model(batch).logits, batch)", False),
    ],
)
def test_labels_that_are_shifted_by_hand(tmp_path: Path, body: str, loss: str, found: bool) -> None:
    text = ROWS.format(body=body, loss=loss)
    said = [one.what for one in checked(tmp_path, train_py=text) if one.rule == "labels-do-not-fit"]
    assert [one[:34] for one in said] == ["the model shifts the labels itself"] * found


def test_values_of_a_module_that_is_named(tmp_path: Path) -> None:
    script = "from conf import given\nfrom transformers import Trainer, TrainingArguments\nTrainer(args=TrainingArguments('o', learning_rate=given['lr'])).train()\n"
    (tmp_path / "conf.py").write_text("given = {'lr': 1e-4}\n")
    (alone,) = [one.fix for one in checked(tmp_path, train_py=script) if one.rule == "not-read"]
    both = checked(tmp_path, train_py=script, conf_py="import os\ngiven = {'lr': 1e-4}\n")
    (named,) = [one.fix for one in both if one.rule == "not-read"]
    assert (alone[:8], named) == ("name the", "write them in the script")
