# ruff: noqa: E501 - the files are text
"""What names a part of a job and is not understood: a to do, and never a default in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreign_files import made_of, value_of
from shardwise.errors import JobError
from shardwise.job.source import job_values

HEAD = "from transformers import Trainer, TrainingArguments, AutoModelForCausalLM, HfArgumentParser\n"
TRAIN = "Trainer(model=m, args=TrainingArguments('o', num_train_epochs=2, learning_rate=1e-4)).train()\n"
YAML = "model_name_or_path: a/b\nper_device_train_batch_size: 2\n"
PARSER = "import argparse\nfrom helper import adapt\np = argparse.ArgumentParser()\n"
FIELDS = (
    "from dataclasses import dataclass, field\n@dataclass\nclass Mine(TrainingArguments):\n    max_seq_length: int = 512\n"
    "    use_lora: bool = field(default=False)\nargs, = HfArgumentParser(Mine).parse_args_into_dataclasses()\n"
)
RUN = "torchrun --nproc_per_node 2 train.py --model_name_or_path a/b "
UNCLEAR = "not understood; write"

# files, values of the job, what must be said
CASES: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "flags that go to a helper": (
        {"train.py": f"{HEAD}{PARSER}p.add_argument('--lora_r', default=8)\na = p.parse_args()\nm = adapt(m, lora_r=a.lora_r)\n{TRAIN}",
         "run.sh": f"{RUN} --lora_r 4"},
        {"model.lora.rank": 4},
        "",
    ),
    "a switch that goes to a helper": (
        {"train.py": f"{HEAD}{PARSER}p.add_argument('--adapter_size')\na = p.parse_args()\nm = adapt(m, a.adapter_size)\n{TRAIN}",
         "run.sh": f"{RUN} --adapter_size 4"},
        {"train.epochs": 2},
        f"run.sh:1: adapter_size 4: {UNCLEAR} model.lora",
    ),
    "a key of a YAML": ({"a.yaml": f"{YAML}my_lora: {{r: 4}}\n"}, {}, f"a.yaml:3: my_lora.r 4: {UNCLEAR} model.lora"),
    "a name of a run": (
        {"a.yaml": f"{YAML}output_dir: out-qlora\nlora_r: 4\n"},
        {"model.lora.rank": 4},
        f"a.yaml:3: output_dir out-qlora: {UNCLEAR} model.quantization",
    ),
    "constants of a loop": (
        {"train.py": "block_size = 1024\nmax_iters = 100 * 6\nimport torch\ntorch.optim.AdamW(p, lr=1e-3)\n"},
        {"optimizer.learning_rate": 1e-3},
        f"train.py:1: block_size 1024: {UNCLEAR} data.sequence_length",
    ),
    "a number of steps that is computed": (
        {"train.py": "max_iters = 100 * 6\nimport torch\ntorch.optim.AdamW(p, lr=1e-3)\n"},
        {"train.epochs": None},
        f"train.py:1: max_iters: {UNCLEAR} train.steps",
    ),
    "data of another key": ({"a.yaml": f"{YAML}dataset_id_or_path: c/d\n"}, {}, f"dataset_id_or_path c/d: {UNCLEAR}"),
    "an argument that the script reads": (
        {"train.py": f"{HEAD}{FIELDS}total = 5 * args.num_train_epochs\nTrainer(model=m, args=args).train()\n",
         "run.sh": f"{RUN} --num_train_epochs 10"},
        {"train.epochs": 10},
        "",
    ),
    "the beginning of a flag": (
        {"train.py": f"{HEAD}{FIELDS}Trainer(model=m, args=args).train()\n", "run.sh": f"{RUN} --max_seq_len 2048"},
        {"data.sequence_length": 2048},
        "",
    ),
    "rows and answers that are cut apart": (
        {"train.py": f"{HEAD}import argparse\np = argparse.ArgumentParser()\np.add_argument('--source_max_len', default=16)\n"
         f"p.add_argument('--target_max_len', default=512)\na = p.parse_args()\nt(x, max_length=a.source_max_len)\n{TRAIN}"},
        {"data.sequence_length": 528},
        "",
    ),
    "a tokenizer of another model": (
        {"train.py": f"{HEAD}from transformers import AutoTokenizer\nfrom liger_kernel import AutoLigerKernelForCausalLM\n"
         f"t = AutoTokenizer.from_pretrained('a/chat')\nm = AutoLigerKernelForCausalLM.from_pretrained('a/base')\n{TRAIN}"},
        {"model.source": "a/base"},
        "",
    ),
    "trackers in a list": ({"a.yaml": f"{YAML}report_to: [wandb, tensorboard]\n"}, {"tracking": ["wandb", "tensorboard"]}, ""),
    "no warm-up of a constant rate": (
        {"a.yaml": f"{YAML}lr_scheduler_type: constant\nwarmup_ratio: 0.1\n"}, {"optimizer.warmup_steps": 0}, ""
    ),
    "GPUs of Slurm": (
        {"run.sh": "#!/bin/bash\n#SBATCH --gpus-per-node=4\naccelerate launch train.py --per_device_train_batch_size 2\n"},
        {"train.global_batch": 8},
        "",
    ),
    "a name with a number": ({"a.yaml": f"{YAML}output_dir: o/Llama-3.2-11B\n"}, {"name": "Llama-3.2-11B"}, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_understood_is_to_do(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, values, sentence = CASES[name]
    text, said = made_of(files, tmp_path, monkeypatch)
    job = job_values(text)
    assert {key: value_of(job, key) for key in values} == values, said
    todo = [one for one in said if "not understood" in one]
    assert (
        any(sentence in one for one in todo) if sentence else not any("model.lora" in one for one in todo)
    ), said


REFUSED = {
    "torchtune": ("model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\nbatch_size: 2\n", "torchtune"),
    "litgpt": ("checkpoint_dir: checkpoints/a\ntrain:\n  epochs: 3\n  lr_warmup_steps: 2\n", "LitGPT"),
    "preferences, Axolotl": ("base_model: a/b\nrl: dpo\nmicro_batch_size: 1\n", "next token"),
    "rewards": ("model_name_or_path: a/b\nreward_funcs: [accuracy]\nnum_generations: 8\n", "next token"),
    "preferences, LLaMA-Factory": ("model_name_or_path: a/b\nstage: dpo\nfinetuning_type: lora\n", "next token"),
    "another tool's model and data": ("model: {a: 1}\ndata: {path: x}\nlora: {r: 4}\nqa: {b: 1}\ninference: {c: 1}\n", "none of"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_other_tools_and_methods_make_no_job(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, what = REFUSED[name]
    with pytest.raises(JobError, match=what):
        made_of({"a.yaml": text}, tmp_path, monkeypatch)


def test_a_script_whose_arguments_come_from_elsewhere_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"{HEAD}{FIELDS}Trainer(model=m, args=args).train()\n"
    wanted = "to do: train.py: its command, or a file, gives it arguments; add that to --from"
    assert wanted in made_of({"train.py": script}, tmp_path, monkeypatch)[1]
    assert wanted not in made_of({"train.py": script, "run.sh": RUN}, tmp_path, monkeypatch)[1]


def test_a_command_and_two_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first script has taken the flag, and the second has it, too."""
    parser = f"{HEAD}{PARSER}p.add_argument('--learning_rate', default=1e-3)\na = p.parse_args()\n"
    script = f"{parser}Trainer(model=m, args=TrainingArguments('o', learning_rate=a.learning_rate)).train()\n"
    files = {"run.sh": f"{RUN} --learning_rate 2e-4", "train.py": script, "utils.py": parser}
    text, _ = made_of(files, tmp_path, monkeypatch)
    assert job_values(text)["optimizer"]["learning_rate"] == 2e-4


def test_a_flag_may_have_any_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"{HEAD}{PARSER}p.add_argument('--my(lora[')\na = p.parse_args()\n{TRAIN}"
    made_of({"run.sh": f"{RUN} '--my(lora[' 3 --a+lora 4", "train.py": script}, tmp_path, monkeypatch)


def test_a_section_of_many_keys_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = "".join(f"  k{number}: 1\n" for number in range(20))
    _, said = made_of({"a.yaml": f"{YAML}mixture:\n{keys}"}, tmp_path, monkeypatch)
    assert (
        f"left out: a job has no such key: {', '.join(sorted(f'mixture.k{one}' for one in range(20)))}"
        in said
    ), said
