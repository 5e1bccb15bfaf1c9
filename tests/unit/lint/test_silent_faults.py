# ruff: noqa: E501 - the files are text
"""Faults that a walk found to be missed, each with right files of the same shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checked_files import checked


def found(folder: Path, rule: str, **texts: str) -> list[tuple[str, int]]:
    """Severities and lines of what a rule finds in the first of these files; `train_py` is train.py."""
    first = str(folder / next(iter(texts)).replace("_", "."))
    mine = (one for one in checked(folder, **texts) if one.rule == rule and one.file == first)
    return [(one.severity, one.line) for one in mine]


JOB = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\n{}\n"
STATIC = "--nnodes 2 --nproc_per_node 8 --master_addr $HEAD"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (f"srun torchrun {STATIC} --node_rank $SLURM_NODEID train.py", True),
        (f"srun torchrun {STATIC} --node_rank=${{SLURM_PROCID}} train.py", True),
        (f"srun torchrun {STATIC} --node_rank 0 train.py", True),
        (f"srun bash -c 'torchrun {STATIC} --node_rank $SLURM_NODEID train.py'", False),
        (f"srun --nodes=1 -w $HEAD torchrun {STATIC} --node_rank 0 train.py &", False),
        (f"srun torchrun {STATIC} --rdzv_backend c10d --node_rank $SLURM_NODEID train.py", False),
        ("srun accelerate launch --num_processes 16 --num_machines 2 --machine_rank $SLURM_NODEID train.py", True),
        ("srun accelerate launch --num_processes 8 --num_machines 2 train.py", True),  # 4 of the 8 GPUs
        ("srun accelerate launch --num_processes 16 --num_machines 2 train.py", False),
    ],
)  # fmt: skip
def test_a_rank_that_the_batch_script_fills_in_is_the_same_on_all_nodes(
    tmp_path: Path, command: str, wrong: bool
) -> None:
    assert found(tmp_path, "slurm-and-launcher", job_slurm=JOB.format(command)) == [("error", 4)] * wrong


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ("export A=1\n#SBATCH --time=1:00:00", [5]),
        ("# a comment\n\n#SBATCH --time=1:00:00", []),
        ("cat <<E > other.slurm\n#SBATCH --time=1:00:00\nE", []),
    ],
)
def test_what_sbatch_does_not_read(tmp_path: Path, rows: str, lines: list[int]) -> None:
    text = JOB.format(f"{rows}\nsrun torchrun --nnodes 2 --nproc_per_node 8 train.py")
    assert found(tmp_path, "slurm-and-launcher", job_slurm=text) == [("warning", line) for line in lines]


LOOP = """import torch
opt = torch.optim.AdamW(model.parameters())
other = torch.optim.AdamW(critic.parameters())
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max={count})
gas = 4
for epoch in range(3):
    for i, batch in enumerate(loader):
        {rows}
    {after}
"""


def loop(*rows: str, count: str = "9", after: str = "pass") -> str:
    return LOOP.format(rows="\n        ".join(rows), count=count, after=after)


BACK = "(model(batch).loss / gas).backward()"


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        ((BACK, "opt.zero_grad()", "opt.step()"), [9]),
        ((BACK, "model.zero_grad()", "opt.step()"), [9]),
        (("opt.zero_grad()", BACK, "if (i + 1) % gas == 0: opt.step()"), [8]),
        ((BACK, "last = (i + 1) % gas == 0", "if last:", "    opt.step()", "opt.zero_grad()"), [12]),
        (("opt.zero_grad()", BACK, "opt.step()"), []),
        (("if gas > 1:", f"    {BACK}", "    if i % gas == 0: opt.step(); opt.zero_grad()", "else:", "    opt.zero_grad()", f"    {BACK}", "    opt.step()"), []),
        (("if (i + 1) % gas: ", f"    {BACK}", "else:", f"    {BACK}", "    opt.step()", "    opt.zero_grad()"), []),
        ((BACK, "if (i + 1) % gas == 0:", "    opt.step()", "    opt.zero_grad()"), []),
        (("if i % gas == 0: opt.zero_grad()", BACK, "if (i + 1) % gas == 0: opt.step()"), []),
        ((BACK, "other.zero_grad()", "opt.step()", "opt.zero_grad()"), []),
        ((BACK, "opt.step()", "opt.zero_grad()", "critic(batch).backward()", "other.step()", "other.zero_grad()"), []),
    ],
)  # fmt: skip
def test_gradients_are_there_when_the_optimizer_steps(
    tmp_path: Path, rows: tuple[str, ...], lines: list[int]
) -> None:
    said = found(tmp_path, "gradients-are-cleared", train_py=loop(*rows))
    assert said == [("error", line) for line in lines]


@pytest.mark.parametrize(
    ("count", "row", "after", "lines"),
    [
        ("3 * len(loader)", "pass", "sched.step()", [12]),
        ("3 * len(loader)", "sched.step()", "pass", []),
        ("3", "pass", "sched.step()", []),
    ],
)
def test_a_schedule_of_batches_advances_with_them(
    tmp_path: Path, count: str, row: str, after: str, lines: list[int]
) -> None:
    text = loop(BACK, "opt.step(); opt.zero_grad()", row, count=count, after=after)
    said = found(tmp_path, "schedule-counts-otherwise", train_py=text)
    assert [line for _, line in said] == [line - 1 for line in lines]


HALF = """import torch
from transformers import AutoModelForCausalLM
{scaler}
model = AutoModelForCausalLM.from_pretrained("m"{given}){after}
opt = torch.optim.AdamW(model.parameters())
for batch in loader:
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(**batch).loss
    {step}
