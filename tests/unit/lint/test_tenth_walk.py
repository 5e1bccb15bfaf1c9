"""Files of Axolotl and LLaMA-Factory, and scripts that transformers 5 or the default collator stops."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.check import check, load
from shardwise.lint.setup import ModelFacts, Setup


def severities(folder: Path, rule: str, **texts: str) -> list[str]:
    files = [folder / f"{name[: name.rindex('_')]}.{name[name.rindex('_') + 1 :]}" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    documents, broken = load(files)
    return [one.severity for one in check(Setup(documents=documents), broken).findings if one.rule == rule]


AXOLOTL = {
    "base_model": "a/b",
    "datasets": "[{path: rows.jsonl, type: alpaca}]",
    "val_set_size": "0.05",
    "sequence_len": "2048",
    "sample_packing": "true",
    "adapter": "lora",
    "lora_r": "8",
    "lora_target_linear": "true",
    "gradient_accumulation_steps": "4",
    "micro_batch_size": "2",
    "num_epochs": "1",
    "optimizer": "adamw_bnb_8bit",
    "lr_scheduler": "cosine",
    "learning_rate": "0.0002",
    "bf16": "auto",
    "flash_attention": "true",
}
FACTORY = {
    "model_name_or_path": "a/b",
    "stage": "sft",
    "do_train": "true",
    "finetuning_type": "lora",
    "dataset": "rows",
    "template": "default",
    "cutoff_len": "2048",
    "output_dir": "out",
    "learning_rate": "1.0e-4",
    "bf16": "true",
}


def written(base: dict[str, str], changes: str) -> str:
    """The keys of a file with others; `-key` takes one out."""
    rows = dict(one.split(": ", 1) for one in changes.split("; ") if one and one[0] != "-")
    gone = {one[1:] for one in changes.split("; ") if one[:1] == "-"}
    return "".join(f"{key}: {value}\n" for key, value in (base | rows).items() if key not in gone)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("", []),
        ("-micro_batch_size", ["error"]),
        ("-gradient_accumulation_steps", ["error"]),
        ("-gradient_accumulation_steps; batch_size: 8", []),
        ("batch_size: 8", ["error"]),
        ("-learning_rate", ["error"]),
        ("-learning_rate; -micro_batch_size; -num_epochs", []),  # a part of a file
        ("save_strategy: epoch; save_steps: 100", ["error"]),
        ("save_strategy: steps; save_steps: 100", []),
        ("load_best_model_at_end: true; save_steps: 30; eval_steps: 50", ["error"]),
        ("load_best_model_at_end: true; save_steps: 100; eval_steps: 50", []),
        ("load_best_model_at_end: false; save_steps: 30; eval_steps: 50", []),
        ("load_best_model_at_end: true; save_steps: 0.3; eval_steps: 0.1", []),
        ("save_steps: 30; eval_steps: 50", []),
        ("test_datasets: [{path: a}]", ["error"]),
        ("test_datasets: [{path: a}]; val_set_size: 0", []),
        ("rl: dpo", ["error"]),
        ("rl: dpo; sample_packing: false", []),
        ("rl: kto; sample_packing: false", ["error"]),
        ("streaming: true; val_set_size: 0", ["error"]),
        ("streaming: true; val_set_size: 0; max_steps: 100", []),
        ("bf16: false", ["error"]),
        ("bf16: false; fp16: true", []),
        ("lora_qkv_kernel: true; load_in_8bit: true", ["error"]),
        ("-flash_attention", ["warning"]),
        ("-flash_attention; attn_implementation: sdpa", []),
        ("load_in_8bit: true; load_in_4bit: true", ["warning"]),
        ("val_set_size: 5", ["warning"]),
        ("val_set_size: 500", []),
        ("micro_batch_size: two", ["error"]),
        ("micro_batch_size: '2'", []),
        ("learning_rate: 2e-4", []),
        ("learning_rate: $RATE", []),
        ("flash_attention: sure", ["error"]),
        ("flash_attention: 'yes'", []),
    ],
)
def test_what_stops_axolotl(tmp_path: Path, changes: str, said: list[str]) -> None:
    assert severities(tmp_path, "axolotl-stops", a_yaml=written(AXOLOTL, changes)) == said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ("", []),
        ("adapter_name_or_path: out; finetuning_type: full", ["error"]),
        ("adapter_name_or_path: out", []),
        ("neat_packing: true; stage: dpo", ["error"]),
        ("neat_packing: true", []),
        ("neat_packing: true; packing: false", ["note"]),
        ("stage: ppo", ["error"]),
        ("stage: ppo; reward_model: out", []),
        ("streaming: true", ["error"]),
        ("streaming: true; max_steps: 10", []),
        ("val_size: 0.1; eval_dataset: rows", ["error"]),
        ("use_galore: true", ["error"]),
        ("use_galore: true; finetuning_type: full", []),
        ("use_dora: true; finetuning_type: full", ["error"]),
        ("quantization_bit: 6", ["error"]),
        ("quantization_bit: 6; quantization_method: hqq", []),
        ("mask_history: true; train_on_prompt: true", ["error"]),
        ("val_size: 10", ["warning"]),
        ("val_size: 0.1", []),
        ("cutoff_len: 2k", ["error"]),
        ("packing: yup", ["error"]),
    ],
)
def test_what_stops_llama_factory(tmp_path: Path, changes: str, said: list[str]) -> None:
    assert severities(tmp_path, "llama-factory-stops", a_yaml=written(FACTORY, changes)) == said


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (AXOLOTL, "optimizer: adamw_bnb_8bits", ["error"]),
        (AXOLOTL, "optimizer: muon", []),
        (AXOLOTL, "optimizer: adamw_torch_fused", []),
        (AXOLOTL, "lr_scheduler: cosin", ["error"]),
        (AXOLOTL, "lr_scheduler: rex", []),
        (FACTORY, "pref_loss: sigmod", ["error"]),
        (FACTORY, "mix_strategy: concat", []),
    ],
)
def test_words_of_tools(tmp_path: Path, base: dict[str, str], changes: str, said: list[str]) -> None:
    assert severities(tmp_path, "unknown-word", a_yaml=written(base, changes)) == said


def test_a_script_of_ones_own_is_not_axolotl(tmp_path: Path) -> None:
    text = "base_model: a/b\nbatch_size: 8\ngradient_accumulation_steps: 4\nstreaming: true\n"
    assert severities(tmp_path, "axolotl-stops", a_yaml=text) == []


CHAT = """import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained("a/b")
model = AutoModelForCausalLM.from_pretrained("a/b")
ids = {}
{}
"""
MADE = "tokenizer.apply_chat_template(rows(), return_tensors='pt')"


@pytest.mark.parametrize(
    ("made", "use", "hits"),
    [
        (MADE, "len(ids)", 1),
        (MADE, "model.generate(ids, max_new_tokens=5)", 1),
        (MADE, "model.generate(input_ids=ids)", 1),
        (f"{MADE}.to('cuda')", "ids.shape[-1]", 1),
        (MADE, "row = {'input_ids': ids, 'labels': 0}", 1),
        (MADE, "both = ids + [1]", 1),
        (MADE, "ids[:, 1:]", 1),
        ("[0]", f"row = {{'input_ids': {MADE}}}", 1),
        (MADE, "model.generate(**ids)", 0),
        (MADE, "ids['input_ids'].shape", 0),
        (MADE.replace(")", ", tokenize=False)").replace("rows(, tokenize=False)", "rows()"), "len(ids)", 0),
        (MADE.replace("'pt')", "'pt', return_dict=False)"), "len(ids)", 0),
        (MADE, "if hasattr(ids, 'input_ids'): ids = ids['input_ids']\nlen(ids)", 0),
        (MADE.replace("tokenizer.", "processor."), "len(ids)", 0),
    ],
)
def test_a_chat_template_gives_a_dict(tmp_path: Path, made: str, use: str, hits: int) -> None:
    text = CHAT.format(made, use)
    rule = "chat-template-gives-a-dict"
    assert severities(tmp_path, rule, a_py=text) == ["error"] * hits
    trusting = text.replace(
        'Tokenizer.from_pretrained("a/b"', 'Tokenizer.from_pretrained("a/b", trust_remote_code=True'
    )
    assert severities(tmp_path, rule, a_py=trusting) == ["warning"] * hits
    (tmp_path / "requirements.txt").write_text("transformers==4.50\n")
    assert severities(tmp_path, rule, a_py=text) == ["warning"] * hits


ROWS = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
tokenizer = AutoTokenizer.from_pretrained("a/b")
model = AutoModelForCausalLM.from_pretrained("a/b")
def encode(row):
    made = tokenizer(row["text"], truncation=True{})
    {}
    return made
data = load().map(encode)
args = TrainingArguments("out", per_device_train_batch_size={})
Trainer(model=model, args=args, train_dataset=data{}).train()
"""
LABELS = 'made["labels"] = made["input_ids"].copy()'


