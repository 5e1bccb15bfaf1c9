# ruff: noqa: E501 - the files are text
"""Spellings of real files that rules did not read, or read as something else."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked
from shardwise.lint.check import check, load
from shardwise.lint.setup import Setup

PARSED = "from transformers import HfArgumentParser, TrainingArguments\nparser = HfArgumentParser(TrainingArguments)\n"
YAML = "model_name_or_path: m\noutput_dir: o\nwarmup_ratio: 0.1\nlearning_rate: 1.0e-5\n"


def of(folder: Path, rule: str, **texts: str) -> list[str]:
    """The severities of what a rule finds; `train_py` is train.py."""
    return [one.severity for one in checked(folder, **texts) if one.rule == rule]


@pytest.mark.parametrize(
    ("name", "text", "severity"),
    [
        ("pyproject.toml", '[project]\ndependencies = ["transformers (==4.48.1)"]\n', "warning"),
        ("pyproject.toml", '[project]\ndependencies = ["transformers[torch] (>=4.40,<5.0)"]\n', "warning"),
        ("pyproject.toml", '[project]\ndependencies = ["transformers (>=5.20)"]\n', "error"),
        ("requirement.txt", "torch\ntransformers==4.49.0\n", "warning"),
        (
            "reqirements.txt",
            "# pins\n-f https://x.org\ntransformers[torch]==4.49.0 ; python_version>'3.8'\n",
            "warning",
        ),
        ("story.txt", "transformers are robots\ntransformers==4.49.0\n", "error"),
        ("words.txt", "transformers\ntorch\n", "error"),
    ],
)
def test_pins_with_brackets_and_in_files_of_other_names(
    tmp_path: Path, name: str, text: str, severity: str
) -> None:
    (tmp_path / name).write_text(text)
    assert of(tmp_path, "flag-was-removed", train_py=PARSED, a_yaml=YAML) == [severity]


def test_a_file_of_pins_in_another_folder_is_known_by_its_lines(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "requirement.txt").write_text("transformers==4.49.0\n")
    files = [tmp_path / "a.yaml", tmp_path / "train.py", tmp_path / "other" / "requirement.txt"]
    for path, text in zip(files, (YAML, PARSED), strict=False):
        path.write_text(text)
    documents, broken = load(files)
    found = check(Setup(documents=documents), broken).findings
    assert [one.severity for one in found if one.rule == "flag-was-removed"] == ["warning"]


@pytest.mark.parametrize(("extra", "severity"), [(", allow_extra_keys=True", "warning"), ("", "error")])
def test_a_parser_that_leaves_out_what_it_does_not_know_does_not_stop(
    tmp_path: Path, extra: str, severity: str
) -> None:
    script = f"{PARSED}a = parser.parse_yaml_file('a.yaml'{extra})\n"
    found = [one for one in checked(tmp_path, train_py=script, a_yaml=YAML) if one.rule == "flag-was-removed"]
    assert [one.severity for one in found] == [severity]
    assert ("it stops" in found[0].what) is not bool(extra)


LOOP = """from accelerate import Accelerator, DeepSpeedPlugin
plugin = DeepSpeedPlugin(zero_stage=3)
accelerator = Accelerator({})
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x in loader:
    loss = model(x).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LAUNCH = "accelerate launch --mixed_precision=bf16 {} train.py\n"


@pytest.mark.parametrize(
    ("given", "flag", "severity"),
    [
        ("deepspeed_plugin=plugin", "", ["error"]),
        ("", "--use_deepspeed", ["error"]),
        ("", "--multi_gpu", []),  # bf16 scales no loss
    ],
)
def test_deepspeed_of_a_plugin_or_a_flag_takes_the_step(
    tmp_path: Path, given: str, flag: str, severity: list[str]
) -> None:
    files = {"train_py": LOOP.format(given), "run_sh": LAUNCH.format(flag)}
    assert of(tmp_path, "backward-outside-accelerator", **files) == severity


STEPS = """import torch
first = torch.optim.AdamW(model.parameters())
optimizers = [first, Muon(model.parameters())]
schedulers = [torch.optim.lr_scheduler.LambdaLR(one, rate) for one in optimizers]
for x in loader:
    model(x).loss.backward()
    for {}:
        {}.step()
"""


@pytest.mark.parametrize(
    ("loop", "name", "clears", "found"),
    [
        ("opt, sched in zip(optimizers, schedulers)", "opt", "", ["error"]),
        ("opt in optimizers", "opt", "", ["error"]),
        ("opt in optimizers", "opt", "    model.zero_grad()\n", []),
        ("opt, sched in zip(optimizers, schedulers)", "sched", "", []),
        ("opt in others", "opt", "", []),
    ],
)
def test_optimizers_of_a_list_add_up_gradients(
    tmp_path: Path, loop: str, name: str, clears: str, found: list[str]
) -> None:
    assert of(tmp_path, "no-zero-grad", train_py=STEPS.format(loop, name) + clears) == found


