"""Faults that a ninth walker planted or found, each in two more scripts of the same shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.check import check, headings, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup


def checked(folder: Path, **texts: str) -> list[Finding]:
    files = [folder / f"{name[: name.rindex('_')]}.{name[name.rindex('_') + 1 :]}" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    documents, broken = load(files)
    return [*check(Setup(documents=documents), broken).findings]


def of_rule(folder: Path, rule: str, **texts: str) -> list[Finding]:
    return [one for one in checked(folder, **texts) if one.rule == rule]


WRAPPED = """import torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM
def main(args):
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    if args.use_fsdp:
        model = FSDP(model)
    else:
        model = {other}
    for batch in loader:
        model(**batch).loss.backward()
        {clips}
    {saves}
main(parse())
"""
OTHERS = ["model.to(device)", "torch.nn.parallel.DistributedDataParallel(model)", "torch.compile(model)"]
ALONE = "if dist.get_rank() == 0:\n        torch.save(model.state_dict(), 'o')"


@pytest.mark.parametrize("other", OTHERS)
def test_a_wrap_in_a_branch_is_seen_by_the_rules_of_fsdp(tmp_path: Path, other: str) -> None:
    clips = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    text = WRAPPED.format(other=other, clips=clips, saves=ALONE)
    said = {one.rule for one in checked(tmp_path, train_py=text)}
    assert {"one-process-calls-for-all", "clips-wrong-gradients"} <= said


@pytest.mark.parametrize(
    "saves",
    [
        f"if args.use_fsdp:\n        pass\n    else:\n        {ALONE}".replace("    torch", "        torch"),
        "if dist.get_rank() == 0:\n        model.eval()",
        "model.state_dict()",
    ],
)
def test_what_only_the_other_branch_or_all_processes_call_does_not_hang(tmp_path: Path, saves: str) -> None:
    text = WRAPPED.format(other="model.to(device)", clips="pass", saves=saves)
    assert not of_rule(tmp_path, "one-process-calls-for-all", train_py=text)


LABELS = """from transformers import AutoTokenizer, Trainer
def tokenize(rows):
    out = tokenizer(rows["text"], padding="max_length", truncation=True)
    # nothing is set to -100
    {}
    return out
Trainer(model, args, train_dataset=rows.map(tokenize)).train()
"""


@pytest.mark.parametrize(
    ("line", "hits"),
    [
        ('out["labels"] = [x.copy() for x in out["input_ids"]]', 1),
        ('labels = [list(ids) for ids in out["input_ids"]]\n    out["labels"] = labels', 1),
        ('out["labels"] = copy.deepcopy(out["input_ids"])', 1),
        ('out["labels"] = [[-100 if t == 0 else t for t in x] for x in out["input_ids"]]', 0),
    ],
)
def test_labels_that_copy_padded_rows(tmp_path: Path, line: str, hits: int) -> None:
    assert len(of_rule(tmp_path, "labels-include-padding", train_py=LABELS.format(line))) == hits


SCHEDULED = """import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--accum", type=int, default=1)
args = parser.parse_args()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max={length})
for step, batch in enumerate(loader):
    (model(**batch).loss / args.accum).backward()
    if (step + 1) % args.accum == 0:
        optimizer.step()
        optimizer.zero_grad()
    {early}
