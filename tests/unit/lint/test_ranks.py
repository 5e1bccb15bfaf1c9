"""Loops of one's own in several processes: rows, GPUs, steps and optimizers of each."""

from __future__ import annotations

import pytest

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

RULES = {
    "no-sampler",
    "sampler-without-set-epoch",
    "one-gpu-for-all",
    "not-prepared",
    "no-zero-grad",
    "schedule-before-optimizer",
    "two-optimizers",
}


def found(script: str, **files: str) -> list[Finding]:
    texts = {"train.py": script} | {name.replace("_", "."): text for name, text in files.items()}
    documents = tuple(read(text, name) for name, text in texts.items())
    return [one for one in check(Setup(documents=documents)).findings if one.severity != "note"]


def hits(script: str, **files: str) -> list[tuple[str, str]]:
    """The rule and the text of the line of each finding of this page's rules."""
    rows = script.split("\n")
    return [(one.rule, rows[one.line - 1].strip()) for one in found(script, **files) if one.rule in RULES]


def changed(script: str, *edits: str) -> str:
    """The script after `old -> new` edits, each of which must fit."""
    for edit in edits:
        old, _, new = edit.partition(" -> ")
        assert old in script, old
        script = script.replace(old, new)
    return script


DDP = """import os
import torch
import torch.distributed as dist
from datasets import load_dataset
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
rows = load_dataset("json", data_files="a.jsonl")["train"]
sampler = DistributedSampler(rows)
loader = DataLoader(rows, batch_size=4, sampler=sampler)
net = DDP(torch.nn.Linear(2, 2).cuda(), device_ids=[rank])
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = net(batch.to(rank)).sum()
        loss.backward()
        optimizer.step()
        scheduler.step()
"""
PLAIN = "sampler=sampler -> shuffle=True"
NO_SAMPLER = (PLAIN, "sampler = DistributedSampler(rows)\n -> ", ", DistributedSampler -> ",
              "    sampler.set_epoch(epoch)\n -> ")  # fmt: skip
