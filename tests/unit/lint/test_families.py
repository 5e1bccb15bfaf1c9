"""What suits another family of models: classes, modules, lengths, templates and keys of another tool."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwise
from shardwise.folders import packaged
from shardwise.lint.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.model import blocks_of, facts_of
from shardwise.lint.read import read
from shardwise.lint.schema import names, table
from shardwise.lint.setup import Setup

MODEL = "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
AXOLOTL = "base_model: mistralai/Mistral-7B-v0.1\ndatasets:\n  - path: a/b\n    type: alpaca\noutput_dir: o\n"
FACTORY = "model_name_or_path: {}\nfinetuning_type: lora\nstage: sft\noutput_dir: o\n"
FSDP = """distributed_type: FSDP
mixed_precision: bf16
num_processes: 4
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
"""
LOADED = """import argparse
from transformers import AutoModelForCausalLM
p = argparse.ArgumentParser()
p.add_argument("--model", default="meta-llama/Llama-2-7b-hf")
a = p.parse_args()
AutoModelForCausalLM.from_pretrained(a.model)
"""
LORA = "from peft import LoraConfig\n" + MODEL + "AutoModelForCausalLM.from_pretrained('{}')\n"
TOKENS = """MODEL, LENGTH = "gpt2-medium", {}
tokenizer = AutoTokenizer.from_pretrained(MODEL)
model = {}
rows = tokenizer(["a"], {}max_length=LENGTH)
"""
ENDS = """from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, Trainer
from data import tokenizer, rows
model = AutoModelForCausalLM.from_pretrained("{}")
{}
texts = [row + {} for row in rows]
Trainer(model, data_collator=DataCollatorForLanguageModeling(tokenizer, mlm={}))
"""
PAD = "tokenizer.pad_token = tokenizer.eos_token"


def found(rule: str, *texts: str) -> list[Finding]:
    """The rule's findings in files of these texts; the name of a script is `train.py`."""
    kinds = ("train.py" if "import" in text else f"file{n}" for n, text in enumerate(texts))
    documents = tuple(read(text, name) for text, name in zip(texts, kinds, strict=True))
    return [one for one in check(Setup(documents=documents)).findings if one.rule == rule]


@pytest.mark.parametrize("kind", sorted(table("named_families")))
def test_the_families_are_those_of_transformers(kind: str) -> None:
    blocks = blocks_of((kind,))
    assert blocks is not None
    assert len(blocks.blocks) == 1
    assert blocks.parts & {*names("lora_modules")}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("EleutherAI/pythia-1.4b", True),
        ("EleutherAI/pythia-410m-deduped", True),  # not in the catalog
        ("meta-llama/Llama-2-7b-hf", False),
        ("our/pythia-like", False),
        ("$MODEL", False),
    ],
)
def test_the_model_of_the_command_decides_which_class_is_wrapped(command: str, wrong: bool) -> None:
    launch = f"accelerate launch --config_file fsdp.yaml train.py --model {command}\n"
    errors = found("fsdp-block-class", FSDP, LOADED, launch)
    assert [one.severity for one in errors] == ["error"] * wrong
    assert all(one.fix.startswith("GPTNeoXLayer") for one in errors)
    assert not found("fsdp-block-class", FSDP, LOADED)


@pytest.mark.parametrize(
    ("fsdp", "wrong"),
    [
        ("fsdp='full_shard auto_wrap', fsdp_config={'transformer_layer_cls_to_wrap': ['GPT2Block']}", True),
        (
            "fsdp='full_shard auto_wrap', fsdp_config={'transformer_layer_cls_to_wrap': ['OPTDecoderLayer']}",
            False,
        ),
        ("fsdp='full_shard', fsdp_config={'transformer_layer_cls_to_wrap': ['GPT2Block']}", False),
    ],
)
def test_the_trainers_own_fsdp_wraps_by_a_class_too(fsdp: str, wrong: bool) -> None:
    text = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\n"
    text += "m = AutoModelForCausalLM.from_pretrained('facebook/opt-1.3b')\n"
    text += f"Trainer(m, TrainingArguments('o', {fsdp}))\n"
    assert bool(found("fsdp-class-of-another-family", text)) == wrong


