# ruff: noqa: E501 - the files are text
"""`trl sft ...`: TRL's own command, which is `accelerate launch` of its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked
from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

GIVEN = "--model_name_or_path a/b --dataset_name c/d --output_dir out"
YAML = "model_name_or_path: a/b\ndataset_name: c/d\noutput_dir: out\nmax_length: 2048\npacking: true\nuse_peft: true\nlora_r: 8\n"
DEFAULTS = {
    "optimizer.learning_rate": 2e-5,
    "optimizer.schedule": "linear",
    "train.checkpointing": "full",
    "train.precision": "bf16",
    "data.loss_on": "all",
    "train.epochs": 3,
}
SETS = "model_name_or_path: a/b\nlearning_rate: 1e-4\nuse_peft: true\n"
ZERO_3 = "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config:\n  zero_stage: 3\n"

CASES: dict[str, Case] = {
    "flags, and TRL's defaults": (
        {"run.sh": f"#!/bin/bash\ntrl sft {GIVEN} --use_peft\n"},
        DEFAULTS
        | {
            "model.source": "a/b",
            "data.train": "c/d",
            "model.lora.rank": 16,
            "model.lora.alpha": 32,
            "data.sequence_length": 1024,
            "train.micro_batch": 8,
            "data.packing": False,
        },
        ("assumed, as TRL's SFTConfig does", "assumed, as TRL's ModelConfig does"),
        ("not understood", "is not there", "sft.py"),
    ),
    "rows that are joined, and a word before it with the same letters": (
        {
            "run.sh": f"TRL_LOG=trl CUDA_VISIBLE_DEVICES=0,1 uv run trl sft \\\n  {GIVEN} \\\n  --learning_rate=1e-4 > trl.log\n"
        },
        {"optimizer.learning_rate": 1e-4, "model.source": "a/b", "train.global_batch": 16},
        (),
        (),
    ),
    "a file, as the flags": (
        {"run.sh": "trl sft --config c.yaml --num_processes 2\n", "c.yaml": YAML},
        DEFAULTS
        | {
            "data.sequence_length": 2048,
            "data.packing": True,
            "model.lora.rank": 8,
            "model.lora.alpha": 32,
            "train.global_batch": 16,
            "strategy": "ddp",
        },
        ("assumed, as TRL since 0.22 does",),
        ("as the Trainer does", "is not there"),
    ),
    "flags of the launcher, which follow": (
        {
            "run.sh": f"trl sft --num_processes 4 {GIVEN} --gradient_accumulation_steps 2 --accelerate_config zero3\n"
        },
        {"strategy": "zero3", "train.global_batch": 64, "train.epochs": 3},
        (),
        ("launcher", "accelerate_config"),
    ),
    "a file of the launcher": (
        {"run.sh": f"trl sft {GIVEN} --accelerate_config z3.yaml\n", "data/x": "", "z3.yaml": ZERO_3},
        {"strategy.stage": 3, "train.global_batch": 32},
        (),
        ("is not there",),
    ),
    "an earlier TRL, whose defaults were others": (
        {"run.sh": f"trl sft {GIVEN} --max_seq_length 512\n"},
        {"data.sequence_length": 512, "train.checkpointing": None, "train.precision": None},
        (),
        ("since 0.22",),
    ),
    "a file of TRL's alone": (
        {"c.yaml": YAML},
        DEFAULTS | {"data.sequence_length": 2048},
        (),
        ("as the Trainer does",),
    ),
    "a split without rows to evaluate on": (
        {"c.yaml": f"{SETS}datasets:\n  - path: c/d\n    split: train[:90%]\n"},
        {"data.train": "c/d", "data.split": "train[:90%]"},
        (),
        (),
    ),
    "a split of some data sets alone": (
        {"c.yaml": f"{SETS}datasets:\n  - path: c/d\n    split: train\n  - path: e/f\n"},
        {"data.train": ["c/d", "e/f"], "data.split": "train"},
        (),
        (),
    ),
    "bf16 that a flag switches off": (
        {"run.sh": f"trl sft {GIVEN} --bf16 False\n"},
        {"train.precision": "fp32"},
        (),
        ("train.precision bf16",),
    ),
    "bf16 that a file switches off": (
        {"c.yaml": f"{SETS}dataset_name: c/d\nbf16: false\n"},
        {"train.precision": "fp32"},
        (),
        ("train.precision bf16",),
    ),
    "bf16 that a script switches off": (
        {
            "a.py": "from trl import SFTConfig, SFTTrainer\n"
            "SFTTrainer('a/b', args=SFTConfig('o', bf16=False), train_dataset=load_dataset('c/d')).train()\n"
        },
        {"train.precision": "fp32"},
        (),
        ("train.precision bf16",),
    ),
    "bf16 that a launcher's file of TRL's switches on again": (
        {"run.sh": f"trl sft {GIVEN} --bf16 False --accelerate_config multi_gpu\n"},
        {"train.precision": None},
        (),
        (),
    ),
    "fp16 in its place": (
        {"run.sh": f"trl sft {GIVEN} --bf16 False --fp16\n"},
        {"train.precision": "fp16"},
        (),
        (),
    ),
    "weights in bf16": (
        {"run.sh": f"trl sft {GIVEN} --bf16 False --dtype bfloat16\n"},
        {"train.precision": "bf16"},
        (),
        (),
    ),
    "no length at which rows are cut": (
        {"c.yaml": f"{SETS}dataset_name: c/d\nmax_length: null\n"},
        {"data.sequence_length": None},
        (
            "to do: c.yaml:5: max_length null: then no row is cut, so that the longest one decides; write data.seq",
        ),
        ("sequence_length=1024",),
    ),
    "one GPU by the name of a launcher's file": (
        {"run.sh": f"trl sft {GIVEN} --accelerate_config single_gpu\n"},
        {"strategy": "single", "train.global_batch": 8, "train.micro_batch": 8},
        (),
        ("no file says how many", "to do: batch"),
    ),
    "no length at which a script cuts rows": (
        {
            "a.py": "from trl import SFTConfig, SFTTrainer\n"
            "SFTTrainer('a/b', args=SFTConfig('o', max_length=None), train_dataset=load_dataset('c/d')).train()\n"
        },
        {"data.sequence_length": None},
        ("a.py:2: max_length: its value could not be read; write data.sequence_length",),
        ("sequence_length=1024",),
    ),
    "names of data sets": ({"c.yaml": f"{SETS}datasets: [c/d]\n"}, {"model.source": "a/b"}, (), ()),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_the_command_trains(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)


@pytest.mark.parametrize("command", ["trl dpo", "accelerate launch trl/scripts/dpo.py"])
def test_another_method_is_refused(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="dpo: a job trains on the next token"):
        made_of({"run.sh": f"{command} {GIVEN}\n"}, tmp_path, monkeypatch)


def test_the_commands_that_are_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no command in it starts a training") as refused:
        made_of({"run.sh": "trl env\n"}, tmp_path, monkeypatch)
    assert "accelerate launch, trl, llamafactory-cli, axolotl, swift" in str(refused.value)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_check_reads_it(tmp_path: Path, method: str) -> None:
    assert checked(tmp_path, run_sh=f"trl {method} {GIVEN} --learning_rate 1e-5\n") == []
    command = f"trl {method} {GIVEN} --fp16 --deepspeed ds.json\n"
    text = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    assert "trainer-and-file-differ" in [one.rule for one in checked(tmp_path, run_sh=command, ds_json=text)]


def test_a_flag_that_trl_had(tmp_path: Path) -> None:
    (one,) = checked(tmp_path, run_sh=f"trl sft {GIVEN} --max_seq_length 512\n")
    assert (one.rule, one.severity) == ("flag-was-removed", "warning")
    assert "TRL 1.16 has no argument `--max_seq_length`" in one.what
