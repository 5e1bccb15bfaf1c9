# ruff: noqa: E501 - the files are text
"""What a sixth walk through public files found: judged wrongly, or missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from checked_files import checked
from shardwise.lint.finding import Finding


def found(folder: Path, rule: str = "", **texts: str) -> list[Finding]:
    """Errors and warnings of files, all or those of one rule; `train_py` is train.py."""
    all_ = checked(folder, **texts)
    return [one for one in all_ if one.severity != "note" and rule in ("", one.rule)]


ZERO_3 = '{"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true}, "zero_optimization": {"stage": 3, "overlap_comm": true, "stage3_gather_16bit_weights_on_model_save": true}}'
SAVES = """from transformers import Trainer, TrainingArguments
from mine import model, rows
def save_all(trainer, folder):
    state = trainer.model.state_dict()
    held = {key: value.cpu() for key, value in state.items()}
    trainer._save(folder, state_dict=held)
def train():
    trainer = Trainer(model=model, args=TrainingArguments("o", deepspeed="ds.json"), train_dataset=rows)
    trainer.train()
    %s
if __name__ == "__main__":
    %s
"""


@pytest.mark.parametrize("start", ["train()", "fire.Fire(train)"])
@pytest.mark.parametrize(("last", "judged"), [("pass", 0), ("save_all(trainer, 'o')", 1)])
def test_a_function_that_nothing_calls_is_not_judged(
    tmp_path: Path, last: str, start: str, judged: int
) -> None:
    text = SAVES % (last, start)
    assert len(found(tmp_path, "weights-are-elsewhere", train_py=text, ds_json=ZERO_3)) == judged


@pytest.mark.parametrize(
    "more", ["", "logger = get(__name__)\ndef run(x):\n    helper()\ndef helper():\n    pass\n"]
)
def test_a_function_of_a_module_is_judged(tmp_path: Path, more: str) -> None:
    text = (SAVES % ("pass", "train()")).partition("def train")[0] + more
    assert len(found(tmp_path, "weights-are-elsewhere", train_py=text, ds_json=ZERO_3)) == 1


IMPORTED = "import inspect\nimport transformers\nfrom transformers import Trainer, TrainingArguments\nfrom trl import SFTConfig, SFTTrainer\nfrom mine import model, tok\n"


@pytest.mark.parametrize(
    "rows",
    [
        'kw = dict(output_dir="o")\nif "evaluation_strategy" in inspect.signature(TrainingArguments.__init__).parameters:\n    kw["evaluation_strategy"] = "steps"\nTrainingArguments(**kw)',
        'known = inspect.signature(SFTConfig).parameters\nkw = {}\nif "max_length" in known:\n    kw["max_length"] = 5\nelse:\n    kw["max_seq_length"] = 5\nSFTConfig(**kw)',
        'sig = inspect.signature(SFTTrainer.__init__)\nif "tokenizer" in sig.parameters:\n    SFTTrainer(model, tokenizer=tok)\nelse:\n    SFTTrainer(model, processing_class=tok)',
        'try:\n    a = TrainingArguments("o", evaluation_strategy="no")\nexcept TypeError:\n    a = TrainingArguments("o", eval_strategy="no")',
        'if transformers.__version__ < "5":\n    TrainingArguments("o", evaluation_strategy="no")',
        "try:\n    from trl import DataCollatorForCompletionOnlyLM\nexcept ImportError:\n    DataCollatorForCompletionOnlyLM = None",
    ],
)
def test_an_argument_that_the_script_asks_for_first_stops_nothing(tmp_path: Path, rows: str) -> None:
    assert found(tmp_path, train_py=IMPORTED + rows) == []


def test_a_handler_that_only_prints_is_no_other_way(tmp_path: Path) -> None:
    rows = 'try:\n    TrainingArguments("o", evaluation_strategy="no")\nexcept Exception as error:\n    print(error)\n    raise'
    (one,) = found(tmp_path, train_py=IMPORTED + rows)
    assert (one.rule, one.line, one.severity) == ("argument-was-removed", 7, "error")


OWN_KEYS = "model_name_or_path: a/b\noutput_dir: o\nlearning_rate: 1.0e-4\nper_device_train_batch_size: 2\nnum_train_epochs: 1\nmax_seq_len: 512\nbf16: true\nseed: 1\n"
KNOWN_KEYS = "weight_decay: 0.0\nmax_steps: 5\nsave_steps: 5\nlogging_steps: 5\nfp16: false\n"
PARSES = """from transformers import HfArgumentParser, TrainingArguments
{}
HfArgumentParser(({}, TrainingArguments)).parse_yaml_file("a.yaml")
"""


@pytest.mark.parametrize(
    "names",
    [
        ("from arguments import DataArguments", "DataArguments"),
        ("import arguments", "arguments.DataArguments"),
    ],
)
def test_keys_of_a_class_in_another_file_are_not_misspelt(tmp_path: Path, names: tuple[str, str]) -> None:
    assert found(tmp_path, a_yaml=OWN_KEYS, train_py=PARSES.format(*names)) == []


def test_a_file_with_keys_of_no_tool_is_read_by_a_script_of_its_own(tmp_path: Path) -> None:
    (one,) = found(tmp_path, a_yaml=OWN_KEYS)
    assert (one.rule, one.key) == ("misspelt-key", "max_seq_len")
    assert found(tmp_path, a_yaml=OWN_KEYS + KNOWN_KEYS + "data_root: d\nlimit: 100\n") == []


FACTORY = (
    "model_name_or_path: Qwen/Qwen2.5-7B\nfinetuning_type: lora\ndataset: d\noutput_dir: o\ntemplate: qwen\n"
)
AXOLOTL = "base_model: Qwen/Qwen2.5-7B\ndatasets:\n  - path: d\n    type: alpaca\nadapter: lora\n"
PEFT = "from peft import LoraConfig, TaskType\nLoraConfig({})\n"


@pytest.mark.parametrize(
    ("file", "text", "fix"),
    [
        ("a_yaml", FACTORY + "stage: stf\n", "sft"),
        ("a_yaml", FACTORY.replace("lora", "loar"), "lora"),
        ("a_yaml", AXOLOTL + "rl: dop\n", "dpo"),
        ("a_yaml", AXOLOTL.replace("lora", "qlroa") + "load_in_4bit: true\n", "qlora"),
        ("a_py", PEFT.format('task_type="CASUAL_LM"'), "CAUSAL_LM"),
        ("a_py", PEFT.format("task_type=TaskType.CAUSUAL_LM"), "CAUSAL_LM"),
        ("a_py", PEFT.format('bias="non"'), "none"),
        ("a_py", "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('a/b', attn_implementation='flash_attention2')\n", "flash_attention_2"),
    ],
)  # fmt: skip
def test_a_misspelt_word_of_a_closed_set_is_an_error(tmp_path: Path, file: str, text: str, fix: str) -> None:
    (one,) = found(tmp_path, **{file: text})
    assert (one.rule, one.severity, one.fix) == ("unknown-word", "error", f"did you mean {fix!r}?")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("a_yaml", FACTORY + "stage: sft\nflash_attn: fa2\n"),
        ("a_yaml", AXOLOTL + "rl: dpo\n"),
        ("a_py", PEFT.format('task_type=TaskType.CAUSAL_LM, bias="lora_only"')),
        ("a_py", "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('a/b', attn_implementation='kernels-community/flash-attn3')\n"),
        ("a_py", "from transformers import AutoModelForCausalLM\nAutoModelForCausalLM.from_pretrained('a/b', attn_implementation='own', trust_remote_code=True)\n"),
    ],
)  # fmt: skip
def test_words_of_the_set_and_those_of_own_code_are_right(tmp_path: Path, file: str, text: str) -> None:
    assert found(tmp_path, **{file: text}) == []


def test_a_word_that_a_fork_may_know_is_a_warning(tmp_path: Path) -> None:
    (one,) = found(tmp_path, a_yaml=FACTORY + "stage: grpo_online\n")
    assert (one.rule, one.severity) == ("unknown-word", "warning")


def test_a_dropout_of_percents_is_a_share_above_one(tmp_path: Path) -> None:
    (one,) = found(tmp_path, a_py=PEFT.format("lora_dropout=5"))
    assert (one.rule, one.severity, one.fix) == ("share-above-one", "error", "0.05")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("export CUDA_VISIBLE_DEVICES=0,1\nNPROC_PER_NODE={} llamafactory-cli train a.yaml\n", 2),
        ("CUDA_VISIBLE_DEVICES=0,1,2 NPROC_PER_NODE={} swift sft --model a\n", 3),
        ("export NPROC_PER_NODE={}\nCUDA_VISIBLE_DEVICES=0 FORCE_TORCHRUN=1 llamafactory-cli train a.yaml\n", 1),
    ],
)  # fmt: skip
def test_processes_of_a_variable_need_their_gpus(tmp_path: Path, text: str, right: int) -> None:
    rule = "more-processes-than-devices"
    (one,) = found(tmp_path, rule, a_sh=text.format(4))
    assert (one.severity, one.fix) == ("error", f"NPROC_PER_NODE={right}")
    assert found(tmp_path, rule, a_sh=text.format(right)) == []


def test_one_visible_gpu_starts_no_torchrun(tmp_path: Path) -> None:
    text = "CUDA_VISIBLE_DEVICES=0 NPROC_PER_NODE=4 llamafactory-cli train a.yaml\n"
    assert found(tmp_path, "more-processes-than-devices", a_sh=text) == []


@pytest.mark.parametrize(
    ("command", "fix"),
    [
        ("torchrun --nproc_per_node 4 --standalone -m src/train --a 3", "src.train"),
        ("accelerate launch --num_processes 2 \\\n  -m src/train.py --a 3", "src.train"),
        ("uv run python -m torch.distributed.run --nproc_per_node 2 -m pkg.train.py", "pkg.train"),
        ("python -m train.py", "train"),
    ],
)
def test_a_module_is_no_path(tmp_path: Path, command: str, fix: str) -> None:
    (one,) = found(tmp_path, "module-flag-and-file", a_sh=command + "\n")
    assert (one.severity, one.fix) == ("error", f"remove -m; or -m {fix}")


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc_per_node 4 -m src.train --model a/b",
        "torchrun --standalone train.py -m models/llama",
        "python train.py -m models/llama",
        "python -m src.train -m models/llama -d d.py",
        "git commit -m fix/train",
        "deepspeed --num_gpus 2 train.py --module a/b",
    ],
)
def test_a_flag_of_the_script_is_no_module(tmp_path: Path, command: str) -> None:
    assert found(tmp_path, "module-flag-and-file", a_sh=f"torchrun a.py\n{command}\n") == []


def test_a_length_that_trl_1_has_no_more_in_a_file(tmp_path: Path) -> None:
    script = "from trl import {}SFTConfig, TrlParser\nTrlParser(({}SFTConfig,)).parse_args_and_config()\n{}"
    keys = "model_name_or_path: a/b\noutput_dir: o\nmax_seq_length: 512\nlearning_rate: 2.0e-5\n"
    (one,) = found(tmp_path, a_yaml=keys, t_py=script.format("", "", ""))
    assert (one.rule, one.key, one.fix) == (
        "flag-was-removed", "max_seq_length", "max_seq_length -> max_length; or an earlier version"
    )  # fmt: skip
    own = "class Mine:\n    max_seq_length: int = 3\n"
    assert found(tmp_path, a_yaml=keys, t_py=script.format("", "Mine, ", own)) == []


PADS = """from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--model", default="{}")
args = parser.parse_args()
model = AutoModelForCausalLM.from_pretrained(args.model)
tokenizer = AutoTokenizer.from_pretrained(args.model)
{}
"""


@pytest.mark.parametrize(
    "row", ["tokenizer(['a', 'b c'], padding=True)", "DataCollatorForSeq2Seq(tokenizer)"]
)
def test_a_tokenizer_without_a_pad_token_is_known_by_a_flag(tmp_path: Path, row: str) -> None:
    rule = "no-pad-token"
    assert len(found(tmp_path, rule, a_py=PADS.format("mistralai/Mistral-7B-v0.1", row))) == 1
    assert found(tmp_path, rule, a_py=PADS.format("Qwen/Qwen2.5-0.5B", row)) == []
    set_ = f"tokenizer.pad_token = tokenizer.eos_token\n{row}"
    assert found(tmp_path, rule, a_py=PADS.format("mistralai/Mistral-7B-v0.1", set_)) == []


SUMS = """import torch
from mine import loader, held_out, model
optimizer = torch.optim.AdamW(model.parameters())
def train(epoch):
    total, seen = 0, 0
    for batch in loader:
        loss = model(batch).loss
        {}.backward()
        optimizer.step()
        optimizer.zero_grad()
        {}
    return total
