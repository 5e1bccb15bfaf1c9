"""What a thirteenth blind walk found: settings that a file leaves out, lost updates, rows without an end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checked_files import checked
from shardwise.lint.finding import Finding


def found(folder: Path, **texts: str) -> list[Finding]:
    """Errors and warnings of files whose names are the words: `train_py`."""
    return [one for one in checked(folder, **texts) if one.severity != "note"]


def of_rule(name: str, folder: Path, **texts: str) -> list[str]:
    return [one.severity for one in found(folder, **texts) if one.rule == name]


OWN_TRAINER = """from transformers import HfArgumentParser, Trainer, TrainingArguments
from mine import model, rows, schedule

class OwnTrainer(Trainer):
    def {method}(self, *args, **kwargs):
        self.lr_scheduler = schedule(self.optimizer)
        return self.lr_scheduler

args = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()[0]
OwnTrainer(model=model, args=args, train_dataset=rows).train()
"""
WITH_FILE = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --output_dir out --learning_rate 1e-5 {}\n"
SCHEDULE = {
    "type": "WarmupDecayLR",
    "params": {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": "auto"},
}


@pytest.mark.parametrize(
    ("method", "flags", "params", "schedule", "expected"),
    [
        ("create_scheduler", "", {"lr": "auto"}, SCHEDULE, 1),
        ("create_scheduler", "", {"lr": "auto"}, None, 0),
        ("compute_loss", "--adam_beta1 0.9 --adam_beta2 0.95", {"lr": "auto"}, None, 1),
        ("compute_loss", "--adam_beta2 0.95", {"lr": "auto", "betas": "auto"}, None, 0),
        ("compute_loss", "--adam_beta2 0.999", {"lr": "auto"}, None, 0),  # which is the default
        ("compute_loss", "--weight_decay 0.1 --adam_epsilon 1e-6", {"lr": "auto"}, None, 2),
        ("compute_loss", "--weight_decay 0.01", {"lr": "auto", "torch_adam": True}, None, 0),
        ("compute_loss", "", {"eps": 1e-8}, None, 1),  # the rate is 0.001
        ("compute_loss", "", {"eps": 1e-8}, SCHEDULE, 0),  # the schedule sets it
        ("create_optimizer", "", {"lr": "auto"}, None, 1),
    ],
)
def test_what_the_deepspeed_file_leaves_out_is_named(
    tmp_path: Path, method: str, flags: str, params: dict[str, object], schedule: object, expected: int
) -> None:
    config = {"optimizer": {"type": "AdamW", "params": params}, "zero_optimization": {"stage": 2}}
    config |= {"scheduler": schedule} if schedule else {}
    texts = {"train_py": OWN_TRAINER.format(method=method), "run_sh": WITH_FILE.format(flags)}
    said = of_rule("file-replaces-argument", tmp_path, **texts, ds_json=json.dumps(config))
    assert said == ["warning"] * expected


LOOP = """import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import AutoModelForCausalLM
from mine import loader
{dtype}
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", {given}){after}
model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
optimizer = {optimizer}
for batch in loader:
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
ADAMW = "torch.optim.AdamW(model.parameters(), lr={})"


@pytest.mark.parametrize(
    ("given", "after", "optimizer", "expected"),
    [
        ("torch_dtype=torch.bfloat16", "", ADAMW.format("2e-5"), 1),
        ("dtype='bfloat16'", "", ADAMW.format("2e-5"), 1),
        ("torch_dtype=DTYPE", "", ADAMW.format("LR"), 1),  # which the other file has
        ("use_cache=False", ".to(torch.bfloat16)", ADAMW.format("1e-5"), 1),
        ("use_cache=False", "\nmodel.bfloat16()", ADAMW.format("1e-5"), 1),
        ("torch_dtype=torch.bfloat16", "", ADAMW.format("1e-3"), 0),
        ("torch_dtype=torch.float32", "", ADAMW.format("2e-5"), 0),
        ("use_cache=False", "", ADAMW.format("2e-5"), 0),
        ("torch_dtype=torch.bfloat16", ".float()", ADAMW.format("2e-5"), 0),
        ("torch_dtype=torch.bfloat16", "\nmodel = get_peft_model(model, c)", ADAMW.format("2e-5"), 0),
        ("torch_dtype=torch.bfloat16", "", "optimi.AdamW(model.parameters(), lr=2e-5, kahan_sum=True)", 0),
        ("torch_dtype=torch.bfloat16", "", "torch.optim.SGD(model.parameters(), lr=2e-5)", 0),
    ],
)
def test_updates_that_bf16_weights_lose_are_named(
    tmp_path: Path, given: str, after: str, optimizer: str, expected: int
) -> None:
    loop = LOOP.format(dtype="from config import DTYPE, LR", given=given, after=after, optimizer=optimizer)
    config = (
        "import torch\nLR = 2e-5\nDTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16\n"
    )
    said = of_rule("bf16-rounds-updates-away", tmp_path, train_py=loop, config_py=config)
    assert said == ["warning"] * expected


