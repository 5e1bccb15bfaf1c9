# ruff: noqa: E501 - the files are text
"""What a walk through public files found to be false or misleading, and files of the same shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checked_files import checked
from shardwise.app.check import check as check_files
from shardwise.lint.check import check, headings, load, unreached
from shardwise.lint.document import UnreadableError
from shardwise.lint.finding import Finding
from shardwise.lint.model import facts_of
from shardwise.lint.read import read
from shardwise.lint.setup import Setup


def found(folder: Path, rule: str = "", **texts: str) -> list[Finding]:
    """Errors and warnings of files, all or those of one rule; `train_py` is train.py."""
    all_ = checked(folder, **texts)
    return [one for one in all_ if one.severity != "note" and rule in ("", one.rule)]


LOOP = """import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
from datasets import load_from_disk
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
loader = DataLoader(load_from_disk("d"), batch_size=2, shuffle=True)
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
gas = 4
sched = get_cosine_schedule_with_warmup(opt, 10, 3 * len(loader) // gas)
for epoch in range(3):
    for i, batch in enumerate(loader):
        loss = model(**batch).loss / gas
        loss.backward()
        {}
"""
STEP = "opt.step(); opt.zero_grad()"


def loop(*rows: str) -> str:
    return LOOP.format("\n        ".join(rows))


@pytest.mark.parametrize(
    "rows",
    [
        ("last = (i + 1) % gas == 0", f"if last: {STEP}; sched.step()"),
        ("last = (i + 1) % gas == 0", f"if (i + 1) % gas == 0: {STEP}", "if last: sched.step()"),
        ("more = (i + 1) % gas != 0", f"if not more: {STEP}", "if not more: sched.step()"),
        ("rest = (i + 1) % gas", "last = rest == 0 or i + 1 == len(loader)", "if not last: continue", STEP, "sched.step()"),
        ("do = bool((i + 1) % gas == 0)", "sync = do", "if sync and epoch >= 0:", f"    {STEP}", "    if sched is not None: sched.step()"),
        ("new = False", "if (i + 1) % gas == 0:", f"    {STEP}", "    new = True", "if new: sched.step()"),
    ],
)  # fmt: skip
def test_a_condition_in_a_variable_is_as_good_as_one_in_its_place(
    tmp_path: Path, rows: tuple[str, ...]
) -> None:
    assert found(tmp_path, train_py=loop(*rows)) == []


def test_a_condition_in_a_variable_hides_no_schedule_that_advances_too_often(tmp_path: Path) -> None:
    rows = "last = (i + 1) % gas == 0", f"if last: {STEP}", "if sched is not None: sched.step()"
    (one,) = found(tmp_path, train_py=loop(*rows))
    assert (one.rule, one.line, one.severity) == ("schedule-counts-otherwise", 16, "error")


BOTH = "from transformers import TrainingArguments\na = TrainingArguments('o', fp16=True, bf16=True)"


def cells(*codes: str) -> str:
    return json.dumps({"cells": [{"cell_type": "code", "source": one} for one in codes]})


@pytest.mark.parametrize(
    "cell",
    [
        "!torchrun --nproc_per_node 2 train.py \\\n    --bf16 True \\\n    --use_lora",
        "!export BS=16; rm -rf out; \\\nCUDA_VISIBLE_DEVICES=0 deepspeed --num_gpus=1 train.py",
        "pip install -q transformers trl",
        "cd ..\nls -l\nconda install -y x\nload_ext autoreload",
        "files = !ls\nfiles?",
        "if True:\n    %pip install a \\\n        b\n    x = 1",
        "%%bash\nnot (python",
        "%%time\nx = 1",
    ],
)
def test_what_only_ipython_reads_does_not_stop_a_notebook(tmp_path: Path, cell: str) -> None:
    (one,) = found(tmp_path, a_ipynb=cells(cell, BOTH))
    assert (one.rule, one.where) == ("contradicting-arguments", f"{tmp_path}/a.ipynb: cell 2, line 2: fp16")


def test_code_of_a_timed_cell_is_read(tmp_path: Path) -> None:
    (one,) = found(tmp_path, a_ipynb=cells(f"%%time\n{BOTH}"))
    assert (one.rule, one.cell, one.line) == ("contradicting-arguments", 1, 3)


def test_an_error_of_syntax_is_shown_in_its_cell(tmp_path: Path) -> None:
    (one,) = found(
        tmp_path, a_ipynb=cells("x = 1", "text = '''\n!not for the shell \\\n'''", "y = 1\nf(a b)")
    )
    assert (one.rule, one.where) == ("unreadable", f"{tmp_path}/a.ipynb: cell 3, line 2")
    assert "unknown" not in one.what


LORA = """from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({name!r}, trust_remote_code=True)
model = get_peft_model(model, LoraConfig(r=8, target_modules={modules}))
"""


@pytest.mark.parametrize(
    ("name", "modules", "right"),
    [
        ("microsoft/Phi-4-mini-instruct", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], True),
        ("/models/phi-3.5-mini", ["qkv_proj", "o_proj"], True),
        ("/models/phi-2-mine", ["q_proj", "dense"], True),
        ("THUDM/glm-4-9b-chat", ["query_key_value"], True),
        ("/models/GLM-4-9B-0414", ["q_proj", "gate_up_proj"], True),
        ("/models/phi-3.5-mini", ["c_attn"], False),
        ("/models/gpt2-mine", ["q_proj"], False),
        ("/models/llama-7b-mine", ["c_attn"], False),
    ],
)
def test_a_name_that_several_families_have_is_judged_by_all_of_them(
    tmp_path: Path, name: str, modules: list[str], right: bool
) -> None:
    script = tmp_path / "train.py"
    script.write_text(LORA.format(name=name, modules=modules))
    documents, _ = load([script])
    said = check(Setup(documents=documents, model=facts_of(name))).findings
    assert [one.severity for one in said if one.rule == "lora-targets"] == ([] if right else ["warning"])


ACCELERATOR = """from accelerate import Accelerator
from setting import *
accelerator = Accelerator({given})
model, opt, loader = accelerator.prepare(model, opt, loader)
for batch in loader:
    loss = model(**batch).loss
    {backward}
    opt.step(); opt.zero_grad()
"""


@pytest.mark.parametrize(
    ("given", "backward", "severity", "what"),
    [
        ("", "accelerator.backward()", "error", "gets no loss: TypeError"),
        ("", "accelerator.backward(loss=loss)", "", ""),
        ("mixed_precision='bf16'", "loss.backward()", "", ""),
        ("", "loss.backward()", "warning", "with fp16 the loss is not scaled"),
        ("gradient_accumulation_steps=8, mixed_precision='bf16'", "loss.backward()", "warning", "it is not divided by the 8"),
    ],
)  # fmt: skip
def test_what_a_backward_pass_of_an_accelerator_lacks(
    tmp_path: Path, given: str, backward: str, severity: str, what: str
) -> None:
    script = ACCELERATOR.format(given=given, backward=backward)
    said = found(tmp_path, "backward-outside-accelerator", train_py=script)
    assert [one.severity for one in said] == ([severity] if severity else [])
    assert all(one.what.find(what) >= 0 and "backward(accelerator)" not in one.fix for one in said)


OWN_ENGINE = """import deepspeed, json
from transformers import HfArgumentParser, TrainingArguments
args = HfArgumentParser(TrainingArguments).parse_args()
config = json.load(open(args.deepspeed_config))
engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
"""
OF_A_MODULE = """import deepspeed
from methods import OwnTrainer
from arguments import read_arguments
args = read_arguments()
OwnTrainer(model, args).fit_all()
"""
COMMAND = "deepspeed train.py --output_dir o --per_device_train_batch_size 4 --{flag} zero2.json\n"


@pytest.mark.parametrize(
    ("script", "flag", "reader"),
    [
        (OWN_ENGINE, "deepspeed_config", "deepspeed"),
        (OWN_ENGINE, "", "deepspeed"),  # without its command
        (OF_A_MODULE, "deepspeed_config", None),  # the module's own affair
        (OF_A_MODULE, "", None),
        (OF_A_MODULE, "deepspeed", "trainer"),  # the Trainer's flag
        ("from transformers import TrainingArguments, Trainer\nTrainer(m, TrainingArguments(deepspeed=c))", "deepspeed_config", "trainer"),
        ("from mine import OwnTrainer\nfrom transformers import HfArgumentParser\nOwnTrainer(HfArgumentParser(Own))", "", "trainer"),
    ],
)  # fmt: skip
def test_a_file_for_deepspeed_is_read_by_what_consumes_it(
    tmp_path: Path, script: str, flag: str, reader: str | None
) -> None:
    texts = {"train.py": script, "run.sh": COMMAND.format(flag=flag)} if flag else {"train.py": script}
    texts["zero2.json"] = json.dumps({"zero_optimization": {"stage": 2}, "steps_per_print": "auto"})
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    documents, _ = load([tmp_path / name for name in texts])
    assert Setup(documents=documents).reader == reader


PLACED = """import argparse
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer
parser = argparse.ArgumentParser()
parser.add_argument("--load_in_8bit", action="store_true")
args = parser.parse_args()
{}
Trainer(model).train()
"""


@pytest.mark.parametrize(
    ("rows", "flags", "rules"),
    [
        ("{load}'auto')", "", ["device-map-and-processes"]),
        ("if args.load_in_8bit:\n    {load}'auto')\nelse:\n    {load}None)", "", []),
        ("if args.load_in_8bit:\n    {load}'auto')\nelse:\n    {load}None)", "--load_in_8bit", ["device-map-and-processes"]),
        ("from setting import small\nif small:\n    {load}'auto')\nelse:\n    {load}None)", "", []),
        ("{load}'auto' if args.load_in_8bit else None)", "", []),
        ("more = {{}}\nif args.load_in_8bit:\n    more['device_map'] = 'auto'\nmodel = AutoModelForCausalLM.from_pretrained('m', **more)", "", []),
    ],
)  # fmt: skip
def test_a_device_map_counts_where_its_branch_is_taken(
    tmp_path: Path, rows: str, flags: str, rules: list[str]
) -> None:
    script = PLACED.format(rows.format(load="model = AutoModelForCausalLM.from_pretrained('m', device_map="))
    run = f"torchrun --nproc_per_node 4 train.py {flags}\n"
    said = found(tmp_path, "device-map-and-processes", train_py=script, run_sh=run)
    assert [one.rule for one in said] == rules


READS_YAML = """import yaml
from transformers import Trainer, TrainingArguments
cfg = yaml.safe_load(open("own.yaml"))
args = TrainingArguments("o", eval_strategy="steps", eval_steps=cfg["eval_steps"])
Trainer(model, args, eval_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("keys", "script", "lines"),
    [
        ("eval_steps: 25\nlearning_rate: 0.1\n", "", [1]),
        ("eval_steps: 25\nlearning_rate: 0.1\n", READS_YAML, []),  # which sets the strategy
        ("eval_steps: 25\nregularise_by: 0.1\n", "", []),  # of a script that is not here
        ("bf16: true\nfp16: true\nregularise_by: 0.1\n", "", [2]),
    ],
)
def test_a_yaml_is_judged_with_what_the_script_says(
    tmp_path: Path, keys: str, script: str, lines: list[int]
) -> None:
    text = f"output_dir: o\nper_device_train_batch_size: 1\n{keys}"
    texts = {"own_yaml": text} | ({"train_py": script} if script else {})
    said = found(tmp_path, "contradicting-arguments", **texts)
    assert [one.line - 2 for one in said if one.file.endswith("own.yaml")] == lines


@pytest.mark.parametrize(
    "reads",
    [
        "from omegaconf import OmegaConf\nc = OmegaConf.to_container(OmegaConf.load('ds.yaml'))",
        "import yaml\nc = yaml.safe_load(open('ds.yaml'))",
        "import hydra\n@hydra.main(config_path='.')\ndef main(c): ...",
    ],
)
def test_deepspeeds_settings_in_yaml_are_judged_where_a_script_reads_them(tmp_path: Path, reads: str) -> None:
    text = "train_micro_batch_size_per_gpu: 1\ngradient_clipping: 1.0\nzero_optimization:\n  stag: 2\n"
    script = f"{reads}\nimport deepspeed\nengine, *_ = deepspeed.initialize(model=m, optimizer=o, config=c)\n"
    said = found(tmp_path, ds_yaml=text, train_py=script)
    assert ("refused-key", 4) in [(one.rule, one.line) for one in said]
    (other,) = found(tmp_path, "unreadable", ds_yaml=text, train_py="import deepspeed\n")
    assert "DeepSpeed reads JSON" in other.what


EVALUATES = """import torch
opt = torch.optim.AdamW(model.parameters())
for epoch in range(3):
    {first}
    for step, batch in enumerate(loader):
        loss = model(**batch).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 100 == 0:
            model.eval()
            validate(model)
            {after}
"""


@pytest.mark.parametrize(
    ("first", "after", "what", "fix", "line"),
    [
        ("model.train()", "pass", "for the rest of the epoch", "model.train() after the evaluation", 11),
        ("pass", "pass", "for the next epochs", "model.train() at the beginning of each epoch", 3),
        ("pass", "model.train()", "", "", 0),
    ],
)
def test_how_long_eval_mode_stays(
    tmp_path: Path, first: str, after: str, what: str, fix: str, line: int
) -> None:
    said = found(tmp_path, "eval-mode-stays", train_py=EVALUATES.format(first=first, after=after))
    assert [(what in one.what, one.fix, one.line) for one in said] == ([(True, fix, line)] if line else [])


PARSES = """from transformers import HfArgumentParser, Trainer, TrainingArguments
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
Trainer("model", args).train()
"""


@pytest.mark.parametrize(
    "flag", ["fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer", "sharded_ddp simple", "logging_dir logs"]
)
def test_a_flag_that_the_trainer_had_is_a_removed_one_and_no_unknown_one(tmp_path: Path, flag: str) -> None:
    said = found(tmp_path, train_py=PARSES, run_sh=f"torchrun train.py --output_dir o --{flag}\n")
    assert [(one.rule, one.severity) for one in said] == [("flag-was-removed", "error")]


def test_names_that_trl_had_are_removed_ones(tmp_path: Path) -> None:
    text = """from trl import DPOConfig, DPOTrainer, DataCollatorForCompletionOnlyLM
from trl.experimental.orpo import ORPOTrainer
args = DPOConfig("o", max_prompt_length=512, evaluation_strategy="steps", beta=0.1)
DPOTrainer(model, args=args, tokenizer=tokenizer, train_dataset=rows).train()
"""
    said = found(tmp_path, train_py=text)
    assert sorted((one.line, one.rule) for one in said if "removed" in one.rule) == [
        (1, "import-was-removed"), (3, "argument-was-removed"),
    ]  # fmt: skip
    (first,) = (one for one in said if one.rule == "argument-was-removed")
    assert first.fix.splitlines()[0] == "line 3: max_prompt_length -> nothing: remove it"
    assert "line 4: tokenizer -> processing_class" in first.fix
    assert "evaluation_strategy -> eval_strategy" in first.fix
    assert "TRL 1.16" in first.what


ARRAY = '#!/bin/bash\nCMD=("$PYTHON_BIN" train.py --lr 1)\nif [ -n "$X" ]; then\n  CMD+=(--lr 2)\nfi\necho "${CMD[@]}"\n"${CMD[@]}"\n'


def test_a_command_in_an_array_is_read_and_flags_of_a_branch_leave_it_open(tmp_path: Path) -> None:
    run = tmp_path / "run.sh"
    run.write_text(ARRAY)
    (document,), broken = load([run])
    assert (document.get("launcher"), document.get("script"), broken) == ("python", "train.py", ())
    assert (document.get("lr"), document.has("launcher.open")) == (None, True)


@pytest.mark.parametrize(
    ("starts", "not_judged"),
    [
        ("srun --output=$LOG/n-%t.out sh node.sh", False),
        ("srun --nodes 1 \\\n  --gres gpu:8 \\\n  bash -c './node.sh' &", False),
        ("sbatch --nodes=2 $HERE/node.sh", False),
        ("sbatch --nodes=2 elsewhere.sh", True),
    ],
)
def test_a_script_that_starts_another_is_followed(tmp_path: Path, starts: str, not_judged: bool) -> None:
    (tmp_path / "node.sh").write_text("torchrun --nproc_per_node 4 --nodes 9 train.py\n")
    (tmp_path / "job.sh").write_text(f"export A=1\n{starts}\n")
    documents, broken = load([tmp_path / "job.sh"])
    checked = check(Setup(documents=documents), broken)
    assert [one.rule for one in checked.findings] == ([] if not_judged else ["unknown-launcher-flag"])
    open_ = f"what {tmp_path}/job.sh starts: elsewhere.sh is not here; name that file, too"
    assert unreached(checked.setup) == ([open_] if not_judged else [])
    assert set(headings(checked).values()) == {f"{one.name}: launch command" for one in documents}


TOKENISED = """from transformers import AutoTokenizer
def rows(batch):
    out = tok(batch["source"], padding="max_length", truncation=True)
    {}
    return out
"""


@pytest.mark.parametrize(
    ("row", "what", "fix"),
    [
        ("out['labels'] = out['input_ids'].copy()", "are the padded input ids", "attention_mask"),
        ("labels = tok(batch['t'], padding=True); out['labels'] = labels['input_ids']", "padded with the pad token", "-100 in the labels"),
        ("out['labels'] = tok(text_target=batch['t'], padding=True).input_ids", "", ""),
        ("labels = targets.input_ids", "padded with the pad token", "-100 in the labels"),
    ],
)  # fmt: skip
def test_labels_of_their_own_are_no_input_ids(tmp_path: Path, row: str, what: str, fix: str) -> None:
    said = found(tmp_path, "labels-include-padding", train_py=TOKENISED.format(row))
    assert [(what in one.what, fix in one.fix) for one in said] == ([(True, True)] if what else [])


def test_a_script_without_a_parser_is_not_asked_for_flags(tmp_path: Path) -> None:
    script = "from transformers import Trainer, TrainingArguments\nTrainer('m', TrainingArguments('o', deepspeed='ds.json'))\n"
    config = json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}})
    said = found(
        tmp_path, "trainer-and-file-differ", train_py=script, run_sh="deepspeed train.py\n", ds_json=config
    )
    assert [Path(one.file).name for one in said] == ["train.py"]
    said = found(
        tmp_path,
        "trainer-and-file-differ",
        train_py=PARSES,
        run_sh="deepspeed train.py --deepspeed ds.json\n",
        ds_json=config,
    )
    assert "run.sh" in [Path(one.file).name for one in said]


