"""Misspelt names of arguments, prefixes of launch commands, and files that nothing was understood of."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from shardwise.folders import packaged
from shardwise.lint.check import check
from shardwise.lint.read import read
from shardwise.lint.schema import names
from shardwise.lint.setup import Setup


def rules(text: str, name: str, *more: str) -> list[str]:
    texts = (read(text, name), *(read(one, f"{n}.py") for n, one in enumerate(more)))
    return [one.rule for one in check(Setup(documents=texts)).findings if one.file == name]


def test_the_names_are_those_of_the_installed_libraries() -> None:
    from peft import LoraConfig
    from transformers import BitsAndBytesConfig

    for made in (LoraConfig, BitsAndBytesConfig):
        known = {*packaged("lint/arguments.toml")[made.__name__].split(), "self", "kwargs"}
        assert {*inspect.signature(made.__init__).parameters} <= known


@pytest.mark.parametrize(
    ("script", "misspelt"),
    [
        ("from peft import LoraConfig\nLoraConfig(lora_alhpa=8)\n", True),
        ("from transformers import BitsAndBytesConfig as B\nB(bnb_4bit_compute_dype='x')\n", True),
        ("from trl import SFTConfig\nSFTConfig('o', max_seq_lenght=8)\n", True),
        ("from trl import SFTConfig\nSFTConfig('o', max_seq_length=8)\n", False),  # of earlier versions
        (
            "from transformers import TrainingArguments\nTrainingArguments('o', evaluation_strategy='no')\n",
            False,
        ),
        ("from transformers import TrainingArguments\nTrainingArguments('o', sharded_ddp='')\n", False),
        ("from transformers import TrainingArguments\nTrainingArguments(**given)\n", False),
        ("from own import TrainingArguments\nTrainingArguments('o', learning_rat=1)\n", False),
    ],
)
def test_a_name_near_a_known_one_is_misspelt(script: str, misspelt: bool) -> None:
    assert ("misspelt-argument" in rules(script, "train.py")) == misspelt


def test_a_key_that_a_script_has_is_not_misspelt() -> None:
    text = "output_dir: o\nlearning_rate: 1\nbf16: true\nmax_steps: 1\nlora_target_module: q\n"
    assert "misspelt-key" in rules(text, "a.yaml")
    assert "misspelt-key" not in rules(text, "a.yaml", "import trl\nclass A:\n    lora_target_module: str\n")
    for name in (*names("trainer_arguments"), *packaged("lint/arguments.toml")["frameworks"].split()):
        assert "misspelt-key" not in rules(f"output_dir: o\n{name}: 1\n", "a.yaml")


@pytest.mark.parametrize(
    "prefix",
    [
        "nohup",
        "time",
        "uv run",
        "uv run --frozen",
        "poetry run",
        "conda run -n x",
        "env A=b",
        "numactl --cpunodebind=0 --membind=0",
        "numactl -C 0-31",
        "stdbuf -oL",
        "A=b nohup",
        "timeout 24h",
        "conda run --no-capture-output -n x",
        "srun",
        "nohup uv run",
    ],
)
def test_the_words_before_a_launcher(prefix: str) -> None:
    for launcher in ("accelerate launch", "torchrun", "deepspeed"):
        document = read(f"{prefix} {launcher} train.py --lr 1\n", "a.sh")
        assert (document.get("launcher"), document.get("script")) == (launcher.split()[0], "train.py")


@pytest.mark.parametrize("name", ["a.job", "launch"])
def test_a_script_of_another_suffix_is_known_by_its_first_line(name: str) -> None:
    assert read("#!/bin/bash\npython train.py --lr 1\n", name).syntax == "shell"


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("", "a.py", "no setting"),
        ("tune run --nproc_per_node 2 full --config a\n", "a.sh", "torchtune"),
        ("import hydra\n@hydra.main()\ndef main(c):\n    pass\n", "a.py", "Hydra"),
    ],
)
def test_what_was_not_understood_is_said(text: str, name: str, said: str) -> None:
    (found,) = check(Setup(documents=(read(text, name),))).findings
    assert said in found.what


def test_processes_of_all_nodes_share_no_devices() -> None:
    text = "CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_machines 2 --num_processes {} t.py"
    assert rules(text.format(4), "a.sh") == []
    assert rules(text.format(8), "a.sh") == ["more-processes-than-devices"]


def test_devices_that_the_script_shows_itself() -> None:
    script = "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n"
    assert rules("torchrun --nproc_per_node 4 t.py", "a.sh", script) == ["more-processes-than-devices"]
    assert rules("torchrun --nproc_per_node 2 t.py", "a.sh", script) == []


@pytest.mark.parametrize("quote", ["'", '"'])
@pytest.mark.parametrize("before", ["srun --ntasks=2 bash -c ", "bash -lc ", "srun sh -c "])
def test_a_command_in_the_quotes_of_another_shell(before: str, quote: str) -> None:
    document = read(f"{before}{quote}torchrun --nproc_per_node=2 t.py --lr 1{quote}\necho 3\n", "a.sh")
    assert {key: document.get(key) for key in ("launcher", "nproc_per_node", "script", "lr")} == {
        "launcher": "torchrun",
        "nproc_per_node": 2,
        "script": "t.py",
        "lr": 1,
    }


def test_a_file_that_comes_with_the_tool_is_not_missing(tmp_path: Path) -> None:
    text = "base_model: a/b\noutput_dir: o\ndeepspeed: {}/zero2.json\n"
    found = {
        folder: rules(text.format(folder), str(tmp_path / "a.yaml")) for folder in ("deepspeed_configs", "ds")
    }
    assert [("named-file-is-missing" in one) for one in found.values()] == [False, True]
