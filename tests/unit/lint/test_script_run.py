"""Scripts as they run: what classes and functions do stands where it is called."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from shardwise.lint.check import check, load, unreached
from shardwise.lint.read import read
from shardwise.lint.script_run import as_run
from shardwise.lint.setup import Setup

HEAD = """import os, torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from rows import rows
from net import Net
"""


def found(text: str, *others: str, head: str = HEAD) -> set[tuple[str, int]]:
    """Rules and lines, counted below the head."""
    documents = (read(head + text, "train.py"), *(read(one, f"file{n}") for n, one in enumerate(others)))
    return {(one.rule, one.line - head.count("\n")) for one in check(Setup(documents=documents)).findings}


def run(text: str, **others: str) -> str:
    documents = [read(one, f"{name}.py") for name, one in others.items()]
    return as_run(read("import x\n" + text, "a.py"), documents).text.removeprefix("import x\n").strip()


@pytest.mark.parametrize(
    ("text", "as_it_runs"),
    [
        ("def f(a):\n    g(a)\nf(b)", "g(b)"),
        ("def f(a, n=2):\n    g(a, n)\nf(b)", "n = 2\ng(b, n)"),
        ("def f():\n    m = g()\n    return m\nx = f()", "x = g()"),
        ("def f():\n    m, o = g()\n    return m, o\nx, y = f()", "x, y = g()"),
        ("def f(m):\n    return g(m)\nx = h(f(y))", "x = h(g(y))"),
        ("def f(a):\n    f(a)\nf(b)", "f(b)"),
        ("def f():\n    yield 1\nf()", "def f():\n    yield 1\nf()"),
        (
            "def f(a):\n    if a:\n        return g(a)\n    return h(a)\nx = f(b)",
            "if b:\n    x = g(b)\nelse:\n    x = h(b)",
        ),
        (
            "def f(a):\n    if a:\n        return g()\n    else:\n        raise E\ny(f(b))",
            "if b:\n    f = g()\nelse:\n    raise E\ny(f)",
        ),
        (loops := "def f(a):\n    for b in a:\n        return b\nx = f(c)", loops),
        (
            "class A:\n    def go(self):\n        s(self.m)\na = A()\na.go()",
            "class A:\n    pass\na = A()\ns(a.m)",
        ),
        (
            "class A:\n    def __init__(self, m):\n        self.m = m\na = A(net)",
            "class A:\n    pass\na = A(net)\na.m = net",
        ),
    ],
)
def test_a_function_stands_where_it_is_called(text: str, as_it_runs: str) -> None:
    assert run(text) == as_it_runs


def test_what_an_early_return_leaves_out_stays_apart() -> None:
    made = run("def f(rank):\n    if rank > 0:\n        return\n    save()\nf(r)\ndist.barrier()")
    assert ast.parse(made).body[-1].col_offset == 0
    assert made.endswith("dist.barrier()")
    assert "save()" in made.splitlines()[-2]
    assert made.splitlines()[-2].startswith("    ")


def test_a_function_of_another_file_has_the_line_of_its_call() -> None:
    other = "import torch\ndef make(m):\n    return torch.optim.AdamW(m.parameters())\n"
    text = "from parts import make\nx = 1\no = make(net)\n"
    made = as_run(read(text, "a.py"), [read(other, "parts.py")])
    assert "o = torch.optim.AdamW(net.parameters())" in made.text
    assert made.at(made.text.splitlines().index("o = torch.optim.AdamW(net.parameters())") + 1) == "3"


FSDP_CLASS = """class Runner:
    def __init__(self, model):
        self.rank = int(os.environ["RANK"])
        self.model = model
        {early}
        self.model = FSDP(module=self.model)
        {late}
    def save(self):
        {gather}
        if self.rank == 0:
            torch.save({saved}, "m.pt")
    def train(self):
        self.save()
def main():
    runner = Runner(Net())
    runner.train()
main()
"""
MAKES = "self.optimizer = torch.optim.AdamW(self.model.parameters())"
GATHER = "state = self.model.state_dict()"


def test_what_a_class_keeps_in_self_is_followed() -> None:
    right = FSDP_CLASS.format(early="pass", late=MAKES, gather=GATHER, saved="state")
    assert found(right) == set()
    early = FSDP_CLASS.format(early=MAKES, late="pass", gather=GATHER, saved="state")
    assert found(early) == {("optimizer-made-early", 5)}
    alone = FSDP_CLASS.format(early="pass", late=MAKES, gather="pass", saved="self.model.state_dict()")
    assert found(alone) == {("one-process-calls-for-all", 11)}
    documents = (read(HEAD + alone, "a.py"),)
    (one,) = check(Setup(documents=documents)).findings
    assert one.source.startswith("torch/distributed/fsdp")


PREPARED = """def build(model):
    optimizer = torch.optim.AdamW(model.parameters())
    return optimizer