@pytest.mark.parametrize(
    ("requirements", "shell", "severity"),
    [
        ("torch\n", "", "error"),
        ("transformers==4.44.0\n", "", "warning"),
        ("transformers<5\n", "", "warning"),
        ("trl==0.9.6\n", "", "warning"),
        ("transformers>=4.0\n", "", "error"),
        ("", "pip install 'transformers<4.50'\ntorchrun train.py\n", "warning"),
    ],
)
def test_an_argument_that_an_earlier_version_has_stops_the_newest(
    tmp_path: Path, requirements: str, shell: str, severity: str
) -> None:
    (tmp_path / "requirements.txt").write_text(requirements)
    text = "from transformers import TrainingArguments\nTrainingArguments('o', evaluation_strategy='no')\n"
    texts = {"train_py": text} | ({"run_sh": shell} if shell else {})
    assert [one.severity for one in found(tmp_path, "argument-was-removed", **texts)] == [severity]


def test_a_sampler_in_a_variable_and_shuffle_stop_a_loader(tmp_path: Path) -> None:
    text = "from torch.utils.data import DataLoader, DistributedSampler\n{}\nDataLoader(rows, sampler=s, shuffle=True)\n"
    for made, severity in (("s = DistributedSampler(rows)", "error"), ("s = make()", "warning")):
        said = found(tmp_path, "sampler-and-shuffle", train_py=text.format(made))
        assert [one.severity for one in said] == [severity]


