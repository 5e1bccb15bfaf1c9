# ruff: noqa: E501 - the files are text
"""Files of the user's own: sections, switches, names, and values that a name alone explains."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

RANKS = "model_name_or_path: a/b\noutput_dir: o\nlora_r: 64\nlora_alpha: 128\n"
NO_LORA = {"model.lora": None}
HF = "from transformers import AutoModelForCausalLM, Trainer, TrainingArguments\nmodel = AutoModelForCausalLM.from_pretrained('a/b')\n"
ARGUMENTS = """\
from dataclasses import dataclass, field
from transformers import HfArgumentParser, TrainingArguments, Trainer, AutoModelForCausalLM
from peft import LoraConfig, get_peft_model
@dataclass
class Own:
    model_name_or_path: str = field(default="a/b")
    use_lora: bool = field(default=True)
    lora_r: int = field(default=8)
own, args = HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path)
if own.use_lora:
    model = get_peft_model(model, LoraConfig(r=own.lora_r))
Trainer(model=model, args=args).train()
"""
CASES: dict[str, Case] = {
    f"off: {key}": ({"a.yaml": f"{RANKS}{key}: false\n"}, NO_LORA, ("lora_r 64 is of no use",), ("say it",))
    for key in ("use_lora", "use_peft", "enable_lora", "lora")
}
CASES |= {
    "on": ({"a.yaml": f"{RANKS}use_lora: true\n"}, {"model.lora.rank": 64}, (), ("of no use",)),
    "off in a file that a script reads": (
        {"train.py": ARGUMENTS, "a.json": '{"use_lora": false, "lora_r": 64, "output_dir": "o"}'},
        NO_LORA,
        (),
        (),
    ),
    "off in a command": (
        {"run.sh": "python train.py --use_lora False --lora_r 64 --output_dir o\n", "train.py": ARGUMENTS},
        NO_LORA,
        (),
        (),
    ),
    "a tokenizer's folder": (
        {
            "train.py": "from transformers import AutoTokenizer\nfrom own import Net\ntok = AutoTokenizer.from_pretrained('./tokenizer')\nmodel = Net(dim=64)\nfor step in range(9):\n    model(step).backward()\n"
        },
        {"model.source": "fill-in-the-model"},
        ("model.source: not found in the files",),
        (),
    ),
    "all modules, and a system prompt, of a command": (
        {
            "run.sh": "swift sft --model a/b --target_modules all --lora_rank 8 --system 'You are a cat.' --learning_rate 1e-4\n"
        },
        {"model.lora.targets": "all-linear", "data.system": "You are a cat."},
        (),
        (),
    ),
    "a system prompt of LLaMA-Factory": (
        {
            "a.yaml": "model_name_or_path: a/b\nstage: sft\ntemplate: qwen\ndefault_system: You are a cat.\nlearning_rate: 1e-4\n"
        },
        {"data.system": "You are a cat."},
        (),
        (),
    ),
    "deepspeed's settings in place of its file": (
        {
            "a.yaml": "model_name_or_path: a/b\nstage: sft\nlearning_rate: 1e-4\ndeepspeed:\n  zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}\n  train_micro_batch_size_per_gpu: 1\n"
        },
        {"strategy.stage": 2, "strategy.offload_optimizer": "cpu"},
        (),
        ("deepspeed.zero_optimization",),
    ),
    "several data sets": (
        {
            "train.py": HF
            + "from datasets import concatenate_datasets, load_dataset\na = load_dataset('json', data_files='a.jsonl')\nrows = concatenate_datasets([a, load_dataset('o/b')])\nTrainer(model, TrainingArguments('o'), train_dataset=rows).train()\n"
        },
        {},
        ("write data.train, the files of all data sets that the script joins",),
        (),
    ),
    "adapters in a comment": (
        {
            "train.py": HF
            + "from peft import LoraConfig, get_peft_model\nconfig = LoraConfig(r=8)\n# model = get_peft_model(model, config)\nTrainer(model, TrainingArguments('o')).train()\n"
        },
        NO_LORA,
        (),
        (),
    ),
    "a script's path in a variable": (
        {
            "run.sh": 'DIR=$(dirname $0)\npython "$DIR/train.py" --model_name_or_path c/d --learning_rate 1e-4\n'
        },
        {"model.source": "c/d", "optimizer.learning_rate": 1e-4},
        (),
        (),
    ),
    "a python with its path": (
        {"run.sh": "A=1 /opt/x.y/bin/python3 -u train.py --model_name_or_path c/d --learning_rate 1e-4\n"},
        {"model.source": "c/d", "optimizer.learning_rate": 1e-4},
        (),
        (),
    ),
    "a python of a folder": (
        {"run.sh": ".venv/bin/python train.py --model_name_or_path c/d --learning_rate 1e-4\n"},
        {"model.source": "c/d", "optimizer.learning_rate": 1e-4},
        (),
        (),
    ),
    "sections with a job's names": (
        {
            "a.yaml": "model: {model_name_or_path: c/d}\ndata: {train_file: a.jsonl}\ntraining: {learning_rate: 1e-4, num_train_epochs: 2, per_device_train_batch_size: 2}\n"
        },
        {"optimizer.learning_rate": 1e-4, "train.epochs": 2, "train.micro_batch": 2},
        (),
        (),
    ),
    "on in a command": (
        {"run.sh": "python train.py --lora_r 64 --output_dir o\n", "train.py": ARGUMENTS},
        {"model.lora.rank": 64},
        (),
        (),
    ),
    "off by default, with a layer of the script's own": (
        {
            "train.py": f"{HF}p.add_argument('--use_lora', action='store_true')\np.add_argument('--lora_rank', type=int, default=16)\nlora_out = x @ a.T\nTrainer(model, TrainingArguments('o')).train()\n"
        },
        NO_LORA,
        (),
        ("write model.lora",),
    ),
    "a word for all modules": (
        {"a.yaml": f"{RANKS}target_modules: [all-linear]\n"},
        {"model.lora.targets": "all-linear"},
        (),
        (),
    ),
}

OWN = """\
sft_data_path: rows.jsonl
checkpoint_dir: null
model_config: {model_name: a/b, trust_remote_code: false}
sft_config:
  num_train_epochs: 2
  learning_rate: 1.0e-5
  bf16: true
  max_grad_norm: 0.5
  max_length: 8192
  lr_scheduler_type: cosine