def main():
    accelerator = Accelerator()
    model = Net()
    optimizer = build(model)
    {}
    for batch in rows:
        accelerator.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
main()
"""


def test_what_a_helper_returns_is_to_be_prepared() -> None:
    right = PREPARED.format("model, optimizer = accelerator.prepare(model, optimizer)")
    assert found(right) == set()
    wrong = PREPARED.format("model = accelerator.prepare(model)")
    assert found(wrong) == {("not-prepared", 2)}


ENGINE = """import deepspeed
if {config}:
    engine, optimizer, _, _ = deepspeed.initialize(model=m, model_parameters=p, config="ds.json")
else:
    optimizer = torch.optim.AdamW(p)
for batch in rows:
    if {config}:
        engine.backward(engine(batch))
        engine.step()
    else:
        optimizer.zero_grad()
        m(batch).backward()
        {step}
"""


def test_an_optimizer_of_the_branch_without_an_engine_is_its_own() -> None:
    rule = "engine-steps-itself"
    text = ENGINE.format(config="args.ds is not None", step="optimizer.step()")
    assert rule not in {name for name, _ in found(text)}
    bypassed = text.replace("engine.step()", "optimizer.step()")
    assert rule in {name for name, _ in found(bypassed)}


DDP_SCRIPT = """dist.init_process_group("nccl")
{device}
sampler = DistributedSampler(rows)
loader = DataLoader(rows, {sampler})
model = DDP(Net().cuda())
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    sampler.set_epoch(epoch)
    for i, batch in enumerate(loader):
        loss = model(batch){divided}
        loss.backward()
        right += (loss == batch).sum().item()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
SETS = 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'


@pytest.mark.parametrize(
    ("device", "sampler", "divided", "rules"),
    [
        (SETS, "sampler=sampler", " / 4", set()),
        (SETS, "shuffle=True", " / 4", {"no-sampler"}),
        ("pass", "sampler=sampler", " / 4", {"one-gpu-for-all"}),
        (SETS, "sampler=sampler", "", {"loss-not-divided"}),
    ],
)
def test_a_loop_on_several_gpus(device: str, sampler: str, divided: str, rules: set[str]) -> None:
    text = DDP_SCRIPT.format(device=device, sampler=sampler, divided=divided)
    assert {rule for rule, _ in found("right = 0\n" + text)} == rules


@pytest.mark.parametrize(
    ("padding", "rest", "wrong"),
    [
        ("tokenizer.pad_token_id", "", True),
        ("-100", "", False),
        ("tokenizer.pad_token_id", "loss = CrossEntropyLoss(ignore_index=tokenizer.pad_token_id)\n", False),
    ],
)
def test_labels_that_pad_sequence_fills(padding: str, rest: str, wrong: bool) -> None:
    text = (
        "def collate(batch, tokenizer):\n    ids = pad_sequence([x['input_ids'] for x in batch], True, 0)\n"
    )
    text += f"    labels = pad_sequence([x['labels'] for x in batch], True, padding_value={padding})\n"
    assert ("labels-include-padding", 3) in found(text + rest) or not wrong
    assert wrong or not any(rule == "labels-include-padding" for rule, _ in found(text + rest))


def test_a_model_is_not_put_on_gpu_0_before_the_accelerator() -> None:
    launch = "accelerate launch --num_processes 4 train.py\n"
    for text, wrong in (
        ("m = Net().cuda()\na = Accelerator()\n", True),
        ("a = Accelerator()\nm = Net().cuda()\n", False),
    ):
        assert any(rule == "one-gpu-for-all" for rule, _ in found(text, launch)) == wrong


@pytest.mark.parametrize(
    ("processes", "rest", "idle"), [(5, "", True), (7, "", False), (5, "--vllm 1", False)]
)
def test_gpus_that_no_process_uses(processes: int, rest: str, idle: bool) -> None:
    gpus = "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6"
    text = f"{gpus} accelerate launch --num_processes {processes} train.py {rest}\n"
    rules = [one.rule for one in check(Setup(documents=(read(text, "run.sh"),))).findings]
    assert ("more-processes-than-devices" in rules) == idle


