"""Every rule on an example that breaks it and on one that does not."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.lint.check import check, correct, findings_of
from shardwise.lint.document import Document
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.rules import RULES
from shardwise.lint.schema import accelerate_keys, deepspeed_schema
from shardwise.lint.setup import READERS, ModelFacts, Setup
from shardwise.lint.text import read_json, read_yaml
from shardwise.lint.translate import translate

LOADED = "from accelerate import Accelerator\nAccelerator()\ndl = DataLoader(r, batch_size={})\n"
GONE = object()
"""Takes a key out of the base."""

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "overlap_comm": True},
    "timers": {"throughput": {"enabled": False}},
}
STAGE_3 = {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
ACCELERATE: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "mixed_precision": "bf16",
    "num_processes": 4,
    "num_machines": 1,
    "deepspeed_config": {"zero_stage": 2},
}
FSDP: dict[str, Any] = {
    "distributed_type": "FSDP",
    "deepspeed_config": GONE,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
    },
}
LLAMA = ModelFacts(
    name="llama",
    hidden_size=4096,
    key_value_heads=8,
    precision="bf16",
    model_type="llama",
    model_types=("llama",),
)
MAMBA = ModelFacts(name="mamba", model_type="mamba2")
MOE = ModelFacts(name="moe", model_type="olmoe", experts=True)
TRAINER = "from transformers import Trainer, TrainingArguments\n"
ADAMW = "o = torch.optim.AdamW(m.parameters(), lr=1e-5)\n"
KEYS = (
    "model_name_or_path: a/b\noutput_dir: o\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\nlora_r: 8\n"
)
SHIFTED = """import torch
m = AutoModelForCausalLM.from_pretrained('gpt2')
m(input_ids=input_ids[:{}], labels=ids[:{}])
"""
DROPPED = (
    TRAINER
    + """from transformers import AutoModel
def collate(rows):
    return [row['text'] for row in rows]
model = AutoModel.from_pretrained("gpt2")
args = TrainingArguments(output_dir="o"{})
Trainer(model=model, args=args, data_collator=collate).train()
"""
)
ZEUS = "import zeus\nfrom zeus.x import *\n"
LOOP = """import deepspeed
engine, outer, _, schedule = deepspeed.initialize(model=model, optimizer=inner, config={{"zero": 2}})
for batch in data:
    engine.backward(engine(batch))
    {}
"""
WORD = """from transformers import TrainingArguments
TrainingArguments("o", {})
"""
READ_ONCE = """import torch
params = {}
optimizer = torch.optim.AdamW(params, lr=1e-4)
torch.nn.utils.clip_grad_norm_(params, 1.0)
"""
STACKED = """from transformers import Trainer
rows = rows.map(lambda row: tokenizer(row["text"]))
Trainer(model=model, train_dataset=rows{}).train()
"""
CUT = """import torch
def row(prompt, answer):
    input_ids = prompt + answer
    labels = [-100] * len(prompt) + answer
    input_ids = input_ids[:512]{}
    return input_ids, labels
"""
RESUMED = """from transformers import Trainer, TrainingArguments
Trainer(args=TrainingArguments(save_only_model={})).train(resume_from_checkpoint=True)
"""
MARKED = """from peft import LoraConfig, get_peft_model
tokenizer = AutoTokenizer.from_pretrained("mistralai/Mistral-7B-v0.1")
tokenizer.add_special_tokens({{"pad_token": "<pad>", "additional_special_tokens": ["<|im_start|>"]}})
model.resize_token_embeddings(len(tokenizer))
model = get_peft_model(model, LoraConfig(r=8{}))
Trainer(model=model).train()
"""
ANSWERED = """from transformers import Trainer
rows = [{{"role": "user", "content": q}}, {{"role": "assistant", "content": a}}]
text = tokenizer.apply_chat_template(rows, tokenize=False, add_generation_prompt={})
Trainer(model=m, train_dataset=[text]).train()
"""
BOOL = """import torch
from mine import parser
parser.add_argument("--packing", type={})
"""
BEST = """from transformers import Trainer, TrainingArguments
args = TrainingArguments("o", eval_strategy="epoch", metric_for_best_model="{}")
Trainer(model=model, args=args, train_dataset=rows, eval_dataset=others).train()
"""
CHAT = """from transformers import AutoModelForCausalLM, AutoTokenizer
name = "{0}"
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
text = tokenizer.apply_chat_template(rows(), tokenize=False)
def rows(): return []
"""
POSITIONS = """from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained("gpt2")
tokenizer = AutoTokenizer.from_pretrained("gpt2")
tokenizer.pad_token = tokenizer.eos_token
rows = tokenizer("a", padding="max_length", max_length={})
"""
ADAPTERS = """from peft import LoraConfig
from mine import model, trainer
lora = LoraConfig(r=8)
{}
trainer.train()
"""
RESUMES = """from transformers import Trainer
from mine import model
trainer = Trainer(model)
trainer.train(resume_from_checkpoint="out/{}")
"""
SCALED = """import torch
from mine import model, data, optimizer
scaler = torch.amp.GradScaler()
for batch in data:
    loss = model(batch).loss
    scaler.scale(loss).backward()
    {}
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
HALF = """import torch
from mine import model, data, optimizer
for batch in data:
    with torch.autocast("cuda", dtype=torch.{}):
        loss = model(batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
RANKED = """import os
from torch.nn.parallel import DistributedDataParallel
from mine import build
local_rank = int(os.environ["LOCAL_RANK"])
model = DistributedDataParallel(build().to(local_rank), device_ids=[{}])
"""
CLEARS = """import torch
o = torch.optim.AdamW(m.parameters())
for x in rows:
    m(x).backward()
    o.{}()
    o.{}()
"""
LOADS_AGAIN = """import torch
opt = torch.optim.AdamW(m.parameters())
c = torch.load('c.pt')
m.load_state_dict(c['m'])
{}
for epoch in range(c['epoch'], 3):
    m(x).backward()
    torch.save({{'m': m.state_dict(), 'o': opt.state_dict(), 'epoch': epoch}}, 'c.pt')
"""
ALONE = """import torch
import torch.distributed as dist
from mine import model, rows
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
for row in rows:
    model(row).backward()
    if {}:
        optimizer.step()
    optimizer.zero_grad()
"""
UNITS = """from transformers import AutoModelForCausalLM
from torch.distributed.fsdp import fully_shard
model = AutoModelForCausalLM.from_pretrained('x')
for block in model.model.layers:
    {}
fully_shard(model)
"""
ENDS = """from transformers import Trainer, TrainingArguments
from mine import model, rows
trainer = Trainer(model, TrainingArguments('out', save_strategy='no'), {}train_dataset=rows)
trainer.train()
trainer.{}()
"""
UNREAD = """from dataclasses import dataclass
from transformers import HfArgumentParser
@dataclass
class Settings:
    lr: float = 1e-4
    warmup: int = 10
settings = HfArgumentParser(Settings).parse_args_into_dataclasses()[0]
print(settings.lr, {})
"""
SPLIT = """import torch
from mine import data, model
model = torch.nn.parallel.DistributedDataParallel(model)
train, held_out = torch.utils.data.random_split(data, [9000, 1000]{})
"""
APART = """from transformers import AutoModelForCausalLM, AutoTokenizer
model, tok = AutoModelForCausalLM.from_pretrained('x'), AutoTokenizer.from_pretrained('x')
def row(one):
    read = tok(one['prompt'])
    written = tok({})
    return {{'input_ids': read['input_ids'], 'labels': written['input_ids']}}
