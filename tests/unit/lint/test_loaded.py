"""DeepSpeed files that a script loads and changes, and saving and clipping next to them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

FILE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
}
HEAD = """import argparse, deepspeed, json, torch
p = argparse.ArgumentParser()
p.add_argument("--bs", type=int, default=4)
args = p.parse_args()
config = json.load(open("ds.json"))
"""
LOOP = """
engine, _, loader, _ = deepspeed.initialize(model=net, config=config, training_data=rows)
for batch in loader:
    engine.backward(engine(batch).loss)
    engine.step()
"""


def found(change: str, file: dict[str, Any], *rules: str, gpus: int | None = None) -> list[Finding]:
    texts = {"train.py": HEAD + change + LOOP, "ds.json": json.dumps(FILE | file)}
    documents = tuple(read(text, name) for name, text in texts.items())
    checked = check(Setup(documents=documents, asked_world_size=gpus))
    return [one for one in checked.findings if one.rule in rules]


OPEN_RATE = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}}}


@pytest.mark.parametrize(
    ("change", "left"),
    [
        ("", True),
        ('config["optimizer"]["params"]["lr"] = args.lr', False),
        ('config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-4}}', False),
        ('config.update({"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}})', False),
        ("def fill(c):\n    c['optimizer']['params']['lr'] = 1e-4\nfill(config)", False),
        ("from parts import fill\nfill(config, args)", False),
        ('config["train_batch_size"] = 8', True),
        ("print(config)", True),
    ],
)
def test_a_key_that_the_script_sets_is_not_the_one_of_the_file(change: str, left: bool) -> None:
    assert bool(found(change, OPEN_RATE, "auto-without-trainer")) is left


def test_the_value_that_the_script_sets_is_judged_at_its_line() -> None:
    right = 'config["train_batch_size"] = args.bs * 4 * torch.distributed.get_world_size()'
    assert not found(right, {"train_batch_size": 20}, "batch-arithmetic", gpus=2)
    (one,) = found('config["train_batch_size"] = 20', {}, "batch-arithmetic", gpus=2)
    assert (one.file, one.line, one.changes) == ("train.py", 6, ())
    assert one.what.startswith("`train_batch_size`: 20 is not 4 x 4 x 2 processes = 32")
    (one,) = found("", {"train_batch_size": 20}, "batch-arithmetic", gpus=2)
    assert one.file == "ds.json"


def saved(*texts: str, stage: int = 3, clips: float | None = 1.0, rule: str = "weights-are-elsewhere") -> Any:
    file = FILE | {"zero_optimization": {"stage": stage}, "gradient_clipping": clips}
    names = ("ds.json", "train.py", "parts.py")
    documents = tuple(read(text, name) for name, text in zip(names, (json.dumps(file), *texts), strict=False))
    checked = check(Setup(documents=documents))
    return [(one.file, one.line, one.severity) for one in checked.findings if one.rule == rule]


SAVE = """def save_model(model, d, state_dict=None):
    if state_dict == None:
        model.save_pretrained(d)
    else:
        model.save_pretrained(d, state_dict=state_dict)
"""
GATHER = (
    "sd = engine._zero3_consolidated_16bit_state_dict()\nif rank == 0:\n    save_model(engine, 'o', sd)\n"
)


def test_weights_that_were_gathered_are_saved_in_another_file() -> None:
    head = "from parts import save_model\n" + HEAD + LOOP
    assert not saved(head + GATHER, SAVE)
    assert not saved(head + GATHER)  # more files make no finding false
    assert saved(head + "save_model(engine, 'o')\n", SAVE) == [("parts.py", 3, "error")]


def test_a_branch_for_other_stages_saves_no_shards() -> None:
    test = 'if config["zero_optimization"]["stage"] == 3:\n    '
    save = "engine.module.save_pretrained('o')\n"
    other = HEAD + LOOP + test + f"pass\nelse:\n    {save}"
    assert not saved(other)
    assert saved(HEAD + LOOP + test + save) == [("train.py", 12, "error")]


def test_one_process_gathers_nothing_alone() -> None:
    text = HEAD + LOOP + "if args.rank <= 0:\n    sd = engine._zero3_consolidated_16bit_state_dict()\n"
    assert saved(text, rule="one-process-calls-for-all") == [("train.py", 12, "error")]
    assert not saved(text, rule="one-process-calls-for-all", stage=2)
    outside = text.replace("if args.rank <= 0:\n    ", "")
    assert not saved(outside, rule="one-process-calls-for-all")


def test_a_clipping_call_next_to_the_files_does_nothing() -> None:
    clip = "    torch.nn.utils.clip_grad_norm_(engine.parameters(), 1.0)\n    engine.step()"
    text = HEAD + LOOP.replace("    engine.step()", clip)
    assert saved(text, stage=2) == [("train.py", 10, "warning")]
    assert saved(text, stage=2, clips=None) == [("train.py", 10, "error")]


SAVER = """import time
import torch
class Saver:
    def save(self, model):
        if torch.distributed.get_rank() == 0:
            t = int(time.time() * 1000)
            print(t)
            {call}
"""
SHARDS = "import torch\nfrom parts import Saver\n"
SHARDS += "from torch.distributed.fsdp import fully_shard\nfully_shard(net)\n"


@pytest.mark.parametrize("call", ["pass", "torch.save(rows, 'x')", "torch.distributed.barrier()"])
def test_a_finding_in_another_files_function_names_that_file(call: str) -> None:
    hits = saved(
        SHARDS + "s = Saver()\ns.save(net)\n", SAVER.format(call=call), rule="one-process-calls-for-all"
    )
    assert hits == ([("parts.py", 8, "error")] if "barrier" in call else [])


def test_a_sampler_may_be_in_a_dict_and_its_epoch_set_elsewhere() -> None:
    head = (
        "import torch\nfrom torch.utils.data import DataLoader, DistributedSampler\nfrom parts import start\n"
    )
    head += "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(net)\n"
    head += "sampler = DistributedSampler(rows)\n"
    loop = "loader = DataLoader(rows, **kw)\nfor epoch in range(3):\n    start(sampler, epoch)\n"
    start = (
        "def start(sampler, epoch):\n    for _ in (1,):\n        sampler.set_epoch(epoch)\n        return 1\n"
    )
    given = head + "kw = {'sampler': sampler}\n" + loop
    assert not saved(given, start, rule="no-sampler")
    assert saved(head + loop.replace("start(sampler", "sampler.set_epoch(None"), rule="no-sampler") == [
        ("train.py", 6, "warning")
    ]
    assert not saved(given, start, rule="sampler-without-set-epoch")
    assert saved(given, rule="sampler-without-set-epoch") == [("train.py", 6, "warning")]


def test_a_part_of_a_script_is_no_unknown_tool() -> None:
    net = "import torch\nclass Net(torch.nn.Module):\n    pass\n"
    assert not saved("from parts import Net\n" + HEAD, net, rule="unknown-tool")
    assert saved(HEAD, net, rule="unknown-tool") == [("parts.py", 1, "note")]
