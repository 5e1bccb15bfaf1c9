# ruff: noqa: E501 - the files are text
"""Trainings that go wrong without an error, and ends of runs: each fault with right files of its shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked


def of_rule(folder: Path, rule: str, **texts: str) -> list[tuple[str, int]]:
    """Severities and lines of what a rule finds in these files; `train_py` is train.py."""
    return [(one.severity, one.line) for one in checked(folder, **texts) if one.rule == rule]


CLEARS = """import torch
from mine import model, loader, args
optimizer = torch.optim.AdamW(model.parameters())
for at, batch in enumerate(loader):
    try:
        (model(**batch).loss / args.steps).backward()
        if (at + 1) % args.steps == 0:
            optimizer.step()
            {}
    except torch.cuda.OutOfMemoryError:
        {}
"""


@pytest.mark.parametrize(
    ("after", "handler", "lines"),
    [("optimizer.zero_grad()", "optimizer.zero_grad()", 0), ("pass", "continue", 0)],
)
def test_a_handler_of_an_error_runs_in_place_of_the_loop(
    tmp_path: Path, after: str, handler: str, lines: int
) -> None:
    text = CLEARS.format(after, handler)
    assert len(of_rule(tmp_path, "gradients-are-cleared", train_py=text)) == lines


def test_what_stands_before_the_handler_still_clears(tmp_path: Path) -> None:
    text = CLEARS.format("optimizer.zero_grad()", "optimizer.zero_grad()")
    text = text.replace("    try:\n", "    try:\n        optimizer.zero_grad()\n")
    assert of_rule(tmp_path, "gradients-are-cleared", train_py=text) == [("error", 6)]


LOSS = """import torch.nn as nn
from transformers import Trainer

class OwnTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits
        {}
        return loss
"""
MODEL = "from transformers import AutoModel{}\nmodel = AutoModel{}.from_pretrained('x')\n"
FLAT = "logits.view(-1, logits.size(-1)), labels.view(-1)"


@pytest.mark.parametrize(
    ("loss", "kind", "more", "found"),
    [
        (f"loss_fct = nn.CrossEntropyLoss(ignore_index=-100)\n        loss = loss_fct({FLAT})", "ForCausalLM", "", 1),
        (f"loss = nn.CrossEntropyLoss()({FLAT})", "ForCausalLM", "", 1),
        (f"loss = nn.functional.cross_entropy({FLAT})", "ForCausalLM", "", 1),
        (f"loss = nn.CrossEntropyLoss()({FLAT})", "ForCausalLM", "from peft import LoraConfig\nc = LoraConfig(target_modules=['q_proj'])\n", 1),
        (f"loss = nn.CrossEntropyLoss()({FLAT})", "ForTokenClassification", "", 0),
        (f"logits, labels = logits[:, :-1], labels[:, 1:]\n        loss = nn.CrossEntropyLoss()({FLAT})", "ForCausalLM", "", 0),
        (f"loss = nn.CrossEntropyLoss()({FLAT})", "ForCausalLM", "def row(ids):\n    return {'labels': ids[1:]}\n", 0),
        ("loss = nn.MSELoss()(logits, labels)", "ForCausalLM", "", 0),
    ],
)  # fmt: skip
def test_a_loss_of_ones_own_that_nothing_shifts(
    tmp_path: Path, loss: str, kind: str, more: str, found: int
) -> None:
    """The model is loaded in another file."""
    files = {"loss_py": LOSS.format(loss), "model_py": MODEL.format(kind, kind) + more}
    severities = [one for one, _ in of_rule(tmp_path, "shift-of-labels", **files)]
    assert severities == ["warning"] * found


DDP = """import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from mine import model, loader
model = DDP(model, device_ids=[0])
optimizer = torch.optim.AdamW(model.parameters())
for batch in loader:
    {}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("step", "lines"),
    [
        ("loss = model.module(**batch).loss", [7]),
        ("with timer():\n        loss = model.module(**batch).loss", [8]),
        ("loss = model(**batch).loss", []),
        ("loss = model(**batch).loss\n    seen = model.module(**batch)", []),
        (
            "with torch.no_grad():\n        old = model.module(**batch)\n    loss = step(model, batch, old)",
            [],
        ),
        ("loss = model(**batch).loss + model.module.penalty()", []),
    ],
)
def test_the_model_within_ddp_is_called(tmp_path: Path, step: str, lines: list[int]) -> None:
    assert of_rule(tmp_path, "goes-past-ddp", train_py=DDP.format(step)) == [("error", at) for at in lines]


FP16 = """import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from mine import rows
model = AutoModelForCausalLM.from_pretrained("gpt2", torch_dtype=torch.{})
{}
args = TrainingArguments("out", {}=True)
Trainer(model=model, args=args, train_dataset=rows).train()
"""
LORA = "from peft import LoraConfig, get_peft_model\nmodel = get_peft_model(model, LoraConfig(r=8{}))"


