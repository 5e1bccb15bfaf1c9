# ruff: noqa: E501 - the files are text
"""What a job does otherwise than the files, and what is asked of the user with the numbers that are known.

A row of CASES: the files, the values of the job by key, what the sentences must say, and what they may not say.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of, value_of
from shardwise.job.source import job_values

FACTORY = "model_name_or_path: a/b-Instruct\nstage: sft\nfinetuning_type: lora\ndataset: c/d\nper_device_train_batch_size: 2\n"
AXOLOTL = "base_model: a/b\ndatasets:\n  - path: c/d\n    type: completion\nmicro_batch_size: 1\n"
HF = "from transformers import AutoModelForCausalLM, BitsAndBytesConfig, DataCollatorForLanguageModeling, Trainer, TrainingArguments\nfrom trl import SFTConfig, SFTTrainer\n"
ARGS = "args = TrainingArguments(output_dir='o', learning_rate=1e-4, num_train_epochs=2, per_device_train_batch_size=4)\n"
PAD = "def tokens(row):\n    out = tok(row['text'], truncation=True, padding='max_length', max_length=64)\n    out['labels'] = out['input_ids'].copy()\n    return out\ndata = data.map(tokens)\n"
LOOP = """\
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for epoch in range(2):
    for batch in torch.utils.data.DataLoader(rows, batch_size=4):
        model(**batch).loss.backward()
        optimizer.step()
