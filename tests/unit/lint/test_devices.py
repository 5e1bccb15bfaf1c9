"""GPUs that a launch shows, those without bf16, and flags that argparse gives as text."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

ACCELERATE = "distributed_type: {}\nmixed_precision: bf16\nnum_machines: {}\nnum_processes: {}\n"
SCRIPT = """import argparse
from torch.utils.data import DataLoader
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", {})
args = parser.parse_args()
{}
"""
LOADER = "DataLoader(rows, batch_size=args.batch_size)"
PASSES = "torchrun --nproc_per_node 2 train.py --batch_size 16\n"


def found(rule: str, files: dict[str, str], **setup: Any) -> list[Finding]:
    made = tuple(read(text, name) for name, text in files.items())
    return [one for one in check(Setup(documents=made, **setup)).findings if one.rule == rule]


@pytest.mark.parametrize(
    ("command", "alarm"),
    [
        ("export CUDA_VISIBLE_DEVICES=4,5,6,7\ndeepspeed --num_gpus 4 t.py", True),
        ("export CUDA_VISIBLE_DEVICES=4,5,6,7\ndeepspeed t.py", False),
        ("export CUDA_VISIBLE_DEVICES=4,5,6,7\ndeepspeed t.py --num_gpus 4", False),  # the script's own
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed --num_gpus 4 t.py", False),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed --num_gpus 2 t.py", False),
        ("CUDA_VISIBLE_DEVICES=0,1,2,3 deepspeed --num_gpus $N t.py", False),
        ("CUDA_VISIBLE_DEVICES=0,1 deepspeed --num_gpus 4 t.py", True),
        ("CUDA_VISIBLE_DEVICES=4,5 deepspeed --include localhost:4,5 t.py", False),
        ("CUDA_VISIBLE_DEVICES=4,5 deepspeed --include localhost:0,1 t.py", True),
        ("CUDA_VISIBLE_DEVICES=4,5 deepspeed --exclude localhost:0 t.py", True),
        ("CUDA_VISIBLE_DEVICES=4,5 deepspeed --hostfile h --num_gpus 2 t.py", False),
        ("CUDA_VISIBLE_DEVICES=$1 deepspeed --num_gpus 2 t.py", True),
    ],
)
def test_the_deepspeed_launcher_ignores_the_variable(command: str, alarm: bool) -> None:
    assert bool(found("visible-devices", {"a.sh": command})) == alarm


def test_what_the_deepspeed_launcher_takes_is_said() -> None:
    (one,) = found("visible-devices", {"a.sh": "CUDA_VISIBLE_DEVICES=6,7 deepspeed --num_gpus 2 t.py"})
    assert "runs on GPUs 0,1" in one.what
    assert one.fix.startswith("--include localhost:6,7")


@pytest.mark.parametrize(
    ("command", "file", "processes"),
    [
        ("#SBATCH --gres=gpu:a100:4\naccelerate launch --config_file a.yaml t.py", ("FSDP", 1, 8), "4"),
        ("#SBATCH --gres=gpu:a100:8\naccelerate launch --config_file a.yaml t.py", ("FSDP", 1, 8), None),
        ("#SBATCH -N 2 --gres gpu:4\naccelerate launch --config_file a.yaml t.py", ("FSDP", 2, 8), None),
        ("#SBATCH -N2 --gres gpu:4\naccelerate launch --config_file a.yaml t.py", ("FSDP", 2, 16), "8"),
        ("#SBATCH --gres=gpu:4\naccelerate launch --config_file a.yaml t.py", ("NO", 1, 8), None),
        ("#SBATCH --gres=gpu:4\naccelerate launch --config_file b.yaml t.py", ("FSDP", 1, 8), None),
        ("#SBATCH --gres=tmp:4\naccelerate launch --config_file a.yaml t.py", ("FSDP", 1, 8), None),
        (
            "#SBATCH --gres=gpu:4\naccelerate launch --config_file a.yaml --num_processes 4 t.py",
            ("FSDP", 1, 8),
            None,
        ),
        (
            "#SBATCH --gpus-per-node=v:4\naccelerate launch --config_file a.yaml --num_processes 8 t.py",
            ("FSDP", 1, 4),
            "4",
        ),
        (
            "#SBATCH --gres=gpu:4\naccelerate launch --config_file a.yaml t.py --num_processes 4",
            ("FSDP", 1, 8),
            "4",
        ),
        (
            "#SBATCH --gres=gpu:4\naccelerate launch --config_file a.yaml --num_machines $N t.py",
            ("FSDP", 1, 8),
            None,
        ),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --config_file a.yaml t.py", ("MULTI_GPU", 1, 4), "2"),
        ("#SBATCH --gpus=2 --nodes=1\naccelerate launch --num_processes 4 t.py", ("FSDP", 1, 4), "2"),
        ("#SBATCH --gpus=2\naccelerate launch --num_processes 4 t.py", ("FSDP", 1, 4), None),
    ],
)
def test_processes_of_accelerate_and_the_gpus_of_a_job(
    command: str, file: tuple[str, int, int], processes: str | None
) -> None:
    one = found("more-processes-than-devices", {"a.sh": command, "a.yaml": ACCELERATE.format(*file)})
    assert [x.fix.split(",")[0] for x in one] == ([f"--num_processes {processes}"] if processes else [])


def test_processes_of_torchrun_and_the_gpus_of_a_job_are_said_once() -> None:
    text = "#SBATCH --gres=gpu:a100-sxm4:4\ntorchrun --nproc_per_node 8 t.py"
    assert [one.severity for one in found("slurm-and-launcher", {"a.sh": text})] == ["error"]
    assert found("more-processes-than-devices", {"a.sh": text}) == []


@pytest.mark.parametrize(
    ("command", "script", "count"),
    [
        ("#SBATCH --gres=gpu:v100:8\ntorchrun --master_port=1 t.py", "", 8),
        ("#SBATCH --gres=gpu:2080ti:2\ntorchrun t.py", "", 2),
        ("#SBATCH --gres=gpu\ntorchrun t.py", "", 0),
        ("#SBATCH --gres=gpu:1\ntorchrun t.py", "", 0),
        ("#SBATCH --gres=gpu:8\ntorchrun --nproc-per-node gpu t.py", "", 0),
        ("#SBATCH --gres=gpu:8\ntorchrun $ARGS t.py", "", 0),
        ("#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node=8\nsrun torchrun t.py", "", 0),
        ("#SBATCH --gres=gpu:8\n#SBATCH -N 2 -n 2\nsrun torchrun --nnodes 2 t.py", "", 8),
        ("#SBATCH --gres=gpu:8\nsrun --ntasks=8 torchrun t.py", "", 0),
        ("#SBATCH --gres=gpu:8\nCUDA_VISIBLE_DEVICES=3 torchrun t.py", "", 0),
        ("#SBATCH --gres=gpu:8\nCUDA_VISIBLE_DEVICES=$I torchrun t.py", "", 0),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun t.py", "", 2),
        ("#SBATCH --gres=gpu:8\necho CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES\ntorchrun t.py", "", 8),
        ("#SBATCH --gres=gpu:8\ntorchrun t.py", "from_pretrained('x', device_map='auto')\n", 0),
        ("torchrun t.py", "", 0),
    ],
)
def test_torchrun_starts_one_process(command: str, script: str, count: int) -> None:
    files = {"a.sh": command + "\n"} | ({"t.py": f"import transformers\n{script}"} if script else {})
    one = found("one-process-for-several-gpus", files)
    assert [x.fix for x in one] == ([f"--nproc_per_node {count}"] if count else [])


def test_the_gpus_that_check_is_given_count() -> None:
    for world, gpus in ((8, 8), (1, 1)):
        one = found(
            "one-process-for-several-gpus",
            {"a.sh": "torchrun t.py"},
            asked_world_size=world,
            gpus_per_node=gpus,
        )
        assert len(one) == (gpus > 1)


@pytest.mark.parametrize(
    ("asked", "old"),
    [
        ("--gres=gpu:v100:8", True),
        ("--gres=gpu:tesla_v100-sxm2-32gb:8", True),
        ("--gres=gpu:v100l:4", True),
        ("--gres=gpu:t4", True),
        ("--gres=gpu:rtx2080:2", True),
        ("--gres=gpu:gtx1080ti:2", True),
        ("--gres=gpu:titan:2", True),
        ("--gpus-per-node=p100:2", True),
        ("--gpus=v100:4", True),
        ("-C v100", True),
        ('--constraint="v100|a100"', False),
        ("-p gpu_v100", True),
        ("--partition=v100,a100", False),
        ("--partition=titan", False),
        ("-p gpu4 --gres=gpu:4", False),
        ("-p v100 --gres=gpu:a100:4", False),
        ("-p v100-a40", False),
        ("--gres=gpu:rtx3090:2", False),
        ("--gres=gpu:l4:2", False),
        ("--gres=gpu:8", False),
    ],
)
def test_gpus_without_bf16(asked: str, old: bool) -> None:
    text = f"#!/bin/bash\n#SBATCH {asked}\ntorchrun --nproc_per_node 8 t.py --bf16 True\n"
    assert bool(found("bf16-without-hardware", {"a.sh": text})) == old


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"t.py": "from transformers import TrainingArguments\nTrainingArguments('o', bf16=True)\n"},
            "t.py:2",
        ),
        (
            {
                "t.py": "import torch\nfrom transformers import TrainingArguments\n"
                "TrainingArguments('o', bf16=torch.cuda.is_bf16_supported())\n"
            },
            "",
        ),
        ({"a.yaml": ACCELERATE.format("FSDP", 1, 8)}, "a.sh:2"),
        ({"b.json": '{"bf16": {"enabled": true}}'}, "a.sh:2"),
        ({"c.yaml": "model_name_or_path: a/b\noutput_dir: o\nbf16: true\n"}, "c.yaml:3"),
        ({"c.yaml": "model_name_or_path: a/b\noutput_dir: o\nfp16: true\n"}, ""),
    ],
)
def test_where_bf16_is_asked_for(files: dict[str, str], said: str) -> None:
    text = "#!/bin/bash\n#SBATCH --gres=gpu:v100:8\naccelerate launch --num_processes 8 t.py\n"
    found_ = found("bf16-without-hardware", {"a.sh": text} | files)
    assert [one.where for one in found_] == ([said] if said else [])
    a100 = text.replace("v100", "a100")
    assert found("bf16-without-hardware", {"a.sh": a100} | files) == []


@pytest.mark.parametrize(
    ("option", "rest", "command", "alarm"),
    [
        ("default=32", LOADER, PASSES, True),
        ("default=32", LOADER, "torchrun --nproc_per_node 2 train.py\n", False),
        ("default=32", LOADER, PASSES.replace("train.py", "other.py"), False),
        ("default=32, type=int", LOADER, PASSES, False),
        ("default='32'", LOADER, "", True),
        ("required=True", LOADER, "", True),
        ("required=True", "for _ in range(args.batch_size):\n    pass", "", True),
        ("nargs='+'", LOADER, "", False),
        ("required=True", "DataLoader(rows, batch_size=int(args.batch_size))", "", False),
        ("required=True", f"args.batch_size = int(args.batch_size)\n{LOADER}", "", False),
        ("required=True", "print(args.batch_size)", PASSES, False),
        (
            "default=32",
            "def load(batch_size):\n    DataLoader(rows, batch_size=batch_size)\nload(4)",
            PASSES,
            False,
        ),
        (
            "default=32",
            "def load(x, batch_size):\n    DataLoader(x, batch_size=batch_size)\nload(1, args.batch_size)",
            PASSES,
            True,
        ),
        ("default=1e-3", "optimizer = AdamW(parameters, lr=args.batch_size)", PASSES, True),
    ],
)
def test_a_flag_without_a_type_is_text(option: str, rest: str, command: str, alarm: bool) -> None:
    files = {"train.py": SCRIPT.format(option, rest)} | ({"a.sh": command} if command else {})
    one = found("argument-is-text", files)
    assert [x.line for x in one] == ([4] if alarm else [])
    if one:
        assert one[0].fix.startswith("type=float" if "1e-3" in option else "type=int")


@pytest.mark.parametrize(("gpu", "found"), [("V100 SXM2 32GB", 1), ("A100 SXM4 80GB", 0)])
def test_bf16_on_the_gpus_that_the_user_names(gpu: str, found: int) -> None:
    made = read("model_name_or_path: a/b\nbf16: true\n", "a.yaml", other="training")
    findings = check(Setup(documents=(made,), gpu=gpu)).findings
    assert [one.rule for one in findings].count("bf16-without-hardware") == found