@torch.no_grad()
def evaluate():
    model.eval()
    total = 0
    for batch in held_out:
        loss = model(batch).loss
        total += loss
    return total
for epoch in range(3):
    model.train()
    train(epoch)
    evaluate()
"""


@pytest.mark.parametrize(
    ("given", "row", "lines"),
    [
        ("loss", "total += loss", [11]),
        ("scaler.scale(loss)", "total += loss * 4", [11]),
        ("loss", "total += loss.item()", []),
        ("loss", "total += float(loss)", []),
        ("loss", "loss = loss.detach(); total += loss", []),
        ("loss", "seen += 1", []),
        ("loss", "total += loss.detach() / 4", []),
    ],
)
def test_a_sum_of_losses(tmp_path: Path, given: str, row: str, lines: list[int]) -> None:
    text = SUMS.format(given, row)
    assert [one.line for one in found(tmp_path, "sum-keeps-the-graph", a_py=text)] == lines


GRPO = "CUDA_VISIBLE_DEVICES=0,1,2,3 accelerate launch --num_processes 3 {}grpo.py --config a.yaml\n"


@pytest.mark.parametrize("key", ["use_vllm: true", "rollout_backend: sglang"])
def test_a_gpu_that_another_file_gives_to_an_engine_is_not_idle(tmp_path: Path, key: str) -> None:
    rule, keys = "more-processes-than-devices", "model_name_or_path: a/b\noutput_dir: o\n"
    script = "from trl import GRPOTrainer\n"
    assert found(tmp_path, rule, a_sh=GRPO.format(""), grpo_py=script, a_yaml=keys + key) == []
    assert len(found(tmp_path, rule, a_sh=GRPO.format(""), grpo_py=script, a_yaml=keys)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "model:\n  name: a/b\ntraining:\n  output_dir: o\nwandb:\n  project: p\n",
        "backbone: a/b\noptimizer: adamw\nscheduler: cosine\n",
    ],
)
def test_settings_of_the_users_own_are_no_deepspeed_file(tmp_path: Path, text: str) -> None:
    script = "from transformers import Trainer\nfrom mine import model, load\nTrainer(model, load('a.yaml')).train()\n"
    assert found(tmp_path, a_yaml=text, t_py=script) == []


def test_keys_of_deepspeed_in_yaml_are_an_error(tmp_path: Path) -> None:
    (one,) = found(tmp_path, a_yaml="zero_optimization:\n  stage: 2\ntrain_batch_size: 8\n")
    assert (one.rule, one.severity, one.what) == (
        "unreadable", "error", "DeepSpeed keys in YAML: DeepSpeed reads JSON"
    )  # fmt: skip


def test_an_older_name_of_axolotl_is_none_that_is_misspelt(tmp_path: Path) -> None:
    assert (
        found(tmp_path, a_yaml=AXOLOTL + KNOWN_KEYS + "model_config:\n  output_router_logits: true\n") == []
    )


@pytest.mark.parametrize("value", ["$OPTIM", "${OPTIM:-adamw_torch}"])
def test_a_word_that_only_the_shell_knows_is_not_judged(tmp_path: Path, value: str) -> None:
    command = f"torchrun --nproc_per_node 2 train.py --output_dir o --per_device_train_batch_size 1 --optim {value}\n"
    assert found(tmp_path, "unknown-word", a_sh=command) == []
    assert len(found(tmp_path, "unknown-word", a_sh=command.replace(value, "adamw_torc"))) == 1
