# ruff: noqa: E501 - the files are text
"""What of a set-up decides in place of another, and what stays open: files in, values and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

TRAINER = (
    "from transformers import AutoModelForCausalLM, HfArgumentParser, Trainer, TrainingArguments\n"
    "(args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()\n"
    "Trainer(model=AutoModelForCausalLM.from_pretrained('a/b'), args=args, train_dataset=rows()).train()\n"
)
ZERO_3 = '{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}, "gradient_clipping": 0.5}'
ACCELERATE = "accelerate launch --num_processes 4 --use_deepspeed "
SWIFT = "swift {} --model a/b --train_type full --dataset {} --per_device_train_batch_size 1"
UNSLOTH = """\
from trl import SFTConfig, SFTTrainer
from unsloth import {0}
from datasets import load_dataset
model, tokenizer = {0}.from_pretrained("a/b")
model = {0}.get_peft_model(model, r=16{1})
rows = load_dataset("json", data_files=find(), split="train")
SFTTrainer(model=model, args=SFTConfig("o"), train_dataset=rows).train()
"""
OWN = "not said by the files, so shardwise's own: "
YAML = "model_name_or_path: a/b\nper_device_train_batch_size: 2\n"
HEAD = "from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]

CASES: dict[str, Case] = {
    "the file of --deepspeed_config_file decides": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py --output_dir o\n", "train.py": TRAINER, "data/z.json": "", "z.json": ZERO_3},
        {"strategy.stage": 3, "optimizer.clip_norm": 0.5},
        (),
        ("conflict", "zero2", "no such key"),
    ),
    "of a file that is named alone": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.conf train.py\n", "train.py": TRAINER, "data/x": "", "z.conf": ZERO_3},
        {"strategy.stage": 3},
        (),
        ("zero2",),
    ),
    "flags alone": (
        {"run.sh": f"{ACCELERATE}--zero_stage 3 train.py --output_dir o\n", "train.py": TRAINER},
        {"strategy": "zero3"},
        (),
        (),
    ),
    "a file that is not there": (
        {"run.sh": f"{ACCELERATE}--deepspeed_config_file z.json train.py\n", "train.py": TRAINER},
        {"strategy": None},
        ("to do: run.sh:1: z.json is not there; add it to --from",),
        ("zero2",),
    ),
    "Unsloth's modules are all of them": (
        {"train.py": UNSLOTH.format("FastModel", "")},
        {"model.lora.targets": "all-linear"},
        ("as Unsloth does",),
        ("q_proj",),
    ),
    "FastLanguageModel's modules are all of them": (
        {"train.py": UNSLOTH.format("FastLanguageModel", "")},
        {"model.lora.targets": "all-linear", "data.eval_fraction": 0},
        ("write data.train",),
        ("q_proj", "data.eval,", "train.eval_every"),
    ),
    "Unsloth's switches choose the modules": (
        {"train.py": UNSLOTH.format("FastModel", ", finetune_vision_layers=False, finetune_mlp_modules=False")},
        {"model.lora.targets": ATTENTION},
        (),
        ("finetune_",),
    ),
    "ms-swift's pt learns all of a text": (
        {"run.sh": SWIFT.format("pt", "d.jsonl")},
        {"data.format": "text", "data.loss_on": "all", "data.too_long": None},
        ("changed: run.sh:1: swift: pt: the job's rows are plain text",),
        ("too_long",),
    ),
    "ms-swift's sft says neither": (
        {"run.sh": SWIFT.format("sft", "d.jsonl")},
        {"data.format": None, "data.loss_on": None, "data.too_long": "drop"},
        (),
        ("swift:",),
    ),
    "rows of an id": (
        {"run.sh": SWIFT.format("sft", "swift/self-cognition#1000")},
        {"data.train": "swift/self-cognition", "data.max_samples": 1000},
        (),
        ("#",),
    ),
    "rows of several ids": (
        {"run.sh": SWIFT.format("sft", "'a/b#10' c/d")},
        {"data.train": ["a/b", "c/d"], "data.max_samples": None},
        ("dataset: 10 rows: prepare files with so many rows of each",),
        (),
    ),
    "a sum of expr": (
        {"run.sh": f"N=4\nSTEPS=$(expr 32 / $N / 2)\nNPROC_PER_NODE=$N {SWIFT.format('sft', 'd.jsonl')} --gradient_accumulation_steps $(expr $STEPS \\* 2)\n"},
        {"train.global_batch": 32},
        (),
        ("could not be read",),
    ),
    "a key that a sentence asks for is no default of shardwise's": (
        {"train.py": "import torch\nfrom transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
         "block_size = pick()\ntorch.optim.AdamW(m.parameters(), lr=rate())\nmax_iters = 5 * 100\n"},
        {"optimizer.learning_rate": None},
        ("write optimizer.learning_rate; until then 2e-05", "max_iters: not understood; write train.steps; until then one epoch", OWN + "data.sequence_length 1024"),
        (OWN + "optimizer", "one epoch,", ", one epoch"),
    ),
    "several keys of one sentence": (
        {"train.py": f"{HEAD}Trainer(m, TrainingArguments('o', optimizers=make(), **more))\n"},
        {},
        ("until then optimizer.learning_rate 2e-05, optimizer.beta1 0.9", "one epoch"),
        (OWN + "optimizer",),
    ),
    "a default of shardwise loses to what is read": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py\n", "train.py": f"{HEAD}Trainer(m, TrainingArguments('o', per_device_train_batch_size=48, gradient_accumulation_steps=cfg['n']))\n"},
        {"train.micro_batch": 48, "train.global_batch": 96},
        ("to do: of a step's rows the files say gpus 2, micro 48, and another factor could not be read; write train.micro_batch, train.global_batch",),
        ("left out: train", "does not divide", "until then 16"),
    ),
    "what is known of a batch stays": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py\n", "train.py": f"{HEAD}Trainer(m, TrainingArguments('o', per_device_train_batch_size=4, gradient_accumulation_steps=cfg['n']))\n"},
        {"train.micro_batch": 4, "train.global_batch": None},
        ("the files say gpus 2, micro 4, and another factor could not be read; write train.micro_batch, train.global_batch; until then 16",),
        (),
    ),
    "an open accumulation is none of ms-swift's own": (
        {"run.sh": f"NPROC_PER_NODE=2 {SWIFT.format('sft', 'd.jsonl')} --gradient_accumulation_steps $N\n"},
        {"train.global_batch": None},
        ("gradient_accumulation_steps: its value could not be read",),
        ("train.global_batch=16",),
    ),
    "what changes the text comes first": (
        {"a.yaml": f"{YAML}chat_template: \"{{% for m in messages %}}{'x' * 99}{{% endfor %}}\"\neos_token: <|end|>\ndebug: true\nlogging_steps: 1\nrope_theta: 30000\n"},
        {"data.chat_template": None},
        (
            "to do: a.yaml: chat_template (line 3) `{% for m in messages %}",
            "xxx...`: write data.chat_template, a file with this text",
            "eos_token (line 4) `<|end|>`: prepare a tokenizer that ends answers with it",
            "rope_theta (line 7) `30000`: prepare a model folder",
            "left out: a job has no such key: debug\nleft out: shardwise does it itself: logging_steps",
        ),
        ("x" * 80,),
    ),
    "a template of another tool": (
        {"a.yaml": f"{YAML}template: qwen\n"},
        {},
        ("changed: a.yaml: template (line 3) `qwen`: trained with the model's own chat template",),
        (),
    ),
    "tokens that a script adds": (
        {"train.py": f"{HEAD}t = AutoTokenizer.from_pretrained('a/b')\nt.add_special_tokens({{'additional_special_tokens': ['<a>'], 'pad_token': '<p>'}})\nTrainer(m, TrainingArguments('o'))\n"},
        {},
        ("to do: train.py: add_special_tokens.special_tokens_dict.additional_special_tokens (line 4): prepare a tokenizer with these tokens",),
        ("to do: train.py: add_special_tokens.special_tokens_dict.pad_token",),
    ),
    "weights in bf16 alone": (
        {"run.sh": "torchrun --nproc_per_node 2 train.py --model_name a/b --pure_bf16\n"},
        {"train.precision": "bf16"},
        ("changed: run.sh:1: pure_bf16: True: the weights and the moments of the optimizer stay in fp32",),
        (),
    ),
    "clipping below zero is none": (
        {"a.yaml": f"{YAML}max_grad_norm: -1\n"}, {"optimizer.clip_norm": 0}, (), ("clip_norm",),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_decides_is_taken_and_the_rest_stays_open(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)
