"""What scripts do that stops a run, hangs it, or saves nothing; and what only looks like it."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from shardwise.lint.check import check
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

HEAD = "import deepspeed, torch\nimport torch.distributed as dist\nfrom setting import *\n"
ENGINE = HEAD + "engine, *_ = deepspeed.initialize(model=m, optimizer=o, config='0.json')\n"
TRAINER = HEAD + "from transformers import Trainer, TrainingArguments\nt = Trainer(m, a)\n"
SFT = HEAD + "from trl import SFTConfig\n"
BEST = "load_best_model_at_end=True"


def lines_of(rule: str, script: str, stage: int | None = None, name: str = "train.py") -> list[int]:
    configs = () if stage is None else (json.dumps({"zero_optimization": {"stage": stage}}),)
    documents = (read(script, name), *(read(one, "0.json") for one in configs))
    return [one.line for one in check(Setup(documents=documents)).findings if one.rule == rule]


def hangs(condition: str, call: str, stage: int | None = None, head: str = ENGINE) -> bool:
    found = lines_of("one-process-calls-for-all", f"{head}if {condition}:\n    {call}\n", stage)
    assert found in ([], [head.count("\n") + 2])
    return bool(found)


@pytest.mark.parametrize(
    ("condition", "one"),
    [
        ("dist.get_rank() == 0", True),
        ("torch.distributed.get_rank() == 0 and step % 100 == 0", True),
        ("args.local_rank in (-1, 0)", True),
        ("args.local_rank in [-1, 0]", True),
        ("int(os.environ['LOCAL_RANK']) == 0", True),
        ("os.environ.get('RANK', '0') == '0'", True),
        ("accelerator.is_main_process", True),
        ("trainer.is_world_process_zero()", True),
        ("accelerator.process_index == 0", True),
        ("args.local_rank not in (-1, 0)", False),
        ("dist.get_rank() == 0 or sharded", False),
        ("step % 100 == 0", False),
        ("lora_rank == 0", False),
        ("tp_rank == 0", False),
        ("dist.get_rank(group) == 0", False),
    ],
)
def test_a_condition_that_holds_in_one_process(condition: str, one: bool) -> None:
    assert hangs(condition, "dist.barrier()") == one


@pytest.mark.parametrize(
    ("call", "stage", "waits"),
    [
        ("engine.save_checkpoint('out')", 0, True),
        ("self.engine.save_checkpoint('out')", 0, True),
        ("dist.all_reduce(x)", None, True),
        ("dist.all_reduce(x, group=pair)", None, False),
        ("accelerator.wait_for_everyone()", None, True),
        ("accelerator.save_state('out')", None, False),
        ("accelerator.save_state('out')", 2, True),
        ("accelerator.get_state_dict(m)", 2, False),
        ("accelerator.get_state_dict(m)", 3, True),
        ("t.save_model('out')", 2, False),
        ("t.save_model('out')", 3, True),
        ("torch.save(x, 'x.pt')", 3, False),
        ("wandb.log({'loss': loss})", 3, False),
        ("accelerator.unwrap_model(m).save_pretrained('out', state_dict=state)", 3, False),
        ("manager.save_checkpoint(x)", 3, False),
        ("functools.reduce(add, x)", 3, False),
    ],
)
def test_a_call_that_waits_for_all(call: str, stage: int | None, waits: bool) -> None:
    assert hangs("dist.get_rank() == 0", call, stage, TRAINER) == waits


@pytest.mark.parametrize("shards", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_the_trainer_gathers_only_a_full_state_dict_of_fsdp(shards: str) -> None:
    """transformers/trainer.py: save_model does nothing else."""
    made = f"a = TrainingArguments('out', fsdp='full_shard', fsdp_config={{'state_dict_type': '{shards}'}})\n"
    assert hangs("dist.get_rank() == 0", "t.save_model()", head=TRAINER + made) == shards.startswith("FULL")


def test_processes_that_meet_do_not_hang() -> None:
    first = "if args.local_rank not in [-1, 0]:\n    dist.barrier()\nload()\nif args.local_rank == 0:\n"
    both = "if dist.get_rank() == 0:\n    dist.broadcast(x, 0)\nelse:\n    dist.broadcast(y, 0)\n"
    for script in (first + "    torch.distributed.barrier()\n", both):
        assert lines_of("one-process-calls-for-all", HEAD + script) == []


@pytest.mark.parametrize(
    ("call", "stages"),
    [
        ("torch.save(m.state_dict(), 'x.pt')", [3]),
        ("torch.save({'model': engine.module.state_dict()}, 'x.pt')", [3]),
        ("m.save_pretrained('out')", [3]),
        ("m.save_pretrained('out', state_dict=state)", []),
        ("tokenizer.save_pretrained('out')", []),
        ("torch.save(schedule.state_dict(), 'x.pt')", []),
        ("with deepspeed.zero.GatheredParameters(p): torch.save(m.state_dict(), 'x.pt')", []),
        ("torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)", [1, 2, 3]),
        ("torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)", [1, 2, 3]),
        ("torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)", []),
    ],
)
def test_zero_keeps_gradients_and_at_stage_3_weights_elsewhere(call: str, stages: list[int]) -> None:
    """Run with DeepSpeed 0.19.8: the norm is 0 at stages 1 to 3, and 57.75 at stage 0."""
    found = [lines_of("weights-are-elsewhere", f"{ENGINE}{call}\n", stage) for stage in range(4)]
    assert [stage for stage, lines in enumerate(found) if lines == [5]] == stages
    assert sum(map(bool, found)) == len(stages)


@pytest.mark.parametrize(
    ("given", "stops"),
    [
        ("bf16=True, fp16=True", True),
        ("bf16=True, fp16=False", False),
        ("bf16=True, fp16=half", False),
        (f"{BEST}, eval_strategy='no'", True),
        (BEST, True),  # the default is "no"
        (f"{BEST}, eval_strategy='steps'", False),
        (f"{BEST}, eval_strategy='epoch'", True),
        (f"{BEST}, eval_strategy='epoch', save_strategy='epoch'", False),
        (f"{BEST}, evaluation_strategy='steps'", False),
        (f"{BEST}, eval_strategy=cfg.when", False),
        (f"{BEST}, eval_strategy=IntervalStrategy.EPOCH", True),
        (f"{BEST}, save_strategy='best'", False),
        (f"{BEST}, **more", False),
        (f"{BEST}, eval_strategy='steps', save_steps=200, eval_steps=200", False),
        (f"{BEST}, eval_strategy='steps', save_steps=400, eval_steps=200", False),
        (f"{BEST}, eval_strategy='steps', save_steps=300, eval_steps=200", True),
        (f"{BEST}, eval_strategy='steps', save_steps=300", True),  # evaluated every 500, as it logs
        (f"{BEST}, eval_strategy='steps', save_steps=0.2, eval_steps=0.1", False),
    ],
)
def test_arguments_stop_where_those_of_transformers_do(given: str, stops: bool) -> None:
    script = f"{TRAINER}a = TrainingArguments('out', {given})\n"
    assert bool(lines_of("contradicting-arguments", script)) == stops
    if "cfg" not in given and "**" not in given and "half" not in given and "evaluation_" not in given:
        from transformers import TrainingArguments
        from transformers.trainer_utils import IntervalStrategy

        known = {"TrainingArguments": TrainingArguments, "IntervalStrategy": IntervalStrategy}
        with pytest.raises(ValueError, match=r"At most one|requires the sav") if stops else nullcontext():
            eval(f"TrainingArguments('out', use_cpu=True, {given})", known)


def test_a_name_of_ones_own_for_an_import_is_followed() -> None:
    script = "import transformers as T\nfrom deepspeed import comm as far\n"
    script += "a = T.TrainingArguments('o', bf16=True, fp16=True)\n"
    assert lines_of("contradicting-arguments", script) == [3]
    assert lines_of("one-process-calls-for-all", f"{script}if far.get_rank() == 0:\n    far.barrier()\n") == [
        5
    ]


def test_a_class_of_trl_logs_at_steps_of_its_own() -> None:
    given = f"SFTConfig('out', {BEST}, eval_strategy='steps', save_steps=300"
    assert lines_of("contradicting-arguments", f"{SFT}{given})\n") == []
    assert lines_of("contradicting-arguments", f"{SFT}{given}, eval_steps=200)\n") == [5]


@pytest.mark.parametrize(
    ("flags", "stops"),
    [
        ("--bf16 --deepspeed z3.json --fp16", True),
        ("--bf16 --deepspeed z3.json", False),
        ("--bf16 True --fp16 False --per_device_train_batch_size 1", False),
        ("--bf16 --fp16", False),  # who reads them is unknown
        (f"--{BEST.partition('=')[0]} --output_dir out --deepspeed z3.json", False),  # the script's default
        ("--load_best_model_at_end --eval_strategy epoch --save_strategy steps --deepspeed z3.json", True),
    ],
)
def test_flags_that_exclude_each_other(flags: str, stops: bool) -> None:
    found = lines_of(
        "contradicting-arguments", f"torchrun --nproc_per_node 4 train.py {flags}\n", name="run.sh"
    )
    assert bool(found) == stops