@pytest.mark.parametrize(
    ("yaml", "file", "found"),
    [
        ("fp16: true", "bf16", ["error"]),
        ("bf16: true", "fp16", ["error"]),
        ("bf16: true", "bf16", []),
        ("fp16: true\nbf16: true", "bf16", []),  # which another rule judges
    ],
)
def test_a_yaml_and_a_json_of_other_formats(tmp_path: Path, yaml: str, file: str, found: list[str]) -> None:
    text = f"model_name_or_path: m\nfinetuning_type: full\nstage: sft\ndeepspeed: ds.json\noutput_dir: o\n{yaml}\n"
    config = f'{{"{file}": {{"enabled": true}}, "zero_optimization": {{"stage": 2}}}}'
    assert of(tmp_path, "trainer-and-file-differ", a_yaml=text, ds_json=config) == found


@pytest.mark.parametrize(
    ("kind", "found"), [("constant", ["warning"]), ("constant_with_warmup", []), ("cosine", [])]
)
def test_axolotls_constant_schedule_has_no_warm_up(tmp_path: Path, kind: str, found: list[str]) -> None:
    text = f"base_model: m\nmicro_batch_size: 1\nlr_scheduler: {kind}\nwarmup_steps: 5\n"
    assert of(tmp_path, "schedule-and-its-arguments", a_yml=text) == found


SPAWNED = """import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
def train(rank, world_size):
    dist.init_process_group("nccl", rank=rank, world_size=world_size)
    model = DDP(Net().to(rank), device_ids=[rank])
    torch.save(model.state_dict(), "weights.pth")
if __name__ == "__main__":
    {}
"""


@pytest.mark.parametrize(
    ("start", "found"), [("mp.spawn(train, args=(4,), nprocs=4)", ["warning"]), ("train(0, 1)", [])]
)
def test_processes_that_a_script_starts_count_more_than_its_launch(
    tmp_path: Path, start: str, found: list[str]
) -> None:
    command = "torchrun --nproc_per_node=1 train.py\n"
    assert of(tmp_path, "every-process-saves", train_py=SPAWNED.format(start), run_sh=command) == found


BF16 = """import torch, yaml
from transformers import AutoModelForCausalLM
config = yaml.safe_load(open("a.yaml"))
use_bf16 = {}
policy = AutoModelForCausalLM.from_pretrained("m", torch_dtype=torch.bfloat16 if use_bf16 else torch.float32)
ref_model = AutoModelForCausalLM.from_pretrained("m")
ref_model.requires_grad_(False)
optimizer = torch.optim.AdamW(params=policy.parameters(), lr=5e-7)
for x in loader:
    policy(x).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ('config["precision"] == "bf16"', ["warning"]),
        ("True", ["warning"]),
        ('config["precision"] == "fp16"', []),
        ("asked()", []),
    ],
)
def test_bf16_that_a_condition_chooses(tmp_path: Path, test: str, found: list[str]) -> None:
    config = "precision: bf16\nlearning_rate: 5.0e-7\noutput_dir: o\n"
    assert of(tmp_path, "bf16-rounds-updates-away", train_py=BF16.format(test), a_yaml=config) == found


PASSES = """import torch
from torch.nn.parallel import DistributedDataParallel as DDP
model = DDP(Net().to(rank), device_ids=[rank])
opt = torch.optim.AdamW(model.parameters())
for step, x in enumerate(loader):
{}
    opt.step()
    opt.zero_grad()
"""
ALL_IN = "    with model.no_sync():\n        loss = model(x).loss\n        loss.backward()"
LAST_OUT = f"    if step % 4:\n{ALL_IN.replace('    ', '        ', 1).replace(chr(10), chr(10) + '    ')}\n    else:\n        model(x).loss.backward()"
BACKWARD_IN = "    loss = model(x).loss\n    with model.no_sync():\n        loss.backward()"


@pytest.mark.parametrize(
    ("passes", "found"),
    [
        (ALL_IN, ["error"]),
        (LAST_OUT, []),
        (BACKWARD_IN, []),  # the forward pass decides: run with torch 2 and two processes
        (ALL_IN + "\n    reduce(model)", ["error"]),
        (ALL_IN + "\n    [torch.distributed.all_reduce(p.grad) for p in model.parameters()]", []),
    ],
)
def test_no_sync_around_all_passes_averages_nothing(tmp_path: Path, passes: str, found: list[str]) -> None:
    assert of(tmp_path, "goes-past-ddp", train_py=PASSES.format(passes)) == found


ACCUMULATED = """import torch
opt = torch.optim.AdamW(model.parameters())
for step, x in enumerate(loader):
{}
    if (step + 1) % steps == 0:
{}
        opt.step()
        opt.zero_grad()
