"""Mistakes that cost days: each with scripts and commands that make it, and near ones that do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.app.check import check as check_files
from shardwise.lint.check import check, correct
from shardwise.lint.finding import Finding
from shardwise.lint.model import facts_of
from shardwise.lint.read import read
from shardwise.lint.setup import Setup


def found(rule: str, *texts: str) -> list[Finding]:
    """Findings of a rule in `train.py`, and in files whose kind their text shows."""
    documents = [read(texts[0], "train.py")]
    for at, text in enumerate(texts[1:]):
        known = text.startswith("{") or "distributed_type" in text
        documents.append(read(text, f"file{at}" if known else f"file{at}.sh"))
    inner = [one for document in documents for one in document.inner]
    named = Setup(documents=tuple(documents)).named_model
    setup = Setup(documents=(*documents, *inner), model=facts_of(named) if named else None)
    return [one for one in check(setup).findings if one.rule == rule]


def lines(rule: str, *texts: str) -> list[tuple[str, str]]:
    """The severity, and the line of the script, of each finding."""
    rows = texts[0].split("\n")
    return [(one.severity, rows[one.line - 1].strip()) for one in found(rule, *texts)]


NO_PARSER = "from transformers import Trainer\nTrainer(m).train()\n"
PARSER = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--{}')\np.parse_args()\n"
ELSEWHERE = "from mine import parse\nargs = parse()\n"


@pytest.mark.parametrize(
    ("script", "command", "severities"),
    [
        (NO_PARSER, "accelerate launch train.py --num_processes 8 --config_file a.yaml", ["error"] * 2),
        (NO_PARSER, "accelerate launch --num_processes 8 train.py", []),
        (NO_PARSER, "torchrun train.py --nproc-per-node=8", ["error"]),
        (NO_PARSER, "deepspeed train.py --num_gpus 8", ["error"]),
        (NO_PARSER, "accelerate launch train.py --mixed_precision bf16", []),  # scripts have this too
        (PARSER.format("rate"), "accelerate launch train.py --num_processes 8", ["error"]),
        (PARSER.format("num_processes"), "accelerate launch train.py --num_processes 8", []),
        (ELSEWHERE, "accelerate launch train.py --num_processes 8", ["warning"]),
        (ELSEWHERE + "args.num_processes", "accelerate launch train.py --num_processes 8", []),
        (ELSEWHERE, "torchrun train.py --num_processes 8", []),  # no flag of torchrun's
        (NO_PARSER, "accelerate launch other.py --num_processes 8", []),  # a script that was not read
    ],
)
def test_a_launchers_flag_after_the_script(script: str, command: str, severities: list[str]) -> None:
    hits = found("flags-of-the-script", script, command)
    assert [one.severity for one in hits] == severities
    assert all("launcher" in one.fix for one in hits)


def test_a_configuration_after_the_script_is_not_the_launchers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(NO_PARSER)
    (tmp_path / "a.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: 1\n")
    (tmp_path / "run.sh").write_text("accelerate launch train.py --config_file a.yaml\n")
    read_files = [Path(one.name).name for one in check_files(tmp_path / "run.sh").setup.documents]
    assert read_files == ["run.sh", "train.py"]


FSDP2 = "import os, torch\nimport torch.distributed as dist\nfrom torch.distributed.fsdp import *\n"
EARLY = FSDP2 + "model = Net()\nopt = torch.optim.AdamW(model.parameters(), lr=1)\n"


@pytest.mark.parametrize(
    ("script", "hits"),
    [
        (EARLY + "for layer in model.layers:\n    fully_shard(layer)\nfully_shard(model)\n", 1),
        (EARLY + "model = FullyShardedDataParallel(model)\n", 1),
        (EARLY + "net = FullyShardedDataParallel(model, device_id=0)\n", 1),
        (EARLY + "model = FullyShardedDataParallel(model, use_orig_params=False)\n", 1),
        (EARLY + "model = FullyShardedDataParallel(model, use_orig_params=True)\n", 0),
        (EARLY + "model = FullyShardedDataParallel(model, use_orig_params=args.orig)\n", 0),
        (EARLY + "fully_shard(model)\nopt = torch.optim.AdamW(model.parameters())\n", 1),
        (EARLY + "opt = None\nfully_shard(model)\n", 0),
        (EARLY + "model = Other()\nfully_shard(model)\n", 0),
        (EARLY + "fully_shard(other)\n", 0),
        (EARLY + "if args.fsdp:\n    fully_shard(model)\n", 0),  # another branch may make it again
        (FSDP2 + "def a(m):\n    o = torch.optim.AdamW(m.parameters())\ndef b(m):\n    fully_shard(m)\n", 0),
        (FSDP2 + "fully_shard(model)\nopt = torch.optim.AdamW(model.parameters())\n", 0),
        (EARLY + "model = DistributedDataParallel(model)\n", 0),
    ],
)  # fmt: skip
def test_an_optimizer_before_its_model_is_sharded(script: str, hits: int) -> None:
    assert len(found("optimizer-made-early", script)) == hits


NODES = "torchrun --nnodes 2 --nproc_per_node 8 train.py\n"


@pytest.mark.parametrize(
    ("given", "command", "hits"),
    [
        ('torch.cuda.set_device(int(os.environ["RANK"]))', NODES, 1),
        ('rank = int(os.environ["RANK"])\ntorch.cuda.set_device(rank)', NODES, 1),
        ("torch.cuda.set_device(dist.get_rank())", NODES, 1),
        ('torch.cuda.set_device(int(os.environ["RANK"]))', NODES.replace("2", "1"), 0),
        ('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))', NODES, 0),
        ("torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())", NODES, 0),
        ("torch.cuda.set_device(dist.get_node_local_rank())", NODES, 0),
    ],
)
def test_the_gpu_by_the_rank_of_all_nodes(given: str, command: str, hits: int) -> None:
    assert len(found("one-gpu-for-all", f"{FSDP2}{given}\nfully_shard(m)\n", command)) == hits


SAVES = "if dist.get_rank() == 0:\n    torch.save(model.state_dict(), 'm.pt')\n"
FSDP_FILE = (
    "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nmixed_precision: bf16\nnum_processes: 8\n"
)
DDP_FILE = "distributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\n"
ACCELERATED = "from accelerate import Accelerator\nacc = Accelerator()\nmodel = acc.prepare(model)\n"


@pytest.mark.parametrize(
    ("script", "file", "hits"),
    [
        (FSDP2 + "fully_shard(model)\n" + SAVES, "", 1),
        (FSDP2 + "model = FullyShardedDataParallel(model)\n" + SAVES, "", 1),
        (FSDP2 + "model = DistributedDataParallel(model)\n" + SAVES, "", 0),
        (FSDP2 + "fully_shard(other)\n" + SAVES, "", 0),
        (FSDP2 + "if args.fsdp:\n    fully_shard(model)\n" + SAVES, "", 1),
        (FSDP2 + "fully_shard(model)\n" + SAVES.replace("model.state_dict()", "state"), "", 0),
        (ACCELERATED + "if acc.is_main_process:\n    acc.get_state_dict(model)\n", FSDP_FILE, 1),
        (ACCELERATED + "if acc.is_main_process:\n    acc.save_state('x')\n", FSDP_FILE, 1),
        (ACCELERATED + "acc.get_state_dict(model)\n", FSDP_FILE, 0),
        (ACCELERATED + "if acc.is_main_process:\n    acc.get_state_dict(model)\n", DDP_FILE, 0),
    ],
)  # fmt: skip
def test_one_process_saves_what_all_hold(script: str, file: str, hits: int) -> None:
    said = found("one-process-calls-for-all", script, *([file] if file else []))
    assert len(said) == hits
    assert all(("full_state_dict=True" in one.fix) == ("model.state_dict" in one.what) for one in said)


HALF = "model = AutoModelForCausalLM.from_pretrained('gpt2', torch_dtype={})\n"
TRAINER = "from transformers import *\n"
FP16 = "Trainer(model, TrainingArguments(fp16=True)).train()\n"
SCALED = "from accelerate import Accelerator\nimport torch\naccelerator = Accelerator(mixed_precision={})\n"
CLIPS = "accelerator.backward(loss)\ntorch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)\n"


@pytest.mark.parametrize(
    ("script", "file", "hits"),
    [
        (TRAINER + HALF.format("torch.float16") + FP16, "", 1),
        (TRAINER + HALF.format("'float16'") + FP16, "", 1),
        (TRAINER + "half = torch.float16\n" + HALF.format("half") + FP16, "", 1),
        (TRAINER + HALF.format("torch.float16") + FP16.replace("(model, ", "(x=1, model=model, y="), "", 1),
        (TRAINER + HALF.format("torch.bfloat16") + FP16, "", 1),
        (TRAINER + HALF.format("torch.float32") + FP16, "", 0),
        (TRAINER + HALF.format("torch.float16") + FP16.replace("fp16", "bf16"), "", 0),
        (TRAINER + HALF.format("torch.float16") + "model = get_peft_model(model, c)\n" + FP16, "", 0),
        (TRAINER + HALF.format("torch.float16").replace("model", "teacher", 1) + FP16, "", 0),
        (TRAINER + HALF.format("torch.float16") + FP16, '{"zero_optimization": {"stage": 2}}', 0),
        (TRAINER + HALF.format("torch.float16") + FP16, FSDP_FILE.replace("bf16", "fp16"), 0),
        (TRAINER + HALF.format("torch.float16") + "Trainer(model)", DDP_FILE.replace("bf16", "fp16"), 1),
        (SCALED.format("'fp16'") + CLIPS, "", 1),
        (SCALED.replace("mixed_precision={}", "") + CLIPS, DDP_FILE.replace("bf16", "fp16"), 1),
        (SCALED.format("'bf16'") + CLIPS, "", 0),
        (SCALED.format("'fp16'") + CLIPS.replace("torch.nn.utils", "accelerator"), "", 0),
        (SCALED.format("'fp16'") + "accelerator.unscale_gradients()\n" + CLIPS, "", 0),
        (SCALED.format("'fp16'") + CLIPS, '{"zero_optimization": {"stage": 2}}', 0),
    ],
)  # fmt: skip
def test_fp16_has_fp32_weights_and_its_own_clipping(script: str, file: str, hits: int) -> None:
    assert len(found("fp16-needs-fp32-weights", script, *([file] if file else []))) == hits


@pytest.mark.parametrize(
    ("model", "given", "hits"),
    [
        ("google/gemma-2-9b", "fp16=True", 1),
        ("Qwen/Qwen2.5-7B", "fp16=True", 1),
        ("google/gemma-2-9b", "bf16=True", 0),
        ("gpt2-xl", "fp16=True", 0),
        ("meta-llama/Llama-2-7b-hf", "fp16=True", 0),  # published in fp16
    ],
)
def test_fp16_for_a_family_of_bf16(model: str, given: str, hits: int) -> None:
    script = f"{TRAINER}m = AutoModel.from_pretrained('{model}')\nTrainer(m, TrainingArguments({given}))\n"
    assert [one.severity for one in found("precision-of-the-script", script)] == ["warning"] * hits


TOKENS = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
tok = AutoTokenizer.from_pretrained("{model}")
{add}
model = AutoModelForCausalLM.from_pretrained("{model}")
Trainer(model).train()
"""
LLAMA = "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("model", "add", "hits"),
    [
        (LLAMA, "tok.add_special_tokens({'pad_token': '[PAD]'})", 1),
        (LLAMA, "tok.add_tokens(['<|user|>'])", 1),
        ("gpt2", "tok.add_special_tokens({'additional_special_tokens': ['<a>']})", 1),
        (LLAMA, "NEW = {'pad_token': '[PAD]'}\ntok.add_special_tokens(NEW)", 1),
        (LLAMA, "tok.add_special_tokens({'pad_token': '</s>'})", 0),  # it has this one
        (LLAMA, "tok.add_special_tokens({'pad_token': tok.eos_token})", 0),
        (LLAMA, "tok.add_tokens(['<a>'])\nresize(model.resize_token_embeddings)", 0),
        ("Qwen/Qwen2.5-7B", "tok.add_tokens(['<a>'])", 0),  # its embedding has spare rows
        (LLAMA, "words.add_tokens(['<a>'])", 0),
    ],
)
def test_new_tokens_have_rows(model: str, add: str, hits: int) -> None:
    assert len(found("new-tokens-without-rows", TOKENS.format(model=model, add=add))) == hits
    other = TOKENS.format(model=model, add=add).replace("Trainer(model).train()", "model.generate(x)")
    assert not found("new-tokens-without-rows", other)


