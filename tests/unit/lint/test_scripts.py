"""What scripts do that stops a run, hangs it, or saves nothing; and what only looks like it."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardwise.lint.check import check, load
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
        ("not rank", True),
        ("not dist.get_rank()", True),
        ("not args.local_rank and step % 10 == 0", True),
        ("0 == rank", True),
        ("not dist.is_initialized() or dist.get_rank() == 0", True),
        ("world_size == 1 or rank == 0", True),
        ("not rank or sharded", False),
        ("not lora_rank", False),
        ("not rank == 0", False),
        ("rank", False),
        ("rank > 0", False),
        ("not accelerator.is_main_process", False),
        ("tp_rank == 0", False),
        ("dist.get_rank(group) == 0", False),
    ],
)
def test_a_condition_that_holds_in_one_process(condition: str, one: bool) -> None:
    assert hangs(condition, "dist.barrier()") == one


BARRIER = HEAD + "rank = dist.get_rank()\n"
MAIN = BARRIER + "is_main = rank == 0\n"


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (MAIN + "if is_main:\n    dist.barrier()\n", 7),
        (MAIN + "if is_main and step == 0:\n    dist.barrier()\n", 7),
        (BARRIER + "is_main = not rank\nif is_main:\n    dist.barrier()\n", 7),
        (BARRIER + "is_main: bool = rank == 0\nif is_main:\n    dist.barrier()\n", 7),
        (BARRIER + "self.main = a.is_main_process\nif self.main:\n    dist.barrier()\n", 7),
        (BARRIER + "if rank != 0:\n    pass\nelse:\n    dist.barrier()\n", 8),
        (MAIN + "if not is_main:\n    pass\nelse:\n    dist.barrier()\n", 9),
        (BARRIER + "def save():\n    if rank > 0:\n        return\n    dist.barrier()\n", 8),
        (MAIN + "is_main = True\nif is_main:\n    dist.barrier()\n", None),  # who knows which
        (MAIN + "if not is_main:\n    dist.barrier()\nload()\nif is_main:\n    dist.barrier()\n", None),
        (MAIN + "if not is_main:\n    dist.barrier()\nelse:\n    dist.barrier()\n", None),
        (BARRIER + "if rank > 0:\n    dist.barrier()\nif rank == 0:\n    dist.barrier()\n", None),
        (
            BARRIER
            + "def f():\n    if rank == 0:\n        dist.barrier()\n        return\n    dist.barrier()\n",
            None,
        ),
        (BARRIER + "for x in y:\n    if step % 9 != 0:\n        continue\n    dist.barrier()\n", None),
    ],
)
def test_a_condition_by_a_name_and_its_other_side(script: str, line: int | None) -> None:
    assert lines_of("one-process-calls-for-all", script) == ([] if line is None else [line])


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
    script = f"{TRAINER.replace('m, a', 'm, a, eval_dataset=m')}a = TrainingArguments('out', {given})\n"
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


def test_an_argument_is_shown_at_its_own_line() -> None:
    rows = (
        "SFTConfig(",
        "'out',",
        f"{BEST},",
        "evaluation_strategy='steps',",
        "eval_steps=50, save_steps=70)",
    )
    given = "\n    ".join(rows) + "\n"
    before = SFT.count("\n")
    assert lines_of("contradicting-arguments", SFT + given) == [before + 3]
    alone = given.replace(f"    {BEST},\n", "") + "t = SFTTrainer(m, a)\nt.train()\n"
    text = SFT.replace("SFTConfig", "SFTConfig, SFTTrainer", 1) + alone
    assert lines_of("contradicting-arguments", text)[-1:] == [before + 3]


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


ACCELERATOR = """import torch
from accelerate import Accelerator
from setting import *
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
"""
TRAINED = """import torch
from transformers import Trainer, TrainingArguments
from setting import *
model.save_pretrained('before')
trainer = Trainer(model=model, args=TrainingArguments('out'))
"""


@pytest.mark.parametrize("head", [ACCELERATOR, TRAINED], ids=["accelerator", "trainer"])
@pytest.mark.parametrize(
    ("call", "by", "stages"),
    [
        ("accelerator.unwrap_model(model).save_pretrained('o')", None, [3]),
        (
            "accelerator.unwrap_model(m).save_pretrained('o', state_dict=accelerator.get_state_dict(m))",
            None,
            [],
        ),
        ("torch.save(accelerator.unwrap_model(model).state_dict(), 'o')", None, [3]),
        ("one = accelerator.unwrap_model(model); one.save_pretrained('o')", None, [3]),
        ("trainer.model.save_pretrained('o')", None, [3]),
        ("self.trainer.model.save_pretrained('o')", None, [3]),
        ("trainer.model.config.save_pretrained('o')", None, []),
        ("trainer.save_model('o')", None, []),
        ("model.save_pretrained('o')", None, [3]),
        ("other.save_pretrained('o')", None, []),
        ("tokenizer.save_pretrained('o')", None, []),
        ("model = load('o'); model.save_pretrained('p')", TRAINED, []),
        ("if trainer.is_deepspeed_enabled: pass\nelse: model.save_pretrained('o')", None, []),
        ("if trainer.is_world_process_zero(): trainer.model.save_pretrained('o')", None, [3]),
        ("torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)", ACCELERATOR, [1, 2, 3]),
        ("accelerator.clip_grad_norm_(model.parameters(), 1.0)", None, []),
    ],
)
def test_weights_that_accelerate_or_the_trainer_shards(
    head: str, call: str, by: str | None, stages: list[int]
) -> None:
    if by in (None, head):
        found = [lines_of("weights-are-elsewhere", f"{head}{call}\n", stage) for stage in range(4)]
        assert [stage for stage, lines in enumerate(found) if lines == [6]] == stages
        assert sum(map(bool, found)) == len(stages)


@pytest.mark.parametrize(
    ("call", "lines"),
    [
        ("loss.backward()", [6]),
        ("(loss / 4).backward()", [6]),
        ("scaler.scale(loss).backward()", [6]),
        ("accelerator.backward(loss)", []),
        ("if a: accelerator.backward(loss)\nelse: loss.backward()", []),
    ],
)
def test_the_accelerator_steps_in_its_backward(call: str, lines: list[int]) -> None:
    assert lines_of("backward-outside-accelerator", f"{ACCELERATOR}{call}\n", 2) == lines
    assert lines_of("backward-outside-accelerator", f"{TRAINED}{call}\n", 2) == []


@pytest.mark.parametrize(
    ("script", "file", "severity"),
    [
        ("Accelerator(mixed_precision='bf16')", "mixed_precision: fp16", "error"),
        ("Accelerator(mixed_precision='bf16')", "mixed_precision: 'no'", None),
        ("Accelerator(mixed_precision='bf16')", "mixed_precision: bf16", None),
        ("Accelerator(mixed_precision=a.b)", "mixed_precision: fp16", None),
        ("TrainingArguments('o', fp16=True)", "mixed_precision: bf16", "error"),
        ("AutoModel.from_pretrained('x', dtype=torch.bfloat16)", "mixed_precision: fp16", "warning"),
        ("Accelerator(mixed_precision='fp16')", '{"bf16": {"enabled": true}}', "error"),
        ("Accelerator(mixed_precision='fp16')", '{"bf16": {"enabled": "auto"}}', None),
    ],
)
def test_two_files_with_two_precisions(script: str, file: str, severity: str | None) -> None:
    other = file if file.startswith("{") else f"distributed_type: MULTI_GPU\nnum_processes: 2\n{file}\n"
    documents = (read(f"from accelerate import Accelerator\n{script}\n", "a.py"), read(other, "b"))
    found = [
        one for one in check(Setup(documents=documents)).findings if one.rule == "precision-of-the-script"
    ]
    assert [one.severity for one in found] == ([] if severity is None else [severity])


CALL = "deepspeed.initialize(model=m, optimizer=o, config={})\n"
BOTH = "{'bf16': {'enabled': True},\n 'fp16': {'enabled': True}}"


def of_script(text: str, folder: Path) -> list[tuple[str, int]]:
    file = folder / "train.py"
    file.write_text(text)
    documents, broken = load([file])
    found = check(Setup(documents=documents), broken).findings
    assert {one.file for one in found} <= {str(file)}
    return [(one.rule, one.line) for one in found if one.severity == "error"]


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (CALL.format(BOTH), 5),
        (f"c = {BOTH}\n" + CALL.format("c"), 5),
        (f"c: dict = {BOTH}\n" + CALL.format("c"), 5),
        ("half = {'enabled': True}\nc = {'bf16': half, 'fp16': half}\n" + CALL.format("c"), 4),
        (f"c = {BOTH}\nd = {{**c, 'steps_per_print': 1}}\n" + CALL.format("d"), 5),
        (f"c = {BOTH}\nc['gradient_clipping'] = 1.0\n" + CALL.format("c"), 5),
        (f"def go(c):\n    {CALL.format('c')}c = {BOTH}\ngo(c)\n", 7),
        (f"c = {BOTH}\nprint(c)\n" + CALL.format("c").replace("config=", "config_params="), 5),
        (f"c = {BOTH}\n" + CALL.format("c") * 2, 5),
        (f"def get(a):\n    c = {BOTH}\n    return c\n{CALL.format('get(1)')}", 6),
        ("c = dict(bf16={'enabled': True}, fp16={'enabled': True})\n" + CALL.format("c.copy()"), 4),
        (f"x = Strategy()\nDeepSpeedStrategy(config={BOTH})\n", 6),
        (f"def get(a):\n    if a:\n        return {BOTH}\n{CALL.format('get(1)')}", None),
        (f"c = {BOTH}\ndef fill(d):\n    d['fp16']['enabled'] = 0\nfill(c)\n{CALL.format('c')}", None),
        (f"c = {BOTH}\nd = c['fp16']\nd['enabled'] = half\n{CALL.format('c')}", None),
        (f"x = x['a']\nc = c['b']\n{CALL.format('c')}", None),
        (f"c = {BOTH}\nc['fp16']['enabled'] = half\n" + CALL.format("c"), None),
        (f"c = {BOTH}\nc.update(more)\n" + CALL.format("c"), None),
        (f"c = {BOTH}\nc['fp16'].pop('enabled')\n" + CALL.format("c"), None),
        (f"c = {BOTH}\nc[name] = 1\n" + CALL.format("c"), None),
        (f"c = {BOTH}\nc = 0\n" + CALL.format("c"), None),
        (f"c = {BOTH}\ncomplete(c)\n" + CALL.format("c"), None),
        (
            "c = {**base, 'fp16': {'enabled': True}, 'bf16': {'enabled': True}}\n" + CALL.format("c"),
            None,
        ),
        ("c = {'bf16': make(), 'fp16': {'enabled': True}}\n" + CALL.format("c"), None),
        ("c = {'bf16': {'enabled': a.bf16}, 'fp16': {'enabled': True}}\n" + CALL.format("c"), None),
        (f"c = {BOTH}\n" + CALL.format("other"), None),
        (f"c = {BOTH}\ndraw(config=c)\n", None),
    ],
)
def test_a_configuration_that_the_script_writes_itself(script: str, line: int | None, tmp_path: Path) -> None:
    found = of_script(HEAD + script, tmp_path)
    errors = [one for one in found if one[0] == "bf16-and-fp16"]
    assert errors == ([] if line is None else [("bf16-and-fp16", line)])


@pytest.mark.parametrize(
    "script",
    [
        "c = {**c}\n",
        "b = {**c}\nc = {**b, **b}\n",
        "x = x['a']\nc = x['b']\n",
        "def f(a):\n    a['x'] = 1\n    f(a['b'])\nc = f({})\n",
        "a0 = {'x': 1}\n"
        + "".join(f"a{n + 1} = {{'p': a{n}, 'q': a{n}}}\n" for n in range(30))
        + "c = a30\n",
        "a0 = {'x': 1}\n" + "".join(f"a{n + 1} = {{**a{n}, **a{n}}}\n" for n in range(30)) + "c = a30\n",
    ],
)
def test_no_script_is_too_strange(script: str, tmp_path: Path) -> None:
    begun = time.process_time()
    of_script(HEAD + script + CALL.format("c"), tmp_path)
    assert time.process_time() - begun < 10, "dicts of dicts would take hours"


def test_auto_in_a_dict_is_judged_by_who_is_given_it(tmp_path: Path) -> None:
    auto = "{'train_batch_size': 'auto', 'zero_optimization': {'stage': 2}}"
    found = of_script(HEAD + CALL.format(auto), tmp_path)
    assert found == [("auto-without-trainer", 4)]
    trainer = (
        f"from transformers import Trainer, TrainingArguments\na = TrainingArguments('o', deepspeed={auto})\n"
    )
    assert of_script(trainer + "Trainer(0, a)\n", tmp_path) == []
    own = "{'train_batch_size': a.rows, 'zero_optimization': {'stage': a.stage}}"
    assert of_script(HEAD + CALL.format(own), tmp_path) == []  # a run knows


def _opened(values: dict[str, object]) -> str:
    inner = (f"{k!r}: {_opened(v) if isinstance(v, dict) else 'a.b'}" for k, v in values.items())
    return f"{{{', '.join(inner)}}}"


def test_values_that_only_a_run_knows_are_no_errors(tmp_path: Path) -> None:
    for file in sorted((Path(__file__).parent / "examples").rglob("*.json")):
        values = dict(read(file.read_text(), "ds.json").values)
        plain = of_script(f"{HEAD}c = {values!r}\n{CALL.format('c')}", tmp_path)
        opened = of_script(f"{HEAD}c = {_opened(values)}\n{CALL.format('c')}", tmp_path)
        assert {one for one, _ in opened} <= {one for one, _ in plain}, file


@pytest.mark.parametrize(
    ("storage", "precision", "version", "gpus", "error"),
    [
        ("torch.bfloat16", "bf16", 2, 2, True),
        ("'bfloat16'", "bf16", 2, 2, True),
        ("torch.float16", "bf16", 2, 2, True),  # cast to bf16: no code is left
        ("torch.float32", "bf16", 2, 2, True),
        ("torch.uint8", "bf16", 2, 2, False),  # Accelerate leaves it whole
        ("torch.bfloat16", "bf16", 1, 2, False),
        ("torch.bfloat16", "bf16", 2, 1, False),
        ("torch.bfloat16", "'no'", 2, 2, False),  # beside adapters in fp32 torch gathers bytes
        ("args.storage", "bf16", 2, 2, False),
    ],
)
def test_codes_that_fsdp2_gathers_as_numbers(
    storage: str, precision: str, version: int, gpus: int, error: bool
) -> None:
    script = "import torch\nfrom transformers import BitsAndBytesConfig\nfrom settings import args\n"
    script += f"bits = BitsAndBytesConfig(load_in_4bit=True,\n    bnb_4bit_quant_storage={storage})\n"
    file = f"distributed_type: FSDP\nmixed_precision: {precision}\nnum_processes: {gpus}\n"
    file += f"fsdp_config: {{fsdp_version: {version}}}\n"
    documents = (read(script, "train.py"), read(file, "a.yaml"))
    found = [one for one in check(Setup(documents=documents)).findings if one.rule == "quantised-under-fsdp2"]
    assert [(one.severity, one.line) for one in found] == [("error", 5)] * error


LONG = {
    "branches": "".join(
        f"if args.f{n} and n{n - 1}:\n    n{n} = n{n - 1} if n{n - 1} else f(n{n - 1}, x)\n"
        for n in range(1, 500)
    ),
    "calls": "".join(
        f"def f{n}(a, b=1):\n    c = g(a, f{n - 1}(b, c=a.x))\n    return c\n" for n in range(400)
    ),
    "lines": "if x:\n"
    + "".join(f"    x{n} = make(" + ", ".join(f"part.of{m}" for m in range(300)) + ")\n" for n in range(15)),
    "functions": "o = torch.optim.AdamW(m.parameters())\n" + "def f():\n    return 1\n" * 300,
}


@pytest.mark.parametrize("name", LONG)
def test_no_script_takes_long(name: str) -> None:
    text = ENGINE + LONG[name] + "for batch in loader:\n    engine.backward(m(batch))\n    engine.step()\n"
    began = time.process_time()
    check(Setup(documents=(read(text, "train.py"),)))
    assert time.process_time() - began < 10
