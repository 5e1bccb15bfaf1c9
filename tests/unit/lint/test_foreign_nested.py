# ruff: noqa: E501 - the files are text
"""Settings in parts of files: sections that a script takes step by step, and files that a command writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case

YAML = """\
sft:
  seed: 7
  model:
    path: a/b
    params:
      peft:
        r: 128
        alpha: 32
  trainer:
    params:
      output_dir: o
      per_device_train_batch_size: 4
      learning_rate: 1.0e-4
dpo:
  model:
    path: c/d
"""
RUN = """\
import yaml
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from peft import LoraConfig, get_peft_model
class Run:
    def __init__(self, config):
        self._load(path=config['model']['path'], config=config['model']['params'])
        self.args = config['trainer']['params']
    def _load(self, path, config):
        self.model = AutoModelForCausalLM.from_pretrained(path)
        if 'peft' in config:
            self.peft = LoraConfig(r=config['peft']['r'], lora_alpha=config['peft']['alpha'])
            self.model = get_peft_model(self.model, self.peft)
    def train(self):
        Trainer(self.model, args=TrainingArguments(**self.args)).train()
if __name__ == '__main__':
    with open('/w/c.yaml', 'r') as f:
        config_dict = yaml.safe_load(f)
        config_dict = config_dict['sft']
    run = Run(config=config_dict)
    run.train()
"""
TAKEN = {
    "model.source": "a/b",
    "model.lora.rank": 128,
    "model.lora.alpha": 32,
    "optimizer.learning_rate": 1e-4,
    "train.micro_batch": 4,
}
ORDER = "from transformers import Trainer, TrainingArguments\nrate = 1e-3\nfirst = rate\nrate = 2e-4\nTrainer('a/b', TrainingArguments('o', learning_rate=RATE)).train()\n"
COLLATES = "from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments\nfrom rows import encode\nTrainer('a/b', TrainingArguments('o'), train_dataset=data.map(encode), data_collator=DataCollatorForLanguageModeling(tok, mlm=False)).train()\n"
MASKS = "def encode(row):\n    ids, prompt = tok(row['text']).input_ids, tok(row['prompt']).input_ids\n    return {'input_ids': ids, 'label_ids': [-100] * len(prompt) + ids[len(prompt):]}\n"
SETTINGS = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: some/rows\ntemplate: qwen\ncutoff_len: 4096\nlearning_rate: ${RATE}\nseed: ${SEED}\noutput_dir: o\n"
HEAD = "RATE=5.0e-6\nSEED=$1\nout=conf/run-${SEED}.yaml\n"


def written(start: str, body: str = SETTINGS, end: str = "EOL") -> dict[str, str]:
    """A launch script that writes its file of settings."""
    return {"run.sh": f"{HEAD}{start}\n{body}{end}\nllamafactory-cli train $out\n"}


CASES: dict[str, Case] = {
    "a section, taken step by step": (
        {"c.yaml": YAML, "train.py": RUN},
        TAKEN,
        ("assumed: train.py reads c.yaml",),
        ("its value could not be read", "no such key: sft.trainer.params"),
    ),
    "a part that a section has not": (
        {"c.yaml": YAML.replace("peft:", "other:"), "train.py": RUN},
        {"model.lora": None, "model.source": "a/b"},
        (),
        ("lora_rank",),
    ),
    "the last line before a use": (
        {"train.py": ORDER.replace("RATE", "rate")},
        {"optimizer.learning_rate": 2e-4},
        (),
        ("could not be read",),
    ),
    "a line before the next": (
        {"train.py": ORDER.replace("RATE", "first")},
        {"optimizer.learning_rate": 1e-3},
        (),
        ("could not be read",),
    ),
    "a line of a branch": (
        {"train.py": ORDER.replace("RATE", "rate").replace("rate = 2e-4", "if chosen():\n    rate = 2e-4")},
        {"optimizer.learning_rate": None},
        ("learning_rate: its value could not be read",),
        (),
    ),
    "labels that the collator makes again": (
        {"train.py": COLLATES, "rows.py": MASKS},
        {"data.loss_on": "all"},
        ("masked() (data.loss_on=answers): DataCollatorForLanguageModeling makes the labels again",),
        ("conflict",),
    ),
    **{
        f"a file that a command writes: {start}": (
            written(start),
            {"model.source": "a/b", "data.sequence_length": 4096, "optimizer.learning_rate": 5e-6, "data.train": "some/rows"},
            ("seed",),
            ("is not there",),
        )
        for start in ("cat <<EOL > $out", "cat > $out <<EOL", 'cat <<EOL > "${out}"')
    },
    "a file whose text the shell leaves": (
        written("cat << 'EOL' > $out"),
        {"model.source": "a/b", "optimizer.learning_rate": None},
        (),
        (),
    ),
    "a file that the command does not name": (
        {"run.sh": f"{HEAD}cat <<EOL > other.yaml\n{SETTINGS}EOL\npython train.py --model_name_or_path c/d --learning_rate 1e-5 --output_dir o\n"},
        {"model.source": "c/d", "optimizer.learning_rate": 1e-5, "data.sequence_length": None},
        (),
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_parts_say(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(case, tmp_path, monkeypatch)
