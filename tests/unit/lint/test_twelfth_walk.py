"""What a twelfth blind walk found: a false fix, and faults of loops and launches that no rule saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checked_files import checked
from shardwise.lint.finding import Finding


def found(folder: Path, **texts: str) -> list[Finding]:
    """Errors and warnings of files whose names are the words: `train_py`."""
    return [one for one in checked(folder, **texts) if one.severity != "note"]


def rules(folder: Path, **texts: str) -> list[tuple[str, str]]:
    return [(one.rule, one.severity) for one in found(folder, **texts)]


LOOP = """import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from mine import data, make

dist.init_process_group("nccl")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
sampler = DistributedSampler(data, seed=7)
loader = DataLoader(data, batch_size=4, sampler=sampler)
model = DistributedDataParallel(make().cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for epoch in range(3):
    sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        loss = model(batch).loss
        {before}
        loss.backward()
        {step}
        optimizer.zero_grad()
        {after}
"""
RIGHT = {"before": "pass", "step": "optimizer.step()", "after": "pass"}
ALONE = [("one-process-trains-alone", "error")]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({}, []),
        ({"step": "if rank == 0:\n            optimizer.step()"}, ALONE),
        ({"step": "if rank == 0:\n            print(loss)\n        optimizer.step()"}, []),
        ({"before": "if rank == 0 and loss.isnan():\n            continue"}, ALONE),
        ({"before": "if loss.isnan():\n            continue"}, []),
        ({"after": "if loss < 0.1 and rank == 0:\n            break"}, ALONE),
        ({"after": "if loss < 0.1:\n            break"}, []),
        ({"after": "if rank == 0:\n            print(1)\n            continue"}, []),
    ],
)
def test_one_process_that_goes_its_own_way(
    tmp_path: Path, lines: dict[str, str], expected: list[tuple[str, str]]
) -> None:
    assert rules(tmp_path, train_py=LOOP.format(**{**RIGHT, **lines})) == expected


def test_of_one_process_nothing_can_go_its_own_way(tmp_path: Path) -> None:
    text = LOOP.format(**{**RIGHT, "step": "if rank == 0:\n            optimizer.step()"})
    assert rules(tmp_path, train_py=text, run_sh="torchrun --nproc_per_node 1 train.py\n") == []


def test_a_sharded_model_that_one_process_calls(tmp_path: Path) -> None:
    text = LOOP.format(**{**RIGHT, "after": "if rank == 0:\n            print(model(batch).loss)"})
    assert rules(tmp_path, train_py=text) == []
    wraps = "DistributedDataParallel(make().cuda(), device_ids=[local_rank])"
    text = text.replace(wraps, "FullyShardedDataParallel(make())").replace(
        "from torch.nn.parallel import D", "from torch.distributed.fsdp import FullySharded"
    )
    text = text.replace("FullyShardedistributedDataParallel", "FullyShardedDataParallel")
    assert rules(tmp_path, train_py=text) == [("one-process-calls-for-all", "error")]


@pytest.mark.parametrize(
    ("line", "rows", "expected"),
    [
        ("{}", "torch.utils.data.random_split(data, [9, 1])", 1),
        ("torch.manual_seed(0)", "torch.utils.data.random_split(data, [9, 1])", 0),
        ("pass", "data.train_test_split(test_size=0.1, seed=1)", 0),
        ("pass", "data.train_test_split(test_size=0.1, shuffle=False)", 0),
        ("pass", "data.train_test_split(test_size=0.1)", 1),
    ],
)
def test_rows_that_each_process_splits_by_chance(tmp_path: Path, line: str, rows: str, expected: int) -> None:
    text = LOOP.format(**RIGHT).replace("sampler = ", f"{line}\nparts = {rows}\nsampler = ", 1)
    assert len(rules(tmp_path, train_py=text)) == expected


KEEPS = """import torch
from mine import data, model
state = torch.load("last.pt")
model.load_state_dict(state["model"])
optimizer = torch.optim.{kind}(model.parameters(), lr=1e-3)
for epoch in range(state["epoch"], 5):
    for batch in data:
        optimizer.zero_grad()
        model(batch).loss.backward()
        optimizer.step()
    kept = {{}}
    kept["model"] = model.state_dict()
    kept["epoch"] = epoch
    {more}
    torch.save(kept, "last.pt")
"""


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        ("AdamW", "pass", [("saved-state-is-not-loaded", "warning")]),
        ("SGD", "pass", []),
        ("AdamW", "torch.save(optimizer.state_dict(), 'optimizer.pt')", []),
    ],
)
def test_an_optimizer_whose_moments_are_lost(
    tmp_path: Path, kind: str, more: str, expected: list[tuple[str, str]]
) -> None:
    assert rules(tmp_path, train_py=KEEPS.format(kind=kind, more=more)) == expected


SCHEDULED = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup
from mine import data, net

accelerator = Accelerator()
loader = DataLoader(data, batch_size=4, shuffle=True)
{before}
optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
{after}
for batch in loader:
    accelerator.backward(net(batch).loss)
    optimizer.step()
    plan.step()
    optimizer.zero_grad()
"""
PLAN = "plan = get_cosine_schedule_with_warmup(optimizer, 100, {})"


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("pass", f"plan = accelerator.prepare({PLAN.format('3 * len(loader)')[7:]})", 1),
        ("pass", PLAN.format("len(loader)"), 0),  # not prepared: one step for a step
        ("n = len(loader)", f"plan = accelerator.prepare({PLAN.format('n')[7:]})", 0),
        ("pass", f"{PLAN.format('len(loader) * accelerator.num_processes')}\naccelerator.prepare(plan)", 0),
    ],
)
def test_a_prepared_schedule_of_prepared_rows(tmp_path: Path, before: str, after: str, expected: int) -> None:
    said = rules(tmp_path, train_py=SCHEDULED.format(before=before, after=after))
    assert said == [("schedule-counts-otherwise", "warning")] * expected