dpo_config: {num_train_epochs: 1, learning_rate: 3.0e-6, max_grad_norm: 1.0}
"""
SECTION = {
    "model.source": "a/b",
    "train.epochs": 2,
    "optimizer.learning_rate": 1e-5,
    "optimizer.clip_norm": 0.5,
    "train.precision": "bf16",
    "data.sequence_length": 8192,
    "strategy": None,
}
BY_CONFIG = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from .config import load
class SFTTrainer:
    def __init__(self, config, model_config):
        self.config, self.model_config = config, model_config
    def run(self):
        model = AutoModelForCausalLM.from_pretrained(self.model_config.model_name)
        args = TrainingArguments(output_dir="o", num_train_epochs=self.config.num_train_epochs, learning_rate=self.config.learning_rate, bf16=self.config.bf16, max_grad_norm=self.config.max_grad_norm, weight_decay=0.1)
        Trainer(model=model, args=args).train()
"""
STARTS = "from .sft import SFTTrainer\nfrom .config import load\nc = load('c.yaml')\nSFTTrainer(c.sft_config, c.model_config).run()\n"
LORA = "lora: {r: 16, alpha: 32, target_modules: [q_proj, v_proj]}\n"
CASES |= {
    "a section": (
        {"c.yaml": OWN},
        SECTION | {"data.train": "rows.jsonl"},
        (),
        ("DeepSpeed", "sft_data_path"),
    ),
    "a section that a script reads elsewhere": (
        {"pkg/main.py": STARTS, "pkg/sft.py": BY_CONFIG, "c.yaml": OWN + "  # more\n"},
        SECTION | {"optimizer.weight_decay": 0.1},
        ("assumed, as the Trainer does",),
        ("TRL", "could not be read"),
    ),
    "a section of adapters": (
        {"c.yaml": OWN + LORA},
        {"model.lora.rank": 16, "model.lora.alpha": 32, "model.lora.targets": ["q_proj", "v_proj"]},
        (),
        (),
    ),
    "a section that is off": (
        {"c.yaml": OWN + LORA.replace("{", "{enabled: false, ")},
        NO_LORA,
        (),
        ("write model.lora",),
    ),
    "two sections of a training": (
        {"c.yaml": OWN.replace("dpo_config", "second")},
        {"optimizer.learning_rate": None},
        ("sft_config, second: give a file with the one of these sections that the run takes",),
        (),
    ),
    "a script that decides all": (
        {
            "train.py": f"{HF}Trainer(model, TrainingArguments('o', num_train_epochs=1, learning_rate=3e-4)).train()\n",
            "c.yaml": OWN,
        },
        {"train.epochs": 1, "optimizer.learning_rate": 3e-4, "optimizer.clip_norm": None},
        (),
        ("conflict",),
    ),
    "keys that DeepSpeed has, too": (
        {"c.yaml": "optimizer: adamw_torch\nlearning_rate: 1e-4\nmodel_name: a/b\ndata_path: rows.jsonl\n"},
        {"strategy": None, "optimizer.learning_rate": 1e-4, "model.source": "a/b"},
        (),
        ("DeepSpeed has no",),
    ),
}