@pytest.mark.parametrize(
    ("command", "hits"),
    [
        ("torchrun --nnodes=2 --nproc_per_node=8 --rdzv_endpoint=127.0.0.1:29500 train.py", 1),
        ("torchrun --nnodes 2 --nproc_per_node 8 --node_rank 1 --master_addr localhost train.py", 1),
        ("accelerate launch --num_machines 2 --main_process_ip localhost train.py", 1),
        ("HOST=localhost\ntorchrun --nnodes 2 --nproc_per_node 8 --master_addr $HOST train.py", 1),
        ("HOST=${HOST:-localhost}\ntorchrun --nnodes 2 --nproc_per_node 8 --master_addr $HOST train.py", 0),
        ("torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint head:29500 train.py", 0),
        ("torchrun --nnodes $N --nproc_per_node 8 --rdzv_endpoint localhost:29500 train.py", 0),
        ("torchrun --nproc_per_node 8 --master_addr localhost train.py", 0),
    ],
)
def test_nodes_meet_at_one_host(command: str, hits: int) -> None:
    assert len(found("nodes-meet-at-localhost", "import torch\n", command)) == hits


@pytest.mark.parametrize(
    ("command", "hits"),
    [
        ("torchrun --nnodes 4 --nproc_per_node 8 t.py", 1),
        ("srun torchrun --nnodes 4 --nproc_per_node 8 t.py", 0),
        ("srun bash -c '\ntorchrun --nnodes 4 --nproc_per_node 8 t.py'", 0),
        ("for n in $NODES; do ssh $n ./x.sh; done\ntorchrun --nnodes 4 --nproc_per_node 8 t.py", 0),
        ("torchrun --nproc_per_node 8 t.py", 0),
    ],
)
def test_a_job_of_several_nodes_starts_on_all(command: str, hits: int) -> None:
    said = [
        one.what for one in found("slurm-and-launcher", "import torch\n", f"#SBATCH --nodes=4\n{command}\n")
    ]
    assert sum("on the first of 4 nodes only" in one for one in said) == hits