MASKS = """from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-1.5B", padding_side="{side}")
def encode(row):
    prompt = tokenizer(row["prompt"])["input_ids"]
    full = tokenizer(row["prompt"] + row["answer"], max_length=1024, padding="max_length", truncation=True)
    labels = list(full["input_ids"])
    labels[: len(prompt)] = [-100] * len(prompt)
    return {{"input_ids": full["input_ids"], "labels": labels}}
"""


@pytest.mark.parametrize(("side", "expected"), [("left", 1), ("right", 0)])
def test_a_prompt_that_is_masked_from_the_wrong_end(tmp_path: Path, side: str, expected: int) -> None:
    said = rules(tmp_path, train_py=MASKS.format(side=side))
    assert said == [("labels-do-not-fit", "error")] * expected


@pytest.mark.parametrize(
    ("joined", "model", "expected"),
    [
        ("pass", "AutoModelForCausalLM", [("labels-of-another-text", "error")]),
        ("pass", "AutoModelForSeq2SeqLM", []),
        ("inputs['input_ids'] = inputs['input_ids'] + answers['input_ids']", "AutoModelForCausalLM", []),
    ],
)
def test_labels_that_are_tokens_of_another_text(
    tmp_path: Path, joined: str, model: str, expected: list[tuple[str, str]]
) -> None:
    text = f"""from transformers import AutoTokenizer, {model}
tokenizer = AutoTokenizer.from_pretrained("x")
model = {model}.from_pretrained("x")
def encode(rows):
    inputs = tokenizer(rows["question"], max_length=512, truncation=True)
    answers = tokenizer(text_target=rows["answer"], max_length=512) if 0 else tokenizer(rows["answer"])
    {joined}
    inputs["labels"] = answers["input_ids"]
    return inputs
"""
    assert rules(tmp_path, train_py=text) == expected
    both = text.replace("import AutoTokenizer", "import AutoModelForSeq2SeqLM, AutoTokenizer")
    assert rules(tmp_path, train_py=both) == []  # it may train a model of two texts


SRUN = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
{}
srun bash -c '{}python train.py'
"""


@pytest.mark.parametrize(
    ("line", "own", "expected"),
    [
        ("export MASTER_PORT=29500", "", [("slurm-and-launcher", "error")]),
        ("export MASTER_PORT=29500", "LOCAL_RANK=$SLURM_LOCALID RANK=$SLURM_PROCID ", []),
        ("source ./variables.sh", "", []),  # which may set it
    ],
)
def test_ranks_that_srun_does_not_set(
    tmp_path: Path, line: str, own: str, expected: list[tuple[str, str]]
) -> None:
    assert rules(tmp_path, job_sh=SRUN.format(line, own), train_py=LOOP.format(**RIGHT)) == expected


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("", [("nodes-meet-at-localhost", "warning")]),
        ("--node_rank $RANK ", []),
        ("--rdzv_backend c10d ", []),
    ],
)
def test_nodes_of_which_each_is_the_first(tmp_path: Path, more: str, expected: list[tuple[str, str]]) -> None:
    command = f"torchrun --nnodes ${{WORLD_SIZE:-1}} --nproc_per_node 8 {more}--master_addr $HOST train.py\n"
    assert rules(tmp_path, run_sh=command, train_py=LOOP.format(**RIGHT)) == expected


SWIFT = """NPROC_PER_NODE={} swift rlhf --rlhf_type grpo --model Qwen/Qwen2.5-7B-Instruct --dataset rows \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --num_generations 8 --output_dir out
"""


@pytest.mark.parametrize(("processes", "expected"), [(6, []), (7, [("contradicting-arguments", "error")])])
def test_completions_of_a_swift_launch(
    tmp_path: Path, processes: int, expected: list[tuple[str, str]]
) -> None:
    """The first of several launches counts for itself alone."""
    said = found(tmp_path, first_sh=SWIFT.format(6), second_sh=SWIFT.format(processes))
    assert [(one.rule, one.severity) for one in said] == expected
    assert all(one.file.endswith("second.sh") for one in said)


@pytest.mark.parametrize(
    ("model", "more", "expected"),
    [
        ("mistralai/Mistral-7B-v0.1", "", [("new-tokens-are-not-trained", "warning")]),
        ("mistralai/Mistral-7B-v0.1", "lora_modules_to_save: [embed_tokens, lm_head]\n", []),
        ("Qwen/Qwen2.5-7B", "", []),  # it has these tokens
    ],
)
def test_tokens_that_axolotl_adds(
    tmp_path: Path, model: str, more: str, expected: list[tuple[str, str]]
) -> None:
    text = f"""base_model: {model}