TRAINER = """import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from mine import rows
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2.5-7B", dtype=torch.bfloat16)
args = TrainingArguments("out", bf16=True, {})
Trainer(model=model, args=args, train_dataset=rows).train()
"""


@pytest.mark.parametrize(
    ("arguments", "command", "expected"),
    [
        ("learning_rate=2e-5", "torchrun --nproc_per_node 8 train.py\n", 1),
        ("num_train_epochs=1", "accelerate launch --multi_gpu --num_processes 8 train.py\n", 1),
        ("learning_rate=2e-5", "accelerate launch --use_deepspeed train.py\n", 0),
        ("learning_rate=2e-5", "accelerate launch train.py\n", 0),  # its file may shard, and keep masters
        ("learning_rate=2e-5, fsdp='full_shard'", "torchrun --nproc_per_node 8 train.py\n", 0),
        ("learning_rate=2e-5, optim='adamw_anyprecision'", "torchrun --nproc_per_node 8 train.py\n", 0),
        ("learning_rate=1e-3", "torchrun --nproc_per_node 8 train.py\n", 0),
    ],
)
def test_the_trainer_steps_bf16_weights_only_where_no_engine_keeps_masters(
    tmp_path: Path, arguments: str, command: str, expected: int
) -> None:
    script = TRAINER.format(arguments)
    said = of_rule("bf16-rounds-updates-away", tmp_path, train_py=script, run_sh=command)
    assert said == ["warning"] * expected


DATASET = """import torch
from datasets import load_dataset
from torch.utils.data import Dataset

TEMPLATE = '''### Question:
{{question}}

### Answer:
{end}'''

class Rows(Dataset):
    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.rows = [make(row) for row in load_dataset("mine")["train"]]

    def __getitem__(self, at):
        return self.tokenizer({row})

def make(row):
    return TEMPLATE.format(question=row["question"], answer=row["answer"])
"""
OWN_LOOP = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from rows import Rows

tokenizer = AutoTokenizer.from_pretrained("meta-llama/Meta-Llama-3-8B")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("meta-llama/Meta-Llama-3-8B")
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
for batch in Rows(tokenizer):
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("end", "row", "expected"),
    [
        ("{answer}", "self.rows[at]", 1),
        ("{answer}</s>", "self.rows[at]", 0),
        ("{answer}", "self.rows[at] + self.tokenizer.eos_token", 0),
        ("", "self.rows[at]", 0),  # a prompt
    ],
)
def test_a_template_of_a_dataset_without_an_end_is_named(
    tmp_path: Path, end: str, row: str, expected: int
) -> None:
    rows = DATASET.format(end=end, row=row).replace("{{", "{").replace("}}", "}")
    said = of_rule("answers-have-no-end", tmp_path, train_py=OWN_LOOP, rows_py=rows)
    assert said == ["warning"] * expected


BY_HAND = """from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen2-7B-Instruct")
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen2-7B-Instruct")

def make(row):
    question = tokenizer(f"<|im_start|>user\\n{{row['input']}}<|im_end|>\\n<|im_start|>assistant\\n")
    answer = tokenizer({text}, add_special_tokens=False)
    input_ids = question["input_ids"] + answer["input_ids"]{end}
    labels = [-100] * len(question["input_ids"]) + answer["input_ids"]{end}
    return {{"input_ids": input_ids, "labels": labels}}

rows = load_dataset("mine")["train"].map(make)
Trainer(model=model, train_dataset=rows, data_collator=DataCollatorForSeq2Seq(tokenizer)).train()
"""


@pytest.mark.parametrize(
    ("text", "end", "expected"),
    [
        ("f\"{row['output']}\"", "", 1),
        ("row['output']", "", 1),
        ("row['output']", " + [tokenizer.pad_token_id]", 0),
        ("row['output']", " + [tokenizer.eos_token_id]", 0),
        ("f\"{row['output']}<|im_end|>\"", "", 0),
    ],
)
def test_hand_made_labels_without_an_end_are_named(
    tmp_path: Path, text: str, end: str, expected: int
) -> None:
    said = of_rule("answers-have-no-end", tmp_path, train_py=BY_HAND.format(text=text, end=end))
    assert said == ["warning"] * expected