CASES |= {
    f"keys that DeepSpeed has in a JSON: {name}": ({"c.json": text}, expected, (), ("DeepSpeed has no",))
    for name, text, expected in [
        (
            "of the user's own",
            '{"optimizer": "adamw_torch", "learning_rate": 1e-4, "model_name": "a/b", "scheduler": "cosine"}',
            {"strategy": None, "optimizer.learning_rate": 1e-4},
        ),
        (
            "DeepSpeed's",
            '{"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}',
            {"optimizer.clip_norm": 0, "optimizer.learning_rate": 1e-4, "train.global_batch": 8},
        ),
    ]
}

LEAST = """\
from dataclasses import dataclass, field
from transformers import HfArgumentParser, TrainingArguments, Trainer, AutoModelForCausalLM
@dataclass
class Arguments(TrainingArguments):
    output_dir: str = field(default="o")
    learning_rate: float = field(default=2e-5)
    min_learning_rate: float = field(default=2e-6)
    use_packing: bool = field(default=True)
    lr_scheduler_type: str = field(default="cosine")
(training_args,) = HfArgumentParser(Arguments).parse_args_into_dataclasses()
if CONDITION:
    training_args.lr_scheduler_type = "cosine_with_min_lr"
    training_args.lr_scheduler_kwargs = {"min_lr_rate": training_args.min_learning_rate / training_args.learning_rate}
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), training_args).train()
"""
KNOWN = "hasattr(training_args, 'min_learning_rate') and training_args.min_learning_rate is not None"
RUN = "python train.py\n"
CASES |= {
    "a schedule that is set later": (
        {"run.sh": RUN, "train.py": LEAST.replace("CONDITION", KNOWN)},
        {"optimizer.schedule": "cosine", "optimizer.final_fraction": 0.1, "data.packing": True},
        ("use_packing: not understood; write data.packing; until then true",),
        ("packing=false",),
    ),
    "a schedule that may be set later": (
        {"run.sh": RUN, "train.py": LEAST.replace("CONDITION", "is_long(rows)")},
        {"optimizer.final_fraction": None},
        ("write optimizer.final_fraction, optimizer.schedule, optimizer.warmup_steps",),
        (),
    ),
    "a schedule that is not set": (
        {"run.sh": RUN, "train.py": LEAST.replace("CONDITION", "training_args.use_packing is False")},
        {"optimizer.schedule": "cosine", "optimizer.final_fraction": 0},
        (),
        ("write optimizer",),
    ),
    "a least rate": (
        {
            "c.yaml": "model_name_or_path: a/b\nlearning_rate: 1e-5\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr: 1.0e-6}\n"
        },
        {"optimizer.final_fraction": 0.1},
        (),
        ("write optimizer.final_fraction",),
    ),
    **{
        f"a least rate {name}": (
            {
                "c.yaml": f"model_name_or_path: a/b\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {{min_lr: {text}}}\n"
            },
            {"optimizer.schedule": "cosine", "optimizer.final_fraction": share},
            (),
            (),
        )
        for name, text, share in [("of 0", "0", 0), ("that is no number", "some", None)]
    },
    "values by name": (
        {
            "train.py": f"{HF}BATCH_SIZE = 1\nMAX_LENGTH = 2048\nfrom torch.optim import AdamW\nAdamW(model.parameters(), lr=1e-4)\nloss.backward()\n"
        },
        {"train.micro_batch": 1, "train.global_batch": 1, "data.sequence_length": 2048},
        (
            "BATCH_SIZE 1: not understood; write train.micro_batch, train.global_batch; until then train.micro_batch 1",
            "MAX_LENGTH 2048: not understood; write data.sequence_length; until then 2048",
        ),
        (),
    ),
    "a model that a run has written": (
        {"c.yaml": "model_name_or_path: out/checkpoint-1900\noutput_dir: runs/new\nlearning_rate: 1e-5\n"},
        {"model.source": "./out/checkpoint-1900"},
        (),
        (),
    ),
    "a model in the output": (
        {"c.yaml": "model_name_or_path: out/best\noutput_dir: out/\nlearning_rate: 1e-5\n"},
        {"model.source": "./out/best"},
        (),
        (),
    ),
    "a model on the hub": (
        {"c.yaml": "model_name_or_path: out/best\noutput_dir: outputs\nlearning_rate: 1e-5\n"},
        {"model.source": "out/best"},
        (),
        (),
    ),
    "a template of the script's own": (
        {
            "train.py": f"{HF}T = '{{% for m in messages %}}<|im_start|>\\nx{{% endfor %}}'\ntokenizer.apply_chat_template(r, chat_template=T, max_length=64, truncation=True)\nTrainer(model, TrainingArguments('o')).train()\n"
        },
        {},
        ("tokenizer.chat_template (line 4)", "write data.chat_template, a file with this text"),
        ("text by",),
    ),
    "another command of a tool": (
        {
            "run.sh": "llamafactory-cli train --model_name_or_path a/b --num_train_epochs 2\nllamafactory-cli train --model_name_or_path a/b --num_train_epochs 50\n"
        },
        {"train.epochs": 2},
        ("launcher.more (line 2) `llamafactory-cli train`: write a job of its own for it",),
        (),
    ),
    "another script that trains": (
        {
            "run.sh": "python train.py\npython train_dpo.py\n",
            "train.py": f"{HF}Trainer(model, TrainingArguments('o')).train()\n",
        },
        {},
        ("launcher.more (line 2) `python train_dpo.py`",),
        (),
    ),
    "another command that trains nothing": (
        {
            "run.sh": "llamafactory-cli train --model_name_or_path a/b\nllamafactory-cli export x.yaml\npython evaluate.py\n"
        },
        {},
        (),
        ("launcher.more",),
    ),
    "a variable of the environment": (
        {
            "train.py": f"import os\n{HF}if os.environ.get('DATA', 'dolly') == 'dolly':\n    d = load_dataset('a/dolly')\nTrainer(model, TrainingArguments('o')).train()\n"
        },
        {"data.train": "a/dolly"},
        ("assumed: train.py finds no variable of the environment DATA (dolly)",),
        (),
    ),
    "a variable that the command sets": (
        {
            "run.sh": "DATA=x python train.py\n",
            "train.py": f"import os\n{HF}if os.environ.get('DATA', 'dolly') == 'dolly':\n    d = load_dataset('a/dolly')\nTrainer(model, TrainingArguments('o')).train()\n",
        },
        {"data.train": "fill-in-the-data.jsonl"},
        (),
        ("finds no variable",),
    ),
    "a loop that evaluates": (
        {
            "train.py": f"{HF}import torch\nval_rows = load('val')\no = torch.optim.AdamW(model.parameters(), lr=1e-4)\nloss.backward()\n"
        },
        {"data.eval_fraction": None},
        ("train.py:4: eval_dataset", "write data.eval"),
        ("evaluates on no rows",),
    ),
    "products in another format": (
        {
            "train.py": f"{HF}b = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4', bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float16)\nmodel = AutoModelForCausalLM.from_pretrained('a/b', quantization_config=b)\nTrainer(model, TrainingArguments('o', bf16=True)).train()\n"
        },
        {"train.precision": "bf16"},
        (
            "changed: train.py: bnb_4bit_compute_dtype (line 3) `torch.float16`: trained with products in train.precision",
        ),
        (),
    ),
    "a question whether there is a GPU": (
        {"train.py": f"{HF}Trainer(model, TrainingArguments('o', bf16=torch.cuda.is_available())).train()\n"},
        {"train.precision": "bf16"},
        (),
        ("the GPUs compute in bf16",),
    ),
    "a parser that is not used": (
        {
            "train.py": f"from transformers import HfArgumentParser\n{HF}Trainer(model, TrainingArguments('o')).train()\n"
        },
        {},
        (),
        ("gives it arguments",),
    ),
    "eval rows that no file has": (
        {
            "c.yaml": "model_name_or_path: a/b\nfinetuning_type: full\ntemplate: qwen\ndataset: one\neval_dataset: two\neval_strategy: steps\ndo_eval: true\n"
        },
        {"data.eval_fraction": None},
        ("write data.eval, or data.eval_fraction; until then 0.02",),
        ("do_eval:", "evaluates on no rows"),
    ),
    "a section of QLoRA": (
        {"c.yaml": "model_name_or_path: a/b\nlearning_rate: 1e-4\nqlora: {learning_rate: 2e-4}\n"},
        {"optimizer.learning_rate": 1e-4},
        (),
        ("say it", "did you mean"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_the_users_own(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        (
            "merge.py",
            "m = PeftModel.from_pretrained(b, 'x').merge_and_unload()\nm.save_pretrained('o')\n",
            "trains",
        ),
        ("infer.yaml", "model_name_or_path: a/b\nmax_new_tokens: 9\ntemperature: 0.1\n", "trains"),
        ("export.yaml", "model_name_or_path: a/b\nadapter_name_or_path: x\nexport_dir: o\n", "trains"),
        ("empty.py", "\n", "it is empty"),
    ],
)
def test_a_file_that_trains_nothing_is_refused(
    file: str, text: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match=what):
        made_of({file: text}, tmp_path, monkeypatch)