"""
SCALER = "scaler = torch.amp.GradScaler()"
SCALED = "scaler.scale(loss).backward(); scaler.step(opt); scaler.update(); opt.zero_grad()"
PLAIN = "loss.backward(); opt.step(); opt.zero_grad()"


@pytest.mark.parametrize(
    ("scaler", "given", "after", "step", "severity"),
    [
        (SCALER, ", dtype=torch.float16", ".cuda()", SCALED, "error"),
        (SCALER, ", torch_dtype=torch.half", "", SCALED, "error"),
        (SCALER, "", ".half().cuda()", SCALED, "error"),
        ("", "", ".half().cuda()", PLAIN, "warning"),
        (SCALER, "", ".cuda()", SCALED, ""),
        ("", ", dtype=torch.bfloat16", "", PLAIN, ""),
    ],
)
def test_weights_of_fp16_are_not_trained(
    tmp_path: Path, scaler: str, given: str, after: str, step: str, severity: str
) -> None:
    text = HALF.format(scaler=scaler, given=given, after=after, step=step)
    said = found(tmp_path, "fp16-needs-fp32-weights", train_py=text)
    assert said == ([(severity, 4)] if severity else [])


COLLATED = (
    "from transformers import {}, DataCollatorForLanguageModeling\nDataCollatorForLanguageModeling({})\n"
)


@pytest.mark.parametrize(
    ("model", "given", "wrong"),
    [
        ("AutoModelForCausalLM", "tok", True),
        ("AutoModelForCausalLM", "tokenizer=tok, return_tensors='pt'", True),
        ("AutoModelForCausalLM", "tok, mlm=True", True),
        ("AutoModelForCausalLM", "tok, True", True),
        ("AutoModelForCausalLM", "tokenizer=tok, mlm=True, mlm_probability=0.3", True),
        ("AutoModelForCausalLM", "tok, mlm=args.mlm", False),
        ("AutoModelForMaskedLM", "tok, mlm=True", False),
        ("AutoModelForCausalLM", "tok, mlm=False", False),
        ("AutoModelForCausalLM", "tok, False", False),
        ("AutoModelForCausalLM", "tok, **more", False),
        ("AutoModelForMaskedLM", "tok", False),
    ],
)
def test_a_causal_model_gets_no_masked_words(tmp_path: Path, model: str, given: str, wrong: bool) -> None:
    said = found(tmp_path, "collator-replaces-labels", train_py=COLLATED.format(model, given))
    assert said == [("warning", 2)] * wrong


@pytest.mark.parametrize(
    ("given", "by_default"), [("tok", True), ("tok, True", False), ("tok, mlm=True", False)]
)
def test_it_is_said_where_nobody_asked_for_masked_words(tmp_path: Path, given: str, by_default: bool) -> None:
    found = checked(tmp_path, train_py=COLLATED.format("AutoModelForCausalLM", given))
    (said,) = [one.what for one in found if one.rule == "collator-replaces-labels"]
    assert ("by default" in said) is by_default


PACKED = """from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer
model = AutoModelForCausalLM.from_pretrained('a/b'{})
SFTTrainer(model, SFTConfig('o',
    {})).train()