"""
LOSS = "    loss = model(x).loss / steps"


@pytest.mark.parametrize(
    ("before", "inside", "found"),
    [
        (LOSS, "        loss.backward()", ["error"]),
        ("    loss = model(x).loss\n    loss /= steps", "        scaler.scale(loss).backward()", ["error"]),
        (f"{LOSS}\n    loss.backward()", "        pass", []),
        (f"{LOSS}\n    total += loss", "        total.backward()", []),
        ("    loss = loss + model(x).loss / steps", "        loss.backward()", []),
        (f"{LOSS}\n    losses.append(loss)", "        sum(losses).backward()", []),
        ("    pass", "        loss = model(x).loss / steps\n        loss.backward()", []),
        ("    loss = model(x).loss", "        loss.backward()", []),  # every so many steps, as of a critic
    ],
)
def test_batches_without_a_backward_pass(tmp_path: Path, before: str, inside: str, found: list[str]) -> None:
    assert of(tmp_path, "gradients-are-cleared", train_py=ACCUMULATED.format(before, inside)) == found


@pytest.mark.parametrize(
    ("pad", "found"),
    [("tok.pad_token_id", ["warning"]), ("-100", []), ("pad", ["warning"]), ("-100 if ignore else pad", [])],
)
def test_labels_that_are_padded_with_the_pad_id(tmp_path: Path, pad: str, found: list[str]) -> None:
    script = "from transformers import AutoTokenizer, DataCollatorForSeq2Seq\ntok = AutoTokenizer.from_pretrained('t5-small')\n"
    script += f"pad = tok.pad_token_id\ncollator = DataCollatorForSeq2Seq(tok, label_pad_token_id={pad})\n"
    assert of(tmp_path, "labels-do-not-fit", train_py=script) == found


BEST = """from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments
(args,) = HfArgumentParser(Seq2SeqTrainingArguments).parse_args_into_dataclasses()
trainer = Seq2SeqTrainer(model=m, args=args, train_dataset=a, eval_dataset=b{})
trainer.train()
"""
IF_ASKED = ", compute_metrics=f if args.predict_with_generate else None"


@pytest.mark.parametrize(
    ("given", "flags", "found"),
    [
        (IF_ASKED, "--eval_strategy epoch", ["error"]),
        (IF_ASKED, "--eval_strategy epoch --predict_with_generate", []),
        (IF_ASKED, "--eval_strategy no", []),
        (", compute_metrics=f", "--eval_strategy epoch", []),
        (", **more", "--eval_strategy epoch", []),
        ("", "--eval_strategy steps", ["error"]),
    ],
)
def test_the_best_metric_of_a_command(tmp_path: Path, given: str, flags: str, found: list[str]) -> None:
    command = f"python train.py --output_dir o --metric_for_best_model rougeLsum {flags}\n"
    files = {"run_sh": command, "train_py": BEST.format(given)}
    assert of(tmp_path, "best-metric-is-not-computed", **files) == found


@pytest.mark.parametrize(
    ("block", "found"),
    [
        ("training:\n  num_epochs: 3\n  learning_rate: 2e-4\n", ["warning"]),
        ("notes:\n  author: me\n  learning_rate: 2e-4\n", []),
        ("special_tokens:\n  pad_token: a\n", []),
        ("common: &c\n  num_epochs: 3\n  learning_rate: 2e-4\n<<: *c\n", []),
    ],
)
def test_settings_in_a_block_that_axolotl_has_not(tmp_path: Path, block: str, found: list[str]) -> None:
    text = f"base_model: m\nmicro_batch_size: 1\ndatasets:\n  - path: a\n    type: alpaca\n{block}"
    assert of(tmp_path, "misspelt-key", a_yml=text) == found


@pytest.mark.parametrize(
    ("template", "model", "fix", "severity"),
    [
        ("qwen2", "Qwen/Qwen2-7B-Instruct", "did you mean `qwen`?", "warning"),  # perhaps a later one
        ("llama_3", "a/b", "did you mean `llama3`?", "error"),
        ("qwen", "Qwen/Qwen2-7B-Instruct", "", ""),
        ("chatglm2", "a/b", "", ""),  # which earlier versions had
        ("of_mine", "a/b", "", ""),
    ],
)
def test_templates_that_llama_factory_has_not(
    tmp_path: Path, template: str, model: str, fix: str, severity: str
) -> None:
    text = f"model_name_or_path: {model}\nfinetuning_type: lora\nstage: sft\ntemplate: {template}\n"
    found = [one for one in checked(tmp_path, a_yaml=text) if "no such template" in one.what]
    assert [(one.severity, one.fix) for one in found] == [(severity, fix)] * bool(fix)
