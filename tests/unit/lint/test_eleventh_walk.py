"""What an eleventh blind walk found: wrong findings, and mistakes that no rule saw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.lint.check import check, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup


def found(folder: Path, **texts: str) -> list[Finding]:
    """Errors and warnings of files whose names are the words: `train_py`."""
    files = [folder / f"{name[: name.rindex('_')]}.{name[name.rindex('_') + 1 :]}" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    documents, broken = load([one for one in files if one.name != "requirements.txt"])
    findings = check(Setup(documents=documents), broken).findings
    return [one for one in findings if one.severity != "note"]


def rules(folder: Path, **texts: str) -> list[tuple[str, str]]:
    return [(one.rule, one.severity) for one in found(folder, **texts)]


STAGE_2 = json.dumps(
    {
        "zero_optimization": {"stage": 2, "overlap_comm": True},
        "bf16": {"enabled": "auto"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
    }
)
QUANTISED = """from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainingArguments
from transformers import default_data_collator
{imports}
bits = BitsAndBytesConfig(load_in_4bit=True)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", quantization_config=bits)
{adapters}
args = TrainingArguments(output_dir="out", learning_rate=1e-4, bf16=True, deepspeed="ds.json")
Trainer(model=model, args=args, train_dataset=rows(), data_collator=default_data_collator).train()
"""


@pytest.mark.parametrize(
    ("imports", "adapters", "expected"),
    [
        ("from rows import rows", "", [("quantised-without-adapter", "error")]),
        (
            "from datasets import load_from_disk as rows",
            "print(model)",
            [("quantised-without-adapter", "error")],
        ),
        (
            "from peft import PeftModel",
            "model = PeftModel.from_pretrained(model, 'a', is_trainable=True)",
            [],
        ),
        ("", "model.load_adapter('out/stage1', is_trainable=True)", []),
        ("from company.tuning import attach", "model = attach(model)", []),
        ("from .tuning import attach", "attach(model)", []),
    ],
)
def test_adapters_that_come_from_elsewhere(
    tmp_path: Path, imports: str, adapters: str, expected: list[tuple[str, str]]
) -> None:
    text = QUANTISED.format(imports=imports, adapters=adapters)
    given = [one for one in rules(tmp_path, train_py=text, ds_json=STAGE_2) if "quantised" in one[0]]
    assert given == expected


AXOLOTL = """base_model: Qwen/Qwen2.5-7B
datasets: [{path: rows.jsonl, type: alpaca}]
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 1
learning_rate: 0.0002  # as before
optimizer: adamw_torch_fused
val_set_size: 0.05
"""


@pytest.mark.parametrize(
    ("again", "severity"),
    [
        ("learning_rate: 0.0002", "warning"),
        ("learning_rate: 0.002", "error"),
        ("datasets: [{path: b, type: alpaca}]", "error"),
    ],
)
def test_a_key_twice_with_the_same_value(tmp_path: Path, again: str, severity: str) -> None:
    assert rules(tmp_path, axolotl_yaml=f"{AXOLOTL}{again}\n") == [("key-twice", severity)]


def test_a_key_twice_stops_deepspeed_with_any_value(tmp_path: Path) -> None:
    text = '{\n"train_micro_batch_size_per_gpu": 1,\n"gradient_clipping": 1.0,\n"gradient_clipping": 1.0,\n'
    text += '"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2, "overlap_comm": true}}'
    assert ("duplicate-key", "error") in rules(tmp_path, ds_json=text)


REMOVED = """from transformers import AdamW, AutoModelForCausalLM, TrainingArguments
model = AutoModelForCausalLM.from_pretrained("gpt2", use_auth_token=True)
args = TrainingArguments(output_dir="out", evaluation_strategy="no", overwrite_output_dir=True)
"""


@pytest.mark.parametrize(
    ("pins", "severity"),
    [
        ("tokenizers==0.19.1", "warning"),
        ("huggingface-hub<1.0", "warning"),
        ("tokenizers==0.23.2", "error"),
        ("huggingface_hub>=0.30", "error"),
        ("transformers==5.99", "error"),
        ("transformers==4.44", "warning"),
    ],
)
def test_a_pin_that_excludes_transformers_5(tmp_path: Path, pins: str, severity: str) -> None:
    given = found(tmp_path, requirements_txt=pins, train_py=REMOVED)
    assert {one.severity for one in given if "removed" in one.rule} == {severity}
    if severity == "warning":  # one cause, one finding
        assert len(given) == 1
        assert given[0].fix.count("line ") == 3


LATER = """from transformers import AutoModelForCausalLM
class Loader:
    def __init__(self):
        self.kwargs = {{"load_in_8bit": True}}
    def distributed(self):
        {changes}
    def load(self):
        return AutoModelForCausalLM.from_pretrained("gpt2", **self.kwargs)