ENGINE = """import deepspeed
from mine import *
engine, opt, _, sched = deepspeed.initialize(model=model, {given}config={config})
for x in data:
    engine.backward(engine(x))
    {steps}
"""


@pytest.mark.parametrize(
    ("given", "config", "steps", "hits"),
    [
        ("lr_scheduler=sched, ", "{'train_batch_size': 1}", "engine.step()\n    sched.step()", 1),
        ("lr_scheduler=own, ", "{'train_batch_size': 1}", "engine.step()\n    own.step()", 1),
        ("", "{'scheduler': {'type': 'WarmupLR'}}", "engine.step()\n    log()\n    sched.step()", 1),
        ("lr_scheduler=sched, ", "{'train_batch_size': 1}", "engine.step()", 0),
        ("", "{'train_batch_size': 1}", "engine.step()\n    sched.step()", 0),  # a schedule of the script's
        ("lr_scheduler=None, ", "{'train_batch_size': 1}", "engine.step()\n    other.step()", 0),
        ("lr_scheduler=sched, ", "{'train_batch_size': 1}",
         "if ds:\n        engine.step()\n    else:\n        sched.step()", 0),
    ],
)  # fmt: skip
def test_a_schedule_of_the_engine_is_stepped_once(given: str, config: str, steps: str, hits: int) -> None:
    script = ENGINE.format(given=given, config=config, steps=steps)
    found_ = [one for one in found("engine-steps-itself", script) if "twice as fast" in one.what]
    assert len(found_) == hits