@pytest.mark.parametrize("after", ["", "tokenizer.pad_token_id = 0\n"])
def test_a_pad_token_that_another_replaces_needs_no_row(after: str) -> None:
    text = "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer\n"
    text += "tokenizer = AutoTokenizer.from_pretrained('gpt2')\n"
    text += "tokenizer.add_special_tokens({'pad_token': '[PAD]'})\n" + after
    text += "model = AutoModelForCausalLM.from_pretrained('gpt2')\nTrainer(model=model).train()\n"
    assert any(rule == "new-tokens-without-rows" for rule, _ in found(text)) != bool(after)


@pytest.mark.parametrize(
    "given",
    [
        "load_in_8bit=False",
        "load_in_4bit=True if x else False",
        "use_flash_attention_2=True",
        "use_auth_token=None",
    ],
)
def test_what_from_pretrained_no_longer_takes(given: str) -> None:
    text = "from transformers import AutoModelForCausalLM\n"
    text += f"m = AutoModelForCausalLM.from_pretrained('a', {given})\n"
    assert ("argument-was-removed", 2) in found(text)
    other = text.replace("AutoModelForCausalLM", "FastLanguageModel")
    assert not any(rule == "argument-was-removed" for rule, _ in found(other))


def test_one_misspelt_section_is_one_error() -> None:
    config = {"zero_optimisation": {"stage": 2, "reduce_bucket_size": "auto"}, "train_batch_size": "auto"}
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 2\n"
    text += "deepspeed_config:\n  deepspeed_config_file: ds.json\n"
    documents = (read(json.dumps(config), "ds.json"), read(text, "a.yaml"))
    errors = [one for one in check(Setup(documents=documents)).findings if one.severity == "error"]
    assert [one.rule for one in errors] == ["ignored-key"]


def test_a_flag_that_begins_like_another_is_meant() -> None:
    script = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--lora_r')\n"
    script += "p.add_argument('--local_rank')\nargs = p.parse_args()\n"
    documents = (read(script, "train.py"), read("torchrun train.py --lora_rank 8\n", "run.sh"))
    (one,) = [one for one in check(Setup(documents=documents)).findings if one.rule == "flags-of-the-script"]
    assert one.fix == "did you mean `--lora_r`?"