@pytest.mark.parametrize(
    ("padding", "labels", "batch", "given", "hits"),
    [
        ("", "pass", 4, "", 1),
        ("", LABELS, 4, ", processing_class=tokenizer", 1),
        ("", "pass", 4, ", processing_class=tokenizer", 0),
        (", padding='max_length'", LABELS, 4, "", 0),
        ("", LABELS, 1, "", 0),
        ("", LABELS, 4, ", data_collator=own", 0),
        ("", LABELS, 4, ", **rest", 0),
    ],
)
def test_rows_that_nothing_pads(
    tmp_path: Path, padding: str, labels: str, batch: int, given: str, hits: int
) -> None:
    text = ROWS.format(padding, labels, batch, given)
    assert severities(tmp_path, "rows-are-not-padded", a_py=text) == ["error"] * hits


LLAMA = """from transformers import AutoTokenizer, Trainer
from mine import load_tokenizer
name = "meta-llama/Llama-2-7b-hf"
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = {}
rows = tokenizer("a", padding=True)
"""


@pytest.mark.parametrize(
    ("made", "hits"), [("AutoTokenizer.from_pretrained(name)", 1), ("load_tokenizer(name)", 0)]
)
def test_a_tokenizer_that_another_file_makes_may_have_a_pad_token(
    tmp_path: Path, made: str, hits: int
) -> None:
    assert severities(tmp_path, "no-pad-token", a_py=LLAMA.format(made)) == ["error"] * hits