def test_notes_on_defaults_do_not_push_findings_off_the_screen(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    for keys, shown in (({}, True), ({"zero_optimisation": {}}, False)):
        file.write_text(json.dumps({"train_micro_batch_size_per_gpu": 8, "bf16": {"enabled": True}} | keys))
        report = check_files([file])
        assert {"throughput-timer", "clipping-default"} <= {one.rule for one in report.findings}
        assert ("[throughput-timer]" in report.text()) is shown
        assert ("not shown: " in report.text()) is not shown


def test_arguments_of_the_trainer_in_another_file_read_no_file_for_deepspeed(tmp_path: Path) -> None:
    reads = "from transformers import TrainingArguments\nargs = TrainingArguments('o')\n"
    own = "import deepspeed\nengine, *_ = deepspeed.initialize(model=model, config=config)\n"
    for name, text in {"arguments.py": reads, "train.py": own}.items():
        (tmp_path / name).write_text(text)
    documents, _ = load([tmp_path / "train.py", tmp_path / "arguments.py"])
    assert Setup(documents=documents).reader == "deepspeed"
    (tmp_path / "train.py").write_text(own + "from transformers import Trainer\nTrainer(model).train()\n")
    documents, _ = load([tmp_path / "train.py", tmp_path / "arguments.py"])
    assert Setup(documents=documents).reader == "trainer"


def test_a_job_is_made_of_no_script_that_only_starts_others(tmp_path: Path) -> None:
    run = tmp_path / "job.sh"
    run.write_text("export A=1\nsbatch --nodes=2 elsewhere.sh\n")
    with pytest.raises(UnreadableError, match="no command in it starts a training"):
        read(run.read_text(), str(run), other="training")


def test_a_condition_that_is_set_by_itself_ends(tmp_path: Path) -> None:
    for name, value in (("args.kept", "args.kept and not args.other"), ("kept", "not kept or rank")):
        body = f"def main(args, kept, rank):\n    {name} = {value}\n    if {name}:\n        model.save_pretrained('o')\n"
        assert (
            found(
                tmp_path,
                train_py=f"from transformers import Trainer\nmodel = None\n{body}    Trainer(model).train()\n",
            )
            == []
        )


def test_deepspeeds_scheduler_has_a_warm_up_whatever_the_arguments_name(tmp_path: Path) -> None:
    script = "from transformers import Trainer, TrainingArguments\nargs = TrainingArguments('o', deepspeed='ds.json', "
    script += "lr_scheduler_type='constant', warmup_steps=30)\nTrainer(model, args).train()\n"
    settings = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    warm = settings | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    assert found(tmp_path, "schedule-and-its-arguments", train_py=script, ds_json=json.dumps(settings))
    assert not found(tmp_path, "schedule-and-its-arguments", train_py=script, ds_json=json.dumps(warm))


def test_a_lora_config_that_only_a_comment_uses_is_an_error(tmp_path: Path) -> None:
    script = "from peft import LoraConfig, get_peft_model\nfrom transformers import Trainer\nconfig = LoraConfig(r=8)\n"
    script += "{}model = get_peft_model(model, config)\nTrainer(model=model).train()\n"
    assert found(tmp_path, "adapters-given-wrongly", train_py=script.format("# "))
    assert not found(tmp_path, "adapters-given-wrongly", train_py=script.format(""))
