"""Accumulation by hand, the Trainer's words, LoRA's modules, frameworks' YAML, and what was not read."""

from __future__ import annotations

import json

import pytest

from shardwise.lint.check import check
from shardwise.lint.document import UnreadableError
from shardwise.lint.model import facts_of
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

HEAD = "import deepspeed, torch\nimport torch.distributed as dist\nfrom setting import *\n"
ENGINE = HEAD + "engine, *_ = deepspeed.initialize(model=m, optimizer=o, config='0.json')\n"
TRAINER = HEAD + "from transformers import Trainer, TrainingArguments\nt = Trainer(m, a)\n"


BY_HAND = """import torch
from accelerate import Accelerator
from setting import *
accelerator = Accelerator({given})
model, optimizer = accelerator.prepare(model, optimizer)
for step, batch in enumerate(data):
    {body}
"""
COUNT = "gradient_accumulation_steps=4"
BACKWARD = "accelerator.backward(model(batch).loss)"


def by_hand(given: str, *body: str, also: str = "") -> list[tuple[str, int, str]]:
    texts = [BY_HAND.format(given=given, body="\n    ".join(body)), *([also] if also else [])]
    documents = tuple(read(text, f"{at}.py" if at == 0 else "0.json") for at, text in enumerate(texts))
    rules = ("backward-outside-accelerator", "loss-divided-twice", "accumulate-is-missing")
    found = check(Setup(documents=documents)).findings
    return [(one.rule, one.line, one.severity) for one in found if one.rule in rules]


@pytest.mark.parametrize(
    ("given", "body", "found"),
    [
        (COUNT, (BACKWARD, "optimizer.step()"), [("accumulate-is-missing", 8)]),
        (
            COUNT,
            ("loss = model(batch).loss / 4", "accelerator.backward(loss)", "optimizer.step()"),
            [("loss-divided-twice", 7), ("accumulate-is-missing", 9)],
        ),
        (
            COUNT,
            ("with accelerator.accumulate(model):", "    loss = model(batch).loss", "    loss /= 4",
             "    accelerator.backward(loss)", "    optimizer.step()"),
            [("loss-divided-twice", 9)],
        ),
        (
            COUNT,
            ("with accelerator.accumulate(model):", "    loss = model(batch).loss",
             "    accelerator.backward(loss / accelerator.gradient_accumulation_steps)"),
            [("loss-divided-twice", 9)],
        ),
        (
            "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=4)",
            ("with accelerator.accumulate(model):", "    accelerator.backward(model(batch).loss / 4)"),
            [("loss-divided-twice", 8)],
        ),
        (
            COUNT,
            ("with accelerator.accumulate(model):", "    loss = model(batch).loss",
             "    accelerator.backward(loss)", "    optimizer.step()", "total = total + loss.item() / 4"),
            [],
        ),
        (
            COUNT,
            ("accelerator.backward(model(batch).loss)", "if (step + 1) % 4 == 0:", "    optimizer.step()"),
            [],
        ),
        (
            COUNT,
            (BACKWARD, "if (step + 1) % 4:", "    continue", "optimizer.step()"),
            [],
        ),
        (COUNT, ("for micro in batch:", "    accelerator.backward(model(micro))", "optimizer.step()"), []),
        ("", ("loss = model(batch).loss / 4", "accelerator.backward(loss)", "optimizer.step()"), []),
        ("gradient_accumulation_steps=2", ("with accelerator.accumulate(model):",
         "    accelerator.backward((fake + real) / 2)"), []),
        (COUNT, ("with accelerator.accumulate(model):", "    accelerator.backward(f(x / 4))"), []),
        (COUNT, ("with accelerator.accumulate(m):", "    accelerator.backward((x / 4).mean())"),
         [("loss-divided-twice", 8)]),
        (COUNT, ("with accelerator.accumulate(model):", "    accelerator.backward((a + b) / 2)"), []),
        ("gradient_accumulation_steps=1", ("accelerator.backward(loss)", "optimizer.step()"), []),
    ],
)  # fmt: skip
def test_accumulation_with_an_accelerator(
    given: str, body: tuple[str, ...], found: list[tuple[str, int]]
) -> None:
    assert [(rule, line) for rule, line, _ in by_hand(given, *body)] == found