"""


@pytest.mark.parametrize("length", ["1000", "args.max_steps", "total_updates"])
def test_a_schedule_that_advances_at_each_micro_batch(tmp_path: Path, length: str) -> None:
    text = SCHEDULED.format(length=length, early="scheduler.step()")
    assert len(of_rule(tmp_path, "schedule-counts-otherwise", train_py=text)) == 1
    right = SCHEDULED.format(length=length, early="    scheduler.step()")
    assert not of_rule(tmp_path, "schedule-counts-otherwise", train_py=right)


def test_a_schedule_of_batches_may_advance_at_batches(tmp_path: Path) -> None:
    text = SCHEDULED.format(length="len(loader)", early="scheduler.step()")
    assert not of_rule(tmp_path, "schedule-counts-otherwise", train_py=text)


RANKS = """import os, torch, torch.distributed as dist
dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
rank = {rank}
device = {device}
model = torch.nn.parallel.DistributedDataParallel(Model().to(device))
"""


@pytest.mark.parametrize(
    ("rank", "device", "hits"),
    [
        ('int(os.environ["RANK"])', 'torch.device(f"cuda:{rank}")', 1),
        ("dist.get_rank()", 'torch.device("cuda", rank)', 1),
        ("dist.get_rank()", "Model().cuda(rank)", 1),
        ("dist.get_rank()", 'torch.device(f"cuda:{local_rank}")', 0),
        ("dist.get_rank()", 'torch.device(f"cuda:{rank % torch.cuda.device_count()}")', 0),
    ],
)
def test_a_rank_of_all_nodes_is_no_number_of_a_gpu(tmp_path: Path, rank: str, device: str, hits: int) -> None:
    text = RANKS.format(rank=rank, device=device)
    said = of_rule(tmp_path, "one-gpu-for-all", train_py=text)
    assert [one.severity for one in said] == ["warning"] * hits
    one = of_rule(tmp_path, "one-gpu-for-all", train_py=text, run_sh="torchrun --nproc_per_node 4 train.py\n")
    several = "torchrun --nnodes 2 --nproc_per_node 4 train.py\n"
    more = of_rule(tmp_path, "one-gpu-for-all", train_py=text, run_sh=several)
    assert (one, [found.severity for found in more]) == ([], ["error"] * hits)


@pytest.mark.parametrize(
    ("made", "targets", "severities"),
    [
        ("GPT2LMHeadModel.from_pretrained('my/folder')", "q_proj", ["error"]),
        ("LlamaForCausalLM.from_pretrained(path)", "c_attn", ["error"]),
        ("GPTNeoXForCausalLM.from_pretrained('./out')", "q_proj", ["error"]),
        ("GPT2LMHeadModel.from_pretrained('my/folder')", "c_attn", []),
        ("AutoModelForCausalLM.from_pretrained('my/folder')", "q_proj", []),
    ],
)
def test_a_class_says_the_family(tmp_path: Path, made: str, targets: str, severities: list[str]) -> None:
    name = made.partition(".")[0]
    text = f"from transformers import {name}\nfrom peft import LoraConfig, get_peft_model\nmodel = {made}\n"
    text += f"model = get_peft_model(model, LoraConfig(target_modules=['{targets}']))\n"
    assert [one.severity for one in of_rule(tmp_path, "lora-targets", train_py=text)] == severities


ZERO = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}'
LAUNCH = "accelerate launch {} --deepspeed_config_file ds.json train.py\n"
OWN = "from accelerate import Accelerator\naccelerator = Accelerator()\n"


@pytest.mark.parametrize(
    ("flags", "severities"),
    [
        ("--num_processes 4", ["warning"]),
        ("--multi_gpu", ["error"]),
        ("--config_file acc.yaml", ["error"]),
        ("--use_deepspeed", []),
        ("--config_file other.yaml", []),
        ("$ARGS", []),
    ],
)
def test_a_deepspeed_file_that_accelerate_does_not_use(
    tmp_path: Path, flags: str, severities: list[str]
) -> None:
    texts = {"ds_json": ZERO, "run_sh": LAUNCH.format(flags), "train_py": OWN}
    texts |= {"acc_yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n"} if "acc." in flags else {}
    said = of_rule(tmp_path, "deepspeed-file-for-accelerate", **texts)
    assert [one.severity for one in said] == severities


BY_HAND = """from accelerate import Accelerator
import torch
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for step, batch in enumerate(loader):
    {}
