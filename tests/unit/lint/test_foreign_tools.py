# ruff: noqa: E501 - the files are text
"""What each tool's own words and defaults mean in a job: files in, values of the job and sentences out."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreign_files import Case, check_case, made_of
from shardwise.errors import JobError

TOKENIZED = """\
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained({tokenizer})
Trainer(AutoModelForCausalLM.from_pretrained("a/b"), TrainingArguments("o", per_device_train_batch_size=1)).train()
"""
ADAPTED = """\
from trl import ModelConfig, SFTConfig, SFTTrainer, TrlParser, get_peft_config
def main(args, model_args):
    adapters = None
    if model_args.use_peft:
        adapters = get_peft_config(model_args)
    SFTTrainer(model_args.model_name_or_path, args=args, train_dataset=rows(), peft_config=adapters).train()
main(*TrlParser((SFTConfig, ModelConfig)).parse_args_and_config())
"""
SFT = "from trl import SFTConfig, SFTTrainer\nSFTTrainer('a/b', args=SFTConfig('o'), train_dataset=rows()).train()\n"
TRAINER = """\
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained('a/b')
Trainer(model, TrainingArguments('o', per_device_train_batch_size=1), {}).train()
"""
ZERO = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 3\n"
LOOP = """\
import torch
from accelerate import Accelerator
class Rows(torch.utils.data.Dataset):
    def __getitem__(self, index):
        row = self.rows[index]
        ids = (row["Question"] + row["CoT"])[-self.max_length:]
        return {"input_ids": ids, "labels": [-100] * len(ids["input_ids"]) + ids}
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup
accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("a/b")
loader = DataLoader(Rows(), batch_size=2)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
steps, warmup = len(loader) * 3, 0.05
schedule = get_cosine_schedule_with_warmup(optimizer, int(warmup * steps), steps)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(3):
    for batch in loader:
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        schedule.step()
"""
AXOLOTL = "base_model: a/b\ndatasets:\n  - path: d.jsonl\n    type: sharegpt\n    conversation: {}\nmicro_batch_size: 1\n"
CASES: dict[str, Case] = {
    "ms-swift's model_name is no model": (
        {"run.sh": "swift sft --model a/b --model_name bot --model_author me --dataset d.jsonl\n"},
        {"model.source": "a/b"},
        ("swift.model_name (line 1)", "self-cognition"),
        ("conflict",),
    ),
    "other tools' model_name is the model": (
        {"run.sh": "accelerate launch sft.py --model_name a/b --dataset_name c/d\n"},
        {"model.source": "a/b"},
        (),
        (),
    ),
    "TRL's tokenizer": (
        {
            "a.yaml": "model_name_or_path: a/b\ntokenizer_name_or_path: a/chat\nper_device_train_batch_size: 1\n"
        },
        {"model.source": "a/b", "model.tokenizer": "a/chat"},
        (),
        (),
    ),
    "a script's tokenizer": (
        {"train.py": TOKENIZED.format(tokenizer='"a/chat"')},
        {"model.source": "a/b", "model.tokenizer": "a/chat"},
        (),
        (),
    ),
    "the model's own tokenizer": (
        {"train.py": TOKENIZED.format(tokenizer='"a/b"')},
        {"model.source": "a/b", "model.tokenizer": None},
        (),
        (),
    ),
    "a tokenizer that only a run knows": (
        {"train.py": TOKENIZED.format(tokenizer="pick()")},
        {"model.tokenizer": None},
        (),
        ("model.tokenizer",),
    ),
    "ms-swift leaves out rows that are too long": (
        {"run.sh": "swift sft --model a/b --dataset d.jsonl --max_length 512\n"},
        {"data.too_long": "drop", "data.eval_fraction": 0, "model.lora.dropout": 0.05},
        (),
        (),
    ),
    "ms-swift 2 holds out 1 %": (
        {"run.sh": "swift sft --model_type qwen-7b --model_id_or_path a/b --dataset d.jsonl\n"},
        {"data.too_long": "drop", "data.eval_fraction": 0.01, "model.lora.dropout": 0.05},
        ("assumed, as ms-swift 2 does",),
        (),
    ),
    "ms-swift cuts the beginning": (
        {"run.sh": "swift sft --model a/b --dataset d.jsonl --truncation_strategy left\n"},
        {},
        ("changed: run.sh: truncation_strategy (line 1) `left`: trained on another part",),
        (),
    ),
    "TRL's ModelConfig in a script": (
        {
            "run.sh": "accelerate launch train.py --model_name_or_path meta-llama/Llama-2-7b-hf --use_peft True --lora_r 4\n",
            "train.py": ADAPTED,
        },
        {
            "model.lora.rank": 4,
            "model.lora.alpha": 32,
            "model.lora.dropout": 0.05,
            "model.lora.targets": ["q_proj", "v_proj"],
        },
        ("assumed, as TRL's ModelConfig does",),
        (),
    ),
    "TRL's ModelConfig without adapters": (
        {"run.sh": "accelerate launch train.py --model_name_or_path a/b\n", "train.py": ADAPTED},
        {"model.lora": None},
        (),
        ("ModelConfig",),
    ),
    "TRL before 0.22, by a word that is gone": (
        {"train.py": SFT.replace("'o'", "'o', max_seq_length=64")},
        {"train.checkpointing": None, "data.sequence_length": 64},
        (),
        (),
    ),
    "no rows to evaluate on": (
        {
            "train.py": f"from datasets import load_dataset\nrows = load_dataset('json', data_files=pick())\n{TRAINER.format('eval_dataset=None')}"
        },
        {"data.eval_fraction": 0, "data.eval": None},
        ("write data.train",),
        ("write data.eval",),
    ),
    "evaluation is off": (
        {
            "run.sh": "python train.py --evaluation_strategy no --output_dir o\n",
            "train.py": TRAINER.format("eval_dataset=rows()"),
        },
        {"data.eval_fraction": 0, "data.eval": None},
        (),
        ("write data.eval",),
    ),
    "evaluation is on": (
        {"train.py": TRAINER.format("eval_dataset=rows()").replace("'o'", "'o', eval_strategy='steps'")},
        {"data.eval_fraction": None},
        ("write data.eval",),
        (),
    ),
    "evaluation is off, whatever the rows": (
        {"train.py": TRAINER.format("eval_dataset=rows()").replace("'o'", "'o', eval_steps=50")},
        {"data.eval_fraction": 0, "train.eval_every": None},
        (),
        ("data.eval,", "write data.eval"),
    ),
    "arguments that another file makes": (
        {
            "train.py": "from transformers import Trainer\nfrom own import make\n"
            "from transformers import AutoModelForCausalLM\nm = AutoModelForCausalLM.from_pretrained('a/b')\n"
            "Trainer(m, make(), eval_dataset=rows()).train()\n"
        },
        {"data.eval_fraction": None},
        ("write data.eval",),
        (),
    ),
    "evaluation is off, and a share held out": (
        {"train.py": TRAINER.format("eval_dataset=r.train_test_split(test_size=0.2)['test']")},
        {"data.eval_fraction": 0.2, "train.eval_every": 0},
        (),
        (),
    ),
    "a share is held out, without an evaluation": (
        {"a.yaml": "model_name_or_path: a/b\nval_size: 0.1\neval_strategy: no\noutput_dir: o\n"},
        {"data.eval_fraction": 0.1},
        (),
        (),
    ),
    "nothing is saved but the end": (
        {"a.yaml": "model_name_or_path: a/b\nsave_strategy: no\nsave_steps: 7\noutput_dir: o\n"},
        {"train.save_every": 0},
        ("shardwise's own: ", "train.keep 2"),
        ("train.save_every 100",),
    ),
    "saving comes from shardwise": (
        {"a.yaml": "model_name_or_path: a/b\nsave_strategy: epoch\nval_size: 0.1\noutput_dir: o\n"},
        {"train.save_every": None},
        (
            "changed: a.yaml: save_strategy (line 2) `epoch`: train.save_every counts steps; until then 100",
            "train.eval_every 50, train.keep 2, tracking [tensorboard]",
        ),
        (),
    ),
    "Accelerate fills in the clipping of DeepSpeed": (
        {"a.yaml": ZERO, "train.py": LOOP},
        {"optimizer.clip_norm": 1},
        ("assumed, as Accelerate with DeepSpeed does: optimizer.clip_norm=1",),
        (),
    ),
    "Accelerate fills in the clipping of its plugin": (
        {
            "train.py": LOOP.replace(
                "Accelerator()",
                "Accelerator(mixed_precision='bf16', deepspeed_plugin=DeepSpeedPlugin(zero_stage=2))",
            )
        },
        {"optimizer.clip_norm": 1},
        (),
        ("without gradient_clipping",),
    ),
    "a DeepSpeed file without clipping": (
        {
            "a.yaml": ZERO.replace("zero_stage: 3", "deepspeed_config_file: data/ds.json"),
            "data/ds.json": '{"zero_optimization": {"stage": 3}}',
            "train.py": LOOP,
        },
        {"optimizer.clip_norm": 0},
        (),
        ("Accelerate with DeepSpeed",),
    ),
    "Accelerate alone clips nothing": (
        {"run.sh": "accelerate launch --multi_gpu train.py\n", "train.py": LOOP},
        {"optimizer.clip_norm": 0},
        (),
        ("Accelerate with DeepSpeed",),
    ),
    "a loop's warm-up is a share of its steps": (
        {"train.py": LOOP},
        {"optimizer.warmup_steps": 0.05},
        (),
        ("num_warmup_steps",),
    ),
    "a loop's rows": (
        {"train.py": LOOP},
        {"data.loss_on": "answers"},
        (
            "to do: train.py: text by Rows (line 3) `CoT, Question`",
            "changed: train.py: truncation_side (line 6): trained on another",
        ),
        (),
    ),
    "names in brackets stand for others": (
        {
            "run.sh": "python train.py --model_path [meta-llama/Llama-3.1-8B] --data_path '<your data>' --output_dir o\n"
        },
        {"model.source": "fill-in-the-model", "data.train": "fill-in-the-data.jsonl"},
        (
            "to do: run.sh: model_path (line 1) `[meta-llama/Llama-3.1-8B]`: placeholder of its author; write model.source",
            "`<your data>`: placeholder of its author; write data.train",
        ),
        ("not found in the files",),
    ),
    "a list in brackets is a list": (
        {
            "a.yaml": "model_name_or_path: a/b\nlora_target: '[q_proj, v_proj]'\nfinetuning_type: lora\noutput_dir: o\n"
        },
        {"model.lora.targets": ["q_proj", "v_proj"]},
        (),
        ("placeholder",),
    ),
    "what only a run knows of a script, another file may say": (
        {
            "a.yaml": "model_name_or_path: a/b\noptimizer_type: adamw_torch\nwarmup_ratio: 0.03\noutput_dir: o\neval_path: ''\n",
            "train.py": TRAINER.format("").replace("'o',", "'o', optim=pick(), warmup_ratio=pick(),"),
        },
        {"optimizer.name": None, "data.eval_fraction": 0},
        (),
        ("could not be read", "changed", "data.eval:"),
    ),
    "the JSON of --fsdp_config is not DeepSpeed's": (
        {
            "run.sh": "torchrun --nproc_per_node 8 train.py --fsdp 'full_shard auto_wrap' --fsdp_config fsdp.json\n",
            "train.py": TRAINER.format(""),
            "fsdp.json": '{"fsdp_transformer_layer_cls_to_wrap": ["L"], "activation_checkpointing": true}',
        },
        {"strategy": "fsdp2", "optimizer.clip_norm": None, "train.checkpointing": "full"},
        (),
        ("conflict", "DeepSpeed without"),
    ),
    "LLaMA-Factory's own script is none of the user's": (
        {
            "run.sh": "torchrun --nproc_per_node 2 src/train.py a.yaml\n",
            "a.yaml": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ncutoff_len: 64\nper_device_train_batch_size: 1\n",
            "src/train.py": "from llamafactory.train.tuner import run_exp\nrun_exp()\n",
        },
        {
            "data.packing": False,
            "optimizer.beta2": 0.999,
            "train.checkpointing": "full",
            "train.global_batch": 2,
        },
        ("assumed, as LLaMA-Factory does",),
        (),
    ),
    "Axolotl's conversation": (
        {"a.yaml": AXOLOTL.format("alpaca")},
        {"data.chat_template": "alpaca"},
        ("changed: a.yaml:5: datasets.0.conversation: alpaca",),
        ("no such key",),
    ),
    "Axolotl's conversation of another name": (
        {"a.yaml": AXOLOTL.format("vicuna_v1.1")},
        {"data.chat_template": None},
        ("to do: a.yaml: datasets.0.conversation (line 5) `vicuna_v1.1`: write data.chat_template",),
        (),
    ),
    "remote code needs no answer": (
        {"train.py": TRAINER.format("eval_dataset=None").replace("'a/b'", "'a/b', trust_remote_code=pick()")},
        {},
        (),
        ("trust_remote_code",),
    ),
    "keyword arguments that quantize nothing": (
        {"train.py": TRAINER.format("eval_dataset=None").replace("'a/b'", "'a/b', **pick()")},
        {},
        (),
        ("model.quantization",),
    ),
    "keyword arguments that may quantize": (
        {
            "train.py": "from transformers import BitsAndBytesConfig\n"
            + TRAINER.format("").replace("'a/b'", "'a/b', **pick()")
        },
        {},
        ("write model.quantization",),
        (),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tools(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(CASES[name], tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("pin", "checkpointing"),
    [
        ("", "full"),
        ("torch\ntrl[peft] == 0.12.0\n", None),
        ("trl<0.20\n", None),
        ("trl==0.22.1\n#trl==0.1\n", "full"),
        ("other-trl==0.1\n", "full"),
    ],
)
def test_trl_recomputes_since_0_22(
    pin: str, checkpointing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "requirements.txt").write_text(pin)
    case: Case = ({"scripts/train.py": SFT}, {"train.checkpointing": checkpointing}, (), ())
    check_case(case, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("a.yml", "base_model: a/b\nmicro_batch_size: two\n", "a.yml:2: micro_batch_size"),
        ("a.yaml", "model_name_or_path: a/b\nlearning_rate: fast\n", "a.yaml:2: learning_rate"),
        ("run.sh", "python a.py --output_dir o --num_train_epochs three\n", "run.sh:1: num_train_epochs"),
    ],
)
def test_a_word_for_a_number_stops(
    name: str, text: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(JobError, match="is no number") as caught:
        made_of({name: text}, tmp_path, monkeypatch)
    assert where in str(caught.value)


def test_words_that_tools_take_for_numbers_do_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "model_name_or_path: a/b\nmax_samples: none\ngradient_accumulation_steps: auto\nwarmup_steps: $W\n"
    made, _ = made_of({"a.yaml": text}, tmp_path, monkeypatch)
    assert "a/b" in made


def test_what_is_not_read_names_what_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = "model:\n  _component_: torchtune.models.llama2.qlora_llama2_7b\nepochs: 1\n"
    with pytest.raises(JobError, match="a file of torchtune") as caught:
        made_of({"a.yaml": recipe}, tmp_path, monkeypatch)
    for tool in (
        "Trainer",
        "TRL",
        "LLaMA-Factory",
        "Axolotl",
        "ms-swift",
        "Unsloth",
        "DeepSpeed",
        "plain loops",
    ):
        assert tool in str(caught.value)


def test_an_empty_file_s_fix_is_not_another_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(JobError, match="no `key: value` lines") as caught:
        made_of({"a.yaml": ""}, tmp_path, monkeypatch)
    assert "shardwise check" not in str(caught.value)


def test_comments_of_the_job_are_no_longer_than_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = "".join(f"a_very_long_unknown_name_{place}: 1\n" for place in range(12))
    text, said = made_of({"a.yaml": f"model_name_or_path: a/b\n{unknown}"}, tmp_path, monkeypatch)
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert max(map(len, said)) > 300 > 110 >= max(map(len, comments))
    joined = " ".join(line.removeprefix("#").strip() for line in comments)
    assert all(" ".join(one.split()) in joined for one in said), "nothing is lost"