"""
TEXTS = """from trl import SFTConfig, SFTTrainer
from mine import rows
rows = rows.map(lambda r: {{'text': r['q'] + r['a']}}{})
args = SFTConfig('out', assistant_only_loss=True)
SFTTrainer(model='x', args=args, train_dataset=rows).train()
"""
JOB = (
    "name: a\nmodel: {{source: {}}}\ndata: {{train: a.jsonl, sequence_length: {}, chat_template: llama-3}}\n"
)
PACKS = """from trl import SFTConfig, SFTTrainer
args = SFTConfig('out', {}=True, model_init_kwargs={{'attn_implementation': '{}'}})
SFTTrainer(model='x', args=args, train_dataset=rows).train()
"""
OF_A_NODE = "torchrun --nnodes 2 --node_rank {} --nproc_per_node 8 --master_addr a train.py --data {}\n"
WRITES = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
from mine import rows, collate
m = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2.5-1.5B')
tok = AutoTokenizer.from_pretrained('Qwen/Qwen2.5-1.5B')
def encode(r):
    text = f"Question: {{r['question']}} Answer: {}"
    return tok(text)
Trainer(model=m, train_dataset=rows.map(encode), data_collator=collate).train()
"""
EVALUATES = """from mine import model, data, held_out, optimizer
def evaluate():
    model.eval()
    return [model(x).loss for x in held_out]
for epoch in range(3):
    {}
    for batch in data:
        model(batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    evaluate()
"""
SUMMED = """import torch
from mine import data, held_out, model
optimizer = torch.optim.AdamW(model.parameters())
total = 0
for batch in data:
    loss = model(batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total += {}
model.eval()
print({})
for batch in held_out:
    print(model(batch).loss)
"""
ACCUMULATED = """from torch.optim import AdamW
from transformers import get_scheduler
from mine import model, data, n
optimizer = AdamW(model.parameters())
schedule = get_scheduler("cosine", optimizer, 0, len(data) // n)
for i, batch in enumerate(data):
    loss = model(batch).loss
    {loss}.backward()
    if (i + 1) % n == 0:
        optimizer.step()
        {both}
        optimizer.zero_grad()
    {every}
"""
PREPARED = """from accelerate import Accelerator
from setting import *
accelerator = Accelerator({})
model, optimizer = accelerator.prepare(model, optimizer)
loss = model(batch).loss
{}
"""
STEPS = "for batch in data:\n    accelerator.backward(model(batch).loss)\n    optimizer.step()\n"
PLUGIN = yaml.safe_dump(ACCELERATE)
OWN = """import deepspeed
from setting import *
engine, *_ = deepspeed.initialize({}, config="file1")
engine.backward(engine(rows))
engine.step()
"""
SHARDED = """import deepspeed
import torch
from setting import *
engine, *_ = deepspeed.initialize(model=m, optimizer=o, config="file1")
{}
"""
PADDED = """from transformers import AutoTokenizer
t = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")
{}
x = t(["a", "b c"], padding=True)
{}
"""
TRAINED = "m = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-2-7b-hf')\nTrainer(m).train()\n"
EPOCHS = """import torch
from setting import *
optimizer = torch.optim.SGD(model.parameters())
sampler = DistributedSampler(rows)
for epoch in range(3):
    model(rows).backward()
    {}
"""
ENGINE = """import deepspeed, torch
from setting import *
optimizer = {}(model.parameters())
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config="file1")
"""
UNPREPARED = """from accelerate import Accelerator
from torch.optim import SGD
from setting import *
accelerator = Accelerator()
net = Net()
optimizer = SGD(net.parameters())
accelerator.prepare({})
accelerator.backward(net(rows))
"""
PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--rate")
parser.parse_args()
"""
NEOX = """model_name_or_path: EleutherAI/pythia-6.9b
output_dir: o
fsdp: full_shard auto_wrap
fsdp_config:
  transformer_layer_cls_to_wrap: {}
"""
TARGETS = """from peft import LoraConfig
from transformers import AutoModelForCausalLM
m = AutoModelForCausalLM.from_pretrained("bigscience/bloomz-7b1-mt")
def train(lora_target_modules={}):
    LoraConfig(target_modules=list(lora_target_modules))
train()
"""
FACTORY = """model_name_or_path: Qwen/Qwen2.5-7B-Instruct
output_dir: o
finetuning_type: lora
template: {}
"""
MASKS = "def mask(r):\n    return [-100] * r['prompt'] + r['input_ids'][r['prompt']:]\n"
SAVES = """import torch
import torch.distributed as dist
dist.init_process_group()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), device_ids=[dist.get_rank()])
if {}:
    torch.save(model.module.state_dict(), "model.pt")
