"""What a walk through unseen public files found to be false, and other files of the same shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked
from shardwise.lint.finding import Finding


def found(folder: Path, rule: str, **texts: str) -> list[Finding]:
    """The findings of a rule in files; `train_py` is train.py."""
    return [one for one in checked(folder, **texts) if one.rule == rule]


FSDP = """import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import FullStateDictConfig, StateDictType
from transformers import AutoModelForCausalLM
model = FSDP(AutoModelForCausalLM.from_pretrained("gpt2"))
for batch in loader:
    model(batch).loss.backward()
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
    GATHERS
if dist.get_rank() == 0:
    SAVES
"""


@pytest.mark.parametrize(
    ("gathers", "saves", "hangs"),
    [
        ("state = model.state_dict()", "model.save_pretrained('out', state_dict=state)", False),
        ("state = model.state_dict()", "model.module.save_pretrained('out', state_dict=state)", False),
        ("pass", "model.save_pretrained('out')", True),
        ("pass", "model.save_pretrained('out', state_dict=model.state_dict())", True),
    ],
)
def test_one_process_may_write_what_all_gathered(
    tmp_path: Path, gathers: str, saves: str, hangs: bool
) -> None:
    text = FSDP.replace("GATHERS", gathers).replace("SAVES", saves)
    assert bool(found(tmp_path, "one-process-calls-for-all", train_py=text)) is hangs


PARSES = """import argparse, deepspeed
p = argparse.ArgumentParser()
p.add_argument("--config")
args = p.parse_args()
"""


@pytest.mark.parametrize(
    ("command", "stops"),
    [
        ("deepspeed --hostfile hosts --launcher OpenMPI train.py --config c", False),
        ("deepspeed --hostfile hosts --launcher=slurm train.py --config c", False),
        ("deepspeed --hostfile hosts \\\n  --launcher MPICH \\\n  train.py --config c", False),
        ("deepspeed --hostfile hosts --launcher PDSH train.py --config c", True),
        ("deepspeed --hostfile hosts train.py --config c", True),
    ],
)
def test_only_deepspeeds_own_launcher_passes_the_local_rank(
    tmp_path: Path, command: str, stops: bool
) -> None:
    findings = found(tmp_path, "flags-of-the-script", train_py=PARSES, run_sh=command)
    assert ["--local_rank" in one.what for one in findings] == [True] * stops


LORA = """import argparse
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer
p = argparse.ArgumentParser()
p.add_argument("--lora_target_modules", type=str, default="q_proj")
args = p.parse_args()
model = AutoModelForCausalLM.from_pretrained("meta-llama/Llama-3.1-8B")
model = get_peft_model(model, LoraConfig(target_modules=args.lora_target_modules))
Trainer(model=model).train()
"""
GIVEN = "python train.py --lora_target_modules "


@pytest.mark.parametrize(
    ("old", "new", "words", "says"),
    [
        ("args.lora_target_modules)", 'args.lora_target_modules.split(","))', "q_proj", []),
        (
            "args.lora_target_modules)",
            "[m for m in args.lora_target_modules.split(',')])",
            "q_proj,o_proj",
            [],
        ),
        ("type=str, default", "type=str,\n               nargs='+', default", "q_proj", []),
        ("args.lora_target_modules)", 'args.lora_target_modules.split(",")))'[:-1], "q_prj", ["q_prj"]),
        ("args.lora_target_modules)", 'args.lora_target_modules.split(","))', "all", []),
        ("", "", "q_proj", ["is text"]),
    ],
)
def test_targets_that_the_script_splits_are_a_list(
    tmp_path: Path, old: str, new: str, words: str, says: list[str]
) -> None:
    text = LORA.replace(old, new) if old else LORA
    findings = found(tmp_path, "lora-targets", train_py=text, run_sh=GIVEN + words)
    own = [one for one in findings if one.file.endswith("run.sh")]
    assert len(own) == len(says)
    assert all(word in one.what for one, word in zip(own, says, strict=True))


OPEN = "train_micro_batch_size_per_gpu: auto\noptimizer:\n  type: AdamW\n  params:\n    lr: auto\n"
OPEN += "zero_optimization:\n  stage: 2\n"
HYDRA = """import deepspeed, hydra
from omegaconf import OmegaConf
@hydra.main(config_path="conf", config_name="config")
def main(cfg):
    ds = OmegaConf.to_container(cfg.deepspeed, resolve=True)
    ABOVE
    engine, *_ = deepspeed.initialize(model=net, config=ds)
    BELOW
    engine.backward(engine(x))
    engine.step()
main()
"""
SIZE, RATE = "train_micro_batch_size_per_gpu", "optimizer.params.lr"


@pytest.mark.parametrize(
    ("above", "below", "left"),
    [
        ("pass", "pass", {SIZE, RATE}),
        (f"ds.update({{'{SIZE}': cfg.size}})", "pass", {RATE}),
        ("ds['optimizer']['params']['lr'] = cfg.lr", "pass", {SIZE}),
        (f"ds.update({SIZE}=4)", "pass", {RATE}),
        ("ds.update(cfg.more)", "pass", set()),
        ("pass", f"ds['{SIZE}'] = 4", {SIZE, RATE}),
        (f"other['{SIZE}'] = 4", "pass", {SIZE, RATE}),
    ],
)
def test_a_key_that_a_script_fills_before_deepspeed_reads_it_is_not_open(
    tmp_path: Path, above: str, below: str, left: set[str]
) -> None:
    text = HYDRA.replace("ABOVE", above).replace("BELOW", below)
    findings = found(tmp_path, "auto-without-trainer", train_py=text, ds_yaml=OPEN)
    assert {key for one in findings for key in (one.keys or (one.key,))} == left


ROWS = """def encode(row):
    made = tokenizer(row["text"], truncation=True, padding="max_length", max_length=512)
    made["labels"] = made["input_ids"].copy()
    return made
"""
COLLATES = """from transformers import DataCollatorForLanguageModeling, Trainer
from rows import encode
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
Trainer(model=model, args=args, data_collator=collator, train_dataset=rows.map(encode)).train()
"""


@pytest.mark.parametrize(
    ("text", "warns"),
    [
        (COLLATES, False),
        (COLLATES.replace("tokenizer, mlm=False", "mlm=False, tokenizer=tokenizer"), False),
        (COLLATES.replace("ForLanguageModeling(tokenizer, mlm=False)", "WithPadding(tokenizer)"), True),
    ],
)
def test_a_collator_in_another_file_may_make_the_labels(tmp_path: Path, text: str, warns: bool) -> None:
    assert bool(found(tmp_path, "labels-include-padding", rows_py=ROWS, train_py=text)) is warns


def test_the_names_that_a_function_reads_too_early_are_one_finding(tmp_path: Path) -> None:
    text = "import torch\nRATE, SIZE = 1, 2\ndef main(given):\n    RATE = given.get('rate', RATE)\n"
    text += (
        "    SIZE = given.get('size', SIZE)\ndef other():\n    print(SIZE)\n    print(SIZE)\n    SIZE = 3\n"
    )
    one, two = found(tmp_path, "read-before-assignment", train_py=text)
    assert (one.line, two.line) == (4, 7)
    assert "`main` gives a first value to `RATE` in line 4, `SIZE` in line 5" in one.what
    assert "`other` gives a first value to `SIZE` in line 9" in two.what