"""
LOSS = "accelerator.backward(model(**batch).loss / 8)\n    "
PLUGIN = "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
PLUGIN += "deepspeed_config:\n  zero_stage: 2\n"


@pytest.mark.parametrize(
    ("body", "hits"),
    [
        (LOSS + "if (step + 1) % 8 == 0:\n        optimizer.step()\n        optimizer.zero_grad()", 1),
        (LOSS + "if (step + 1) % 8:\n        continue\n    optimizer.step()\n    optimizer.zero_grad()", 1),
        (
            LOSS
            + "last = step % 8 == 7\n    if last:\n        optimizer.step()\n        optimizer.zero_grad()",
            1,
        ),
        ("with accelerator.accumulate(model):\n        accelerator.backward(model(**batch).loss)", 0),
    ],
)
def test_accumulation_by_hand_under_accelerate_and_deepspeed(tmp_path: Path, body: str, hits: int) -> None:
    text = BY_HAND.format(body)
    assert len(of_rule(tmp_path, "accumulate-is-missing", train_py=text, acc_yaml=PLUGIN)) == hits
    assert not of_rule(tmp_path, "accumulate-is-missing", train_py=text)


@pytest.mark.parametrize(
    ("row", "hits"),
    [
        ("fsdp_backward_prefetch: AUTO", 1),
        ("backward_prefetch: pre", 1),
        ("fsdp_backward_prefetch: BACKWARD", 1),
        ("fsdp_backward_prefetch: backward_pre", 0),
        ("fsdp_backward_prefetch: NO_PREFETCH", 0),
    ],
)
def test_a_prefetch_that_torch_does_not_have(tmp_path: Path, row: str, hits: int) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  {row}\n"
    assert len(of_rule(tmp_path, "accelerate-kind-of-value", acc_yaml=text)) == hits


@pytest.mark.parametrize(
    ("line", "severities"),
    [
        ("from transformers.deepspeed import HfDeepSpeedConfig", ["error"]),
        ("from transformers.deepspeed import is_deepspeed_zero3_enabled", ["error"]),
        ("from transformers.generation_utils import GenerationMixin", ["error"]),
        ("import transformers.deepspeed", ["error"]),
        ("import transformers.deepspeed as ds", ["error"]),
        ("import transformers as t\nt.AdamW(x)", ["error"]),
        ("import trl\ndef make():\n    return trl.PPOTrainer(x)", ["error"]),
        ("from mine import transformers\ntransformers.AdamW(x)", []),
        ("import transformers\ntransformers.Trainer(x)", []),
        ("try:\n    import transformers.deepspeed\nexcept ImportError:\n    deepspeed = None", []),
        ("from transformers import AdamW", ["error"]),
        ("# Tested with transformers==4.30\nfrom transformers import AdamW", ["error"]),
        ("PIP = 'pip install transformers==4.30'\nfrom transformers import AdamW", ["warning"]),
        ("def old():\n    from transformers import AdamW", ["warning"]),
        ("from transformers.integrations import HfDeepSpeedConfig", []),
    ],
)
def test_imports_that_stop(tmp_path: Path, line: str, severities: list[str]) -> None:
    assert [
        one.severity for one in of_rule(tmp_path, "import-was-removed", train_py=line + "\n")
    ] == severities


CLIPPED = """import torch
def train(model, optimizer, loader):
    {}
    for batch in loader:
        model(**batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("made", "hits"),
    [
        ("trained = filter(lambda p: p.requires_grad, model.parameters())", 1),
        ("trained = model.parameters()", 1),
        ("trained = model.lm_head.parameters()", 1),
        ("trained = [p for p in model.parameters() if p.requires_grad]", 0),
        ("trained = list(model.parameters())", 0),
    ],
)
def test_a_generator_that_the_first_step_reads(tmp_path: Path, made: str, hits: int) -> None:
    assert len(of_rule(tmp_path, "parameters-are-used-up", train_py=CLIPPED.format(made))) == hits


@pytest.mark.parametrize(
    ("head", "call", "near"),
    [
        ("from torch import distributed as dist", "dist.all_reduct(x)", "all_reduce"),
        ("import torch.distributed as dist", "dist.init_proces_group('nccl')", "init_process_group"),
        ("import torch", "torch.distributed.get_worldsize()", "get_world_size"),
        ("import torch.distributed as dist", "dist.all_reduce(x)", ""),
        ("import torch.distributed as dist", "dist.all_gather_object(x, y)", ""),
    ],
)
def test_a_function_that_torch_distributed_does_not_have(
    tmp_path: Path, head: str, call: str, near: str
) -> None:
    said = [
        one for one in checked(tmp_path, train_py=f"{head}\n{call}\n") if "torch.distributed has" in one.what
    ]
    assert [one.fix for one in said] == [f"did you mean `{near}`?"] * bool(near)