FSDP = (
    "nn.parallel -> distributed.fsdp",
    "DistributedDataParallel as DDP -> FullyShardedDataParallel as FSDP",
    ", device_ids=[rank] -> ",
)
LOADER = ("no-sampler", "loader = DataLoader(rows, batch_size=4, shuffle=True)")


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ((), []),
        (NO_SAMPLER, [LOADER]),
        ((*NO_SAMPLER, "DDP(torch -> FSDP(torch", *FSDP), [LOADER]),
        ((*NO_SAMPLER, '["train"] -> ["train"].shard(8, rank)'), []),
        ((*NO_SAMPLER, '["train"] -> ["train"]\nrows = rows.select(range(rank, len(rows), 8))'), []),
        ((*NO_SAMPLER, '["train"] -> ["train"]\nrows = rows[rank::8]'), []),
        ((*NO_SAMPLER, 'rows = load -> rows = MyRows(rank, 8)\nx = load'), []),
        ((*NO_SAMPLER, "for epoch -> net = parallelize_module(net, mesh)\nfor epoch"), []),
        ((*NO_SAMPLER, 'data_files="a.jsonl" -> streaming=True'), []),
        ((*NO_SAMPLER, "for epoch -> torch.manual_seed(3 + rank)\nfor epoch"), []),
        ((*NO_SAMPLER, "load_dataset(\"json\", data_files=\"a.jsonl\")[\"train\"] -> own_rows()",
          "shuffle=True -> collate_fn=f"), []),  # may well divide itself
        (("    sampler.set_epoch(epoch)\n -> ",),
         [("sampler-without-set-epoch", "sampler = DistributedSampler(rows)")]),
        (("    sampler.set_epoch(epoch)\n -> ", "Sampler(rows) -> Sampler(rows, shuffle=False)"), []),
        (("    sampler.set_epoch(epoch)\n -> ", "Sampler(rows) -> Sampler(val_rows)"), []),
        (("    sampler.set_epoch(epoch)\n -> ", "for epoch in range(3) -> if True"), []),
        (("        optimizer.zero_grad()\n -> ",), [("no-zero-grad", "optimizer.step()")]),
        (("optimizer.zero_grad() -> net.zero_grad(set_to_none=True)",), []),
        (("optimizer.zero_grad() -> torch._foreach_zero_(grads)",), []),
        (("optimizer.zero_grad() -> for p in net.parameters(): p.grad = None",), []),
        (("        optimizer.zero_grad()\n -> ", "torch.optim.AdamW -> own_optimizer"), []),
        (("optimizer.step()\n        scheduler -> scheduler.step()\n        optimizer",),
         [("schedule-before-optimizer", "scheduler.step()")]),
        (("        scheduler.step()\n -> ", "sampler.set_epoch -> scheduler.step()\n    sampler.set_epoch"),
         [("schedule-before-optimizer", "scheduler.step()")]),
        (("        scheduler.step()\n -> ", "for batch in -> scheduler.step(epoch)\n    for batch in"), []),
        (("for batch in -> if epoch: scheduler.step()\n    for batch in",), []),
    ],
)  # fmt: skip
def test_a_loop_of_torch(edits: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert hits(changed(DDP, *edits)) == expected


FOUR = "torchrun --nproc_per_node 4 train.py"
MAP = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("m", device_map={place})
{more}
"""


@pytest.mark.parametrize(
    ("place", "more", "command", "expected"),
    [
        ('{"": 0}', "", FOUR, "model = Auto"),
        ('{"": torch.device("cuda:0")}', "", FOUR, "model = Auto"),
        ('"cuda:0"', "", "accelerate launch --num_processes 2 train.py", "model = Auto"),
        ('{"": "cuda:0"}', "", "deepspeed --num_gpus 2 train.py", "model = Auto"),
        ('{"": 0}', "", "torchrun --nproc_per_node 1 train.py", ""),
        ('{"": 0}', "", "python train.py", ""),
        ('{"": rank}', "rank = int(os.environ['LOCAL_RANK'])", FOUR, ""),
        ("None", 'model.to("cuda:0")', FOUR, "model.to"),
        ("None", "model = model.cuda(0)", FOUR, "model = model.cuda"),
        ("None", "torch.cuda.set_device(0)", FOUR, "torch.cuda.set"),
        ("None", 'd = torch.device("cuda:0")', FOUR, "d = torch"),
        ("None", 'd = torch.device("cuda:0" if ok else "cpu")', FOUR, "d = torch"),
        ("None", 'd = f"cuda:{local_rank}" if x else "cuda:0"', FOUR, ""),
        ("None", 'model.to("cuda:0")', "torchrun --nproc_per_node 1 train.py", ""),
        ("None", 'model.to("cuda:0")\nTrainer(model)', FOUR, ""),
        ("None", 'model.to("cuda")', FOUR, ""),
    ],
)  # fmt: skip
def test_a_gpu_is_that_of_the_process(place: str, more: str, command: str, expected: str) -> None:
    script = MAP.format(place=place, more=more)
    files = {} if command.startswith("python") else {"run_sh": command}
    said = hits(script, **files)
    assert [(rule, line.startswith(expected)) for rule, line in said] == [("one-gpu-for-all", True)] * bool(
        expected
    )


PREPARED = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from setting import *
accelerator = Accelerator()
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
loader = DataLoader(rows, batch_size=4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for batch in loader:
    loss = model(batch).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
"""
GIVEN = "(model, optimizer, loader)"
BY_ITSELF = GIVEN + " -> (model, optimizer)\nloader = accelerator.prepare_data_loader(loader)"
WITHOUT_LOADER = ("model, optimizer, loader = -> model, optimizer =", GIVEN + " -> (model, optimizer)")


@pytest.mark.parametrize(
    ("edits", "expected"),
    [
        ((), []),
        (("model, optimizer, loader = -> model, loader =", GIVEN + " -> (model, loader)"),
         [("not-prepared", "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)")]),
        (WITHOUT_LOADER,
         [("not-prepared", "loader = DataLoader(rows, batch_size=4)")]),
        ((*WITHOUT_LOADER,
          "in loader: -> in tqdm(loader):"), [("not-prepared", "loader = DataLoader(rows, batch_size=4)")]),
        ((*WITHOUT_LOADER,
          "batch_size=4 -> sampler=DistributedSampler(rows)"), []),
        (("model, optimizer, loader = -> optimizer, loader =", GIVEN + " -> (optimizer, loader)"),
         [("not-prepared", "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)")]),
        (("(model, optimizer, loader) -> (*everything)",), []),
        (("model, optimizer, loader = -> own, its, their =",), []),  # a name of its own for each
        (("loader = DataLoader(rows -> eval_loader = DataLoader(rows", "in loader: -> in eval_loader:"), []),
        ((WITHOUT_LOADER[0], BY_ITSELF),
         []),
        (("model, optimizer, loader = accelerator.prepare(model, optimizer, loader) -> "
          "model, optimizer, loader = ready(accelerator, model, optimizer, loader)",), []),
        (("    optimizer.zero_grad()\n -> ",), [("no-zero-grad", "optimizer.step()")]),
        (("model, optimizer, loader = -> self.loader = loader\nmodel, optimizer, self.loader =",
          GIVEN + " -> (model, optimizer, self.loader)"), []),
        (("model = Net() -> self.model = accelerator.prepare(net)", "AdamW(model -> AdamW(self.model",
          "model, optimizer, loader = -> optimizer, loader =", GIVEN + " -> (optimizer, loader)",
          "loss = model( -> loss = self.model("), []),
    ],
)  # fmt: skip
def test_what_an_accelerator_prepares(edits: tuple[str, ...], expected: list[tuple[str, str]]) -> None:
    assert hits(changed(PREPARED, *edits)) == expected


ENGINE = """import deepspeed, torch
from setting import *
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
engine, _, loader, _ = deepspeed.initialize(
    model=model, optimizer=optimizer, training_data=rows, config="ds.json"
)
for batch in loader:
    engine.backward(engine(batch).loss)
    engine.step()
"""
HEAD = '{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true}, '
PLACE = '"zero_optimization": {"stage": 2, "overlap_comm": true, "offload_optimizer": {"device": "cpu"}}'
NO_PLACE = '"zero_optimization": {"stage": 2, "overlap_comm": true}'
OWN = ', "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}'


@pytest.mark.parametrize(
    ("script", "config", "severity"),
    [
        (ENGINE, PLACE, "error"),
        (ENGINE, PLACE + OWN, "error"),
        (ENGINE.replace("optimizer=optimizer", "optimizer=torch.optim.SGD(m)"), PLACE, "error"),
        (ENGINE.replace("torch.optim.AdamW", "DeepSpeedCPUAdam"), PLACE, ""),
        (ENGINE.replace("torch.optim.AdamW", "own"), PLACE, ""),
        (ENGINE.replace("optimizer=optimizer, ", ""), PLACE + OWN, ""),
        (ENGINE, PLACE + ', "zero_force_ds_cpu_optimizer": false', ""),
        (ENGINE, NO_PLACE, ""),
        (ENGINE, NO_PLACE + OWN, "warning"),
        (PREPARED, PLACE, ""),  # Accelerate replaces it by DeepSpeedCPUAdam
        (PREPARED, NO_PLACE + OWN, "error"),
        (PREPARED.replace("torch.optim.AdamW", "DummyOptim"), NO_PLACE + OWN, ""),
    ],
)
def test_an_optimizer_of_the_script_and_one_of_the_file(script: str, config: str, severity: str) -> None:
    said = [one for one in found(script, ds_json=HEAD + config + "}") if one.rule == "two-optimizers"]
    assert [one.severity for one in said] == [severity] * bool(severity)


@pytest.mark.parametrize(("before", "found"), [("", False), ("optimizer = torch.optim.SGD([x])\n", True)])
def test_one_step_of_a_function_adds_to_no_other(before: str, found: bool) -> None:
    """A function that makes its optimizer steps it once; one that is called for each batch does not."""
    own = "" if found else "    optimizer = torch.optim.SGD([x])\n"
    script = f"import torch\n{before}def step(x):\n{own}    x.sum().backward()\n    optimizer.step()\n"
    assert [rule for rule, _ in hits(script)] == ["no-zero-grad"] * found
