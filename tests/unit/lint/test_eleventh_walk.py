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