MAPPED = """from transformers import AutoModelForCausalLM, Trainer
model = AutoModelForCausalLM.from_pretrained("gpt2", device_map="auto")
Trainer(model=model, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("shown", "hits"),
    [
        ("export CUDA_VISIBLE_DEVICES=0\n", 0),
        ("CUDA_VISIBLE_DEVICES=3 ", 0),
        ('export CUDA_VISIBLE_DEVICES="1"\n', 0),
        ("export CUDA_VISIBLE_DEVICES=0,1\n", 1),
        ("", 1),
    ],
)
def test_a_device_map_on_the_only_gpu(tmp_path: Path, shown: str, hits: int) -> None:
    command = f"{shown}accelerate launch train.py\n"
    said = of_rule(tmp_path, "device-map-and-processes", train_py=MAPPED, run_sh=command)
    assert len(said) == hits


SHARDED_ROWS = """from accelerate import Accelerator
from torch.utils.data import DataLoader
import torch
accelerator = Accelerator()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = accelerator.prepare(model, optimizer)
{}
loader = DataLoader(rows)
for batch in loader:
    ids = batch["input_ids"].to(accelerator.device)
    accelerator.backward(model(ids).loss)
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rows", "hits"),
    [
        ("rows = _ShardIter(rows, rank, world)", 0),
        ("rows = rows.shard(world, rank)", 0),
        ("rows = rows[rank::world]", 0),
        ("rows = load()", 1),
    ],
)
def test_rows_that_a_script_divides_itself(tmp_path: Path, rows: str, hits: int) -> None:
    text = SHARDED_ROWS.format(rows)
    assert len(of_rule(tmp_path, "not-prepared", train_py=text)) == hits


@pytest.mark.parametrize(
    ("writes", "hits"),
    [
        ("with open('ds.json', 'w') as f:\n    json.dump({}, f)", 0),
        ("DS = 'ds.json'\nwith open(DS, 'w') as f:\n    json.dump({}, f)", 0),
        ("Path('ds.json').write_text('{}')", 0),
        ("with open(os.path.join(out, 'ds.json'), 'w') as f:\n    json.dump({}, f)", 0),
        ("path = Path(out) / 'ds.json'\npath.write_text('{}')", 0),
        ("path = Path(out) / 'ds.json'\nwith path.open('w') as f:\n    json.dump({}, f)", 0),
        ("with open(os.path.join(out, 'ds' + '.json'), mode='w') as f:\n    json.dump({}, f)", 0),
        ("name = f'{out}.json'\nwith open(name, 'w') as f:\n    json.dump({}, f)", 0),
        ("import shutil\nshutil.copy('a.json', os.path.join(out, 'ds.json'))", 0),
        ("with open('log.txt', 'w') as f:\n    f.write('')", 1),
        ("(Path(out) / 'log.txt').write_text('')", 1),
        ("with open(f'{out}/rows.jsonl', 'w') as f:\n    f.write('')", 1),
        ("import torch\ntorch.save({}, out)", 1),
    ],
)
def test_a_file_that_the_script_writes_is_not_missing(tmp_path: Path, writes: str, hits: int) -> None:
    text = "import json, os, sys\nfrom pathlib import Path\nfrom transformers import TrainingArguments\n"
    text += f"out = sys.argv[1]\n{writes}\nTrainingArguments('o', deepspeed='ds.json')\n"
    assert len(of_rule(tmp_path, "named-file-is-missing", train_py=text)) == hits