EVALUATES = "Trainer(m, TrainingArguments(eval_strategy='steps'), {rows}).train()\n"


@pytest.mark.parametrize(
    ("script", "hits"),
    [
        (EVALUATES.format(rows="train_dataset=d"), 1),
        (EVALUATES.format(rows="train_dataset=d").replace("eval_s", "evaluation_s"), 1),
        (EVALUATES.format(rows="train_dataset=d, eval_dataset=e"), 0),
        (EVALUATES.format(rows="c, d, e"), 0),
        (EVALUATES.format(rows="**rows"), 0),
        (EVALUATES.format(rows="d").replace("'steps'", "'no'"), 0),
        (EVALUATES.format(rows="d").replace("'steps'", "cfg.when"), 0),
        ("class Trainer(Base): pass\n" + EVALUATES.format(rows="d"), 0),
        ("class Mine(Trainer): pass\n" + EVALUATES.format(rows="d").replace("Trainer(m", "Mine(m"), 0),
    ],
)
def test_rows_to_evaluate_on(script: str, hits: int) -> None:
    assert len(found("contradicting-arguments", TRAINER + script)) == hits


def test_a_removed_argument_is_found_where_it_is_given() -> None:
    script = (
        "from trl import SFTTrainer\nm = F.from_pretrained('x', max_seq_length=2)\nSFTTrainer(m,\n  {},\n)\n"
    )
    given = "max_seq_length=2"
    assert lines("argument-was-removed", script.format(given)) == [("error", given + ",")]