datasets: [{{path: rows.jsonl, type: alpaca}}]
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
micro_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 0.0001
num_epochs: 1
bf16: true
output_dir: out
tokens: ["<|im_start|>", "<|im_end|>"]
{more}"""
    assert rules(tmp_path, config_yml=text) == expected


@pytest.mark.parametrize(("gpu", "word"), [("v100", "fp16"), ("a100", "bf16")])
def test_a_format_that_the_gpus_of_the_job_have(tmp_path: Path, gpu: str, word: str) -> None:
    script = f"#!/bin/bash\n#SBATCH --gres=gpu:{gpu}:4\nsrun python train.py --deepspeed_config ds.json\n"
    texts = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    code = (
        "import deepspeed\nengine, *_ = deepspeed.initialize(model=m, config='ds.json')\nfrom mine import m\n"
    )
    said = found(tmp_path, ds_json=json.dumps(texts), job_sh=script, train_py=code)
    [hit] = [one for one in said if one.rule == "no-mixed-precision"]
    assert hit.fix.startswith(f'"{word}"')


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("os.environ['CUDA_LAUNCH_BLOCKING'] = '1'", 1),
        ("torch.autograd.set_detect_anomaly(True)", 1),
        ("torch.autograd.set_detect_anomaly(False)", 0),
        ("torch.autograd.set_detect_anomaly(args.debug)", 0),
        ("if args.debug: torch.autograd.set_detect_anomaly(True)", 0),
    ],
)
def test_switches_that_were_left_on(tmp_path: Path, line: str, expected: int) -> None:
    text = LOOP.format(**RIGHT).replace("dist.init", f"{line}\ndist.init", 1)
    said = rules(tmp_path, train_py=text.replace("import os\n", "import os\nfrom mine import args\n"))
    assert said == [("left-from-debugging", "warning")] * expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("export CUDA_LAUNCH_BLOCKING=1\n", 1),
        ("CUDA_LAUNCH_BLOCKING=1 ", 1),
        ("NCCL_DEBUG=INFO CUDA_LAUNCH_BLOCKING=1 \\\n", 1),
        ("CUDA_LAUNCH_BLOCKING=1\n", 0),  # a variable of the shell alone
        ("# export CUDA_LAUNCH_BLOCKING=1\n", 0),
        ("export CUDA_LAUNCH_BLOCKING=0\n", 0),
    ],
)
def test_a_switch_reaches_the_command(tmp_path: Path, line: str, expected: int) -> None:
    said = rules(tmp_path, run_sh=f"{line}torchrun --nproc_per_node 2 train.py\n")
    assert said == [("left-from-debugging", "warning")] * expected


ENDLESS = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from mine import collate, rows
model = AutoModelForCausalLM.from_pretrained("{model}")
tokenizer = AutoTokenizer.from_pretrained("{model}")
{line}
def encode(row):
    {text}
    return tokenizer(text)
Trainer(model=model, train_dataset=rows.map(encode), data_collator=collate).train()
"""
TEXT = "text = f\"Question: {row['question']} Answer: {row['answer']}\""


@pytest.mark.parametrize(
    ("model", "line", "text", "expected"),
    [
        ("Qwen/Qwen2.5-1.5B", "pass", TEXT, 1),
        ("Qwen/Qwen2.5-1.5B", "tokenizer.pad_token = tokenizer.eos_token", TEXT, 1),
        ("google/flan-t5-base", "pass", TEXT, 0),  # its tokenizer adds one
        ("Qwen/Qwen2.5-1.5B", "pass", f"{TEXT} + tokenizer.eos_token", 0),
        ("Qwen/Qwen2.5-1.5B", "tokenizer.add_eos_token = True", TEXT, 0),
        ("Qwen/Qwen2.5-1.5B", "pass", "text = f\"{row['question']} Answer: \"", 0),
        ("Qwen/Qwen2.5-1.5B", f"print(f{TEXT.partition('f')[2]})", "text = row['text']", 0),
    ],
)
def test_answers_after_which_nothing_ends(
    tmp_path: Path, model: str, line: str, text: str, expected: int
) -> None:
    script = ENDLESS.format(model=model, line=line.replace("row[", "rows[0]["), text=text)
    said = rules(tmp_path, train_py=script)
    assert said == [("answers-have-no-end", "warning")] * expected