"""
FLAG = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--FLAG', action='store_true')\na = p.parse_args()\n"


def four_bits(more: str) -> dict[str, str]:
    bits = f"BitsAndBytesConfig(load_in_4bit=True{more})"
    return {
        "train.py": f"{HF}m = AutoModelForCausalLM.from_pretrained('a/b', quantization_config={bits})\n{ARGS}Trainer(m, args).train()\n"
    }


CASES: dict[str, Case] = {
    "LLaMA-Factory's own text": (
        {"a.yaml": f"{FACTORY}template: default\ncutoff_len: 512\n"},
        {"data.sequence_length": 512, "data.chat_template": None},
        ("to do: a.yaml: template (line 6) `default`: write data.chat_template",),
        ("cutoff_len",),
    ),
    "a template of the model's family": (
        {"a.yaml": f"{FACTORY}template: qwen\ncutoff_len: 512\n"},
        {},
        (),
        ("write data.chat_template",),
    ),
    "a template and no conversations": (
        {"a.yaml": f"{FACTORY.replace('sft', 'pt')}template: default\ncutoff_len: 512\n"},
        {"data.format": "text"},
        (),
        ("template",),
    ),
    "LLaMA-Factory's length by version": (
        {"a.yaml": f"{FACTORY}template: qwen\n"},
        {"data.sequence_length": 2048},
        ("to do: no file has cutoff_len, which is 2048 since LLaMA-Factory 0.9.1 and was 1024 before",),
        (),
    ),
    "terms of another loss": (
        {"a.yaml": f"{FACTORY}kl_beta: 0.1\nbeta: 0.2\nadam_beta1: 0.8\n"},
        {"optimizer.beta1": 0.8},
        ("to do: a.yaml:6: kl_beta 0.1, beta 0.2: it changes the loss",),
        ("adam_beta1: it",),
    ),
    "a term of no weight": ({"a.yaml": f"{FACTORY}kl_beta: 0\n"}, {}, (), ("changes the loss",)),
    "a term that a script's flag has": (
        {
            "run.sh": "python train.py --kl_coef 0.2\n",
            "train.py": FLAG.replace("FLAG', action='store_true'", "kl_coef', type=float, default=0") + LOOP,
        },
        {},
        ("to do: run.sh:1: kl_coef 0.2: it changes the loss",),
        (),
    ),
    "what the Trainer adds to the loss": (
        {
            "train.py": f"{HF}Trainer(m, TrainingArguments('o', label_smoothing_factor=0.1, optim='adafactor', lr_scheduler_type='polynomial'))\n"
        },
        {},
        (
            "changed: train.py: label_smoothing_factor (line 3) `0.1`: trained without it",
            "changed: train.py: optim (line 3) `adafactor`: trained with AdamW",
            "changed: train.py: lr_scheduler_type (line 3) `polynomial`: trained with another schedule",
        ),
        (),
    ),
    "two trainers, one after the other": (
        {
            "train.py": f"{HF}{ARGS}trainer = Trainer(m, args)\ntrainer.train()\nmore = TrainingArguments(output_dir='p', learning_rate=5e-5)\ntrainer2 = Trainer(m, more)\ntrainer2.train()\n"
        },
        {"optimizer.learning_rate": 1e-4},
        ("to do: train.py:8: another training, which is not read; line 5's is",),
        (),
    ),
    "two trainers in two functions": (
        {
            "train.py": f"{HF}def one():\n    trainer = Trainer(m, TrainingArguments('o', learning_rate=1e-4))\n    trainer.train()\ndef two():\n    trainer = SFTTrainer(m, SFTConfig('p'))\n    trainer.train()\none()\ntwo()\n"
        },
        {"optimizer.learning_rate": 1e-4},
        ("to do: train.py:8: another training, which is not read; line 5's is",),
        (),
    ),
    "one trainer, begun or gone on with": (
        {
            "train.py": f"{HF}{ARGS}trainer = Trainer(m, args)\nif old:\n    trainer.train(resume_from_checkpoint=old)\nelse:\n    trainer.train()\n"
        },
        {},
        (),
        ("another training",),
    ),
    "a class around one trainer": (
        {
            "train.py": f"{HF}class Tuner:\n    def __init__(self):\n        self.trainer = Trainer(m, TrainingArguments('o'))\n    def train(self):\n        self.trainer.train()\nmy_trainer = Tuner()\nmy_trainer.train()\n"
        },
        {},
        (),
        ("another training",),
    ),
    "a second command": (
        {"run.sh": "deepspeed train.py --learning_rate 1e-4\ndeepspeed train.py --learning_rate 1e-5\n"},
        {"optimizer.learning_rate": 1e-4},
        ("to do: run.sh: launcher.more (line 2) `deepspeed`: write a job of its own",),
        (),
    ),
    "run_clm's rows for validation": (
        {
            "run.sh": "python run_clm.py --model_name_or_path gpt2 --dataset_name a/b --do_eval --validation_split_percentage 10\n"
        },
        {},
        ("to do: run.sh: validation_split_percentage (line 1) `10`: write data.eval_fraction (10 % is 0.1)",),
        ("do_eval",),
    ),
    "an evaluation of rows that no file names": (
        {"run.sh": "python run_clm.py --model_name_or_path gpt2 --dataset_name a/b --do_eval\n"},
        {},
        ("to do: run.sh:1: do_eval: which rows it takes is not known; write data.eval",),
        (),
    ),
    "rows for evaluation in a file": (
        {
            "run.sh": "python run_clm.py --model_name_or_path gpt2 --train_file a.json --validation_file b.json --do_eval\n"
        },
        {"data.train": "a.json", "data.eval": "b.json", "data.eval_fraction": None},
        (),
        ("do_eval",),
    ),
    "no evaluation": (
        {"run.sh": "python run_clm.py --model_name_or_path gpt2 --dataset_name a/b --do_eval false\n"},
        {},
        (),
        ("to do: do_eval",),
    ),
    "TRL's field of the text": (
        {"train.py": f"{HF}SFTTrainer('a/b', args=SFTConfig('o', dataset_text_field='content')).train()\n"},
        {},
        ("to do: train.py: dataset_text_field (line 3) `content`: prepare rows with this field as `text`",),
        (),
    ),
    "TRL's field, as it is": (
        {"train.py": f"{HF}SFTTrainer('a/b', args=SFTConfig('o', dataset_text_field='text')).train()\n"},
        {"data.format": "text"},
        (),
        ("prepare rows",),
    ),
    "Axolotl's field of the text": (
        {"a.yaml": AXOLOTL.replace("type:", "field: input\n    type:")},
        {},
        ("to do: a.yaml: datasets.0.field (line 4) `input`: prepare rows",),
        (),
    ),
    "Axolotl's roles": (
        {
            "a.yaml": AXOLOTL.replace(
                "completion",
                "chat_template\n    field_messages: messages\n    roles_to_train: [assistant]\n    message_property_mappings: {role: role, content: content}",
            )
        },
        {},
        (),
        ("prepare rows",),
    ),
    "the field that a function tokenises": (
        {
            "train.py": f"{HF}data = data.map(lambda row: tok(row['content'], truncation=True, max_length=64))\n{ARGS}Trainer(m, args).train()\n"
        },
        {"data.sequence_length": 64},
        ("to do: train.py: tokenised field (line 3) `content`: prepare rows with this field as `text`",),
        (),
    ),
    "labels of padding": (
        {"train.py": f"{HF}{PAD}{ARGS}Trainer(m, args).train()\n"},
        {},
        (
            "changed: train.py: labels(padding) (line 5): trained without padding in the loss, which the script's labels count",
        ),
        ("field",),
    ),
    "labels that a collator makes again": (
        {
            "train.py": f"{HF}{PAD}{ARGS}Trainer(m, args, data_collator=DataCollatorForLanguageModeling(tok, mlm=False)).train()\n"
        },
        {},
        (),
        ("padding in the loss",),
    ),
    "4 bits without more": (
        four_bits(""),
        {"model.quantization": "nf4"},
        (
            "changed: load_in_4bit: bitsandbytes has no double quantisation by default",
            "bitsandbytes' 4 bits are FP4",
        ),
        (),
    ),
    "4 bits as a job has them": (
        four_bits(", bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True"),
        {"model.quantization": "nf4"},
        (),
        ("double", "FP4"),
    ),
    "4 bits without double quantisation": (
        four_bits(", bnb_4bit_quant_type='fp4', bnb_4bit_use_double_quant=False"),
        {},
        (
            "changed: train.py: bnb_4bit_use_double_quant (line 3): trained with double quantisation",
            "changed: train.py: bnb_4bit_quant_type (line 3) `fp4`: trained with NF4",
        ),
        ("by default",),
    ),
    "4 bits that only a run knows": (
        four_bits(", bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=twice"),
        {},
        (),
        ("by default",),
    ),
    "a flag that leaves rows out": (
        {
            "run.sh": "python train.py --is_skip\n",
            "train.py": FLAG.replace("FLAG", "is_skip") + LOOP,
        },
        {},
        ("to do: run.sh:1: is_skip: not understood; write data.too_long",),
        (),
    ),
    "a share of steps": (
        {
            "run.sh": "torchrun --nproc_per_node 2 train.py\n",
            "train.py": f"{HF}{ARGS.replace('num', 'warmup_ratio=0.1, num')}Trainer(m, args).train()\n",
        },
        {"train.global_batch": 8, "optimizer.warmup_steps": 0.1},
        (),
        ("to do: train.py:15",),
    ),
    "the text of a row": (
        {
            "train.py": f"{HF}PROMPT = 'Q: {{}} A: {{}}'\ndef first(row):\n    print(f'one row of very many rows: {{row}}')\n    return {{'text': f\"# {{row['q']}}\"}}\ndef second(row):\n    return PROMPT.format(row['q'], row['a'])\nSFTTrainer('a/b', train_dataset=data.map(first), formatting_func=second).train()\n"
        },
        {},
        ("text by first (line 4) `f\"# {row['q']}\"`", "text by second (line 7) `Q: {} A: {}`"),
        ("very many",),
    ),
    "keys that change no weight": (
        {
            "train.py": f"{HF}Trainer(m, TrainingArguments('o', logging_steps=1, logging_dir='l', push_to_hub=True, ddp_timeout=1, disable_tqdm=True))\n"
        },
        {},
        (
            "left out: shardwise does it itself: ddp_timeout, disable_tqdm, logging_dir, logging_steps",
            ": `shardwise export --push` sends the model to the hub",
        ),
        (),
    ),
    "a loop in one process": (
        {"train.py": LOOP},
        {"train.global_batch": 4},
        ("assumed, as a loop in one process does: gpus=1",),
        ("x GPUs",),
    ),
    "TRL's own script, which is not there": (
        {
            "run.sh": "accelerate launch --num_processes 1 ../trl/sft.py --model_name a/b --dataset_name c/d --use_peft --lora_r 8 --load_in_4bit\n"
        },
        {
            "data.loss_on": "all",
            "model.lora.rank": 8,
            "model.lora.alpha": 32,
            "model.lora.dropout": 0.05,
            "model.lora.targets": ["q_proj", "v_proj"],
            "optimizer.learning_rate": 2e-5,
        },
        ("no double quantisation by default",),
        (),
    ),
    "Axolotl trains on all turns": (
        {
            "a.yaml": AXOLOTL.replace("completion", "chat_template\n    roles_to_train: [user, assistant]")
            + "use_gradient_checkpointing: true\n"
        },
        {"train.checkpointing": None},
        ("to do: a.yaml: datasets.0.roles_to_train (line 5): write data.loss_on",),
        (),
    ),
    "a list as fire reads it, and the world of one process": (
        {
            "run.sh": "python train.py --modules='[q_proj,v_proj]' --rows=32\n",
            "train.py": f"import fire, os\n{HF}from peft import LoraConfig\ndef main(modules: list = ['k_proj'], rows: int = 16):\n    more = rows // 4\n    if int(os.environ.get('WORLD_SIZE', 1)) != 1:\n        more = more // int(os.environ.get('WORLD_SIZE', 1))\n    LoraConfig(r=8, target_modules=modules)\n    Trainer(m, TrainingArguments('o', per_device_train_batch_size=4, gradient_accumulation_steps=more)).train()\nfire.Fire(main)\n",
        },
        {"model.lora.targets": ["q_proj", "v_proj"], "train.global_batch": 32},
        (),
        ("could not be read",),
    ),
    "GPUs in a list": (
        {
            "train.py": "import lightning as L\nimport torch\nL.Trainer(devices='0,1,2,3')\ntorch.utils.data.DataLoader(rows, batch_size=2)\n"
        },
        {"train.global_batch": 8},
        (),
        ("no number",),
    ),
    "a second command of the same script": (
        {
            "run.sh": "python train.py --learning_rate 1e-4\npython eval.py\n# python train.py\npython train.py --learning_rate 2e-4\n"
        },
        {"optimizer.learning_rate": 1e-4},
        ("to do: run.sh: launcher.more (line 4)",),
        (),
    ),
    "a loss that is the next token's": (
        {"run.sh": "python train.py --loss_type sft --learning_rate 1e-4\n"},
        {"optimizer.learning_rate": 1e-4},
        (),
        ("changes the loss",),
    ),
    "a switch of 4 bits that is off": (
        {
            "run.sh": "python train.py\n",
            "train.py": f"from dataclasses import dataclass\n{HF}@dataclass\nclass Own:\n    use_quant: bool = False\n    bnb_4bit_kind: str = 'nf4'\n{ARGS}Trainer(m, args).train()\n",
        },
        {"model.quantization": None},
        (),
        ("write model.quantization",),
    ),
    "a loop in several processes": (
        {"train.py": LOOP + "torch.nn.parallel.DistributedDataParallel(model)\n"},
        {},
        ("x GPUs",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_job_does_otherwise_is_said(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("place", "rate"), [("in/c.yaml", 3e-4), ("../c.yaml", None), ("in/link.yaml", None)]
)
def test_a_script_reads_no_file_outside_of_its_folder(
    place: str, rate: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work" / "in").mkdir(parents=True)
    for folder in ("", "work/in/"):
        (tmp_path / f"{folder}c.yaml").write_text("lr: 3.0e-4\n")
    (tmp_path / "work" / "in" / "link.yaml").symlink_to(tmp_path / "c.yaml")
    script = f"import yaml\nc = yaml.safe_load(open('{place}'))\n{LOOP.replace('lr=1e-4', 'lr=c[chr(34)]')}"
    script = script.replace("c[chr(34)]", "c['lr']")
    text, said = made_of({"train.py": script}, tmp_path / "work", monkeypatch)
    assert value_of(job_values(text), "optimizer.learning_rate") == rate
    asked = f"to do: train.py: {place} is outside of this folder; add it to --from"
    assert (asked in said) is (rate is None)


def test_many_loops_take_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "for batch in rows:\n    loss = model(**batch).loss\n    loss.backward()\n    optimizer.step()\n"
    begun = time.process_time()
    text, _ = made_of({"train.py": LOOP + loop * 1000 + "trainer.train()\n" * 1000}, tmp_path, monkeypatch)
    assert value_of(job_values(text), "optimizer.learning_rate") == 1e-4
    assert time.process_time() - begun < 20  # 2 s; 30 s where each line looked at all others
