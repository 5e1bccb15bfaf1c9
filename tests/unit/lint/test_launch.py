"""Commands as bash and the launchers read them, and what scripts and files say against each other."""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shardwise.lint.check import Checked, check, fix_files, load
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.schema import accelerate_keys, names
from shardwise.lint.setup import ModelFacts, Setup

JSON = '{"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'


def checked(*texts: str, **setup: Any) -> Checked:
    """The texts as files 0, 1, ... of one training."""
    return check(Setup(documents=tuple(read(text, str(n)) for n, text in enumerate(texts)), **setup))


def rules(*texts: str, severity: str = "error", **setup: Any) -> dict[str, Finding]:
    return {one.rule: one for one in checked(*texts, **setup).findings if one.severity == severity}


class ParserError(Exception):
    pass


def deepspeed_parser() -> argparse.ArgumentParser:
    from deepspeed.launcher import runner

    def taken(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        raise ParserError(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", taken)
        with pytest.raises(ParserError) as caught:
            runner.parse_args([])
    return caught.value.args[0]


def test_the_flags_are_those_of_the_installed_launchers() -> None:
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    parsers = {"torchrun": get_args_parser(), "accelerate": launch_command_parser()}
    for launcher, parser in {"deepspeed": deepspeed_parser(), **parsers}.items():
        actions = [action for action in parser._actions if action.option_strings]
        theirs = {
            (one.lstrip("-").replace("-", "_"), action.nargs != 0)
            for action in actions
            for one in action.option_strings
        }
        ours = {(one, True) for one in names(f"{launcher}_flags")}
        ours |= {(one, False) for one in names(f"{launcher}_switches")}
        if launcher == "accelerate":
            ours |= {(one, True) for part in accelerate_keys()[1:] for one in part}
            theirs = {one for one in theirs if not one[0].startswith(names("accelerate_families"))}
            ours = {one for one in ours if not one[0].startswith(names("accelerate_families"))}
            ours -= {("fsdp_ignored_modules", True)}  # a key of the file only
        assert theirs <= ours, launcher
        assert ours - theirs <= {("use_env", False)}, launcher  # of the older torch.distributed.launch


ENDS = {
    "no backslash": "echo train.py\n  --a 1\n",
    "space after it": "echo train.py \\ \n  --a 1\n",
    "tab after it": "echo train.py \\\t\n  --a 1\n",
    "in a comment": "echo train.py \\\n  # --old \\\n  --a 1\n",
    "joined": "echo train.py \\\n  --a 1\n",
    "comment of a command": "echo train.py \\\n  `# all of it` \\\n  --a 1\n",
    "a sign within a word": "echo train.py --color a#b \\\n  --a 1\n",
    "a sign within quotes": "echo train.py --color '# b' \\\n  --a 1\n",
    "windows": "echo train.py \\\r\n  --a 1\r\n",
}


@pytest.mark.parametrize("name", ENDS)
def test_a_command_ends_where_bash_ends_it(name: str) -> None:
    text = ENDS[name]
    done = subprocess.run(["bash", "-c", text.replace("\r", "")], capture_output=True, text=True, check=False)
    lost = "not found" in done.stderr
    found = rules(text.replace("echo", "deepspeed"))
    assert ("lost-flags" in found) == lost
    if lost:
        assert found["lost-flags"].line == text.count("\n")
        assert f"line {text.count(chr(10)) - 1}, which" in found["lost-flags"].what
    assert (read(text.replace("echo", "torchrun"), "t").get("a") == 1) != lost


@pytest.mark.parametrize(
    ("command", "flag"),
    [
        ("deepspeed --profile train.py", "--profile"),
        ("deepspeed --num-gpus 2 train.py", "--num-gpus"),
        ("deepspeed --deepspeed ds.json train.py", "--deepspeed"),
        ("accelerate launch --main_port 2 train.py", "--main_port"),
        ("torchrun --nproc-per-node 2 train.py --any 1", None),
        ("accelerate launch --num-processes 2 --fp8_format E4M3 -m package.module --any 1", None),
        ("deepspeed $ARGS --any 1 train.py", None),
        ("deepspeed --include localhost:0,1 --autotuning run train.py --any", None),
    ],
)
def test_a_flag_that_the_launcher_does_not_have(command: str, flag: str | None) -> None:
    found = rules(command)
    assert ("unknown-launcher-flag" in found) == (flag is not None)
    if flag is not None:
        assert f"has no flag `{flag}`" in found["unknown-launcher-flag"].what


LOOP = "import deepspeed\nfrom x import *\nengine, *_ = deepspeed.initialize(model=m, optimizer=o)\n"
TRAINER = "from transformers import Trainer, TrainingArguments\nfrom x import *\n"


@pytest.mark.parametrize(
    ("texts", "reader"),
    [
        (["deepspeed train.py --deepspeed ds.json"], "trainer"),
        (["deepspeed train.py --deepspeed ds.json", LOOP], "deepspeed"),
        (["accelerate launch train.py --deepspeed ds.json --learning_rate 1e-5"], "trainer"),
        (["accelerate launch --use_deepspeed --zero_stage 2 train.py"], None),
        (["deepspeed chat.py --deepspeed ds.json", "from setting import model\n"], None),
        (["deepspeed train.py --deepspeed ds.json --output_dir o", "from setting import run\n"], "trainer"),
        (["import lightning as L\nL.Trainer(strategy='deepspeed')\n"], "deepspeed"),
        (["import torch\nclass Trainer:\n    pass\nTrainer()\n"], None),
        (["deepspeed train.py --deepspeed --deepspeed_config ds.json"], "deepspeed"),
    ],
)
def test_what_a_script_calls_counts_more_than_its_flags(texts: list[str], reader: str | None) -> None:
    assert checked(*texts).setup.reader == reader


ACCELERATE = """distributed_type: DEEPSPEED
num_processes: 2
mixed_precision: {precision}
deepspeed_config:
  zero_stage: 2
  gradient_accumulation_steps: 8
"""


def test_accelerates_file_is_compared_with_the_arguments() -> None:
    """As `transformers` 5.23 does: each of these stops Trainer.train with a ValueError."""
    file = ACCELERATE.format(precision="bf16")
    found = rules(TRAINER + "TrainingArguments('o', gradient_accumulation_steps=4, bf16=True)\n", file)
    assert "`gradient_accumulation_steps` is 4" in found["trainer-and-file-differ"].what
    found = rules(TRAINER + "TrainingArguments('o', gradient_accumulation_steps=8)\n", file)
    assert "`bf16` is False by default" in found["trainer-and-file-differ"].what
    assert found["trainer-and-file-differ"].line == 3
    assert rules(TRAINER + "TrainingArguments('o', gradient_accumulation_steps=8, bf16=True)\n", file) == {}
    command = "accelerate launch --config_file a.yaml train.py --gradient_accumulation_steps 4"
    assert "trainer-and-file-differ" in rules(command, file)


def test_all_differences_are_named_and_a_value_that_only_a_run_knows_is_none() -> None:
    file = JSON.replace('"bf16"', '"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "bf16"')
    found = checked(TRAINER + "TrainingArguments('o', bf16=wanted)\n", file).findings
    said = [one.what.split()[0] for one in found if one.rule == "trainer-and-file-differ"]
    assert said == ["`per_device_train_batch_size`", "`learning_rate`"]
    [one] = [
        one
        for one in checked("deepspeed train.py --deepspeed ds.json", file).findings
        if "differ" in one.rule
    ]
    assert one.severity == "warning"
    assert all(f"`--{name}`" in one.what for name in ("bf16", "learning_rate", "per_device_train_batch_size"))


def test_the_other_precision_is_advice_for_a_difference_of_precision_only() -> None:
    file = JSON.replace('"bf16"', '"fp16"')
    found = checked(TRAINER + "TrainingArguments('o', bf16=True)\n", file).findings
    fixes = {one.what.split()[0]: one.fix for one in found if one.rule == "trainer-and-file-differ"}
    assert fixes.keys() == {"`fp16`", "`per_device_train_batch_size`"}
    assert [name for name, fix in fixes.items() if "needs a section `bf16`" in fix] == ["`fp16`"]


def test_an_argument_that_two_sections_have_is_named_once() -> None:
    rates = '"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-4}}, "optimizer": '
    file = JSON.replace('"bf16"', rates + '{"type": "AdamW", "params": {"lr": 1e-4}}, "bf16"')
    found = checked("deepspeed train.py --deepspeed ds.json", file).findings
    [what] = [one.what for one in found if one.rule == "trainer-and-file-differ"]
    assert what.count("`--learning_rate`") == 1


def test_a_device_map_from_a_variable() -> None:
    stage_3 = JSON.replace('"stage": 2', '"stage": 3')
    load = "from transformers import AutoModel\n{}\nAutoModel.from_pretrained(name, device_map=dm)\n"
    for once in ('dm = {"": 0}', 'dm = {"": int(rank)}', 'dm = "auto"'):
        assert "device-map-and-processes" in rules(load.format(once), stage_3, asked_reader="trainer")
    twice = 'dm = None\nif quantised:\n    dm = {"": 0}'
    assert "device-map-and-processes" not in rules(load.format(twice), stage_3, asked_reader="trainer")


FSDP = """distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: {}
"""


@pytest.mark.parametrize(
    ("model", "layer", "wrong"),
    [
        ("google-t5/t5-small", "LlamaDecoderLayer", True),
        ("google-t5/t5-small", "T5Block", False),
        ("bert-base-cased", "GPT2Block", True),
        ("Qwen/Qwen3-30B-A3B", "Qwen3MoeDecoderLayer", False),
        ("llava-hf/llava-1.5-7b", "LlamaDecoderLayer", False),
        ("lmsys/vicuna-7b-v1.5", "LlamaDecoderLayer", False),
    ],
)
def test_a_class_of_another_model_family(model: str, layer: str, wrong: bool) -> None:
    found = rules(FSDP.format(layer), severity="warning", model=ModelFacts(name=model))
    assert ("fsdp-block-class" in found) == wrong


def test_the_autotuners_template_is_no_broken_file() -> None:
    template = '{"autotuning": {"enabled": true}, "fp16": {"enabled": true}}'
    assert rules(template) == {}
    assert rules(template, severity="warning") == {}
    assert {"fp16-needs-zero", "no-batch-size"} <= set(
        rules('{"fp16": {"enabled": true}, "steps_per_print": 1}')
    )


@pytest.mark.parametrize(
    "part", ['"fp16": {"enabled": true}', '"train_micro_batch_size_per_gpu": 2,\n"zero_optimization": {}']
)
def test_a_part_of_a_file_lacks_its_braces_and_nothing_else(part: str) -> None:
    assert set(rules(part)) == {"braces-are-missing"}
    assert rules(part, severity="warning") == {}


def test_a_total_batch_and_the_trainers_rows() -> None:
    file = '{"train_batch_size": 64, "bf16": {"enabled": true}, "zero_optimization": {"stage": 2}}'
    command = "deepspeed train.py --deepspeed d.json --bf16 --per_device_train_batch_size 8"
    [one] = [
        one for one in checked(command, file, asked_world_size=1).findings if one.rule == "batch-arithmetic"
    ]
    assert "64 is not 8 x 1 x 1 process = 8: the Trainer stops" in one.what
    assert "global-batch-alone" not in {one.rule for one in checked(command, file).findings}


def test_a_note_is_said_once_and_counts_its_places() -> None:
    notes = [one for one in checked(JSON, JSON, JSON).findings if one.rule == "throughput-timer"]
    assert [one.what.endswith("; in 3 places") for one in notes] == [True]


def test_a_switched_off_section_is_taken_out_whole(tmp_path: Path) -> None:
    """Without the key alone, what the owner switched off would be on; DeepSpeed refuses the key."""
    from deepspeed.runtime.config import DeepSpeedConfig

    file = tmp_path / "ds.json"
    for section, left in (
        ('"enabled": false, "tp_size": 4, "verbose": false', {}),
        ('"enabled": true, "tp_size": 4, "verbose": false', {"autotp_size": 4}),
    ):
        file.write_text(f'{JSON[:-1]}, "tensor_parallel": {{{section}}}}}')
        fix_files(Setup(documents=load([file])[0]), [file])
        document = load([file])[0][0]
        assert document.section("tensor_parallel") == left
        DeepSpeedConfig(dict(document.values))


PARSER = """import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("-e", "--epochs", type=int)
parser.add_argument("--learning_rate", type=float)
parser.add_argument("--data", required=True)
parser.add_argument("--local_rank", type=int)
parser.add_argument("--bf16", action=argparse.BooleanOptionalAction)
args = parser.parse_args()
"""
DATACLASSES = """from dataclasses import dataclass, field
from transformers import HfArgumentParser, Trainer, TrainingArguments
@dataclass
class ModelArguments:
    model: str
    lora_rank: int = 8
    names: list = field(default_factory=list)
    note: str = field(metadata={"help": "a note"})
parser = HfArgumentParser((ModelArguments, TrainingArguments))
model_args, args = parser.parse_args_into_dataclasses()
Trainer(model=load(model_args.model), args=args)
"""


OWN_CLASS = """import transformers
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str = ""
args, = transformers.HfArgumentParser((TrainingArguments,)).parse_args_into_dataclasses()
"""


@pytest.mark.parametrize(
    ("script", "command", "said"),
    [
        (PARSER, "torchrun train.py --data x --learning_rate 1 --epochs=3 -e 3 --no-bf16", []),
        (PARSER, "torchrun train.py --data x --learning 1", []),  # argparse takes a beginning
        (PARSER, "torchrun train.py --data x --learning-rate 1", ["`--learning-rate`"]),
        (PARSER, "torchrun --nproc_per_node 2 train.py --data x --lerning_rate 1", ["`--lerning_rate`"]),
        (PARSER, "torchrun train.py --data x --warmup 1", ["`--warmup`"]),
        (PARSER, "torchrun train.py", ["requires `--data`"]),
        (PARSER, "torchrun train.py $ARGS", []),
        (PARSER, "deepspeed train.py --data x", []),
        (PARSER.replace("local_rank", "rank"), "deepspeed train.py --data x", ["passes `--local_rank`"]),
        (PARSER.replace("local_rank", "rank"), "deepspeed --no_local_rank train.py --data x", []),
        (
            PARSER,
            "deepspeed train.py --data x --deepspeed --deepspeed_config d.json",
            ["`--deepspeed`", "`--deepspeed_config`"],
        ),
        (PARSER + "deepspeed.add_config_arguments(parser)", "deepspeed train.py --data x --deepspeed", []),
        (PARSER + "add_more(parser)", "torchrun train.py --warmup 1", []),
        (PARSER.replace("parse_args", "parse_known_args"), "torchrun train.py --data x --warmup 1", []),
        (PARSER.replace('"--data"', "NAME"), "torchrun train.py --warmup 1", []),
        (PARSER, "# usage: train.py\ntorchrun --nproc_per_node 2 train.py --data x", []),
        (PARSER.replace("argparse", "jsonargparse"), "torchrun train.py --data x --config c", []),
        (PARSER, "torchrun other.py --warmup 1", []),
        (PARSER, "torchrun train.py --data x -w 1 -lr 2", []),  # short flags are not read
        (PARSER, "torchrun train.py --data x\ntorchrun --nnodes=1 train.py --data y", []),  # another command
        (PARSER, 'MORE="--warm_up 1"\ntorchrun train.py --data x $MORE', ["`--warm_up`"]),
        (PARSER, 'MORE="--learning_rate 1"\ntorchrun train.py --data x $MORE', []),
        (DATACLASSES, "torchrun train.py --model x --note y --lora_rank 4 --output_dir o --bf16", []),
        (DATACLASSES, "torchrun train.py --model x --note y --lora-rank 4 --eval_strategy no", []),
        (DATACLASSES, "torchrun train.py --model x --note y --lora_ranks 4", ["`--lora_ranks`"]),
        (
            DATACLASSES,
            "torchrun train.py --model x --note y --per_device_batch_size 4",
            ["`--per_device_batch"],
        ),
        (DATACLASSES, "torchrun train.py --note y --output_dir o", ["requires `--model`"]),
        (OWN_CLASS, "torchrun train.py --cache_dir x --bf16 --output_dir o", []),
        (OWN_CLASS, "torchrun train.py --cache_dirs x", ["`--cache_dirs`"]),
        (DATACLASSES.replace("(ModelArguments", "(Other, ModelArguments"), "torchrun train.py --x 1", []),
    ],
)
def test_a_command_gives_the_flags_that_its_script_takes(script: str, command: str, said: list[str]) -> None:
    documents = (read(command, "run.sh"), read(script, "train.py"))
    found = [one for one in check(Setup(documents=documents)).findings if one.rule == "flags-of-the-script"]
    assert len(found) == len(said)
    assert all(part in one.what for part, one in zip(said, found, strict=True)), found


def test_a_near_flag_is_named_and_the_line_is_that_of_the_flag() -> None:
    command = "torchrun train.py --data x \\\n  --lerning_rate 1\n"
    documents = (read(command, "run.sh"), read(PARSER, "train.py"))
    [one] = [one for one in check(Setup(documents=documents)).findings if one.severity == "error"]
    assert (one.line, one.fix) == (2, "did you mean `--learning_rate`?")


def test_the_trainers_flags_are_those_of_the_installed_transformers() -> None:
    from dataclasses import fields

    from transformers import Seq2SeqTrainingArguments

    known = {*names("trainer_arguments")}
    theirs = {one.name for one in fields(Seq2SeqTrainingArguments) if one.init}
    removed = {word.partition("=")[0] for word in names("removed_from_TrainingArguments")}
    assert theirs <= known <= theirs | removed


@pytest.mark.parametrize(
    ("head", "command", "said"),
    [
        ("--nodes=2", "srun torchrun --rdzv_backend c10d --nnodes 2 --nproc_per_node 8 t.py", []),
        (
            "--nodes=2",
            "srun torchrun --rdzv_backend c10d --nnodes=4 --nproc_per_node 8 t.py",
            ["has 2 nodes, and torchrun waits for 4"],
        ),
        ("-N 2", "srun torchrun --rdzv_backend c10d --nnodes=4 --nproc_per_node 8 t.py", ["has 2 nodes"]),
        ("--nodes=2", "srun torchrun --rdzv_backend c10d --nnodes=$SLURM_NNODES --nproc_per_node 8 t.py", []),
        ("--nodes=2", "srun torchrun --nproc_per_node 8 t.py", ["trains on its own"]),
        ("--nodes=2", "torchrun --nproc_per_node 8 t.py", []),
        ("--nodes=2-4", "srun torchrun --rdzv_backend c10d --nnodes 3 --nproc_per_node 8 t.py", []),
        ("--gpus-per-node=4", "torchrun --nproc_per_node 8 t.py", ["8 processes on a node with 4 GPUs"]),
        ("--gpus-per-node=h100:8", "torchrun --nproc_per_node 4 t.py", ["stay idle"]),
        ("--gres=gpu:a100:4", "torchrun --nproc_per_node 8 t.py", ["with 4 GPUs"]),
        ("--gres=gpu:4", "torchrun --nproc_per_node 4 t.py", []),
        (
            "--gres=disk:4\n#SBATCH --nodes=2",
            "srun torchrun --rdzv_backend c10d --nnodes 3 --nproc_per_node 8 t.py",
            ["has 2 nodes"],
        ),
        ("--gres=disk:4", "torchrun --nproc_per_node 8 t.py", []),
        ("--gpus-per-node=8", "torchrun --nproc_per_node gpu t.py", []),
        ("--ntasks-per-node=8", "srun torchrun --nproc_per_node 8 t.py", ["srun starts torchrun 8 times"]),
        ("--ntasks-per-node=1", "srun torchrun --nproc_per_node 8 t.py", []),
        ("--ntasks-per-node=8", "srun --ntasks-per-node=1 torchrun --nproc_per_node 8 t.py", []),
        ("--ntasks-per-node=8", "torchrun --nproc_per_node 8 t.py", []),
    ],
)
def test_a_slurm_job_has_what_its_command_starts(head: str, command: str, said: list[str]) -> None:
    text = f"#!/bin/bash\n#SBATCH {head}\n#SBATCH --time=1:00\n{command}\n"
    found = check(Setup(documents=(read(text, "run.sh"),))).findings
    assert [one.rule for one in found] == ["slurm-and-launcher"] * len(said)
    assert all(part in one.what for part, one in zip(said, found, strict=True)), found