def test_two_keys_for_one_argument_are_one_finding() -> None:
    file = '{"optimizer": {"params": {"lr": 1}}, "scheduler": {"params": {"warmup_max_lr": 1}}}'
    script = TRAINER + "Trainer(m, TrainingArguments(learning_rate=2, bf16=False))\n"
    [one] = [one for one in found("trainer-and-file-differ", script, file) if "`learning_rate`" in one.what]
    assert "`optimizer.params.lr`" in one.fix
    assert "`scheduler.params.warmup_max_lr`" in one.fix


def test_of_two_ways_the_user_takes_one() -> None:
    text = (
        '{"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}}'
    )
    document = read(text, "ds.json")
    assert "offload_param" in correct(document, Setup(documents=(document,)))[0].text


@pytest.mark.parametrize(
    ("files", "severities"),
    [
        ({"train.py": TRAINER, "run.sh": "CUDA_VISIBLE_DEVICES=0 python train.py\n"}, []),
        ({"train.py": TRAINER, "conf.yaml": "defaults: [a]\nname: x\n"}, ["note"]),
        ({"conf.yaml": "defaults: [a]\nname: x\n"}, ["error"]),
        ({"train.py": TRAINER, "x.json": '{"a": 1}'}, ["error"]),  # a DeepSpeed file of other keys
        ({"train.py": TRAINER, "conf.yaml": "a: [\n"}, ["error"]),
        ({"train.py": TRAINER, "run.sh": "echo hello\n"}, ["note"]),
    ],
)
def test_other_files_beside_a_script(tmp_path: Path, files: dict[str, str], severities: list[str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    findings = check_files([tmp_path / name for name in files]).findings
    assert [one.severity for one in findings if one.rule == "unreadable"] == severities


def test_a_plain_command_is_one_process() -> None:
    script = TRAINER + "AutoModel.from_pretrained('x', device_map='auto')\n"
    assert not found("device-map-and-processes", script, "python train.py\n")


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ("    a, b = prepare(a0, b)\n", True),
        ("    print(b)\n    b = 1\n", True),
        ("    b = 1\n    a, b = prepare(a0, b)\n", False),
        ("    global b\n    b = prepare(b)\n", False),
        ("    if a0:\n        print(b)\n    b = 1\n", False),
        ("    for i in a0:\n        if i:\n            print(b)\n        b = i\n", False),
        ("    print([b for b in a0])\n    b = 1\n", False),
        ("    f = lambda: b\n    b = 1\n", False),
        ("    import b\n    b = prepare(b)\n", False),
        ("    b = b0 if a0 else b\n", False),
    ],
)
def test_a_name_is_read_before_it_has_a_value(body: str, wrong: bool) -> None:
    text = "import torch\nfrom parts import prepare, b0\nb = 0\ndef train(a0):\n" + body
    assert ("read-before-assignment" in rules_of(text)) is wrong


