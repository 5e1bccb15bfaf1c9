# ruff: noqa: E501 - the files are text
"""A value is taken where the training has it whatever a run knows; else it is to do. Public recipes showed these."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign_files import made_of, value_of
from shardwise.errors import JobError
from shardwise.job.source import job_values

HEAD = "from transformers import Trainer, TrainingArguments, AutoModelForCausalLM\nimport torch\n"
TRAIN = "Trainer(model=m, args=TrainingArguments('o', learning_rate=1e-4)).train()\n"
MODEL = "m = AutoModelForCausalLM.from_pretrained('a/b')\n"
LOOP = f"{HEAD}{MODEL}import sys\n"
PEFT = "from peft import LoraConfig, get_peft_model\nm = get_peft_model(m, LoraConfig(r=4))\n"
AXOLOTL = "base_model: a/b\nmicro_batch_size: 2\n"
SWIFT = "CUDA_VISIBLE_DEVICES=0,1 swift sft --model a/b --dataset d.jsonl --per_device_train_batch_size 4"
FAST = "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer, SFTConfig\nm, t = FastLanguageModel.from_pretrained('a/b')\n"

SETTINGS = "lr: 3.0e-4\nepochs: 2\ntraining: {batch: 4}\n"
READS = (
    f"{HEAD}{MODEL}import sys, yaml\ncfg = yaml.safe_load(open(sys.argv[1]))\n"
    "Trainer(model=m, args=TrainingArguments('o', learning_rate=cfg['lr'], num_train_epochs=cfg['epochs'],\n"
    "    per_device_train_batch_size=cfg['training']['batch'])).train()\n"
)

# files, values of the job, a sentence
CASES: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "a branch that only a run takes": (
        {"train.py": f"{LOOP}if len(sys.argv) > 1:\n    o = torch.optim.AdamW(m.parameters(), lr=3e-4)\n"},
        {"optimizer.learning_rate": None},
        "to do: train.py:6: AdamW.lr: its value could not be read",
    ),
    "two branches that say the same": (
        {"train.py": f"{LOOP}if len(sys.argv) > 1:\n    o = torch.optim.AdamW(m.parameters(), lr=3e-4)\n"
         "else:\n    o = torch.optim.AdamW(m.parameters(), lr=3e-4, fused=True)\n"},
        {"optimizer.learning_rate": 3e-4},
        "",
    ),
    "two branches that differ": (
        {"train.py": f"{LOOP}if len(sys.argv) > 1:\n    o = torch.optim.AdamW(m.parameters(), lr=3e-4)\n"
         "else:\n    o = torch.optim.AdamW(m.parameters(), lr=1e-4)\n"},
        {"optimizer.learning_rate": None},
        "AdamW.lr: its value could not be read",
    ),
    "a branch of a loop": (
        {"train.py": f"{LOOP}o = torch.optim.AdamW(m.parameters(), lr=3e-4)\nfor i, x in enumerate(sys.argv):\n"
         "    if i % 4 == 3:\n        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)\n        o.step()\n"},
        {"optimizer.clip_norm": 0.5},
        "",
    ),
    "a name that two branches bind": (
        {"train.py": f"{HEAD}{MODEL}quick = False\nif quick:\n    rate = 1e-2\nelse:\n    rate = 2e-5\n"
         "Trainer(model=m, args=TrainingArguments('o', learning_rate=rate)).train()\n"},
        {"optimizer.learning_rate": 2e-5},
        "",
    ),
    "what follows the training": (
        {"train.py": f"{HEAD}{MODEL}{TRAIN}m = AutoModelForCausalLM.from_pretrained('c/d', torch_dtype=torch.float16)\n"},
        {"model.source": "a/b", "train.precision": None},
        "",
    ),
    "the tests of an imported file": (
        {"run.sh": "python train.py\n", "train.py": f"{HEAD}{MODEL}from data import rows\n{TRAIN}",
         "data.py": "from torch.utils.data import DataLoader\nif __name__ == '__main__':\n    DataLoader(rows, batch_size=64)\n"},
        {"train.micro_batch": 8},  # the Trainer's
        "",
    ),
    "a test of a text": (
        {"train.py": f"{HEAD}{MODEL}from datasets import load_dataset\nname = 'rows.JSONL'\nif name.lower().endswith('.jsonl'):\n"
         f"    d = load_dataset('json', data_files=name)\nelse:\n    d = load_dataset(name)\n{TRAIN}"},
        {"data.train": "rows.JSONL"},
        "",
    ),
    "the first rows": (
        {"train.py": f"{HEAD}{MODEL}from datasets import load_dataset\nd = load_dataset('c/d', split='train')\n"
         f"e = d.select(range(9))\nd = d.shuffle().select(range(5000))\n{TRAIN}".replace("e = d", "d_test = d")},
        {"data.max_samples": 5000},
        "",
    ),
    "rows of equal length": (
        {"train.py": f"{HEAD}{MODEL}def group_texts(examples):\n    return examples\nrows = find().map(group_texts)\n{TRAIN}"},
        {"data.packing": True},
        "",
    ),
    "PEFT's own modules": (
        {"train.py": f"{HEAD}{MODEL.replace('a/b', 'openai-community/gpt2')}{PEFT}{TRAIN}"},
        {"model.lora.targets": ["c_attn"]},
        "assumed, as PEFT does: model.lora.alpha=8, model.lora.targets=[c_attn]",
    ),
    "PEFT's modules of most models": (
        {"train.py": f"{HEAD}{MODEL}{PEFT}{TRAIN}"}, {"model.lora.targets": ["q_proj", "v_proj"]}, ""
    ),
    "Unsloth's arguments": (
        {"train.py": f"{FAST}SFTTrainer(model=m, args=SFTConfig(output_dir='o')).train()\n"},
        {"optimizer.learning_rate": 5e-5, "train.seed": 3407, "optimizer.weight_decay": 0.01, "optimizer.name": "adamw8bit"},
        "assumed, as Unsloth's SFTConfig does",
    ),
    "TRL with the Trainer's arguments": (
        {"train.py": f"{HEAD}from trl import SFTTrainer\n{MODEL}SFTTrainer(model=m, args=TrainingArguments('o')).train()\n"},
        {"optimizer.learning_rate": 5e-5, "train.checkpointing": None, "data.sequence_length": 1024},
        "",
    ),
    "TRL's YAML": (
        {"a.yaml": "model_name_or_path: a/b\nmax_seq_length: 512\nper_device_train_batch_size: 2\n"},
        {"optimizer.learning_rate": 2e-5},
        "assumed, as TRL's SFTConfig does: optimizer.learning_rate=2e-5",
    ),
    "ms-swift 4": (
        {"run.sh": f"{SWIFT} --tuner_type lora --deepspeed zero3\n"},
        {"model.source": "a/b", "model.lora.rank": 8, "optimizer.schedule": "cosine", "optimizer.beta2": 0.95,
         "train.global_batch": 16, "strategy": "zero3"},
        "assumed, as ms-swift 4 does",
    ),
    "a file without clipping": (
        {"ds.json": '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2}'},
        {"optimizer.clip_norm": 0},
        "assumed, as DeepSpeed before 0.19.3 without gradient_clipping, which later clips at 1.0, does",
    ),
    "adapters that are off": (
        {"a.yaml": "model_name_or_path: a/b\nfinetuning_type: full\nlora_rank: 8\nper_device_train_batch_size: 2\n"},
        {"model.lora": None},
        'changed: a.yaml:2: finetuning_type "full": a.yaml:3: lora_rank 8 is of no use',
    ),
    "Axolotl without an adapter": (
        {"a.yaml": f"{AXOLOTL}lora_r: 8\n"}, {"model.lora": None}, "no adapter: a.yaml:3: lora_r 8 is of no use"
    ),
    "Axolotl's own template": (
        {"a.yaml": f"{AXOLOTL}datasets:\n- path: c/d\n  type:\n    format: '[INST] {{instruction}} [/INST]'\n"},
        {"data.train": "c/d"},
        "to do: a.yaml: datasets.0.type.format (line 6) `[INST] {instruction} [/INST]`: prepare the rows in a shape of data.format",
    ),
    "a share of the steps": (
        {"a.yaml": f"{AXOLOTL}save_steps: 0.2\n"}, {"train.save_every": None}, "to do: train.save_every: a share of all steps (1 x the data's rows / 2); write train.save_every"
    ),
    "a share of the rows": (
        {"a.yaml": "model_name_or_path: a/b\nper_device_train_batch_size: 2\ntest_size: 0.05\n"},
        {"data.eval_fraction": 0.05},
        "to do: a.yaml:3: test_size 0.05: not understood; write data.eval_fraction",
    ),
    "a notebook's export": (
        {"train.py": f"!pip install -q peft\n{HEAD}{MODEL}%%time\n{TRAIN}"}, {"model.source": "a/b"}, ""
    ),
    "a file in another folder": (
        {"train.sh": "deepspeed --num_gpus 2 train.py --deepspeed /workspace/ds.json --model_name_or_path a/b\n",
         "ds.json": '{"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 2}'},
        {"strategy": {"engine": "deepspeed", "stage": 2, "offload_optimizer": "none", "offload_parameters": "none",
                      "reshard": True}},
        "",
    ),
    "a shell that reads its own settings": (
        {"run.sh": "N=4\nsource ~/.bashrc\ntorchrun --nproc_per_node $N train.py --per_device_train_batch_size 2\n"},
        {"train.global_batch": 8},
        "",
    ),
    "variables on lines of their own": (
        {"run.sh": f"NPROC_PER_NODE=4 \\\n{SWIFT.partition(' ')[2]} \\\n  --lora_rank 16\n"},
        {"train.global_batch": 16, "model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.dropout": 0.05},
        "",
    ),
    "a script on the line below": (
        {"run.sh": "CUDA_VISIBLE_DEVICES=0 python \\\n    src/train.py \\\n  --model_name_or_path a/b --learning_rate 1e-4\n"},
        {"model.source": "a/b", "optimizer.learning_rate": 1e-4},
        "",
    ),
    "ms-swift's default is LoRA": ({"run.sh": f"{SWIFT}\n"}, {"model.lora.rank": 8, "model.lora.targets": "all-linear"}, ""),
    "ms-swift, all weights": ({"run.sh": f"{SWIFT} --train_type full\n"}, {"model.lora": None}, ""),
    "a base of 4 bits by a word": (
        {"run.sh": f"{SWIFT} --train_type qlora\n"},
        {"model.quantization": "nf4", "model.lora.rank": 8},
        "",
    ),
    "a collator of its own": (
        {"train.py": f"{HEAD}from trl import SFTTrainer\n{MODEL}class Mine:\n    pass\n"
         "SFTTrainer(model=m, args=TrainingArguments('o'), data_collator=Mine(t)).train()\n"},
        {"data.loss_on": None},
        "the collator is the script's own, and decides which tokens the loss counts; write data.loss_on",
    ),
    "a trainer of its own": (
        {"train.py": f"{HEAD}from mine import KLTrainer\n{MODEL}KLTrainer(model=m, args=TrainingArguments('o')).train()\n"},
        {},
        "mine.KLTrainer is no library's trainer: see whether its loss is another",
    ),
    "a loss of its own": (
        {"train.py": f"{HEAD}{MODEL}class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        return 0\n"
         "Mine(model=m, args=TrainingArguments('o')).train()\n"},
        {},
        "to do: train.py:5: a loss of the script's own, which a job has not",
    ),
    "epochs that are computed again": (
        {"train.py": f"{LOOP}import argparse, math\np = argparse.ArgumentParser()\np.add_argument('--num_train_epochs', default=3)\n"
         "args = p.parse_args()\nargs.num_train_epochs = math.ceil(args.max_train_steps / steps)\n"
         "o = torch.optim.AdamW(m.parameters(), lr=1e-4)\nfor epoch in range(args.num_train_epochs):\n    o.step()\n",
         "run.sh": "python train.py --num_train_epochs 5\n"},
        {"train.epochs": 5, "train.precision": "fp32"},
        "",
    ),
    "a row's fields": (
        {"train.py": f"{HEAD}{MODEL}def chat(row):\n    return {{'conversations': [row['a'], row['b']]}}\nd = d.map(chat)\n{TRAIN}"},
        {},
        "text by chat (line 4): prepare the rows in a shape of data.format",
    ),
    "defaults of a parser in another file": (
        {"run.sh": "torchrun --nproc_per_node 2 --nnode 2 main.py --model_name_or_path a/b --lora_alpha 32\n",
         "main.py": "import argparse\nfrom mine import train\np = argparse.ArgumentParser()\np.add_argument('--lora_r', default=4)\n"
         "p.add_argument('--lora_alpha', default=8)\np.add_argument('--model_name_or_path')\ntrain(p.parse_args())\n",
         "mine.py": f"{HEAD}{MODEL}from peft import LoraConfig\ndef train(args):\n    LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha)\n    {TRAIN}"},
        {"model.lora.rank": 4, "model.lora.alpha": 32, "train.global_batch": 32},
        "",
    ),
    "a loss that is only shown": (
        {"train.py": f"{HEAD}{MODEL}class Mine(Trainer):\n    def compute_loss(self, model, inputs):\n        print(loss := model(**inputs).loss)\n"
         "        return loss\nMine(model=m, args=TrainingArguments('o')).train()\n"},
        {"optimizer.learning_rate": 5e-5},
        "",
    ),
    "ms-swift's accumulation": ({"run.sh": f"{SWIFT}\n"}, {"train.global_batch": 16}, "assumed, as ms-swift 4 does: train.global_batch=16"),
    "functions of a branch that is not taken": (
        {"train.py": f"{HEAD}{MODEL}from peft import LoraConfig\nimport argparse\np = argparse.ArgumentParser()\np.add_argument('--fast', default=False)\n"
         f"args = p.parse_args()\ndef quick():\n    return LoraConfig(r=4, lora_dropout=0)\ndef slow():\n    return LoraConfig(r=4, lora_dropout=0.1)\n"
         f"if args.fast:\n    quick()\nelse:\n    slow()\n{TRAIN}", "run.sh": "python train.py\n"},
        {"model.lora.dropout": 0.1},
        "",
    ),
    "a file that is elsewhere there": (
        {"train.py": READS.replace("sys.argv[1]", "'/workspace/a.yaml'"), "a.yaml": SETTINGS, "b.yaml": "x: 1\ny: 2\n"},
        {"train.micro_batch": 4},
        "assumed: train.py reads a.yaml",
    ),
    "a mixture of data": (
        {"a.yaml": "model_name_or_path: a/b\nper_device_train_batch_size: 2\ndataset_mixer:\n  c/d: 1.0\n"},
        {},
        "to do: a.yaml:4: dataset_mixer.c/d 1.0: not understood; write data.train",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_a_run_does_is_what_the_job_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, values, sentence = CASES[name]
    text, said = made_of(files, tmp_path, monkeypatch)
    job = job_values(text)
    assert {key: value_of(job, key) for key in values} == values, said
    assert any(sentence in one for one in said), said
    assert not any("ds.json is not there" in one or one.startswith("conflict") for one in said), said


REFUSED = {
    "classes": ("from transformers import AutoModelForSequenceClassification, Trainer\n"
                "m = AutoModelForSequenceClassification.from_pretrained('a/b')\nTrainer(m).train()\n", "ForSequenceClassification"),
    "generation": ("from transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\nm.generate(x)\n",
                   "nothing in it trains"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_trains_no_language_model_makes_no_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, what = REFUSED[name]
    with pytest.raises(JobError, match=what):
        made_of({"train.py": script}, tmp_path, monkeypatch)


def test_the_only_file_of_settings_is_the_one_that_a_script_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, said = made_of({"train.py": READS, "a.yaml": SETTINGS}, tmp_path, monkeypatch)
    job = job_values(text)
    assert (job["optimizer"]["learning_rate"], job["train"]["epochs"], job["train"]["micro_batch"]) == (
        3e-4,
        2,
        4,
    )
    assert "assumed: train.py reads a.yaml" in said


def test_of_two_files_of_settings_nobody_knows_which_a_script_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"train.py": READS, "a.yaml": SETTINGS, "b.yaml": SETTINGS.replace("3.0e-4", "1.0e-4")}
    _, said = made_of(files, tmp_path, monkeypatch)
    assert any("per_device_train_batch_size: its value could not be read" in one for one in said), said


NO_TASK = "from transformers import BertModel, Trainer\nfrom sklearn.metrics import f1_score\nTrainer(m).train()\nf1_score(a, b)\n"


def test_a_classifier_makes_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="f1_score"):
        made_of({"train.py": NO_TASK}, tmp_path, monkeypatch)