@pytest.mark.parametrize("stages", ["2", "args.stages", "4, topology=PipeModelDataParallelTopology(2, 1, 4)"])
def test_the_batch_of_a_pipeline_is_not_judged_without_its_stages(tmp_path: Path, stages: str) -> None:
    text = "import deepspeed\nfrom deepspeed.pipe import PipelineModule\n"
    script = f"{text}net = PipelineModule(layers, num_stages={stages})\ndeepspeed.initialize(model=net)\n"
    given = '{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}'
    command = "deepspeed --num_gpus 8 train.py --deepspeed_config ds.json\n"
    assert not of_rule(tmp_path, "batch-arithmetic", ds_json=given, train_py=script, run_sh=command)
    other = f"{text}deepspeed.initialize(model=model)\n"
    assert of_rule(tmp_path, "batch-arithmetic", ds_json=given, train_py=other, run_sh=command)


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ('texts = [f"{x.split("#")[-1]}" for x in rows]', "warning"),
        ('print(f"loss {row["loss"]} of {row["step"]}")', "warning"),
        ("name = f'{row['a']}'", "warning"),
        ("""text = f"<s>{"".join(f"{names[(by := x['from'])]}{x['value']}" for x in rows)}" """, "warning"),
        ('print(f"{x}"', "error"),
    ],
)
def test_f_strings_of_a_newer_python(tmp_path: Path, line: str, severity: str) -> None:
    said = of_rule(tmp_path, "unreadable", train_py=f"import torch\n{line}\n")
    assert [one.severity for one in said] == [severity]
    assert ("which runs check, stops" in said[0].what) is (severity == "warning")


@pytest.mark.parametrize(
    ("row", "severity"),
    [
        ("limit_all_gathers: true", "note"),
        ("fsdp_backward_prefetch_policy: NO_PREFETCH", "note"),
        ("offload_optimizer: 1", "warning"),
        ("fsdp_backward_prefetch_policy: BACKWARD_PRE", "error"),
    ],
)
def test_an_unknown_key_of_what_runs_anyway_is_a_note(tmp_path: Path, row: str, severity: str) -> None:
    text = f"distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  {row}\n"
    assert [one.severity for one in of_rule(tmp_path, "accelerate-unknown-key", acc_yaml=text)] == [severity]


@pytest.mark.parametrize(("decay", "hits"), [("0.0", 0), ("0", 0), ("0.01", 1)])
def test_adam_without_weight_decay_is_adamw(tmp_path: Path, decay: str, hits: int) -> None:
    text = (
        '{"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 1e-4, "weight_decay": %s}}}'
    )
    assert len(of_rule(tmp_path, "adam-is-adamw", ds_json=text % decay)) == hits


def test_an_auto_of_a_format_that_is_off_is_not_judged(tmp_path: Path) -> None:
    text = '{"train_batch_size": 1, "fp16": {"enabled": %s, "auto_cast": "auto"}}'
    script = "import deepspeed\ndeepspeed.initialize(model=model, config='ds.json')\n"
    assert not of_rule(tmp_path, "auto-without-trainer", ds_json=text % "false", train_py=script)
    assert of_rule(tmp_path, "auto-without-trainer", ds_json=text % "true", train_py=script)


FLAGS = "python train.py --output_dir o --evaluation_strategy no --logging_dir l\n"
PARSED = "from transformers import HfArgumentParser, TrainingArguments\n"
PARSED += "args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses({})\n"


@pytest.mark.parametrize(("given", "severity"), [("", "error"), ("return_remaining_strings=True", "warning")])
def test_flags_that_stop_are_one_error(tmp_path: Path, given: str, severity: str) -> None:
    (one,) = of_rule(tmp_path, "flag-was-removed", train_py=PARSED.format(given), run_sh=FLAGS)
    assert one.severity == severity
    assert one.what.count("transformers 5.23") == 1
    assert "`--evaluation_strategy`" in one.what
    assert "`--logging_dir`" in one.what


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("base_model: a/b\ndatasets:\n  - path: c\n    type: alpaca\n", "settings of Axolotl"),
        ("model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\n", "settings of LLaMA-Factory"),
    ],
)
def test_a_heading_names_the_tool(tmp_path: Path, text: str, kind: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    documents, _ = load([tmp_path / "a.yaml"])
    (said,) = headings(check(Setup(documents=documents), ())).values()
    assert said.endswith(kind)