@pytest.mark.parametrize(
    ("model", "targets", "wrong"),
    [
        ("bigscience/bloomz-7b1-mt", "['q_proj', 'v_proj']", True),
        ("bigscience/bloomz-7b1-mt", "['query_key_value', 'q_proj']", False),
        ("bigscience/bloomz-7b1-mt", "['self_attention.dense']", False),
        ("bigscience/bloomz-7b1-mt", "'all-linear'", False),
        ("EleutherAI/pythia-410m-deduped", "['c_attn']", True),
        ("our/model", "['c_attn']", False),
        ("microsoft/phi-2", "['Wqkv']", False),  # of its earlier code
    ],
)
def test_targets_are_modules_of_the_named_model(model: str, targets: str, wrong: bool) -> None:
    text = (
        LORA.format(model) + f"def make(targets={targets}):\n    LoraConfig(target_modules=targets)\nmake()\n"
    )
    errors = found("lora-targets", text)
    assert [(one.severity, one.line) for one in errors] == [("error", 4)] * wrong


def test_targets_in_a_file_of_arguments_are_judged_once() -> None:
    document = read(FACTORY.format("bigscience/bloom-7b1") + "lora_target: q_proj,v_proj\n", "file")
    for model in (None, facts_of("bigscience/bloom-7b1")):
        found = check(Setup(documents=(document,), model=model)).findings
        assert [one.rule for one in found if one.severity == "error"] == ["lora-targets"]


def test_a_mapping_of_itself_ends_nothing() -> None:
    assert not found("lora-targets", LORA.format("gpt2") + "made = {**made}\nmade.run()\n")


@pytest.mark.parametrize(
    ("length", "model", "more", "wrong"),
    [
        (2048, "AutoModelForCausalLM.from_pretrained(MODEL)", "truncation=True, ", True),
        (1024, "AutoModelForCausalLM.from_pretrained(MODEL)", "truncation=True, ", False),
        (2048, "AutoModelForCausalLM.from_pretrained(MODEL)", "", False),
        (
            2048,
            "AutoModelForCausalLM.from_config(x)",
            "truncation=True, ",
            False,
        ),  # another model's tokenizer
        (2048, "AutoModelForCausalLM.from_pretrained(MODEL, n_positions=2048)", "truncation=True, ", False),
    ],
)
def test_rows_of_a_tokenizer_have_positions(length: int, model: str, more: str, wrong: bool) -> None:
    text = MODEL + TOKENS.format(length, model, more)
    assert [one.severity for one in found("rows-longer-than-positions", text)] == ["warning"] * wrong


@pytest.mark.parametrize(
    ("text", "severity"),
    [
        (AXOLOTL + "sequence_length: 4096\n", "warning"),
        (AXOLOTL + "sequence_len: 4096\n", ""),
        (AXOLOTL + "sequence_len: 4096\nmax_length: 1\n", ""),
        ("base_model: a/b\noutput_dir: o\nsequence_length: 4096\n", ""),  # of nobody in particular
        (FACTORY.format("a/b") + "lora_targets: all\n", "error"),
        (
            FACTORY.format("a/b") + "neat_pack: true\n",
            "error",
        ),  # far from neat_packing; it stops all the same
        (FACTORY.format("a/b") + "cutoff_len: 9\nmax_seq_length: 9\n", "error"),
        (FACTORY.format("a/b") + "lora_target: all\nmax_length: 9\n", ""),  # of what it generates
    ],
)
def test_a_key_is_judged_by_the_tool_that_reads_the_file(text: str, severity: str) -> None:
    assert [one.severity for one in found("misspelt-key", text)] == [severity] * bool(severity)


def test_no_tool_calls_a_thing_as_another_tool_does() -> None:
    for rows in packaged("lint/arguments.toml")["other_names"].values():
        others = " ".join(rows.values()).split()
        assert len({*others}) == len(others)
        assert not rows.keys() & {*others}