@pytest.mark.parametrize(
    ("weights", "adapters", "asked", "lines"),
    [
        ("bfloat16", "", "fp16", [4]),
        ("bfloat16", "", "bf16", []),
        ("float32", "", "fp16", []),
        ("bfloat16", LORA.format(""), "fp16", []),  # PEFT keeps its adapters in fp32
        ("bfloat16", LORA.format(", modules_to_save=['lm_head']"), "fp16", [4]),
    ],
)
def test_weights_in_bf16_whose_gradients_fp16_scales(
    tmp_path: Path, weights: str, adapters: str, asked: str, lines: list[int]
) -> None:
    text = FP16.format(weights, adapters, asked)
    found = of_rule(tmp_path, "fp16-needs-fp32-weights", train_py=text)
    assert found == [("error", at) for at in lines]


SAVES = """import torch.distributed as dist
{}
from mine import model, loader
for batch in loader:
    model(**batch).loss.backward()
{}if dist.get_rank() == 0:
    {}({{"model": model.state_dict()}}, checkpoint_id="c"{})
"""


@pytest.mark.parametrize(
    ("how", "before", "call", "more", "found"),
    [
        ("import torch.distributed.checkpoint as dcp", "", "dcp.save", "", 1),
        ("from torch.distributed.checkpoint import save", "", "save", "", 1),
        ("from torch.distributed import checkpoint as kept", "", "kept.save", "", 1),
        ("import sys", "", "dist.checkpoint.save", "", 1),
        ("import torch.distributed.checkpoint as dcp", "", "dcp.save", ", no_dist=True", 0),
        ("from torch import save", "", "save", "", 0),
        ("from mine import save", "", "save", "", 0),
    ],
)
def test_one_process_saves_what_all_hold(
    tmp_path: Path, how: str, before: str, call: str, more: str, found: int
) -> None:
    text = SAVES.format(how, before, call, more)
    assert of_rule(tmp_path, "one-process-calls-for-all", train_py=text) == [("error", 7)] * found


WRAPS = """import argparse
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from mine import make, loader
from steps import train

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="{0}", choices=["FULL_SHARD", "NO_SHARD"])
    args = parser.parse_args()
    model = FSDP(make(), sharding_strategy=ShardingStrategy[args.strategy], auto_wrap_policy=None)
    train(model, loader)

main()
"""
STEPS = """import torch
def train(model, loader):
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in loader:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(("strategy", "lines"), [("FULL_SHARD", [6]), ("NO_SHARD", [])])
def test_a_loop_in_another_file_clips_shards(tmp_path: Path, strategy: str, lines: list[int]) -> None:
    files = {"train_py": WRAPS.format(strategy), "steps_py": STEPS}
    found = of_rule(tmp_path, "clips-wrong-gradients", **files)
    assert found == [("warning", at) for at in lines]


UNITS = """from transformers import AutoModelForCausalLM
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP
model = AutoModelForCausalLM.from_{}("x")
{}
"""


@pytest.mark.parametrize(
    ("made", "wraps", "found"),
    [
        ("pretrained", "model = FSDP(model, device_id=0)", 1),
        ("config", "fully_shard(model, reshard_after_forward=True)", 1),
        ("config", "fully_shard(model, reshard_after_forward=False)", 0),
        ("pretrained", "model = FSDP(model, auto_wrap_policy=policy)", 0),
        ("pretrained", "for block in model.model.layers:\n    fully_shard(block)\nfully_shard(model)", 0),
        (
            "pretrained",
            "def shard(part):\n    fully_shard(part)\nfor one in model.model.layers:\n    shard(one)",
            0,
        ),
        ("pretrained", "[fully_shard(one) for one in model.model.layers]", 0),
    ],
)
def test_a_model_of_one_unit(tmp_path: Path, made: str, wraps: str, found: int) -> None:
    text = UNITS.format(made, wraps)
    assert [one for one, _ in of_rule(tmp_path, "model-is-one-unit", train_py=text)] == ["warning"] * found


ENDS = """from transformers import Trainer, TrainingArguments
from mine import model, rows, own

def make(args):
    return Trainer(model=model, args=args, train_dataset=rows{})

def run(trainer):
    trainer.train()
    {}