def test_a_number_by_a_name_is_followed() -> None:
    text = BY_HAND.format(given="gradient_accumulation_steps=STEPS", body=f"{BACKWARD}; optimizer.step()")
    documents = (read(text.replace("accelerator =", "STEPS = 8; accelerator ="), "a.py"),)
    one = next(one for one in check(Setup(documents=documents)).findings if "missing" in one.rule)
    assert one.severity == "error"
    assert "8 times" in one.what


def test_a_number_that_only_a_run_knows_may_be_1() -> None:
    given = "gradient_accumulation_steps=args.steps"
    found = by_hand(given, "accelerator.backward(model(batch).loss)", "optimizer.step()")
    assert found == [("accumulate-is-missing", 8, "warning")]


def test_what_is_divided_already_is_not_called_undivided() -> None:
    divided = ("loss = model(batch).loss / 4", "loss.backward()", "optimizer.step()")
    documents = (read(BY_HAND.format(given=COUNT, body="\n    ".join(divided)), "a.py"),)
    one = next(one for one in check(Setup(documents=documents)).findings if "outside" in one.rule)
    assert "not divided" not in one.what
    assert one.fix.startswith("accelerator.backward(loss), which divides by 4 itself: also remove")
    assert one.fix.endswith("line 7")
    bare = read(BY_HAND.format(given=COUNT, body="loss.backward()"), "a.py")
    one = next(one for one in check(Setup(documents=(bare,))).findings if "outside" in one.rule)
    assert one.what.endswith("not divided by the 4 accumulated micro-batches")


@pytest.mark.parametrize(
    ("call", "count", "found"),
    [
        ("engine.backward(engine(batch) / 4)", 4, [5]),
        ("engine.backward(engine(batch) / args.gradient_accumulation_steps)", 4, [5]),
        ("engine.backward(engine(batch) / 4)", 1, []),
        ("engine.backward(engine(batch) / 3)", 4, []),
        ("engine.backward(engine(batch) / 4, scale_wrt_gas=False)", 4, []),
        ("other.backward(engine(batch) / 4)", 4, []),
    ],
)
def test_the_engine_divides_the_loss_too(call: str, count: int, found: list[int]) -> None:
    config = json.dumps({"gradient_accumulation_steps": count, "zero_optimization": {"stage": 2}})
    documents = (read(f"{ENGINE}{call}\n", "train.py"), read(config, "0.json"))
    lines = [o.line for o in check(Setup(documents=documents)).findings if o.rule == "loss-divided-twice"]
    assert lines == found