"""
ENDED = """from transformers import DataCollatorForLanguageModeling, DataCollatorForSeq2Seq, Trainer
from data import encode, m, tokenizer
tokenizer.pad_token = tokenizer.eos_token
rows = encode(lambda row: row["answer"] + tokenizer.eos_token)
Trainer(m, train_dataset=rows, data_collator={}).train()
"""
LOAD = "from transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('x', {})\n"


@dataclass(frozen=True)
class Case:
    """Changes to the base of the rule's kind of file, or whole texts; `also`: files beside it."""

    rule: str
    bad: Any
    good: Any
    setup: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def params(kind: str = "AdamW", **keys: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": {"lr": 1e-4, **keys}}}


def schedule(kind: str, **keys: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": keys}}


def plugin(**keys: Any) -> dict[str, Any]:
    return {"deepspeed_config": keys}


def fsdp(**keys: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": {**FSDP["fsdp_config"], **keys}}


OFFLOAD = {"device": "cpu", "pin_memory": True}
JSON = json.dumps(DEEPSPEED)
FSDP_2 = yaml.safe_dump(
    {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 4}
    | {"fsdp_config": FSDP["fsdp_config"]}
)
QLORA = """from transformers import AutoModelForCausalLM, BitsAndBytesConfig
import torch
bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"{})
model = AutoModelForCausalLM.from_pretrained("a/b", quantization_config=bits, dtype=torch.bfloat16)
"""
DS_3 = json.dumps({**DEEPSPEED, "zero_optimization": STAGE_3})
TP = {"tensor_parallel": {"autotp_size": 2}}

CASES = (
    # how it is written and who reads it
    Case("auto-without-trainer", zero(stage="auto"), {}, {"asked_reader": "deepspeed"}),
    Case("auto-nobody-fills", params(betas="auto"), params(lr="auto"), {"asked_reader": "accelerate"}),
    Case("braces-are-missing", '"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 1', JSON),
    Case("comments-in-json", "// pasted\n" + JSON, JSON, {"asked_reader": "trainer"}),
    Case("trailing-comma-in-json", JSON[:-1] + ",}", JSON, {"asked_reader": "trainer"}),
    Case("byte-order-mark", "\ufeff" + JSON, JSON, {"asked_reader": "trainer"}),
    Case("duplicate-key", JSON[:-1] + ', "gradient_clipping": 0.5}', JSON),
    # names and kinds
    Case("ignored-key", {"zero_optimisation": {"stage": 2}, "zero_optimization": GONE}, {}),
    Case("refused-key", zero(overlap_com=True), zero(overlap_comm=True)),
    Case("removed-key", {"amp": {"enabled": False}}, {}),
    Case("deprecated-key", zero(cpu_offload=True), zero(offload_optimizer=OFFLOAD)),
    Case("bfloat16-is-bf16", {"bf16": GONE, "bfloat16": {"enabled": True}}, {}),
    Case("wrong-kind-of-value", zero(reduce_bucket_size=4508876.8), zero(reduce_bucket_size=5e8)),
    Case(
        "not-a-choice", zero(offload_optimizer={**OFFLOAD, "device": "gpu"}), zero(offload_optimizer=OFFLOAD)
    ),
    Case("out-of-bounds", zero(stage=4), zero(stage=1)),
    # batches
    Case(
        "batch-arithmetic",
        {"train_batch_size": 32, "gradient_accumulation_steps": 32},
        {"train_batch_size": 128, "gradient_accumulation_steps": 32},
        {"asked_world_size": 4},
    ),
    Case("no-batch-size", {"train_micro_batch_size_per_gpu": GONE}, {}),
    Case(
        "accumulation-under-lightning",
        {},
        {"gradient_accumulation_steps": GONE},
        also=("import lightning\n",),
    ),
    Case(
        "global-batch-alone",
        {"train_batch_size": 32, "train_micro_batch_size_per_gpu": GONE, "gradient_accumulation_steps": GONE},
        {"train_batch_size": 32, "gradient_accumulation_steps": GONE},
    ),
    Case("batch-under-tensor-parallelism", {**TP, "train_batch_size": 4}, TP, {"asked_world_size": 4}),
    Case(
        "launch-and-gpus-differ",
        "deepspeed --num_gpus 4 train.py",
        "deepspeed --num_gpus 8 train.py",
        {"asked_world_size": 8},
    ),
    Case("processes-and-gpus-differ", {"num_processes": 2}, {}, {"asked_world_size": 4}),
    # ZeRO
    Case("stage-is-missing", zero(stage=GONE), {}),
    Case("accelerate-needs-zero", {"zero_optimization": GONE}, zero(stage=0), {"asked_reader": "accelerate"}),
    Case("stage-3-key-below-stage-3", zero(stage3_max_live_parameters=1e9), {}),
    Case("setting-without-effect", zero(allgather_partitions=False), zero(allgather_partitions=True)),
    Case(
        "small-reduce-bucket",
        zero(**STAGE_3, reduce_bucket_size=1e6),
        zero(**STAGE_3, reduce_bucket_size=5e7),
        {"model": LLAMA},
    ),
    Case("overlap-comm-off", zero(overlap_comm=False), {}),
    Case("overlap-comm-default", zero(overlap_comm=GONE), {}),
    Case("no-model-on-save", zero(stage=3), zero(**STAGE_3), {"asked_reader": "trainer"}),
    # offloading
    Case("offload-param-needs-stage-3", zero(offload_param=OFFLOAD), zero(**STAGE_3, offload_param=OFFLOAD)),
    Case(
        "offload-optimizer-needs-zero",
        zero(stage=0, offload_optimizer=OFFLOAD),
        zero(offload_optimizer=OFFLOAD),
    ),
    Case(
        "nvme-needs-a-path",
        zero(**STAGE_3, offload_optimizer={**OFFLOAD, "device": "nvme"}),
        zero(**STAGE_3, offload_optimizer={**OFFLOAD, "device": "nvme", "nvme_path": "/nvme"}),
    ),
    Case(
        "nvme-needs-stage-3",
        zero(offload_optimizer={**OFFLOAD, "device": "nvme", "nvme_path": "/nvme"}),
        zero(offload_optimizer=OFFLOAD),
    ),
    Case(
        "offload-without-device",
        zero(offload_optimizer={"pin_memory": True}),
        zero(offload_optimizer=OFFLOAD),
    ),
    # precision
    Case("bf16-and-fp16", {"fp16": {"enabled": True}}, {"fp16": {"enabled": False}}),
    Case("no-mixed-precision", {"bf16": GONE}, {}),
    Case("fp16-for-a-bf16-model", {"bf16": GONE, "fp16": {"enabled": True}}, {}, {"model": LLAMA}),
    Case(
        "fp16-needs-zero",
        {"bf16": GONE, "fp16": {"enabled": True}, **zero(stage=0)},
        {"bf16": GONE, "fp16": {"enabled": True}},
    ),
    Case(
        "loss-scale",
        {"bf16": GONE, "fp16": {"enabled": True, "loss_scale_window": 0}},
        {"bf16": GONE, "fp16": {"enabled": True, "loss_scale_window": 1000}},
    ),
    Case(
        "accumulates-in-bf16",
        {"gradient_accumulation_steps": 8},
        {"gradient_accumulation_steps": 8, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    Case("bf16-sent-as-fp16", {"communication_data_type": "fp16"}, {"communication_data_type": "fp32"}),
    Case(
        "quantized-gradients-are-fp16",
        zero(**STAGE_3, zero_quantized_gradients=True),
        {
            "bf16": GONE,
            "fp16": {"enabled": True},
            "zero_optimization": {**STAGE_3, "zero_quantized_gradients": True},
        },
    ),
    # optimizer
    Case(
        "precision-of-the-script",
        PREPARED.format("mixed_precision='fp16'", "accelerator.backward(loss)"),
        PREPARED.format("mixed_precision='bf16'", "accelerator.backward(loss)"),
        also=(PLUGIN,),
    ),
    Case(
        "fp16-needs-fp32-weights",
        f"{TRAINER}m = A.from_pretrained('x', dtype='float16')\nTrainer(m, TrainingArguments(fp16=True))",
        f"{TRAINER}m = A.from_pretrained('x')\nTrainer(m, TrainingArguments(fp16=True))",
    ),
    Case(
        "bf16-rounds-updates-away",
        f"{TRAINER}m = A.from_pretrained('x', dtype='bfloat16')\n{ADAMW}",
        f"{TRAINER}m = A.from_pretrained('x')\n{ADAMW}",
    ),
    Case("unknown-optimizer", params("OneBitAdam"), params("AdamW")),
    Case("untested-optimizer", params("SGD"), {**params("SGD"), "zero_allow_untested_optimizer": True}),
    Case(
        "adam-is-adamw",
        params("Adam", weight_decay=0.01),
        params("Adam", weight_decay=0.01, adam_w_mode=False),
    ),
    Case("max-grad-norm", params(max_grad_norm=1.0), params()),
    Case("unknown-optimizer-parameter", params(learning_rate=1e-4), params()),
    Case("text-for-a-number", params(eps="1e-8"), params(eps=1e-8)),
    Case("clipping-default", {"gradient_clipping": GONE}, {"gradient_clipping": 0.0}),
    Case("unknown-schedule", schedule("WarmupLinear"), schedule("WarmupLR", warmup_num_steps=10)),
    Case(
        "schedule-needs-a-parameter",
        schedule("WarmupDecayLR"),
        schedule("WarmupDecayLR", total_num_steps=100),
    ),
    Case("warmup-steps", schedule("WarmupLR", warmup_num_steps=0), schedule("WarmupLR", warmup_num_steps=1)),
    # tensor parallelism and groups
    Case(
        "two-optimizers",
        ENGINE.format("torch.optim.Adam"),
        ENGINE.format("deepspeed.ops.adam.DeepSpeedCPUAdam"),
        also=(json.dumps(DEEPSPEED | zero(stage=2, offload_optimizer={"device": "cpu"})),),
    ),
    Case("tensor-parallel-without-size", {"tensor_parallel": {"tp_overlap_comm": True}}, TP),
    Case(
        "tensor-parallel-divides-the-gpus",
        {"tensor_parallel": {"autotp_size": 3}},
        TP,
        {"asked_world_size": 4},
    ),
    Case("tensor-parallel-divides-the-heads", {"tensor_parallel": {"autotp_size": 3}}, TP, {"model": LLAMA}),
    Case("tensor-parallel-and-lora", TP, {}, also=("from peft import LoraConfig\nLoraConfig(r=8)\n",)),
    Case(
        "tensor-parallel-preset",
        {"tensor_parallel": {"autotp_size": 2, "preset_model": "gemma"}},
        {"tensor_parallel": {"autotp_size": 2, "preset_model": "Llama"}},
    ),
    Case(
        "hpz-divides-the-gpus",
        zero(**STAGE_3, zero_hpz_partition_size=3),
        zero(**STAGE_3, zero_hpz_partition_size=8),
        {"asked_world_size": 16, "gpus_per_node": 8},
    ),
    Case(
        "experts-at-stage-3",
        zero(**STAGE_3),
        zero(**STAGE_3, leaf_module={"classes": ["OlmoeSparseMoeBlock"]}),
        {"model": MOE},
    ),
    # other sections
    Case("activation-checkpointing", {"activation_checkpointing": {"cpu_checkpointing": True}}, {}),
    Case("deepcompile-is-called", {"compile": {"deepcompile": True}}, {}, {"asked_reader": "trainer"}),
    Case("slow-diagnostics", {"wall_clock_breakdown": True}, {"wall_clock_breakdown": False}),
    Case("throughput-timer", {"timers": GONE}, {"timers": {"throughput": {"synchronized": False}}}),
    Case("autotuning-section", {"autotuning": {"enabled": True}}, {"autotuning": {"enabled": False}}),
    Case(
        "access-key-in-the-file", {"comet": {"enabled": True, "api_key": "k"}}, {"comet": {"enabled": True}}
    ),
    # accelerate
    Case("accelerate-unknown-key", {"num_proceses": 4}, {}),
    Case("accelerate-duplicate-key", yaml.safe_dump(ACCELERATE) + "num_processes: 8\n", {}),
    Case("accelerate-distributed-type", {"distributed_type": "MULTI_GPU"}, {}),
    Case("accelerate-kind-of-value", {"num_processes": "x"}, {"num_processes": "4"}),
    Case(
        "accelerate-names-a-file",
        {"mixed_precision": GONE, **plugin(zero_stage=GONE, deepspeed_config_file=3)},
        {"mixed_precision": GONE, **plugin(zero_stage=GONE, deepspeed_config_file=__file__)},
    ),
    Case(
        "accelerate-file-and-keys",
        plugin(deepspeed_config_file="ds.json"),
        {"mixed_precision": GONE, **plugin(zero_stage=GONE, deepspeed_config_file="ds.json")},
    ),
    Case(
        "deepspeed-file-for-accelerate",
        "accelerate launch --config_file file1 train.py\n",
        "accelerate launch --use_deepspeed --deepspeed_config_file file1 train.py\n",
        also=(json.dumps(DEEPSPEED),),
    ),
    Case("accelerate-precision", {"mixed_precision": False}, {"mixed_precision": "no"}),
    Case(
        "accelerate-offload-and-stage",
        plugin(offload_param_device="cpu"),
        plugin(zero_stage=3, zero3_save_16bit_model=True, offload_param_device="cpu"),
    ),
    Case("accelerate-stage-3-flags", plugin(zero_stage=3), plugin(zero_stage=3, zero3_save_16bit_model=True)),
    Case(
        "accelerate-machines",
        {"num_machines": 2},
        {"num_machines": 2, "main_process_ip": "10.0.0.1"},
        also=("accelerate launch train.py",),
    ),
    Case(
        "accelerate-processes",
        {"num_processes": GONE},
        {},
        also=("accelerate launch --config_file file0 t.py",),
    ),
    Case(
        "accelerate-file-is-not-read", {}, FACTORY.format("qwen"), also=("torchrun t.py --config_file file0",)
    ),
    Case(
        "accelerate-parallelism",
        {"parallelism_config": {"parallelism_config_tp_size": 2}},
        {**FSDP, "parallelism_config": {"parallelism_config_tp_size": 2}},
    ),
    Case("fsdp-version", fsdp(fsdp_version=GONE), fsdp()),
    Case("fsdp1-key-with-fsdp2", fsdp(fsdp_use_orig_params=True), fsdp()),
    Case(
        "fsdp-efficient-loading",
        fsdp(fsdp_cpu_ram_efficient_loading=True, fsdp_sync_module_states=False),
        fsdp(fsdp_cpu_ram_efficient_loading=True),
    ),
    Case(
        "fsdp1-and-lora",
        fsdp(fsdp_version=1, fsdp_use_orig_params=False),
        fsdp(fsdp_version=1, fsdp_use_orig_params=True),
        also=("from peft import LoraConfig\nLoraConfig(r=8)\n",),
    ),
    Case(
        "fsdp-block-class",
        fsdp(fsdp_transformer_layer_cls_to_wrap="GPT2Block"),
        fsdp(fsdp_transformer_layer_cls_to_wrap="LlamaDecoderLayer"),
        {"model": LLAMA},
    ),
    Case("fsdp-wraps-nothing", fsdp(fsdp_auto_wrap_policy="NO_WRAP"), fsdp()),
    # scripts and launches
    Case(
        "device-map-and-processes",
        LOAD.format("device_map='auto'"),
        LOAD.format("dtype='auto'"),
        also=(JSON,),
    ),
    Case(
        "quantised-under-zero",
        TRAINER + LOAD.format("load_in_8bit=True") + "Trainer()\n",
        LOAD.format("dtype='auto'"),
        also=(DS_3,),
    ),
    Case(
        "quantised-under-fsdp2",
        QLORA.format(", bnb_4bit_quant_storage=torch.bfloat16"),
        QLORA.format(""),
        also=(FSDP_2,),
    ),
    Case(
        "trainer-and-file-differ",
        TRAINER + "TrainingArguments(per_device_train_batch_size=4, bf16=True)\n",
        TRAINER + "TrainingArguments(per_device_train_batch_size=1, bf16=True)\n",
        also=(JSON,),
    ),
    Case(
        "found-batch-size-and-stage-3",
        TRAINER + "TrainingArguments(auto_find_batch_size=True, per_device_train_batch_size=1, bf16=True)\n",
        TRAINER + "TrainingArguments(per_device_train_batch_size=1, bf16=True)\n",
        also=(DS_3,),
    ),
    Case(
        "fsdp-and-deepspeed",
        TRAINER + "TrainingArguments(fsdp='full_shard', deepspeed='ds.json')\n",
        TRAINER + "TrainingArguments(fsdp='full_shard')\n",
    ),
    Case(
        "file-replaces-argument",
        TRAINER + "Trainer()\nTrainingArguments('out', bf16=True, lr_scheduler_type='cosine')\n",
        TRAINER + "Trainer()\nTrainingArguments('out', bf16=True, lr_scheduler_type='constant')\n",
        also=('{"zero_optimization": {"stage": 2}, "scheduler": {"type": "WarmupLR"}}',),
    ),
    Case(
        "not-read",
        TRAINER + "TrainingArguments(**read())\n",
        TRAINER + "TrainingArguments(**{'bf16': True})\n",
    ),
    Case(
        "contradicting-arguments",
        TRAINER + "TrainingArguments('out', bf16=True, fp16=True)\n",
        TRAINER + "TrainingArguments('out', bf16=True)\nTrainingArguments('out', fp16=True)\n",
    ),
    Case(
        "misspelt-argument",
        TRAINER + "TrainingArguments('out', learning_rat=1e-4)\n",
        TRAINER + "TrainingArguments('out', learning_rate=1e-4, _n_gpu=1, **more)\n",
    ),
    Case(
        "argument-is-text",
        TRAINER + "TrainingArguments('out', learning_rate='1e-4')\n",
        TRAINER + "TrainingArguments('out', learning_rate=1e-4, eval_steps='0.1')\n",
    ),
    Case("misspelt-key", f"{KEYS}lora_alhpa: 16\n", f"{KEYS}lora_alpha: 16\nmy_own_number: 3\n"),
    Case(
        "warmup-does-not-fit",
        "base_model: a/b\nwarmup_steps: 50\nwarmup_ratio: 0.1\nmax_steps: 20\n",
        "base_model: a/b\nwarmup_steps: 5\nmax_steps: 20\n",
    ),
    Case(
        "rows-longer-than-positions",
        POSITIONS.format("2048"),
        POSITIONS.format("1024"),
    ),
    Case("unknown-tool", "from torchtune import x\n", KEYS),
    Case(
        "named-file-is-missing",
        "accelerate launch --config_file there-is-none.yaml docs/check_page.py",
        "accelerate launch --config_file $here/none.yaml docs/check_page.py",
    ),
    Case(
        "unknown-word",
        TRAINER + "TrainingArguments('out', lr_scheduler_type='cosin')\n",
        TRAINER + "TrainingArguments('out', lr_scheduler_type=SchedulerType.COSINE)\n",
    ),
    Case("share-above-one", KEYS + "lora_dropout: 10", KEYS + "lora_dropout: 0.1"),
    Case(
        "unsloth-comes-late",
        "import trl\nfrom unsloth import FastLanguageModel\n",
        "from unsloth import FastLanguageModel\nimport trl\n",
    ),
    Case(
        "number-of-yaml-is-text",
        "model_name_or_path: a/b\nlearning_rate: 2e-5\n",
        "model_name_or_path: a/b\nlearning_rate: 2.0e-5\n",
        also=("import yaml, torch\ntorch.optim.AdamW(p, lr=yaml.safe_load(open('a'))['learning_rate'])\n",),
    ),
    Case(
        "argument-was-removed",
        TRAINER + "SFTTrainer(model=0, tokenizer=1)\n",
        TRAINER + "SFTTrainer(model=0, processing_class=1)\n",
    ),
    Case(
        "flag-was-removed",
        "torchrun file1.py --evaluation_strategy steps",
        "torchrun file1.py --eval_strategy steps",
        also=(f"{TRAINER}# argparse\nHfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n",),
    ),
    Case("import-was-removed", "from transformers import AdamW\n", "from torch.optim import AdamW\n"),
    Case(
        "chat-template-gives-a-dict",
        "from transformers import tokenizer\nlen(tokenizer.apply_chat_template(rows))\n",
        "from transformers import tokenizer\nlen(tokenizer.apply_chat_template(rows, tokenize=False))\n",
    ),
    Case(
        "fsdp-class-of-another-family",
        NEOX.format("LlamaDecoderLayer"),
        NEOX.format("GPTNeoXLayer"),
    ),
    Case(
        "lora-targets",
        "from peft import LoraConfig\nLoraConfig(target_modules=['c_attn'])\n",
        "from peft import LoraConfig\nLoraConfig(target_modules=['q_proj'])\n",
        {"model": LLAMA},
    ),
    Case("template-of-another-family", FACTORY.format("llama3"), FACTORY.format("qwen")),
    Case(
        "job-template-of-another-family",
        JOB.format("Qwen/Qwen2.5-7B", 9),
        JOB.format("meta-llama/Llama-3.1-8B", 9),
    ),
    Case("job-rows-longer-than-positions", JOB.format("gpt2", 2048), JOB.format("gpt2", 1024)),
    Case(
        "end-token-is-not-learned",
        ENDED.format("DataCollatorForLanguageModeling(tokenizer, mlm=False)"),
        ENDED.format("DataCollatorForSeq2Seq(tokenizer)"),
    ),
    Case("answers-have-no-end", WRITES.format("{r['answer']}"), WRITES.format("{r['answer']}{t.eos_token}")),
    Case(
        "collator-replaces-labels",
        ENDED.format("DataCollatorForLanguageModeling(tokenizer, mlm=False)") + MASKS,
        ENDED.format("DataCollatorForSeq2Seq(tokenizer)") + MASKS,
    ),
    Case(
        "labels-include-padding",
        PADDED.format("t.pad_token = '#'", "x['labels'] = x['input_ids'].clone()"),
        PADDED.format(
            "t.pad_token = '#'", "x['labels'] = x['input_ids'].masked_fill(x['attention_mask'] == 0, -100)"
        ),
    ),
    Case(
        "no-pad-token",
        PADDED.format("", "x"),
        PADDED.format("t.pad_token = t.eos_token", "x"),
    ),
    Case("rows-are-not-padded", STACKED.format(""), STACKED.format(", data_collator=collator")),
    Case("columns-are-dropped", DROPPED.format(""), DROPPED.format(", remove_unused_columns=False")),
    Case(
        "shift-of-labels",
        SHIFTED.format(", :-1", ", 1:"),
        SHIFTED.format("", ""),
    ),
    Case("labels-of-another-text", APART.format("one['answer']"), APART.format("one['prompt']")),
    Case("chats-are-texts-by-then", TEXTS.format(", remove_columns=['q', 'a']"), TEXTS.format("")),
    Case("packed-rows-see-each-other", PACKS.format("packing", "sdpa"), PACKS.format("packing", "flex_x")),
    Case("loader-and-file-differ", LOADED.format(2), LOADED.format(1), also=(JSON,)),
    Case(
        "quantised-without-adapter",
        FACTORY.format("qwen").replace("lora", "full") + "quantization_bit: 4\n",
        FACTORY.format("qwen") + "quantization_bit: 4\n",
    ),
    Case("adapters-given-wrongly", ADAPTERS.format("pass"), ADAPTERS.format("model.add_adapter(lora)")),
    Case(
        "adapters-are-frozen",
        "import peft\nmodel = get_peft_model(model, c)\nmodel = prepare_model_for_kbit_training(model)\n",
        "import peft\nmodel = prepare_model_for_kbit_training(model)\nmodel = get_peft_model(model, c)\n",
    ),
    Case(
        "read-before-assignment",
        "import torch\ndef train(m):\n    m, rows = split(m, rows)\n",
        "import torch\ndef train(m, rows):\n    m, rows = split(m, rows)\n",
    ),
    Case("key-twice", FACTORY.format("qwen") + "output_dir: p\n", FACTORY.format("qwen")),
    Case("no-such-checkpoint", RESUMES.format("checkpoint-last"), RESUMES.format("checkpoint-500")),
    Case("bool-of-a-text", BOOL.format("bool"), BOOL.format("int")),
    Case(
        "schedule-and-its-arguments",
        WORD.format("lr_scheduler_type='constant', warmup_steps=10"),
        WORD.format("lr_scheduler_type='constant_with_warmup', warmup_steps=10"),
    ),
    Case(
        "keeps-the-worst",
        WORD.format("metric_for_best_model='eval_loss', greater_is_better=True"),
        WORD.format("metric_for_best_model='eval_loss', greater_is_better=False"),
    ),
    Case("comma-makes-a-tuple", "import torch\nname = 'a/b',\n", "import torch\nname = ('a/b',)\n"),
    Case(
        "no-chat-template",
        CHAT.format("meta-llama/Llama-3.2-1B"),
        CHAT.format("meta-llama/Llama-3.2-1B-Instruct"),
    ),
    Case(
        "sampler-and-shuffle",
        "from torch.utils.data import *\nDataLoader(rows, shuffle=True, sampler=RandomSampler(rows))\n",
        "from torch.utils.data import *\nDataLoader(rows, sampler=RandomSampler(rows))\n",
    ),
    Case("fp16-without-scaler", HALF.format("float16"), HALF.format("bfloat16")),
    Case("one-device-for-all-ranks", RANKED.format("0"), RANKED.format("local_rank")),
    Case("clips-wrong-gradients", SCALED.format("pass"), SCALED.format("scaler.unscale_(optimizer)")),
    Case(
        "labels-do-not-fit",
        CUT.format(""),
        CUT.format("\n    labels = labels[:512]"),
    ),
    Case(
        "another-answer-begins",
        ANSWERED.format(True),
        ANSWERED.format(False),
    ),
    Case("resume-without-optimizer", RESUMED.format(True), RESUMED.format(False)),
    Case(
        "new-tokens-are-not-trained", MARKED.format(""), MARKED.format(", modules_to_save=['embed_tokens']")
    ),
    Case(
        "qlora-without-4-bits",
        "base_model: a/b\nadapter: qlora\nload_in_8bit: true\n",
        "base_model: a/b\nadapter: qlora\nload_in_4bit: true\n",
    ),
    Case(
        "axolotl-stops",
        "base_model: a/b\nval_set_size: 0.1\neval_steps: 10\nevals_per_epoch: 1\n",
        "base_model: a/b\nval_set_size: 0.1\nevals_per_epoch: 1\n",
    ),
    Case(
        "llama-factory-stops",
        FACTORY.format("qwen") + "cutoff_len: 2k\n",
        FACTORY.format("qwen") + "cutoff_len: 2048\n",
    ),
    Case(
        "no-rows",
        FACTORY.format("qwen") + "eval_strategy: steps\n",
        FACTORY.format("qwen") + "eval_strategy: steps\nval_size: 0.1\n",
    ),
    Case(
        "lost-flags",
        "deepspeed train.py \\\n  --fp16\n  --lr 1\n",
        "deepspeed train.py \\\n  --fp16 \\\n  --lr 1\n",
    ),
    Case("unknown-launcher-flag", "deepspeed --profile train.py", "deepspeed train.py --profile"),
    Case(
        "nodes-without-hostfile",
        "deepspeed --num_nodes 2 --node_rank 1 train.py",
        "deepspeed --num_nodes 2 --hostfile hosts --no_ssh --node_rank 1 train.py",
    ),
    Case("module-flag-and-file", "deepspeed --module train.py --deepspeed d.json", "deepspeed train.py"),
    Case(
        "visible-devices",
        "CUDA_VISIBLE_DEVICES=2,3 deepspeed --num_gpus 2 train.py",
        "CUDA_VISIBLE_DEVICES=2,3 deepspeed train.py",
    ),
    Case(
        "more-processes-than-devices",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 4 train.py",
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py",
    ),
    Case("flags-of-the-script", "torchrun file1.py --lr 1", "torchrun file1.py --rate 1", also=(PARSER,)),
    Case(
        "slurm-and-launcher",
        "#SBATCH --nodes=2\nsrun torchrun --nnodes 4 --nproc_per_node 8 train.py\n",
        "#SBATCH --nodes=4\nsrun torchrun --nnodes 4 --nproc_per_node 8 train.py\n",
    ),
    Case(
        "nodes-train-otherwise",
        OF_A_NODE.format(1, "b.jsonl"),
        OF_A_NODE.format(1, "a.jsonl"),
        also=(OF_A_NODE.format(0, "/home/a.jsonl"),),
    ),
    Case(
        "left-from-debugging",
        "export CUDA_LAUNCH_BLOCKING=1\ntorchrun --nproc_per_node 2 train.py\n",
        "export CUDA_LAUNCH_BLOCKING=0\ntorchrun --nproc_per_node 2 train.py\n",
    ),
    Case(
        "nodes-meet-at-localhost",
        "torchrun --nnodes 2 --nproc_per_node 8 --rdzv_endpoint localhost:29500 t.py",
        "torchrun --nnodes 1 --nproc_per_node 8 --rdzv_endpoint localhost:29500 t.py",
    ),
    Case(
        "one-process-for-several-gpus",
        "#SBATCH --gres=gpu:8\ntorchrun train.py\n",
        "#SBATCH --gres=gpu:8\ntorchrun --nproc-per-node 8 train.py\n",
    ),
    Case(
        "bf16-without-hardware",
        "#SBATCH --gres=gpu:v100:1\ntorchrun train.py --bf16\n",
        "#SBATCH --gres=gpu:a100:1\ntorchrun train.py --bf16\n",
    ),
    Case("engine-steps-itself", LOOP.format("inner.step()"), LOOP.format("engine.step()")),
    Case(
        "no-optimizer",
        OWN.format("model=m"),
        OWN.format("model=m, optimizer=o"),
        also=(JSON,),
    ),
    Case(
        "no-zero-grad",
        EPOCHS.format("optimizer.step()"),
        EPOCHS.format("optimizer.step(); optimizer.zero_grad()"),
    ),
    Case(
        "schedule-before-optimizer",
        EPOCHS.format("scheduler.step(); optimizer.step(); optimizer.zero_grad()"),
        EPOCHS.format("optimizer.step(); scheduler.step(); optimizer.zero_grad()"),
    ),
    Case(
        "undefined-name",
        "import torch\nloaders = []\nfor batch in loader:\n    print(batch)\n",
        "import torch\nprint(torch)\n",
    ),
    Case(
        "new-tokens-without-rows",
        PADDED.format("t.pad_token = '#'; t.add_tokens(['<|user|>'])", TRAINED),
        PADDED.format(
            "t.pad_token = '#'; t.add_tokens(['<|user|>'])", TRAINED + "m.resize_token_embeddings(len(t))"
        ),
    ),
    Case(
        "one-process-calls-for-all",
        SHARDED.format("if engine.local_rank == 0:\n    engine.save_checkpoint('out')"),
        SHARDED.format("engine.save_checkpoint('out')\nif engine.local_rank == 0:\n    print('saved')"),
        also=(DS_3,),
    ),
    Case(
        "weights-are-elsewhere",
        SHARDED.format("torch.save(m.state_dict(), 'final.pt')"),
        SHARDED.format("engine.save_16bit_model('out')\ntorch.save(batch.state_dict(), 'other.pt')"),
        also=(DS_3,),
    ),
    Case(
        "backward-outside-accelerator",
        PREPARED.format("", "loss.backward()"),
        PREPARED.format("", "accelerator.backward(loss)"),
        also=(PLUGIN,),
    ),
    Case(
        "loss-divided-twice",
        PREPARED.format("gradient_accumulation_steps=4", "accelerator.backward(loss / 4)"),
        PREPARED.format("gradient_accumulation_steps=4", "accelerator.backward(loss / 3)"),
    ),
    Case(
        "accumulate-is-missing",
        PREPARED.format("gradient_accumulation_steps=4", STEPS),
        PREPARED.format("gradient_accumulation_steps=1", STEPS),
    ),
    Case(
        "loss-not-divided",
        ACCUMULATED.format(loss="loss", every="pass", both="schedule.step()"),
        ACCUMULATED.format(loss="(loss / n)", every="pass", both="schedule.step()"),
    ),
    Case("gradients-are-cleared", CLEARS.format("zero_grad", "step"), CLEARS.format("step", "zero_grad")),
    Case(
        "clips-after-the-step",
        CLEARS.format("step", "zero_grad").replace(
            "()\n    o.zero", "()\n    clip_grad_norm_(m, 1)\n    o.zero"
        ),
        CLEARS.format("step", "zero_grad").replace("    o.step", "    clip_grad_norm_(m, 1)\n    o.step"),
    ),
    Case(
        "schedule-counts-otherwise",
        ACCUMULATED.format(loss="(loss / n)", every="schedule.step()", both="pass"),
        ACCUMULATED.format(loss="(loss / n)", every="pass", both="schedule.step()"),
    ),
    Case("eval-mode-stays", EVALUATES.format("pass"), EVALUATES.format("model.train()")),
    Case(
        "sum-keeps-the-graph",
        SUMMED.format("loss", "torch.no_grad()"),
        SUMMED.format("loss.item()", "torch.no_grad()"),
    ),
    Case(
        "saved-state-is-not-loaded",
        LOADS_AGAIN.format("pass"),
        LOADS_AGAIN.format("o.load_state_dict(c['o'])"),
    ),
    Case(
        "parameters-are-used-up",
        READ_ONCE.format("model.parameters()"),
        READ_ONCE.format("list(model.parameters())"),
    ),
    Case(
        "no-sampler",
        OWN.format("model=m, optimizer=o") + "loader = DataLoader(rows)\n",
        OWN.format("model=m, optimizer=o") + "loader = DataLoader(rows, sampler=DistributedSampler(rows))\n",
        also=(JSON,),
    ),
    Case(
        "sampler-without-set-epoch",
        EPOCHS.format("optimizer.zero_grad()"),
        EPOCHS.format("sampler.set_epoch(epoch)"),
    ),
    Case(
        "one-gpu-for-all",
        LOAD.format("device_map={'': 0}"),
        LOAD.format("device_map={'': rank()}").replace("\n", "\nfrom x import rank\n", 1),
        {"asked_world_size": 4},
    ),
    Case("every-process-saves", SAVES.format("True"), SAVES.format("dist.get_rank() == 0")),
    Case(
        "not-prepared",
        UNPREPARED.format("optimizer"),
        UNPREPARED.format("optimizer, net"),
    ),
    Case(
        "optimizer-made-early",
        "from x import *\noptimizer = AdamW(m.parameters())\nfully_shard(m)\n",
        "from x import *\nfully_shard(m)\noptimizer = AdamW(m.parameters())\n",
    ),
    Case(
        "goes-past-ddp",
        "from x import *\nddp = DistributedDataParallel(m)\nfor row in rows:\n    m(row).backward()\n",
        "from x import *\nddp = DistributedDataParallel(m)\nfor row in rows:\n    ddp(row).backward()\n",
    ),
    Case("model-is-one-unit", UNITS.format("pass"), UNITS.format("fully_shard(block)")),
    Case("one-process-trains-alone", ALONE.format("dist.get_rank() == 0"), ALONE.format("row.last")),
    Case(
        "split-of-each-process",
        SPLIT.format(""),
        SPLIT.format(", generator=torch.Generator().manual_seed(0)"),
    ),
    Case(
        "evaluates-without-rows", ENDS.format("", "evaluate"), ENDS.format("eval_dataset=rows, ", "evaluate")
    ),
    Case("best-metric-is-not-computed", BEST.format("f1"), BEST.format("eval_loss")),
    Case("nothing-is-saved", ENDS.format("", "train"), ENDS.format("", "save_model")),
    Case("settings-nobody-reads", UNREAD.format("1"), UNREAD.format("settings.warmup")),
    Case(
        "zeus-monitor-of-all-gpus",
        f"{ZEUS}monitor = ZeusMonitor()\n",
        f"{ZEUS}monitor = ZeusMonitor(gpu_indices=[local_rank])\n",
        {"asked_world_size": 4},
    ),
    Case(
        "zeus-cost-of-one-process",
        f"{ZEUS}selector = ZeusCost(0.5)\n",
        f"{ZEUS}selector = ZeusCost(0.5, world_size=4)\n",
        {"asked_world_size": 4},
    ),
    Case(
        "zeus-leaves-limits-changed",
        f"{ZEUS}tuner = HFGlobalPowerLimitOptimizer(monitor)\n",
        f"{ZEUS}monitor = ZeusMonitor([rank])\n",
    ),
)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        below = result.get(key)
        inner = below if isinstance(below, dict) else {}
        result[key] = merged(inner, value) if isinstance(value, dict) else value
    return {key: value for key, value in result.items() if value is not GONE}


def documents(case: Case, example: Any) -> tuple[Document, ...]:
    """The example as a file, the first, and those beside it."""
    kind = next(rule.kind for rule in RULES if rule.name == case.rule)
    text = example
    if isinstance(example, dict) and kind == "accelerate":
        text = yaml.safe_dump(merged(ACCELERATE, example))
    elif isinstance(example, dict):
        text = json.dumps(merged(DEEPSPEED, example), indent=2)
    ends = (".py" * ("argparse" in each) for each in (text, *case.also))
    return tuple(
        read(each, f"file{n}{end}")
        for n, (each, end) in enumerate(zip((text, *case.also), ends, strict=True))
    )


def found(case: Case, example: Any) -> list[Finding]:
    made = documents(case, example)
    said = check(Setup(documents=made, **case.setup)).findings
    return [one for one in said if one.file == "file0" and one.rule != "job-file"]  # no job is on the disk


def test_every_rule_has_an_example_and_there_are_enough_of_them() -> None:
    assert [case.rule for case in CASES] == [rule.name for rule in RULES]
    assert len(RULES) >= 40
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_the_bad_example_breaks_the_rule_and_the_good_one_does_not(case: Case) -> None:
    rule = next(rule for rule in RULES if rule.name == case.rule)
    hits = [one for one in found(case, case.bad) if one.rule == case.rule]
    assert hits, "the bad example passes"
    for one in hits:
        assert one.what
        assert one.fix
        assert one.source
        assert one.line >= 1
    if case.rule not in ("activation-checkpointing", "clipping-default"):
        assert rule.severity in {one.severity for one in hits}
    rest = found(case, case.good)
    assert [one.what for one in rest if one.rule == case.rule] == []
    assert [one.what for one in rest if one.severity == "error"] == [], "the good example is good"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.rule)
def test_what_can_be_mended_is_mended_and_brings_nothing_new(case: Case) -> None:
    made = documents(case, case.bad)
    setup = Setup(documents=made, **case.setup)
    before = findings_of(made[0], setup)
    mine = [one for one in before if one.rule == case.rule and one.fixable and one.severity != "note"]
    corrected, fixed = correct(made[0], setup)
    left = findings_of(corrected, replace(setup, documents=(corrected, *made[1:])))
    if mine:
        assert fixed
        assert case.rule not in {one.rule for one in left if one.fixable and one.severity != "note"}
    errors = {one.rule for one in before if one.severity == "error"}
    assert {one.rule for one in left if one.severity == "error"} <= errors


def test_an_argument_that_was_removed_is_answered_with_what_replaces_it() -> None:
    text = "import trl\nfrom transformers import TrainingArguments\n"
    text += "TrainingArguments('out', evaluation_strategy='steps', max_steps=1)\n"
    text += "args = trl.SFTConfig(max_seq_length=9, evaluation_strategy='no')\n"
    text += "transformers.Trainer(args=args, tokenizer=args)\n"
    text += "trl.SFTTrainer(args=args, tokenizer=args, max_seq_length=9, dataset_text_field='text')\n"
    found = check(Setup(documents=(read(text, "train.py"),))).findings
    (removed,) = [one for one in found if one.rule == "argument-was-removed"]
    rows = [row.strip().partition(";")[0] for row in removed.fix.splitlines()]
    assert rows == [
        "line 3: evaluation_strategy -> eval_strategy",
        *["line 4: max_seq_length -> max_length", "evaluation_strategy -> eval_strategy"],
        "line 5: tokenizer -> processing_class",
        *["line 6: tokenizer -> processing_class", "max_seq_length -> SFTConfig.max_length"],
        "dataset_text_field -> SFTConfig.dataset_text_field",
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from transformers import Trainer\nTrainer(tokenizer=1)\n", 1),
        ("from transformers import Trainer\nTrainer(processing_class=1)\n", 0),
        ("import torch\nclass Trainer:\n    pass\nTrainer(tokenizer=1)\n", 0),
        ("from mylib import Trainer\nTrainer(tokenizer=1)\n", 0),
        ("from .transformers import Trainer\nTrainer(tokenizer=1)\n", 0),
        ("import transformers as T\nT.Trainer(tokenizer=1)\n", 1),
        ("from transformers import Trainer as X\nX(tokenizer=1)\n", 1),
        ("from transformers.trainer import Trainer\nTrainer(tokenizer=1)\n", 1),
    ],
)
def test_a_trainer_of_transformers_has_no_tokenizer(text: str, found: int) -> None:
    findings = check(Setup(documents=(read(text, "train.py"),))).findings
    assert [one.rule for one in findings].count("argument-was-removed") == found


@pytest.mark.parametrize(
    ("key", "value", "severities"),
    [
        ("elastic_checkpoint", True, {0: "warning", 3: "error"}),
        ("offload_optimizer", {**OFFLOAD, "super_offload": True}, dict.fromkeys((0, 1, 2), "error")),
    ],
)
def test_a_setting_is_without_effect_at_the_stages_that_do_not_read_it(
    key: str, value: Any, severities: dict[int, str]
) -> None:
    for stage in range(4):
        document = read(json.dumps(merged(DEEPSPEED, zero(**{**STAGE_3, "stage": stage, key: value}))), "d")
        found = [
            one
            for one in check(Setup(documents=(document,))).findings
            if one.rule == "setting-without-effect"
        ]
        assert [one.severity for one in found] == [severities[one] for one in severities if one == stage]


def test_the_bases_are_without_any_finding() -> None:
    for base in (DEEPSPEED, merged(DEEPSPEED, zero(**STAGE_3))):
        text = json.dumps(base, indent=2)
        assert check(Setup(documents=(read(text, "d"),), asked_reader="trainer")).findings == ()
    for accelerate in (ACCELERATE, merged(ACCELERATE, FSDP)):
        assert check(Setup(documents=(read(yaml.safe_dump(accelerate), "a"),))).findings == ()


PARSED = [
    case
    for case, rule in zip(CASES, RULES, strict=True)
    if rule.kind == "deepspeed" and isinstance(case.bad, dict)
]


def parse(values: dict[str, Any]) -> str:
    """What the installed DeepSpeed says of a configuration; empty where it takes it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig(values)
    except (Exception, AssertionError) as error:  # noqa: BLE001 (its errors have no common kind)
        return f"{type(error).__name__}: {error}"
    return ""


REFUSED_BY_DEEPSPEED = {
    "refused-key",
    "removed-key",
    "wrong-kind-of-value",
    "not-a-choice",
    "out-of-bounds",
    "no-batch-size",
    "bf16-and-fp16",
    "loss-scale",
}
"""Rules whose bad examples DeepSpeed does not even parse."""


@pytest.mark.parametrize("case", PARSED, ids=lambda case: case.rule)
def test_deepspeed_itself_says_the_same(case: Case) -> None:
    """It parses every good example, and refuses the bad ones of the rules that say so, and no others."""
    made = [documents(case, example)[0] for example in (case.bad, case.good)]
    world = case.setup.get("asked_world_size", 1)
    bad, good = (json.loads(document.text) for document in made)
    for values in (bad, good):
        if "train_batch_size" in values and case.rule != "no-batch-size":
            values.pop("train_batch_size") if world > 1 else None
            values.setdefault("train_micro_batch_size_per_gpu", 1)
    if "auto" in json.dumps(good):
        good = {}
    assert good == {} or parse(good) == ""
    if "auto" not in json.dumps(bad):
        assert (parse(bad) != "") == (case.rule in REFUSED_BY_DEEPSPEED), parse(bad)


@pytest.mark.parametrize("case", PARSED, ids=lambda case: case.rule)
def test_what_a_fix_leaves_without_an_error_is_taken_by_deepspeed(case: Case) -> None:
    made = documents(case, case.bad)
    setup = Setup(documents=made, **{**case.setup, "asked_world_size": 1})
    corrected, fixed = correct(made[0], setup)
    left = findings_of(corrected, replace(setup, documents=(corrected, *made[1:])))
    if fixed and "auto" not in corrected.text and not any(one.severity == "error" for one in left):
        assert parse(json.loads(corrected.text)) == ""


class Ranks:
    """So many data-parallel ranks, as DeepSpeed asks a model-parallel unit for them."""

    def __init__(self, number: int) -> None:
        self.number = number

    def get_data_parallel_world_size(self) -> int:
        return self.number


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("total", [1, 2, 4, 6, 7, 8])
@pytest.mark.parametrize("beside", [{}, {"gradient_accumulation_steps": 2}], ids=["alone", "accumulated"])
def test_a_whole_batch_is_refused_where_deepspeed_refuses_it(
    total: int, ranks: int, beside: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed import comm
    from deepspeed.runtime.config import DeepSpeedConfig

    monkeypatch.setattr(comm, "get_rank", lambda: 0)  # else DeepSpeed takes one process
    values = {"train_batch_size": total, **beside, "zero_optimization": {"stage": 2}}
    try:
        parsed = DeepSpeedConfig(dict(values), mpu=Ranks(ranks))
        assert parsed.world_size == ranks
        taken = True
    except AssertionError:
        taken = False
    setup = Setup(
        documents=(read(json.dumps(values), "d"),), asked_world_size=ranks, asked_reader="deepspeed"
    )
    errors = [one for one in check(setup).findings if one.severity == "error"]
    assert [one.rule for one in errors] == ([] if taken else ["batch-arithmetic"])
    if (total, ranks, beside) == (7, 4, {}):
        assert errors[0].what.startswith("`train_batch_size`: 7 is no multiple of 4 processes")
        assert errors[0].fix.startswith("`train_batch_size`: 4 or 8,")


@pytest.mark.parametrize("word", ["yes", "Off", "TRUE", "t", "maybe"])
def test_words_are_booleans_where_deepspeed_takes_them(word: str) -> None:
    values = merged(DEEPSPEED, zero(overlap_comm=word))
    findings = check(Setup(documents=(read(json.dumps(values), "d"),), asked_reader="trainer")).findings
    refused = [one.rule for one in findings if one.severity == "error"]
    values.pop("train_batch_size", None)
    taken = parse({**values, "train_micro_batch_size_per_gpu": 1}) == ""
    assert refused == ([] if taken else ["wrong-kind-of-value"])


@pytest.mark.parametrize("text", ["500", "500.0", "+500", "5e8", "500.5", "-1", "٣", " 500 ", "", "1e308"])
def test_texts_are_numbers_where_deepspeed_takes_them(text: str) -> None:
    values = merged(DEEPSPEED, zero(reduce_bucket_size=text))
    findings = check(Setup(documents=(read(json.dumps(values), "d"),), asked_reader="trainer")).findings
    assert (parse(values) == "") == all(one.severity != "error" for one in findings)


class _Unknown:
    def __repr__(self) -> str:
        return "known.later"


def _leaves(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        yield from _leaves(value, (*above, name)) if isinstance(value, dict) else [(*above, name)]


@pytest.mark.parametrize(
    "case", [one for one in CASES if isinstance(one.good, dict)], ids=lambda one: one.rule
)
def test_a_value_of_a_script_that_only_a_run_knows_breaks_no_rule(case: Case) -> None:
    if documents(case, case.good)[0].kind != "deepspeed":
        return

    def rules(values: dict[str, Any]) -> set[str]:
        text = f"import deepspeed\ndeepspeed.initialize(model=m, optimizer=o, config={values!r})\n"
        script = read(text, "train.py")
        assert len(script.inner) == 1
        return {one.rule for one in check(Setup(documents=(script, *script.inner))).findings}

    good = merged(DEEPSPEED, case.good)
    known = rules(good)
    for key in _leaves(good):
        values: Any = _Unknown()
        for part in reversed(key):
            values = {part: values}
        assert rules(merged(good, values)) <= known, key


VALUES = [None, True, False, 0, -1, 3, 2.5, 1e400, "auto", "", "x", "3", [], [1], {}, {"a": 1}]
JUNK = st.sampled_from(VALUES).map(copy.deepcopy)  # keys are put into them
SECTIONS = deepspeed_schema().sections


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Known keys in their sections, with values that nobody would give."""
    values: dict[str, Any] = {}
    for section in draw(st.lists(st.sampled_from(sorted(SECTIONS)), min_size=1, max_size=8)):
        holder = values
        for part in section:
            below = holder.setdefault(part, {})
            if not isinstance(below, dict):
                break
            holder = below
        for name in draw(st.lists(st.sampled_from(sorted(SECTIONS[section].keys)), max_size=4)):
            holder.setdefault(name, draw(JUNK))
    return values


@settings(deadline=None)
@given(configurations(), st.sampled_from([None, *READERS]), st.sampled_from([None, 1, 4]))
def test_no_configuration_is_too_strange(values: dict[str, Any], reader: Any, world: int | None) -> None:
    text = json.dumps(values).replace("Infinity", "1e400")
    if not values:
        return
    document = read_json(text, "f")
    setup = Setup(documents=(document,), asked_reader=reader, asked_world_size=world, model=LLAMA)
    check(setup)
    corrected, _ = correct(document, setup)
    read_json(corrected.text, "f")
    assert len([*translate(setup)]) == 1


@settings(deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*accelerate_keys()[0], "x"]),
        JUNK
        | st.dictionaries(st.sampled_from([*accelerate_keys()[1], *accelerate_keys()[2]]), JUNK, max_size=4),
        min_size=1,
        max_size=8,
    )
)
def test_no_accelerate_file_is_too_strange(values: dict[str, Any]) -> None:
    document = replace(read_yaml(yaml.safe_dump(values), "f"), kind="accelerate")
    setup = Setup(documents=(document,))
    check(setup)
    correct(document, setup)
    list(translate(setup))