run(make(TrainingArguments("out"{})))
"""


@pytest.mark.parametrize(
    ("rows", "then", "lines"),
    [
        ("", "return trainer.evaluate()", [9]),
        (", eval_dataset=rows", "return trainer.evaluate()", []),
        ("", "return trainer.evaluate(rows)", []),
        ("", "return trainer.evaluate(eval_dataset=rows)", []),
        ("", "return own.evaluate()", []),
        (", **own", "return trainer.evaluate()", []),
        ("", "if own:\n        trainer.evaluate()", []),
        ("", "try:\n        trainer.evaluate()\n    except ValueError:\n        pass", []),
        ("", "trainer.eval_dataset = rows\n    trainer.evaluate()", []),
    ],
)
def test_evaluation_without_rows(tmp_path: Path, rows: str, then: str, lines: list[int]) -> None:
    found = of_rule(tmp_path, "evaluates-without-rows", train_py=ENDS.format(rows, then, ""))
    assert found == [("error", at) for at in lines]


@pytest.mark.parametrize(
    ("given", "then", "found"),
    [
        (", save_strategy='no'", "return own", 1),
        (", save_strategy='no', save_steps=50, save_total_limit=2", "return own", 1),
        ("", "return own", 0),
        (", save_strategy='no'", "trainer.save_model('out')", 0),
        (", save_strategy='no'", "trainer.model.push_to_hub('me/it')", 0),
        (", save_strategy='no'", "own.save_adapter(trainer.model)", 0),
        (", save_strategy='no'", "print(trainer.evaluate(rows))", 0),  # what the run is for
        (", save_strategy='no', max_steps=20", "return own", 0),  # a trial
        (", save_strategy='no', max_steps=2000", "return own", 1),
    ],
)
def test_weights_that_nothing_keeps(tmp_path: Path, given: str, then: str, found: int) -> None:
    text = ENDS.format("", then, given)
    assert [one for one, _ in of_rule(tmp_path, "nothing-is-saved", train_py=text)] == ["warning"] * found


@pytest.mark.parametrize(
    ("command", "head", "found"),
    [
        ("srun --nodes=2 --gpus-per-node=8 deepspeed \\\n  train.py", "", 1),
        ("srun deepspeed train.py", "#SBATCH --nodes=4\n", 1),
        ("srun -N1 deepspeed train.py", "#SBATCH --nodes=4\n", 0),
        ("srun --nodes=1 deepspeed train.py", "", 0),
        ("srun deepspeed --hostfile hosts train.py", "#SBATCH --nodes=2\n", 0),
        ("deepspeed --num_gpus 8 train.py", "#SBATCH --nodes=2\n", 0),  # on the first node: said elsewhere
        ("srun deepspeed train.py", "", 0),
    ],
)
def test_deepspeed_under_srun_without_a_hostfile(tmp_path: Path, command: str, head: str, found: int) -> None:
    text = f"#!/bin/bash\n{head}{command}\n"
    severities = [one for one, _ in of_rule(tmp_path, "nodes-without-hostfile", job_slurm=text)]
    assert severities == ["error"] * found


LAUNCH = """#!/bin/bash
source {}
export CUDA_VISIBLE_DEVICES=0,1
NPROC="${{NPROC:-4}}"
torchrun --nproc_per_node=$NPROC train.py
"""


@pytest.mark.parametrize(
    ("loaded", "file", "found"),
    [
        ("/workspace/env.sh", "#!/bin/bash\n\nexport HF_HOME=/cache\nPORT=${PORT:-1}\n", 1),
        ("env.sh", "export NPROC=2\n", 0),
        ("env.sh", "if [ -d /fast ]; then\n  export NPROC=2\nfi\n", 0),  # only the shell knows
        ("other.sh", "export HF_HOME=/cache\n", 0),
    ],
)
def test_a_file_of_variables_that_a_command_loads(tmp_path: Path, loaded: str, file: str, found: int) -> None:
    """The default of `${NPROC:-4}` is its value where nothing sets it."""
    files = {"run_sh": LAUNCH.format(loaded), "env_sh": file}
    assert of_rule(tmp_path, "more-processes-than-devices", **files) == [("error", 5)] * found


ROWS = """from transformers import AutoModelForCausalLM, AutoTokenizer
model, tok = AutoModelForCausalLM.from_pretrained("x"), AutoTokenizer.from_pretrained("x")

def rows(batch):
    prompts, answers = [], []
    for question, answer in zip(batch["question"], batch["answer"]):
        {}
        answers.append(answer + tok.eos_token)
    read = tok(prompts, padding="max_length")
    labels = tok(answers, padding="max_length")["input_ids"]
    read["labels"] = labels
    return read
"""


@pytest.mark.parametrize(
    ("made", "lines"),
    [
        ("prompts.append('Q: ' + question)", []),  # of one `zip`: both may be in both
        ("prompts.append(question + answer)", []),
        ("prompt = 'Q: ' + question\n        prompt += answer\n        prompts.append(prompt)", []),
    ],
)
def test_texts_that_a_function_puts_together(tmp_path: Path, made: str, lines: list[int]) -> None:
    found = of_rule(tmp_path, "labels-of-another-text", train_py=ROWS.format(made))
    assert found == [("error", at) for at in lines]


APART = """
    prompts = ["Q: " + q for q in batch["question"]]
    answers = [a + tok.eos_token for a in batch["answer"]]
"""


@pytest.mark.parametrize(
    ("more", "lines"),
    [
        ("", [9]),
        ("    prompts = [q + a for q, a in zip(prompts, batch['answer'])]\n", []),
        ("    read = tok([q + a for q, a in zip(prompts, answers)])\n", []),
        ("    labels = [[-100] * 3 + one for one in labels]\n", []),
    ],
)
def test_labels_of_another_field(tmp_path: Path, more: str, lines: list[int]) -> None:
    head, rest = ROWS.split("    prompts, answers = [], []\n")
    below = rest[rest.index("    read = ") :]
    first, last = below.split('    read["labels"]')
    parts = [first, more] if "labels" in more else [more, first]
    text = head + APART.lstrip("\n") + "".join(parts) + '    read["labels"]' + last
    found = of_rule(tmp_path, "labels-of-another-text", train_py=text)
    assert found == [("error", at) for at in lines]