ZIPPED = """    return tokenizer([f"Question: {q}\\nAnswer: {a.strip()}{END}" for q, a in
                      zip(rows["question"], rows["ANSWER"])])
"""


@pytest.mark.parametrize(
    ("end", "field", "expected"), [("", "answer", 1), ("</s>", "answer", 0), ("", "title", 0)]
)
def test_rows_of_zipped_columns_have_their_names(tmp_path: Path, end: str, field: str, expected: int) -> None:
    head, _, tail = BY_HAND.format(text="row", end="").partition("    question =")
    body = ZIPPED.replace("{END}", end).replace("ANSWER", field)
    script = head.replace("(row)", "(rows)") + body + "\n" + tail[tail.index("rows = load") :]
    said = of_rule("answers-have-no-end", tmp_path, train_py=script)
    assert said == ["warning"] * expected


READS = """import yaml
from transformers import Trainer, TrainingArguments
from mine import model, rows
with open("settings.yaml") as file:
    config = yaml.safe_load(file)
part = config["first"]
Trainer(model=model, args=TrainingArguments("out", learning_rate={}), train_dataset=rows).train()
"""
SECTIONS = "base_model: a/b\nfirst:\n  learning_rate: {}\nother:\n  learning_rate: 2e-5\n"


@pytest.mark.parametrize(
    ("rate", "value", "expected"),
    [
        ('part["learning_rate"]', "3e-4", 1),
        ('config["first"]["learning_rate"]', "3e-4", 1),
        ('part.get("learning_rate")', "3e-4", 1),
        ('float(part["learning_rate"])', "3e-4", 0),
        ('part["learning_rate"]', "3.0e-4", 0),
        ('read(config)["learning_rate"]', "3e-4", 0),
    ],
)
def test_a_section_of_yaml_that_a_script_reads_has_texts_for_numbers(
    tmp_path: Path, rate: str, value: str, expected: int
) -> None:
    texts = {"train_py": READS.format(rate), "settings_yaml": SECTIONS.format(value)}
    assert of_rule("number-of-yaml-is-text", tmp_path, **texts) == ["error"] * expected


@pytest.mark.parametrize(("value", "expected"), [("tokenizer.pad_token_id", 1), ("label_pad_token_id", 0)])
def test_a_label_pad_token_is_no_pad_token(tmp_path: Path, value: str, expected: int) -> None:
    script = f"""from torch.nn.utils.rnn import pad_sequence
class Rows:
    def collate(self, batch, label_pad_token_id=None):
        return pad_sequence([one["labels"] for one in batch], padding_value={value})
loss.backward()
"""
    assert of_rule("labels-include-padding", tmp_path, train_py=script) == ["warning"] * expected


ACCELERATED = """import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from transformers import get_scheduler
from mine import model, rows

accelerator = Accelerator({accelerator})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sampler = {sampler}
loader = DataLoader(rows, batch_size=8, {loader})
loader, model, optimizer = accelerator.prepare(loader, model, optimizer)
total = {total}
scheduler = get_scheduler("linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=total)
scheduler = accelerator.prepare(scheduler)
for epoch in range(3):
    for step, batch in enumerate(loader):
        loss = model(**batch).loss{divided}
        accelerator.backward(loss)
        if (step + 1) % 8 == 0:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""
RIGHT = {
    "accelerator": "",
    "sampler": "None",
    "loader": "shuffle=True",
    "total": "3 * len(loader) // 8 * accelerator.num_processes",
    "divided": " / 8",
}
LAUNCH = "accelerate launch --multi_gpu --num_processes 4 train.py\n"


@pytest.mark.parametrize(
    ("rule", "other", "expected"),
    [
        ("loss-not-divided", {}, 0),
        ("loss-not-divided", {"divided": ""}, 1),
        ("loss-not-divided", {"divided": "", "accelerator": "gradient_accumulation_steps=8"}, 0),
        ("loss-not-divided", {"divided": "", "accelerator": "**given"}, 0),
        ("schedule-counts-otherwise", {}, 0),
        ("schedule-counts-otherwise", {"total": "3 * len(loader) // 8"}, 1),  # prepared on its own
        ("no-sampler", {}, 0),
        ("no-sampler", {"loader": "sampler=sampler", "sampler": "DistributedSampler(rows)"}, 1),
        ("no-sampler", {"loader": "sampler=torch.utils.data.RandomSampler(rows)"}, 0),
    ],
)
def test_what_an_accelerator_divides_or_does_not(
    tmp_path: Path, rule: str, other: dict[str, str], expected: int
) -> None:
    script = ACCELERATED.format(**RIGHT | other)
    assert of_rule(rule, tmp_path, train_py=script, run_sh=LAUNCH) == ["warning"] * expected