def rules_of(text: str, *others: str) -> set[str]:
    documents = [read(text, "train.py" if "import" in text else "train.yaml")]
    documents += [read(one, f"run{n}.sh") for n, one in enumerate(others)]
    return {one.rule for one in check(Setup(documents=tuple(documents))).findings}


KBIT = """from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
{first}
model = {second}
trainer.train()
"""
ADAPTS, PREPARES = "get_peft_model(model, LoraConfig())", "prepare_model_for_kbit_training(model)"


def test_adapters_that_are_frozen() -> None:
    frozen = KBIT.format(first=f"model = {ADAPTS}", second=PREPARES)
    assert "adapters-are-frozen" in rules_of(frozen)
    assert "adapters-are-frozen" not in rules_of(KBIT.format(first=f"model = {PREPARES}", second=ADAPTS))
    assert "adapters-are-frozen" not in rules_of(frozen + "p.requires_grad = True\n")
    apart = f"if a:\n    model = {ADAPTS}\nelse:\n    model = {PREPARES}"
    assert "adapters-are-frozen" not in rules_of(KBIT.format(first=apart, second="model"))


FACTORY = """model_name_or_path: Qwen/Qwen2.5-3B
finetuning_type: lora
dataset: identity
val_size: 0.1
output_dir: out
"""


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ("load_best_model_at_end: true\n", "contradicting-arguments"),
        ("load_best_model_at_end: true\neval_strategy: steps\neval_steps: 300\n", "contradicting-arguments"),
        ("load_best_model_at_end: true\neval_strategy: steps\neval_steps: 250\n", None),
        ("load_best_model_at_end: true\neval_strategy: epoch\nsave_strategy: epoch\n", None),
        ("eval_steps: 300\n", "contradicting-arguments"),
        ("eval_strategy: steps\neval_steps: 300\n", None),
        ("lr_scheduler_type: cosine_with_min_lr\n", "schedule-and-its-arguments"),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\n", None),
        ("lr_scheduler_type: cosine\n", None),
    ],
)
def test_the_trainers_defaults_count(settings: str, rule: str | None) -> None:
    found = rules_of(FACTORY + settings) & {"contradicting-arguments", "schedule-and-its-arguments"}
    assert found == ({rule} if rule else set())


def test_flags_of_the_command_reach_the_trainers_arguments() -> None:
    text = """import argparse
from transformers import TrainingArguments, Trainer
p = argparse.ArgumentParser()
p.add_argument("--eval_steps", type=int, default=10)
p.add_argument("--save_steps", type=int, default=10)
args = p.parse_args()
a = TrainingArguments("o", eval_strategy="steps", load_best_model_at_end=True,
    eval_steps=args.eval_steps, save_steps=args.save_steps)
Trainer(args=a, eval_dataset=rows).train()
"""
    assert "contradicting-arguments" in rules_of(text, "python train.py --eval_steps 50 --save_steps 20")
    assert "contradicting-arguments" not in rules_of(text, "python train.py --eval_steps 50 --save_steps 100")