@pytest.mark.parametrize(("name", "hits"), [("run_sh", 0), ("train_py", 1)])
def test_a_line_of_python_in_a_script_for_the_shell_trains_nothing(
    tmp_path: Path, name: str, hits: int
) -> None:
    code = "import torch; torch.cuda.set_device(0); print(torch.ones(1))"
    texts = {"train_py": "import torch\nloss.backward()\n"}
    texts |= {"run_sh": f'torchrun --nproc_per_node 2 train.py\npython -c "{code}"\n' * (name == "run_sh")}
    texts["train_py"] += "torch.cuda.set_device(0)\n" * (name == "train_py")
    texts["run_sh"] = texts["run_sh"] or "torchrun --nproc_per_node 2 train.py\n"
    assert len(severities(tmp_path, "one-gpu-for-all", **texts)) == hits


HEAD = "from transformers import Trainer, TrainingArguments\nfrom trl import SFTConfig\n"
PARSER = """from transformers import HfArgumentParser
from trl import {0}
HfArgumentParser({0}).parse_args_into_dataclasses()
"""
OWN = """class DPOTrainer(Trainer):
    def __init__(self, beta=0.1, **others):
        super().__init__(**others)
"""


@pytest.mark.parametrize(("own", "found"), [("", ["error"]), (OWN, [])])
def test_a_class_of_the_script_is_none_of_trl(own: str, found: list[str], tmp_path: Path) -> None:
    script = f"{HEAD}{own or 'from trl import DPOTrainer'}\nDPOTrainer(beta=0.2).train()\n"
    assert severities(tmp_path, "argument-was-removed", train_py=script) == found


@pytest.mark.parametrize(("base", "found"), [("Trainer", ["error"]), ("Own", [])])
def test_what_a_class_gives_the_trainer_above_it(base: str, found: list[str], tmp_path: Path) -> None:
    script = f"{HEAD}class Mine({base}):\n    def __init__(self, t):\n        super().__init__(tokenizer=t)\n"
    assert severities(tmp_path, "argument-was-removed", train_py=script) == found


@pytest.mark.parametrize("config", ["SFTConfig", "KTOConfig", "GRPOConfig", "TrainingArguments"])
def test_flags_of_every_class_of_arguments_can_be_gone(config: str, tmp_path: Path) -> None:
    command = "torchrun train.py --evaluation_strategy steps\n"
    found = severities(tmp_path, "flag-was-removed", train_py=PARSER.format(config), run_sh=command)
    assert found == ["error"]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("--nnodes=2 --nproc_per_node=8", ["warning"]),
        ("--nnodes=2 --master_addr=10.0.0.1", []),
        ("--nnodes=2 --node_rank=$RANK --master_addr=10.0.0.1", []),
        ("--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=10.0.0.1:29500", []),
        ("--nnodes=1 --nproc_per_node=8", []),
        ("--nnodes=2 $MORE", []),
    ],
)
def test_nodes_need_an_address_and_their_numbers(flags: str, found: list[str], tmp_path: Path) -> None:
    assert severities(tmp_path, "nodes-meet-at-localhost", run_sh=f"torchrun {flags} train.py\n") == found


BY_HAND = """from accelerate import Accelerator
def main():
    accelerator = Accelerator()
    m, optimizer, loader = accelerator.prepare(m, optimizer, loader)
    for step, batch in enumerate(loader):
        accelerator.backward(m(batch) / 8)
        if (step + 1) % 8 == 0:
            optimizer.step()
            optimizer.zero_grad()
if __name__ == "__main__":
    main()
"""
STAGE = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\nnum_processes: 4\n"


@pytest.mark.parametrize(("config", "found"), [(STAGE, ["error"]), ("distributed_type: MULTI_GPU\n", [])])
def test_deepspeed_steps_at_each_backward_also_in_a_main(
    config: str, found: list[str], tmp_path: Path
) -> None:
    assert severities(tmp_path, "accumulate-is-missing", train_py=BY_HAND, ds_yaml=config) == found


@pytest.mark.parametrize(
    ("model", "found"),
    [("meta-llama/Llama-3.1-8B", ["warning"]), ("huggyllama/llama-30b", []), ("a/Mistral-7B-v0.1-GPTQ", [])],
)
def test_what_a_name_says_of_its_precision(model: str, found: list[str], tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"fp16": {"enabled": true}, "zero_optimization": {"stage": 2}}')
    documents, _ = load([tmp_path / "ds.json"])
    findings = check(Setup(documents=documents, model=ModelFacts(name=model))).findings
    assert [one.severity for one in findings if one.rule == "fp16-for-a-bf16-model"] == found