def test_what_no_rule_saw_is_said(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nfrom helpers import make\nmake()\n")
    (tmp_path / "helpers.py").write_text("def make():\n    loss.backward()\n")
    setup = Setup(documents=load([script])[0])
    said = " ".join(unreached(setup))
    assert "helpers.py: name these files, too" in said
    assert "no backward pass and no Trainer" in said
    both = Setup(documents=load([script, tmp_path / "helpers.py"])[0])
    assert unreached(both) == []


@pytest.mark.parametrize(
    ("condition", "wrong"), [("self.gpu == 0 and epoch % 2 == 0", False), ("epoch", True)]
)
def test_one_process_is_known_by_what_self_holds(condition: str, wrong: bool) -> None:
    text = f"""class Runner:
    def __init__(self, model):
        dist.init_process_group()
        self.gpu = int(os.environ["LOCAL_RANK"])
        self.model = DDP(model.to(self.gpu), device_ids=[self.gpu])
    def save(self):
        torch.save(self.model.module.state_dict(), "m.pt")
    def train(self):
        for epoch in range(3):
            if {condition}:
                self.save()
Runner(Net()).train()
"""
    assert found(text) == ({("every-process-saves", 7)} if wrong else set())


LOOP = """
def get_optimizer(model, args):
    if args["optimizer"] == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1)
    elif args["optimizer"] == "adam":
        return torch.optim.Adam(model.parameters())
    else:
        raise ValueError("no")

def get_loader(rows, rank):
    "A loader with a distributed sampler."
    sampler = DistributedSampler(rows)
    return DataLoader(rows, sampler=sampler)

def main(local_rank, args, lora_rank):
    rank = int(os.environ["SLURM_PROCID"]) + local_rank
    torch.cuda.set_device(local_rank)
    model = Net()
    loader = get_loader(Dataset(args["lora_rank"]), rank)
    model = FSDP(model)
    optimizer = get_optimizer(model, args)
    scaler = make_scaler() if args["fp16"] else None
    with profiler(args) as prof:
        for epoch in range(3):
            for at, batch in enumerate(loader):
                last = (at + 1) % 4 == 0
                with model.no_sync():
                    loss = model(batch).loss / 4
                    if scaler:
                        scaler.scale(loss).backward()
                    else:
                        loss.backward()
                if last:
                    if scaler:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    optimizer.zero_grad()
                if last and rank == 0:
                    log_loss = sums[0] / sums[1]
main(0, {}, 8)
class Dataset(torch.utils.data.Dataset):
    pass
"""
EARLY = ("    model = FSDP(model)\n    optimizer = get_optimizer(model, args)\n",)
EARLY += ("    optimizer = get_optimizer(model, args)\n    model = FSDP(model)\n",)


@pytest.mark.parametrize(
    ("edit", "rule"),
    [
        (("", ""), None),
        (("                    optimizer.zero_grad()\n", ""), "no-zero-grad"),
        ((".loss / 4", ".loss"), "loss-not-divided"),
        (EARLY, "optimizer-made-early"),
        (("    sampler = DistributedSampler(rows)\n    return DataLoader(rows, sampler=sampler)",
          "    return DataLoader(rows, shuffle=True)"), "no-sampler"),
    ],
)  # fmt: skip
def test_a_real_loop_has_helpers_contexts_and_two_ways_to_step(edit: tuple[str, str], rule: str) -> None:
    assert edit[0] in LOOP
    rules = {one for one, _ in found(LOOP.replace(*edit))} - {"undefined-name", "sampler-without-set-epoch"}
    assert rules == ({rule} if rule else set())


@pytest.mark.parametrize("loop", ["enumerate(loader)", "tqdm(enumerate(loader))"])
def test_a_loop_goes_over_a_loader_by_another_name(loop: str) -> None:
    text = f"""import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
accelerator = Accelerator()
loader = DataLoader(rows, batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(Net().parameters())
optimizer, other = accelerator.prepare(optimizer, other)
steps = {loop}
for at, batch in steps:
    accelerator.backward(other(batch))
    optimizer.step()
    optimizer.zero_grad()
"""
    missing, given = ("not-prepared", 5), text.replace("optimizer, other", "optimizer, loader, other", 1)
    assert missing in found(text, head="")
    assert missing not in found(given, head="")
    assert missing not in found(text.replace("in steps", "in held"), head="")


def test_an_if_fills_a_dict_of_arguments() -> None:
    text = """from transformers import AutoModelForCausalLM, Trainer
import argparse
p = argparse.ArgumentParser()
p.add_argument("--split", action="store_true")
args = p.parse_args()
kwargs = {"device_map": None}
if %s:
    kwargs["device_map"] = "auto"
model = AutoModelForCausalLM.from_pretrained("gpt2", **kwargs)
Trainer(model=model).train()
"""
    shell = read("torchrun --nproc_per_node 4 train.py", "run.sh")
    for test, wrong in (("not args.split", True), ("args.split", False), ("other()", False)):
        checked = check(Setup(documents=(read(text % test, "train.py"), shell)))
        assert ("device-map-and-processes" in {one.rule for one in checked.findings}) is wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "o = make(net)\nfor b in DataLoader(rows):\n    o_optim.step()\n    net(b).backward()",
            "o_optim is",
        ),
        (
            "optimizer = make()\nfor b in DataLoader(rows):\n    net(b).backward()\n    optimizer.step()",
            "make() is",
        ),
        (
            "def each(rows):\n    for r in rows:\n        yield r\n"
            "optimizer = torch.optim.Adam(p)\n"
            "for b in each(rows):\n    net(b).backward()\n    optimizer.step()",
            "each() is",
        ),
        (
            "optimizer = torch.optim.Adam(p)\n"
            "for b in DataLoader(r):\n    net(b).backward()\n    optimizer.step()",
            "",
        ),
        (
            "e, o, loader, _ = deepspeed.initialize(m)\nfor b in loader:\n    e.backward(e(b))\n    e.step()",
            "",
        ),
    ],
)
def test_a_loop_that_is_not_followed_is_named(text: str, said: str) -> None:
    lines = unreached(Setup(documents=(read(HEAD + text, "train.py"),)))
    line = HEAD.count("\n") + text[: text.index("for b in")].count("\n") + 1
    end = "not followed): zero_grad, sampler, loss division"
    assert lines == ([f"the loop at train.py:{line} ({said} {end}"] if said else [])


def test_settings_in_a_file_that_is_not_there_are_not_read() -> None:
    shell = read("llamafactory-cli train saves/mine.yaml\n", "run.sh")
    (said,) = unreached(Setup(documents=(shell,)))
    assert said == "the settings in saves/mine.yaml of run.sh: no such file was read"
    mine = read("output_dir: x\nper_device_train_batch_size: 1\n", "elsewhere/mine.yaml")
    assert not unreached(Setup(documents=(shell, mine)))
