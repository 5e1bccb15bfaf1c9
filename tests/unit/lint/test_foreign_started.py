# ruff: noqa: E501 - the files are text
"""Commands whose words stand in lines for `read` or `cat`, and modules of tools that a command starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

SCRIPT = "import argparse\nfrom transformers import AutoModelForCausalLM, Trainer, TrainingArguments\np = argparse.ArgumentParser()\np.add_argument('--model')\np.add_argument('--lr', type=float, default=1.0)\np.add_argument('--name')\na = p.parse_args()\nTrainer(model=AutoModelForCausalLM.from_pretrained(a.model), args=TrainingArguments('o', learning_rate=a.lr, run_name=a.name)).train()\n"
FLAGS = "openrlhf.cli.train_sft \\\n  --max_len 2048 \\\n  --dataset some/rows \\\n  --input_key question \\\n  --train_batch_size 256 \\\n  --micro_train_batch_size 2 \\\n  --pretrain a/b \\\n  --save_path ./out \\\n  --save_steps -1 \\\n  --eval_steps -1 \\\n  --zero_stage 2 \\\n  --max_epochs 1 \\\n  --bf16 \\\n  --learning_rate 5e-6 \\\n  --gradient_checkpointing\n"
SINCE = "openrlhf.cli.train_sft \\\n  --data.max_len 2048 \\\n  --data.dataset some/rows \\\n  --train.batch_size 128 \\\n  --train.micro_batch_size 4 \\\n  --model.model_name_or_path a/b \\\n  --ds.zero_stage 3 \\\n  --ds.param_dtype bf16 \\\n  --adam.lr 4e-6 \\\n  --ds.lora.rank 64 \\\n  --ds.packing_samples\n"
STARTS = 'if [[ ${1} != "slurm" ]]; then\n    deepspeed --module $commands\nfi\n'


def written(head: str, body: str, word: str = "EOF") -> str:
    return f"{head}\n{body}{word}\n"


CASES: dict[str, Case] = {
    "lines that `read` takes": (
        {"run.sh": "set -x\n\n" + written("read -r -d '' commands <<EOF", FLAGS) + "\n" + STARTS},
        {"model.source": "a/b", "data.sequence_length": 2048, "data.train": "some/rows", "train.global_batch": 256, "train.micro_batch": 2, "train.epochs": 1, "optimizer.learning_rate": 5e-6, "train.checkpointing": "full", "train.precision": "bf16", "strategy": "zero2", "train.save_every": 0},
        ("openrlhf.input_key (line 22) `question`",),
        ("only the shell knows",),
    ),
    "a tool's defaults, and its later names": (
        {"run.sh": written("read -r -d '' commands <<EOF", SINCE) + STARTS},
        {"model.source": "a/b", "train.global_batch": 128, "train.micro_batch": 4, "train.epochs": 2, "model.lora.rank": 64, "model.lora.alpha": 16, "data.packing": False, "strategy": "zero3", "optimizer.learning_rate": 4e-6, "optimizer.beta2": 0.95, "optimizer.warmup_steps": 0.03, "optimizer.final_fraction": 0.1},
        (),
        ("only the shell knows",),
    ),
    "variables in the lines, and a command that does not end where nothing is read": (
        {"run.sh": "LR=3e-4\nread -r -d '' CMD <<-EOF || true\n\ttrain.py --model a/b --lr $LR --name it\n\tEOF\ntorchrun --nproc_per_node 2 $CMD\n", "train.py": SCRIPT},
        {"model.source": "a/b", "optimizer.learning_rate": 3e-4},
        (),
        ("only the shell knows",),
    ),
    "lines that `cat` prints": (
        {"run.sh": "CMD=$(cat <<'END'\ntrain.py --model a/b\n--lr 2e-4\nEND\n)\ntorchrun --nproc_per_node 2 $CMD\n", "train.py": SCRIPT},
        {"model.source": "a/b", "optimizer.learning_rate": 2e-4},
        (),
        ("only the shell knows",),
    ),
    "lines that a branch may set again": (
        {"run.sh": "read -r -d '' CMD <<EOF\ntrain.py --model a/b --lr 2e-4\nEOF\nif [ -n \"$1\" ]; then\nread -r -d '' CMD <<EOF\ntrain.py --model a/b --lr 9e-4\nEOF\nfi\ntorchrun --nproc_per_node 2 $CMD\n", "train.py": SCRIPT},
        {"optimizer.learning_rate": None},
        (),
        (),
    ),
    "flags of a file that is not there: a parser's defaults may not count": (
        {"run.sh": "source train.env\npython train.py --model a/b $EXTRA\n", "train.py": SCRIPT},
        {"model.source": "a/b", "optimizer.learning_rate": None},
        ("learning_rate: its value could not be read; write optimizer.learning_rate",),
        (),
    ),
    "flags of the shell's own arguments": (
        {"run.sh": 'python train.py --model a/b "$@"\n', "train.py": SCRIPT},
        {"optimizer.learning_rate": 1.0},
        (),
        ("could not be read",),
    ),
    "a flag that is there if a variable is": (
        {"run.sh": "source train.env\npython train.py --model a/b ${LR:+--lr $LR}\n", "train.py": SCRIPT},
        {"model.source": "a/b", "optimizer.learning_rate": None},
        ("learning_rate: its value could not be read; write optimizer.learning_rate",),
        ("only the shell knows",),
    ),
    "a launcher's words alone leave the script its defaults": (
        {"run.sh": "source train.env\ntorchrun $SPREAD train.py --model a/b\n", "train.py": SCRIPT},
        {"optimizer.learning_rate": 1.0},
        (),
        (),
    ),
    "a sum that the shell prints": (
        {"run.sh": "source train.env\npython train.py --model a/b --lr `expr $LR / 2`\n", "train.py": SCRIPT},
        {"optimizer.learning_rate": None},
        ("write optimizer.learning_rate",),
        (),
    ),
    "data of several stages": (
        {"c.yaml": "model_name_or_path: a/b\nsft_data_path: rows.jsonl\nlearning_rate: 1e-4\nper_device_train_batch_size: 2\n"},
        {"data.train": "rows.jsonl"},
        (),
        ("not understood",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_a_command_starts(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)


def test_a_module_of_another_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = written("read -r -d '' commands <<EOF", FLAGS.replace("train_sft", "train_dpo")) + STARTS
    with pytest.raises(JobError, match="train_dpo: a job trains on the next token"):
        made_of({"run.sh": command}, tmp_path, monkeypatch)


def test_lines_that_never_end_are_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "read -r -d '' commands <<EOF\npython train.py --model a/b\n"
    with pytest.raises(JobError, match="no command in it starts a training"):
        made_of({"run.sh": command, "train.py": SCRIPT}, tmp_path, monkeypatch)