@pytest.mark.parametrize(
    ("model", "template", "wrong"),
    [
        ("Qwen/Qwen2.5-7B-Instruct", "llama3", True),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen", False),
        ("Qwen/Qwen2.5-7B-Instruct", "alpaca", False),
        ("Qwen/Qwen2.5-7B", "llama3", True),  # whose vocabulary lacks the tokens
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2_vl", False),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama2", True),
        ("meta-llama/Llama-3.2-11B-Vision-Instruct", "mllama", False),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen", False),
        ("01-ai/Yi-6B-Chat", "qwen", False),  # the same tokens
        ("our/assistant-chat", "llama3", False),
    ],
)
def test_a_template_is_of_the_models_family(model: str, template: str, wrong: bool) -> None:
    text = FACTORY.format(model) + f"template: {template}\n"
    assert bool(found("template-of-another-family", text)) == wrong
    for stage in ("stage: pt", "do_train: true"):
        other = found("template-of-another-family", text.replace("stage: sft", stage))
        used = "pt" not in stage or template == "llama3"  # whose end token LLaMA-Factory then writes
        assert bool(other) == (wrong and used)


@pytest.mark.parametrize(
    ("model", "pad", "end", "mlm", "wrong"),
    [
        ("a/b", PAD, "tokenizer.eos_token", False, True),
        ("a/b", PAD, "'</s>'", False, True),
        ("a/b", PAD, "tokenizer.eos_token", True, False),
        ("a/b", PAD, "'.'", False, False),  # no end in the rows
        ("a/b", f"{PAD}\nstop = tokenizer.eos_token_id", "'.'", False, False),
        ("a/b", "config.pad_token_id = tokenizer.eos_token_id", "tokenizer.eos_token", False, False),
        ("a/b", f"{PAD}\ntokenizer.pad_token = '<pad>'", "tokenizer.eos_token", False, False),
        ("a/b", f"if tokenizer.pad_token is None:\n    {PAD}", "tokenizer.eos_token", False, False),
        ("gpt2", f"if tokenizer.pad_token is None:\n    {PAD}", "tokenizer.eos_token", False, True),
        ("a/b", f"{PAD}\ndef group_texts(): ...", "tokenizer.eos_token", False, False),
    ],
)
def test_an_end_token_that_also_pads_is_masked(
    model: str, pad: str, end: str, mlm: bool, wrong: bool
) -> None:
    assert bool(found("end-token-is-not-learned", ENDS.format(model, pad, end, mlm))) == wrong


@pytest.mark.parametrize(
    ("model", "data", "rows", "template"),
    [
        ("{source: meta-llama/Llama-2-7b-hf}", "sequence_length: 16384", "warning", ""),
        ("{source: meta-llama/Llama-2-7b-hf}", "sequence_length: 4096", "", ""),
        ("{source: meta-llama/Llama-2-7b-hf, weights: random}", "sequence_length: 16384", "", ""),
        ("{source: gpt2, weights: random}", "sequence_length: 2048", "error", ""),
        ("{source: gpt2, weights: random, config: {n_positions: 2048}}", "sequence_length: 2048", "", ""),
        ("{source: Qwen/Qwen2.5-7B-Instruct}", "chat_template: llama-3", "", "warning"),
        ("{source: meta-llama/Llama-3.1-8B}", "chat_template: llama-3", "", ""),
        ("{source: mine/model}", "chat_template: llama-3, sequence_length: 65536", "", ""),
        ("{source: Qwen/Qwen2.5-7B}", "chat_template: alpaca", "", ""),
    ],
)
def test_rows_and_templates_of_jobs(
    model: str, data: str, rows: str, template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("{}\n")
    Path("job.yaml").write_text(f"name: a\nmodel: {model}\ndata:\n  {{train: a.jsonl, {data}}}\n")
    said = {one.rule: (one.severity, one.line) for one in shardwise.check("job.yaml").findings}
    said.pop("job-tokenizer", None)
    expected = {"job-rows-longer-than-positions": rows, "job-template-of-another-family": template}
    assert said == {rule: (severity, 4) for rule, severity in expected.items() if severity}