@pytest.mark.parametrize("scaled", [0.25, 0.0625])
def test_accelerates_backward_divides_without_accumulate(scaled: float) -> None:
    """What the rules above say is what the installed Accelerate does."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
    weight = torch.ones(1, requires_grad=True)
    accelerator.backward(weight.sum() / (4 if scaled < 0.1 else 1))
    assert weight.grad is not None
    assert weight.grad.item() == scaled
    assert accelerator.sync_gradients, "each step is taken"
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def findings(*texts: tuple[str, str], **setup: object) -> list[tuple[str, str, int]]:
    documents = tuple(read(text, name) for name, text in texts)
    found = check(Setup(documents=documents, **setup)).findings  # type: ignore[arg-type]
    return [(one.rule, one.severity, one.line) for one in found]


AXOLOTL = """base_model: meta-llama/Llama-3.1-8B
datasets: [{path: x, type: alpaca}]
micro_batch_size: 2
gradient_accumulation_steps: 4
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
bf16: auto
output_dir: out
"""
FACTORY = "stage: sft\nfinetuning_type: lora\nlora_target: all\nmodel_name_or_path: x\nbf16: true\n"
FACTORY += "per_device_train_batch_size: 2\nlr_scheduler_type: cosine\noutput_dir: out\n"


SHARDED = "fsdp_version: 2\nfsdp_config:\n  auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"


@pytest.mark.parametrize(
    "text",
    [AXOLOTL, FACTORY, AXOLOTL.replace("output_dir: out\n", ""), AXOLOTL + SHARDED, FACTORY + SHARDED],
)
def test_a_yaml_of_a_framework_is_no_broken_file(text: str) -> None:
    assert findings(("a.yml", text)) == [("not-read", "note", 1)]


def test_a_deepspeed_file_in_yaml_still_is_one() -> None:
    with pytest.raises(UnreadableError, match="DeepSpeed keys in YAML"):
        read("zero_optimization: {stage: 2}\noptimizer: {type: AdamW}\n", "ds.yml")


def ds(**keys: object) -> tuple[str, str]:
    base = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "gradient_clipping": 1.0}
    values = base | {"timers": {"throughput": {"enabled": False}}, "bf16": {"enabled": "auto"}} | keys
    return "ds.json", json.dumps({"train_micro_batch_size_per_gpu": "auto"} | values)


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


def test_axolotls_batch_and_deepspeed_file_are_compared() -> None:
    named = ("a.yml", AXOLOTL + "deepspeed: ds.json\n")
    assert findings(named, ds()) == [("not-read", "note", 1)]
    differs = [("trainer-and-file-differ", "error", 3), ("not-read", "note", 1)]
    assert findings(named, ds(train_micro_batch_size_per_gpu=1)) == differs
    replaced = [("file-replaces-argument", "warning", 6), ("not-read", "note", 1)]
    assert findings(named, ds(scheduler=WARMUP)) == replaced


@pytest.mark.parametrize(
    ("argument", "section", "replaced"),
    [
        ("lr_scheduler_type='cosine'", {"scheduler": WARMUP}, True),
        ("lr_scheduler_type=SchedulerType.COSINE", {"scheduler": WARMUP}, True),
        ("lr_scheduler_type='constant_with_warmup'", {"scheduler": WARMUP}, False),
        ("bf16=True", {"scheduler": WARMUP}, False),  # the Trainer's default was not asked for
        ("lr_scheduler_type='linear'", {"scheduler": {"type": "WarmupDecayLR"}}, False),
        ("lr_scheduler_type='cosine'", {"scheduler": {"type": "WarmupDecayLR"}}, True),
        ("lr_scheduler_type='cosine'", {"scheduler": {"type": "WarmupCosineLR"}}, False),
        ("lr_scheduler_type='cosine'", {}, False),
        ("optim='adamw_torch_fused'", {"optimizer": {"type": "AdamW"}}, False),
        ("optim='adamw_torch'", {"optimizer": {"type": "Adam"}}, False),
        ("optim='adafactor'", {"optimizer": {"type": "AdamW"}}, True),
        ("optim='paged_adamw_8bit'", {"optimizer": {"type": "AdamW"}}, True),
        ("optim='adamw_bnb_8bit'", {"optimizer": {"type": "AdamW"}}, True),
        ("optim='lion_32bit'", {"optimizer": {"type": "Lion"}}, False),
        ("optim='adafactor'", {}, False),
    ],
)
def test_the_files_optimizer_and_schedule_replace_the_arguments(
    argument: str, section: dict[str, object], replaced: bool
) -> None:
    script = f"{TRAINER}TrainingArguments('out', {argument}, deepspeed='ds.json')\n"
    found = findings(("a.py", script), ds(**section))
    assert ("file-replaces-argument" in [rule for rule, *_ in found]) is replaced


@pytest.mark.parametrize(
    ("given", "severity", "near"),
    [
        ("lr_scheduler_type='cosin'", "error", "'cosine'"),
        ("optim='adamw_8bits'", "error", "'adamw_8bit'"),
        ("save_strategy='stepz'", "error", "'steps'"),
        ("eval_strategy='epochs'", "error", "'epoch'"),
        ("optim='adamw_hf'", "warning", ""),  # transformers 4 had it
        ("optim='muonlike'", "warning", ""),
        ("optim='adamw_torch', save_strategy='best', eval_strategy='no'", None, ""),
        ("optim=OptimizerNames.ADAMW_TORCH", None, ""),
        ("optim=args.optim", None, ""),
    ],
)
def test_words_that_the_trainer_does_not_know(given: str, severity: str | None, near: str) -> None:
    script = read(f"{TRAINER}TrainingArguments('out', {given})\n", "a.py")
    found = [one for one in check(Setup(documents=(script,))).findings if one.rule == "unknown-word"]
    assert [(one.severity, near in one.fix, one.line) for one in found] == (
        [(severity, True, 6)] if severity else []
    )


@pytest.mark.parametrize(
    ("given", "model", "severity"),
    [
        ("['query_key_value']", "meta-llama/Llama-3.1-8B", "error"),
        ("['c_attn']", "meta-llama/Llama-3.1-8B", "error"),
        ("'all_linear'", "Qwen/Qwen3-8B", "error"),
        ("['all_linear']", "Qwen/Qwen3-8B", "error"),
        ("['all-linear']", "Qwen/Qwen3-8B", "error"),
        ("['all-linear']", None, "error"),
        ("'q_proj'", None, "error"),  # a pattern for a whole name
        ("['q_proj', 'c_attn']", "meta-llama/Llama-3.1-8B", "warning"),
        ("['q_proj', 'v_proj', 'lm_head', 'embed_tokens']", "meta-llama/Llama-3.1-8B", None),
        ("['self_attn.q_proj', 'model.layers.0.mlp.up_proj']", "Qwen/Qwen3-8B", None),
        ("'all-linear'", "Qwen/Qwen3-8B", None),
        ("r'.*\\.(q|v)_proj'", "Qwen/Qwen3-8B", None),
        ("['c_attn']", "openai-community/gpt2", None),
        ("['query_key_value']", "meta-llama/Llama-3.1-8B-custom", "error"),
        ("['q_proj', 'fc1']", "someone/Llama-4-Scout-custom", None),  # and its id misleads
        ("['anything']", None, None),
        ("args.targets", "Qwen/Qwen3-8B", None),
    ],
)
def test_modules_that_lora_is_put_on(given: str, model: str | None, severity: str | None) -> None:
    script = read(f"from peft import LoraConfig\nLoraConfig(r=8, target_modules={given})\n", "a.py")
    setup = Setup(documents=(script,), model=facts_of(model) if model else None)
    found = [one.severity for one in check(setup).findings if one.rule == "lora-targets"]
    expected = (
        "warning" if severity and model and model.endswith("custom") else severity
    )  # known by its id only
    assert found == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("kept", "script", "found"),
    [
        ("false", "LoraConfig(r=8)", True),
        ("true", "LoraConfig(r=8)", False),
        ("false", "LoraConfig(r=8)\nplugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)", False),
        ("false", "Trainer()", False),
    ],
)
def test_fsdp1_flattens_adapters_with_the_original_parameters_only(
    kept: str, script: str, found: bool
) -> None:
    file = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 1\n"
    file += f"  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_use_orig_params: {kept}\n"
    rules = [rule for rule, *_ in findings(("a.py", f"from peft import *\n{script}\n"), ("f.yaml", file))]
    assert ("fsdp1-and-lora" in rules) is found


LIGHTNING = "import lightning as L\nL.Trainer(devices=2, strategy='deepspeed')\n"


def test_lightning_sets_clipping_batch_and_accumulation() -> None:
    bare = {"zero_optimization": {"stage": 2, "overlap_comm": True}, "bf16": {"enabled": True}}
    bare |= {"timers": {"throughput": {"enabled": False}}}
    file = ("ds.json", json.dumps(bare))
    assert findings(("a.py", LIGHTNING), file) == []
    fabric = {rule for rule, *_ in findings(("a.py", LIGHTNING.replace("L.Trainer", "L.Fabric")), file)}
    assert fabric == {"no-batch-size", "clipping-default"}
    file = ("ds.json", json.dumps(bare | {"gradient_accumulation_steps": 4}, indent=1))
    assert [rule for rule, *_ in findings(("a.py", LIGHTNING), file)] == [
        "accumulation-under-lightning",
        "accumulates-in-bf16",
    ]


@pytest.mark.parametrize(
    ("script", "beside", "said"),
    [
        ("TrainingArguments(**yaml.load(f))", "", "`TrainingArguments(**...)`"),
        ("TrainingArguments('o', bf16=args.bf16, optim=args.optim)", "", "`bf16`, `optim`"),
        ("HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()", "", "the command's flags"),
        ("HfArgumentParser(TrainingArguments)", "torchrun a.py --output_dir o --bf16 True", ""),
        ("TrainingArguments('o', bf16=args.bf16)", "torchrun a.py --output_dir o --bf16 True", ""),
        ("TrainingArguments('o', output_dir=args.out)", "", ""),
        ("TrainingArguments(**{'bf16': True})", "", ""),
    ],
)
def test_what_was_not_read_is_said_once(script: str, beside: str, said: str) -> None:
    texts = [read(f"{TRAINER}{script}\n", "a.py"), *([read(beside, "a.sh")] if beside else [])]
    found = [one for one in check(Setup(documents=tuple(texts))).findings if one.rule == "not-read"]
    assert [one.what for one in found] == (
        [f"only a run knows the values of {said}: no rule judged them"] if said else []
    )
