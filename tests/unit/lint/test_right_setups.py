"""What public tools and tutorials do is no error, and no warning."""

from __future__ import annotations

import pytest
import yaml

from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup


def found(**texts: str) -> list[Finding]:
    """Errors and warnings of files of one training; `train_py` is train.py."""
    documents = tuple(read(text, name.replace("_", ".")) for name, text in texts.items())
    return [one for one in check(Setup(documents=documents)).findings if one.severity != "note"]


MACHINES = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "MULTI_GPU",
    "machine_rank": 1,
    "num_machines": 2,
    "num_processes": 16,
    "rdzv_backend": "static",
}
HOSTFILE = {"deepspeed_hostfile": "/job/hostfile", "zero_stage": 2}
PDSH = {"deepspeed_multinode_launcher": "pdsh", "zero_stage": 2}
STANDARD = {"deepspeed_multinode_launcher": "standard", "zero_stage": 2}


@pytest.mark.parametrize(
    ("keys", "command", "severities"),
    [
        ({"main_process_ip": "10.0.0.1", "main_process_port": 29500}, "accelerate launch train.py", []),
        ({}, "accelerate launch --main_process_ip $HEAD --machine_rank 1 train.py", []),
        ({}, "accelerate launch $FLAGS train.py", []),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": HOSTFILE}, "accelerate launch train.py", []),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": PDSH}, "accelerate launch train.py", []),
        ({}, "", ["warning"]),
        ({}, "accelerate launch train.py", ["error"]),
        (
            {"distributed_type": "DEEPSPEED", "deepspeed_config": STANDARD},
            "accelerate launch train.py",
            ["error"],
        ),
    ],
)
def test_machines_find_each_other_by_the_file_or_by_the_command(
    keys: dict[str, object], command: str, severities: list[str]
) -> None:
    texts = {"acc_yaml": yaml.safe_dump(MACHINES | keys)} | ({"run_sh": command} if command else {})
    assert [(one.severity, one.rule) for one in found(**texts)] == [
        (severity, "accelerate-machines") for severity in severities
    ]


UNSLOTH = """from unsloth import FastLanguageModel
model, tokenizer = FastLanguageModel.from_pretrained("unsloth/llama-3-8b-bnb-4bit", load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=16, target_modules=["q_proj"])
from trl import SFTConfig, SFTTrainer
SFTTrainer(model=model, args=SFTConfig(output_dir="out", max_length=9), train_dataset=[]).train()
"""


@pytest.mark.parametrize("kind", ["FastLanguageModel", "FastModel", "FastVisionModel"])
def test_unsloth_takes_what_transformers_does_not(kind: str) -> None:
    text = UNSLOTH.replace("FastLanguageModel", kind)
    assert found(train_py=text, run_sh="torchrun --nproc_per_node 2 train.py") == []
    plain = text.replace(kind, "AutoModelForCausalLM").replace("unsloth import", "transformers import")
    assert "argument-was-removed" in {one.rule for one in found(train_py=plain)}


def test_a_json_that_the_script_reads_by_itself_is_not_accelerates() -> None:
    """`accelerate launch` for several GPUs, and a script that opens the DeepSpeed JSON."""
    texts = {
        "run_sh": "accelerate launch --config_file gpus.yaml chat.py --deepspeed ds.json",
        "gpus_yaml": yaml.safe_dump({**MACHINES, "num_machines": 1, "machine_rank": 0}),
        "chat_py": "import deepspeed\nds = json.load(open(args.deepspeed))\ndeepspeed.init_inference(m)\n",
        "ds_json": '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}}',
    }
    assert "accelerate-needs-zero" not in [one.rule for one in found(**texts)]