"""


def test_an_argument_that_is_taken_out_later(tmp_path: Path) -> None:
    assert not rules(tmp_path, a_py=LATER.format(changes='self.kwargs.pop("load_in_8bit", None)'))
    assert rules(tmp_path, b_py=LATER.format(changes="pass")) == [("argument-was-removed", "error")]


def test_settings_of_a_tool_that_is_not_read_are_no_error(tmp_path: Path) -> None:
    assert not rules(tmp_path, tune_yaml="model:\n  _component_: torchtune.models.qwen2.qwen2_7b\n")


COLLATED = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-0.5B")
def collate(rows):
    return tok([{read} for row in rows], padding=True, return_tensors="pt")
class Weighted(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        weight = {weight}
        return (model(**inputs).loss * weight).mean()
model = AutoModelForCausalLM.from_pretrained({name})
args = TrainingArguments(output_dir="out"{more})
Weighted(model=model, args=args, train_dataset=rows(), data_collator={by}).train()
"""
PLAIN = {
    "read": "row['input_ids']",
    "weight": "1",
    "name": "'Qwen/Qwen2.5-0.5B'",
    "more": "",
    "by": "collate",
}


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, False),
        ({"read": "row['prompt'] + row['answer']"}, True),
        ({"read": "row['label']"}, False),
        ({"read": "row.get('prompt', '')"}, False),
        ({"read": "row['prompt'] if 'prompt' in row else ''"}, False),
        ({"read": "row['prompt']", "more": ", remove_unused_columns=False"}, False),
        ({"read": "row['prompt']", "name": "path()"}, False),
        ({"weight": "inputs.pop('weight')", "by": "None"}, True),
        ({"weight": "inputs['weight']"}, False),  # the script's own collator may make it
        ({"weight": "inputs.pop('weight', 1)", "by": "None"}, False),
        ({"weight": "inputs['labels'].numel()", "by": "None"}, False),
        ({"by": "DataCollatorWithPadding(tok)"}, False),
    ],
)
def test_columns_that_the_trainer_drops(tmp_path: Path, changes: dict[str, str], lost: bool) -> None:
    given = rules(tmp_path, train_py=COLLATED.format(**PLAIN | changes))
    assert (("columns-are-dropped", "error") in given) is lost


LOOP = """import torch
import torch.nn.functional as F
from transformers import {model}
model = {model}.from_pretrained("gpt2")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for batch in loader:
    {forward}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOGITS = """ids, labels = batch["input_ids"], batch["labels"]
    logits = model(ids).logits
    {shift}
    loss = F.cross_entropy(logits.view(-1, 50257), labels.view(-1))"""
TWICE = """ids, labels = batch["input_ids"][:, :-1], batch["input_ids"][:, 1:]
    loss = model(input_ids=ids, labels=labels).loss"""


@pytest.mark.parametrize(
    ("model", "forward", "expected"),
    [
        ("AutoModelForCausalLM", LOGITS.format(shift="pass"), ["warning"]),
        ("AutoModelForCausalLM", LOGITS.format(shift="logits, labels = logits[:, :-1], labels[:, 1:]"), []),
        ("AutoModelForMaskedLM", LOGITS.format(shift="pass"), []),
        ("AutoModelForCausalLM", TWICE, ["error"]),
        ("AutoModelForCausalLM", "loss = model(**batch, labels=batch['input_ids']).loss", []),
        ("AutoModelForSeq2SeqLM", TWICE, []),
    ],
)
def test_labels_are_shifted_once(tmp_path: Path, model: str, forward: str, expected: list[str]) -> None:
    found_ = rules(tmp_path, train_py=LOOP.format(model=model, forward=forward))
    assert [severity for rule, severity in found_ if rule == "shift-of-labels"] == expected


ADAPTED = """import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2")
{before}
model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
{after}
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
MADE = "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)"


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(MADE, "", True), ("", MADE, False), (MADE, MADE, False)]
)
def test_an_optimizer_before_the_adapters(tmp_path: Path, before: str, after: str, expected: bool) -> None:
    given = rules(tmp_path, train_py=ADAPTED.format(before=before, after=after))
    assert (("optimizer-made-early", "error") in given) is expected


WRAPPED = """import os
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
{wrap}
for epoch in range(3):
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = {call}(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    raw.generate(batch)
"""


@pytest.mark.parametrize(
    ("wrap", "call", "expected"),
    [
        ("ddp = DDP(raw, device_ids=[rank])", "raw", True),
        ("ddp = DDP(raw, device_ids=[rank])", "ddp", False),
        ("model = DDP(raw) if several else raw", "model", False),
        ("raw = DDP(raw)", "raw", False),
        ("ddp = DDP(raw)\ntrain(ddp)", "raw", False),
    ],
)
def test_a_forward_past_ddp(tmp_path: Path, wrap: str, call: str, expected: bool) -> None:
    given = rules(tmp_path, train_py=WRAPPED.format(wrap=wrap, call=call))
    assert (("goes-past-ddp", "error") in given) is expected


TEXTS = """from datasets import load_dataset
from transformers import AutoTokenizer
from trl import SFTConfig, SFTTrainer
tok = AutoTokenizer.from_pretrained("Qwen/Qwen2.5-7B-Instruct")
def made(row):
    text = tok.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt={begins})
    return {{"text": text{more}}}
rows = load_dataset("a/b", split="train").map(made)
SFTTrainer(model="Qwen/Qwen2.5-7B-Instruct", args=SFTConfig(output_dir="out"), train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("begins", "more", "expected"),
    [("True", "", True), ("False", "", False), ("True", " + row['answer']", False)],
)
def test_a_text_that_ends_with_the_beginning_of_an_answer(
    tmp_path: Path, begins: str, more: str, expected: bool
) -> None:
    given = rules(tmp_path, train_py=TEXTS.format(begins=begins, more=more))
    assert (("another-answer-begins", "warning") in given) is expected