@pytest.mark.parametrize(
    ("timers", "on"),
    [
        ({}, True),
        ({"throughput": {}}, True),
        ({"throughput": {"enabled": True}}, True),
        ({"throughput": {"enabled": "off"}}, False),  # as pydantic reads it
        ({"throughput": {"enabled": 0}}, False),
        ({"throughput": {"enabled": "true", "synchronized": "No"}}, False),
        ({"throughput": None}, None),
        ("off", True),
        ([], True),
    ],
)
def test_the_timer_is_on_where_deepspeed_has_it_on(timers: Any, on: bool | None) -> None:
    """None: DeepSpeed stops. What is no section is an error of its own."""
    from deepspeed.utils.config import get_timers_config

    try:
        read = get_timers_config({"timers": timers})
        assert (read.enabled and read.synchronized) == on
    except (TypeError, ValueError, AttributeError):
        assert on is None
    document = read_json(json.dumps({**DEEPSPEED, "timers": timers}), "ds.json")
    said = [one.rule for one in findings_of(document, Setup(documents=(document,)))]
    broken = not isinstance(timers, dict) or on is None
    assert ("wrong-kind-of-value" in said, "throughput-timer" in said) == (broken, on is True and not broken)


@pytest.mark.parametrize(
    ("bad", "rule", "instead"),
    [
        (zero(**STAGE_3, mics_shard_size=2), "removed-key", "HSDP"),
        (zero(**STAGE_3, mics_shard_size=2), "removed-key", "zero_hpz_partition_size"),
        (params("OneBitAdam"), "unknown-optimizer", '"type": "AdamW"'),
        (params("OneBitLamb"), "unknown-optimizer", "PowerSGD"),
        (params("ZeroOneAdam"), "unknown-optimizer", "bf16"),
    ],
)
def test_what_deepspeed_no_longer_has_is_an_error_that_names_the_replacement(
    bad: Any, rule: str, instead: str
) -> None:
    [hit] = [one for one in found(Case(rule, bad, bad), bad) if one.rule == rule]
    assert hit.severity == "error"
    assert "was removed in DeepSpeed" in hit.what
    assert instead in hit.fix