"""


@pytest.mark.parametrize(
    ("kernel", "given", "wrong"),
    [
        ("sdpa", "packing=True", True),
        ("eager", "padding_free=True, max_length=None", True),
        ("flash_attention_2", "packing=True", False),
        ("sdpa", "packing=False", False),
        ("sdpa", "packing=True, packing_strategy='wrapped'", False),  # which mixes rows by design
        ("", "packing=True", False),
    ],
)
def test_packed_rows_see_each_other(tmp_path: Path, kernel: str, given: str, wrong: bool) -> None:
    chosen = f", attn_implementation='{kernel}'" if kernel else ""
    said = found(tmp_path, "packed-rows-see-each-other", train_py=PACKED.format(chosen, given))
    assert said == [("warning", 5)] * wrong


ADAPTERS = """from peft import LoraConfig, get_peft_model
from trl import SFTTrainer
config = LoraConfig(r=8)
{}
SFTTrainer({}).train()
"""


@pytest.mark.parametrize(
    ("row", "given", "expected"),
    [
        ("model = get_peft_model(model, config)", "model=model, peft_config=config", [("error", 5)]),
        ("model = get_peft_model(model, config)", "model, peft_config=config", [("error", 5)]),
        ("get_peft_model(model, config)", "model=model", [("warning", 4)]),
        ("model = get_peft_model(model, config)", "model=model", []),
        ("pass", "model=model, peft_config=config", []),
    ],
)
def test_a_model_gets_adapters_once(
    tmp_path: Path, row: str, given: str, expected: list[tuple[str, int]]
) -> None:
    assert found(tmp_path, "adapters-given-wrongly", train_py=ADAPTERS.format(row, given)) == expected


STREAM = """from datasets import load_dataset
from transformers import Trainer, TrainingArguments
rows = load_dataset("c4", streaming={}).map(cut)
{}
Trainer("m", TrainingArguments("o"{}), train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("streams", "row", "given", "wrong"),
    [
        ("True", "pass", "", True),
        ("True", "pass", ", max_steps=100", False),
        ("True", "pass", ", max_steps=steps", False),
        ("True", "rows = Dataset.from_list(list(rows.take(9)))", "", False),
        ("False", "pass", "", False),
    ],
)
def test_a_stream_has_an_end(tmp_path: Path, streams: str, row: str, given: str, wrong: bool) -> None:
    said = found(tmp_path, "contradicting-arguments", train_py=STREAM.format(streams, row, given))
    assert said == [("error", 5)] * wrong


@pytest.mark.parametrize(
    ("given", "processes", "wrong"),
    [
        ("per_device_train_batch_size=2, num_generations=8", 2, True),
        ("per_device_train_batch_size=2, num_generations=8", 4, False),
        ("per_device_train_batch_size=2, gradient_accumulation_steps=2, num_generations=8", 2, False),
        ("per_device_train_batch_size=2, generation_batch_size=16, num_generations=8", 2, False),
    ],
)
def test_generations_divide_a_batch(tmp_path: Path, given: str, processes: int, wrong: bool) -> None:
    text = f"from trl import GRPOConfig\nargs = GRPOConfig('o', {given})\n"
    run = f"accelerate launch --num_processes {processes} train.py\n"
    said = found(tmp_path, "contradicting-arguments", train_py=text, run_sh=run)
    assert said == [("error", 2)] * wrong


AXOLOTL = (
    "base_model: a/b\ndatasets:\n  - path: rows.jsonl\n    type: {}\nval_set_size: {}\nevals_per_epoch: 2\n"
    "micro_batch_size: 1\ngradient_accumulation_steps: 1\nlearning_rate: 0.0001\n"
)


def test_what_axolotl_no_longer_takes(tmp_path: Path) -> None:
    assert found(tmp_path, "axolotl-stops", a_yaml=AXOLOTL.format("chat_template", 0.1)) == []
    said = found(tmp_path, "axolotl-stops", a_yaml=AXOLOTL.format("sharegpt.load_role", 0))
    assert sorted(said) == [("error", 4), ("note", 6)]


ENGINE = """import deepspeed
engine, *_ = deepspeed.initialize(model=model, config="ds.json")
for i, batch in enumerate(loader):
    loss = engine(batch)
    engine.backward(loss)
    {}
if deepspeed.comm.get_rank() == 0:
    torch.save(engine.module.state_dict(), "m.pt")
"""
FILE = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("row", "accumulated", "wrong"),
    [
        ("if (i + 1) % 4 == 0: engine.step()", 4, True),
        ("engine.step()", 4, False),
        ("if (i + 1) % 4 == 0: engine.step()", 1, False),  # which accumulates by hand
    ],
)
def test_an_engine_steps_after_each_backward(tmp_path: Path, row: str, accumulated: int, wrong: bool) -> None:
    config = json.dumps(FILE | {"gradient_accumulation_steps": accumulated})
    files = {"train_py": ENGINE.format(row), "ds_json": config}
    assert found(tmp_path, "engine-steps-itself", **files) == [("error", 6)] * wrong
    assert found(tmp_path, "weights-are-elsewhere", **files) == [("error", 8)]


SHARDED = """import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
{}
loss.backward()
{}
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("shards", "clip", "wrong"),
    [
        ("model = FSDP(model)", CLIP, True),
        ("model = FSDP(model)", "model.clip_grad_norm_(1.0)", False),
        ("fully_shard(model)", CLIP, False),
    ],
)
def test_fsdp1_clips_by_the_norm_of_all_shards(tmp_path: Path, shards: str, clip: str, wrong: bool) -> None:
    said = found(tmp_path, "clips-wrong-gradients", train_py=SHARDED.format(shards, clip))
    assert said == [("warning", 5)] * wrong
