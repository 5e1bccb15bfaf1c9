"""Jobs from files of other tools: every key becomes a key of the job, or is listed with a reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.errors import JobError
from shardwise.job import json_schema
from shardwise.job.load import load_job
from shardwise.job.schema import SAMPLE_FIELDS, Job, StrategySpec
from shardwise.lint.foreign import TABLE, translation

MAMBA = """\
model_type: "mamba"
num_gpus: 4
model: {vocab_size: 50257, max_seq_length: 4096, d_model: 4864, n_layers: 45, d_state: 16, d_conv: 4,
  expand: 2}
training: {batch_size: 1, gradient_accumulation_steps: 8, learning_rate: 1e-4, max_steps: 200000}
"""
DEEPSPEED = {
    "train_batch_size": 64,
    "optimizer": {"type": "AdamW", "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 2e-5, "warmup_num_steps": 100, "total_num_steps": 1000},
    },
    "fp16": {"enabled": True, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": 2e8,
        "overlap_comm": True,
    },
    "wall_clock_breakdown": False,
}
SCRIPT = """\
from transformers import AutoModelForCausalLM, TrainingArguments
from peft import LoraConfig
model = AutoModelForCausalLM.from_pretrained("EleutherAI/gpt-neo-2.7B", load_in_8bit=True)
lora = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
args = TrainingArguments(
    output_dir="./outputs", per_device_train_batch_size=2, gradient_accumulation_steps=8, bf16=True,
    num_train_epochs=3, gradient_checkpointing=True, deepspeed="ds.json", optim="adafactor",
)
"""
ACCELERATE = """\
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_activation_checkpointing: true}
mixed_precision: bf16
num_processes: 8
"""
FACTORY = """\
model_name_or_path: meta-llama/Llama-2-7b-hf
stage: sft
finetuning_type: lora
lora_rank: 32
lora_target: all
quantization_bit: 4
dataset: my_data.jsonl
template: llama2
cutoff_len: 2048
per_device_train_batch_size: 1
gradient_accumulation_steps: 16
learning_rate: 1.0e-4
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
"""
AXOLOTL = """\
base_model: HuggingFaceTB/SmolLM2-360M
adapter: qlora
lora_r: 16
lora_target_linear: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
sequence_len: 1024
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_torch
flash_attention: true
"""


def job_of(folder: Path, *files: str) -> tuple[Job, list[str]]:
    text, said = translation([Path(file) for file in files])
    (folder / "job.yaml").write_text(text.replace("fill-in-the-model", "gpt2"))
    (folder / "fill-in-the-data.jsonl").touch()
    return load_job(folder / "job.yaml").job, said


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    texts = {"mamba.yaml": MAMBA, "train.py": SCRIPT, "accelerate.yaml": ACCELERATE, "axolotl.yaml": AXOLOTL}
    for name, text in {**texts, "factory.yaml": FACTORY, "ds.json": json.dumps(DEEPSPEED)}.items():
        Path(name).write_text(text)
    Path("my_data.jsonl").touch()
    return tmp_path


def test_a_yaml_for_mamba(files: Path) -> None:
    job, said = job_of(files, "mamba.yaml")
    assert job.model.weights == "random"
    sizes = {"hidden_size": 4864, "num_hidden_layers": 45, "state_size": 16, "conv_kernel": 4, "expand": 2}
    assert job.model.config == sizes
    assert job.data.sequence_length == 4096
    assert job.train.global_batch == 4 * 8, "1 row x 8 x 4 GPUs"
    assert (job.train.steps, job.train.micro_batch, job.optimizer.learning_rate) == (200_000, 1, 1e-4)
    assert said == [
        "to do: data.train: not found in the files; write it in place of fill-in-the-data.jsonl",
        "assumed, as a training that evaluates on no rows does: data.eval_fraction=0",
        "not read from the files, so shardwise's own: optimizer.schedule cosine, "
        "train.precision bf16, train.save_every 100, train.keep 2, tracking [tensorboard]",
    ]


def test_trl_s_trainer_takes_the_model_by_name(files: Path) -> None:
    config = 'args = SFTConfig(output_dir="out", per_device_train_batch_size=2)'
    (files / "named.py").write_text(
        f'from trl import SFTConfig, SFTTrainer\nNAME = "Qwen/Qwen2.5-0.5B"\n{config}\n'
        "SFTTrainer(model=NAME, args=args, train_dataset=rows).train()\n"
    )
    job, said = job_of(files, "named.py")
    assert job.model.source == "Qwen/Qwen2.5-0.5B"
    assert not any("left out" in line for line in said), "neither model nor the undefined name `rows`"


def test_a_trainer_s_script_and_the_deepspeed_file_it_names(files: Path) -> None:
    job, said = job_of(files, "train.py")
    assert (job.name, job.model.source) == ("outputs", "EleutherAI/gpt-neo-2.7B")
    assert job.model.quantization == "int8"
    assert job.model.lora is not None
    assert (job.model.lora.rank, job.model.lora.targets) == (8, ["q_proj", "v_proj"])
    assert job.strategy == StrategySpec(
        engine="deepspeed", stage=2, offload_optimizer="cpu", bucket=200_000_000
    )
    assert (job.optimizer.beta2, job.optimizer.schedule, job.optimizer.final_fraction) == (0.999, "linear", 0)
    assert (job.optimizer.warmup_steps, job.train.epochs, job.train.steps) == (100, 3, None)
    assert (job.train.global_batch, job.train.micro_batch, job.train.checkpointing) == (64, 2, "full")
    text = "\n".join(said)
    assert "changed: train.py: optim (line 7) `adafactor`: trained with AdamW, the only optimizer" in text
    assert "fp16.hysteresis" in text
    assert "left out: train.steps and train.epochs both say how long to train" in text
    assert "wall_clock_breakdown (line 1): `shardwise bench --profile`" in text
    used = "ds.json:1: fp16.enabled (train.precision=fp16) is used"
    assert f"conflict: {used}, not train.py:6: bf16 (train.precision=bf16)" in text
    assert job.train.precision == "fp16"


@pytest.mark.parametrize(
    ("stage", "overlap", "left_out"),
    [(2, False, False), (2, True, False), (1, False, True), (3, True, False)],
)
def test_overlap_comm_is_left_out_only_where_a_job_cannot_say_it(
    files: Path, stage: int, overlap: bool, left_out: bool
) -> None:
    (files / "ds.json").write_text(
        json.dumps({"zero_optimization": {"stage": stage, "overlap_comm": overlap}})
    )
    job, said = job_of(files, "ds.json")
    assert isinstance(job.strategy, StrategySpec)
    assert job.strategy.overlap_comm is (overlap or left_out)
    named = [one for one in said if "overlap_comm" in one]
    assert bool(named) is left_out
    assert all("under ZeRO-2 alone" in one for one in named)


def test_accelerate_with_fsdp(files: Path) -> None:
    job, said = job_of(files, "accelerate.yaml", "train.py")
    assert job.train.global_batch == 64, "the DeepSpeed file says it"
    assert any("compute_environment" in one for one in said)
    Path("ds.json").unlink()
    job, _ = job_of(files, "accelerate.yaml", "train.py")
    assert job.strategy == StrategySpec(engine="fsdp2", reshard=False)
    assert job.train.global_batch == 2 * 8 * 8, "2 rows x 8 x 8 processes"


def test_llama_factory(files: Path) -> None:
    job, said = job_of(files, "factory.yaml")
    assert job.model.quantization == "nf4"
    assert job.model.lora is not None
    assert job.model.lora.rank == 32, "what a key says, not the tool's default"
    assert job.data.train == str(files / "my_data.jsonl")
    assert (job.optimizer.schedule, job.optimizer.final_fraction) == ("cosine", 0)
    text = "\n".join(said)
    assert job.optimizer.warmup_steps == 0.1
    assert "template (line 8)" in text
    assert "train.global_batch 16 is 1 x 16 x GPUs; no file says how many" in text


def test_axolotl(files: Path) -> None:
    job, said = job_of(files, "axolotl.yaml")
    assert (job.data.train, job.data.format) == ("tatsu-lab/alpaca", "alpaca")
    assert (job.model.quantization, job.train.epochs) == ("nf4", 2)
    assert job.model.lora is not None
    assert (job.model.lora.rank, job.model.lora.targets) == (16, "all-linear")
    assert any("flash_attention (line 14): the fastest kernel" in one for one in said)


def test_an_axolotl_yaml_with_an_optimizer_is_not_deepspeed_s(files: Path) -> None:
    yaml = AXOLOTL.replace("adamw_torch", "adamw_bnb_8bit") + "bf16: auto\nlearning_rate: 1e-4\n"
    Path("a.yaml").write_text(yaml)
    job, said = job_of(files, "a.yaml")
    assert (job.strategy, job.train.precision, job.optimizer.name) == ("auto", "bf16", "adamw8bit")
    Path("conf").mkdir()
    Path("conf/a.yaml").write_text(f"{yaml}deepspeed: deepspeed_configs/zero2.json\n")
    job, said = job_of(files, "conf/a.yaml")
    there = "to do: conf/a.yaml:17: deepspeed_configs/zero2.json is not there; add it to --from"
    assert there in said
    assert job.strategy == "auto"
    Path("conf/deepspeed_configs").mkdir()
    auto = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    Path("conf/deepspeed_configs/zero2.json").write_text(json.dumps(auto))
    job, said = job_of(files, "conf/a.yaml")
    assert job.strategy == StrategySpec(engine="deepspeed", stage=2)
    assert job.train.precision == "bf16"
    assert there not in said
    Path("f.yaml").write_text(f"{FACTORY}deepspeed: conf/deepspeed_configs/zero2.json\n")
    assert job_of(files, "f.yaml")[0].strategy == job.strategy


def test_kinds_of_lora_and_lists_with_commas(files: Path) -> None:
    more = "use_dora: true\nuse_rslora: true\nloraplus_lr_ratio: 16.0\nearly_stopping_steps: 3\n"
    Path("other.jsonl").touch()
    yaml = FACTORY.replace("target: all", "target: q_proj, v_proj").replace(
        "my_data.jsonl", "my_data.jsonl,other.jsonl"
    )
    Path("f.yaml").write_text(f"{yaml}{more}additional_target: embed_tokens\ndataset_dir: data\n")
    job, said = job_of(files, "f.yaml")
    lora = job.model.lora
    assert lora is not None
    assert (lora.targets, lora.modules_to_save) == (["q_proj", "v_proj"], ["embed_tokens"])
    assert (lora.variants, job.optimizer.lora_plus, job.train.patience) == (["dora", "rslora"], 16, 3)
    assert job.data.train == [str(files / name) for name in ("my_data.jsonl", "other.jsonl")]
    assert any("dataset_dir (line 21): name files" in one for one in said)
    one = "early_stopping_patience: 2\npeft_use_dora: true\n"
    Path("a.yaml").write_text(AXOLOTL + one)
    axolotl, _ = job_of(files, "a.yaml")
    assert axolotl.model.lora is not None
    assert (axolotl.model.lora.variants, axolotl.train.patience) == (["dora"], 2)
    Path("f.yaml").write_text(FACTORY.replace("target: all", "target: q_proj"))
    factory, _ = job_of(files, "f.yaml")
    assert factory.model.lora is not None
    assert factory.model.lora.targets == ["q_proj"]


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_adamw_in_8_bits(files: Path, name: str) -> None:
    Path("f.yaml").write_text(f"{FACTORY}optim: {name}\n")
    job, said = job_of(files, "f.yaml")
    assert job.optimizer.name == "adamw8bit"
    noted = (
        "changed: f.yaml:16: optim: paged_adamw_8bit: optimizer.name adamw8bit keeps the moments on the GPU"
    )
    assert any(one.startswith(noted) for one in said) == name.startswith("paged")


def test_chat_templates_by_name(files: Path) -> None:
    for key, name, known in (
        ("template", "llama3", "llama-3"),
        ("chat_template", "chatml", "chatml"),
        ("template", "qwen", None),
    ):
        Path("f.yaml").write_text(f"{FACTORY.replace('template: llama2', f'{key}: {name}')}")
        job, said = job_of(files, "f.yaml")
        assert job.data.chat_template == known
        assert any(f"{key} (line 8)" in one for one in said) == (known is None)


def test_the_tool_s_defaults_are_written_and_listed_once(files: Path) -> None:
    Path("t.yaml").write_text("model_name_or_path: a/b\ndataset: my_data.jsonl\n")
    job, said = job_of(files, "t.yaml")
    optimizer = job.optimizer
    assert (job.data.packing, job.data.eval_fraction, job.train.epochs) == (False, 0, 3)
    assert (optimizer.schedule, optimizer.final_fraction, optimizer.warmup_steps) == ("linear", 0, 0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.learning_rate) == (0.9, 0.999, 5e-5)
    assert "\n".join(said).count("optimizer.schedule=linear") == 1
    job, _ = job_of(files, "axolotl.yaml")
    assert (job.data.packing, job.optimizer.schedule, job.optimizer.warmup_steps) == (True, "cosine", None)
    assert job.optimizer.beta2 == 0.999
    Path("t.yaml").write_text(
        "model_name_or_path: a/b\nadam_beta2: 0.98\nlr_scheduler_type: constant\npacking: true\n"
    )
    job, _ = job_of(files, "t.yaml")
    assert (job.data.packing, job.optimizer.schedule, job.optimizer.beta2) == (True, "constant", 0.98)


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ("warmup_ratio: 0.1\nmax_steps: 105", 0.1),
        ("warmup_ratio: 0.0", 0),
        ("warmup_steps: 0.03", 0.03),
        ("warmup_ratio: 0.03\nwarmup_steps: 20", 20),
        ("warmup_steps: 20\nwarmup_ratio: 0.03", 20),
        ("warmup_ratio: 0.03\nwarmup_steps: 0", 0.03),
    ],
)
def test_a_share_of_warm_up(files: Path, keys: str, steps: int | None) -> None:
    Path("t.yaml").write_text(f"model_name_or_path: a/b\n{keys}\n")
    job, said = job_of(files, "t.yaml")
    assert job.optimizer.warmup_steps == steps
    assert not any("left out" in one for one in said)


def test_paths_count_from_the_folder_of_the_job(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a").mkdir()
    assert main(["init", "--from", "factory.yaml", "--out", "a/job.yaml"]) == 0
    job = load_job(Path("a/job.yaml")).job
    assert Path(str(job.data.train)).resolve() == files / "my_data.jsonl"
    assert job.model.source == "meta-llama/Llama-2-7b-hf"


PARTS = {"weights", "least_rate"}  # of keys of a job (resolve.py)


def test_every_key_is_one_of_a_job() -> None:
    known = {".".join(key) for key in json_schema.every_key()} | {
        f"data.format.{one}" for one in SAMPLE_FIELDS
    }
    changes = [rule if isinstance(rule, str) else "" for rule in TABLE["keys"].values()]
    changes += [
        c for rule in TABLE["keys"].values() if isinstance(rule, dict) for v in rule.values() for c in v
    ]
    changes += [change for row in TABLE["defaults"] for change in row["job"]]
    targets = {change.partition("=")[0] for change in changes if change}
    assert {one for one in targets if not one.startswith(("batch.", "model.config."))} <= known | PARTS
    decided = {one for keys in TABLE["unread"].values() for one in keys if not one.startswith("batch.")}
    assert decided <= known


def test_values_that_make_no_sense_are_left_out(files: Path) -> None:
    wrong = "per_device_train_batch_size: 0\nlearning_rate: -1.0\n"
    Path("wrong.yaml").write_text(f"model_name_or_path: a/b\n{wrong}seed: 1e3\nmodel_revision: '123'\n")
    job, said = job_of(files, "wrong.yaml")
    text = "\n".join(said)
    assert "per_device_train_batch_size (line 2): 0 is no number" in text
    assert "`optimizer.learning_rate`" in text
    assert (job.model.revision, job.train.seed, job.train.global_batch) == ("123", 1000, 16)


def test_values_that_files_differ_in_are_named_with_the_one_that_is_used(files: Path) -> None:
    params = {"optimizer": {"type": "AdamW", "params": {"lr": 5e-4}}, "train_micro_batch_size_per_gpu": 8}
    Path("ds.json").write_text(json.dumps(params))
    text = "from transformers import TrainingArguments, AutoModelForCausalLM\n"
    text += "AutoModelForCausalLM.from_pretrained('a/b', load_in_8bit=True)\n"
    text += "TrainingArguments(learning_rate=1e-4, per_device_train_batch_size=4, bf16=True)\n"
    Path("train.py").write_text(text)
    job, said = translation([Path("ds.json"), Path("train.py")])
    assert [one for one in said if one.startswith("conflict")] == [
        "conflict: ds.json:1: optimizer.params.lr 0.0005 is used, not train.py:3: learning_rate 0.0001",
        "conflict: ds.json:1: train_micro_batch_size_per_gpu 8 is used, "
        "not train.py:3: per_device_train_batch_size 4",
    ]
    assert "micro_batch: 8" in job
    assert "learning_rate: 0.0005" in job
    assert "assumed: LoRA of rank 16: int8 weights are frozen, and no file has adapters" in said


def zero(stage: int) -> str:
    return json.dumps({"zero_optimization": {"stage": stage}})


NVME = '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}}'


@pytest.mark.parametrize(
    ("texts", "used"),
    [
        ({"a.json": zero(2), "b.json": zero(3)}, StrategySpec(engine="deepspeed", stage=3)),
        ({"a.json": NVME, "b.json": zero(3)}, StrategySpec(engine="deepspeed", stage=3)),
        ({"b.json": zero(3), "a.json": zero(2)}, StrategySpec(engine="deepspeed", stage=2)),
        ({"a.json": zero(2), "acc.yaml": ACCELERATE}, StrategySpec(engine="fsdp2", reshard=False)),
        ({"acc.yaml": ACCELERATE, "a.json": zero(2)}, StrategySpec(engine="deepspeed", stage=2)),
    ],
)
def test_of_two_strategies_the_last_is_used_and_both_are_named(
    files: Path, texts: dict[str, str], used: StrategySpec
) -> None:
    for name, text in texts.items():
        Path(name).write_text(text)
    job, said = job_of(files, *texts)
    assert job.strategy == used
    (conflict,) = [one for one in said if one.startswith("conflict")]
    first, last = texts
    names = {"a.json": "zero2", "b.json": "zero3", "acc.yaml": "fsdp2-noreshard"}
    if texts["a.json"] == NVME:
        names["a.json"] = "zero3-nvme-optimizer, bucket 500000000"
    assert conflict == f"conflict: {last} ({names[last]}) is used, not {first} ({names[first]})"


@pytest.mark.parametrize(
    ("keys", "used"),
    [
        (["load_in_4bit", "load_in_8bit"], "model.quantization=int8"),
        (["load_in_8bit", "load_in_4bit"], "model.quantization=nf4"),
        (["fp16", "bf16"], "train.precision=bf16"),
    ],
)
def test_words_conflict_also_in_one_file(files: Path, keys: list[str], used: str) -> None:
    Path("t.yaml").write_text("model_name_or_path: a/b\n" + "".join(f"{key}: true\n" for key in keys))
    job, said = job_of(files, "t.yaml")
    (conflict,) = [one for one in said if one.startswith("conflict")]
    assert conflict.startswith(f"conflict: t.yaml:3: {keys[1]} ({used}) is used, not t.yaml:2: {keys[0]} (")
    assert used.partition("=")[2] in (job.model.quantization, job.train.precision)


@pytest.mark.parametrize(("steps", "expected"), [(100, (100, None)), (-1, (None, 3))])
def test_max_steps_says_how_long_to_train_as_in_the_trainer(
    files: Path, steps: int, expected: tuple[int | None, int | None]
) -> None:
    Path("t.yaml").write_text(f"model_name_or_path: a/b\nnum_train_epochs: 3\nmax_steps: {steps}\n")
    job, said = job_of(files, "t.yaml")
    assert (job.train.steps, job.train.epochs) == expected
    assert ("left out: t.yaml: num_train_epochs (line 2): max_steps 100 says" in "\n".join(said)) == (
        steps > 0
    )


def test_what_cannot_be_read_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text, message in {"a: [": "not YAML", "- 1": "it holds no `key: value` lines"}.items():
        Path("bad.yaml").write_text(text)
        with pytest.raises(JobError) as raised:
            translation([Path("bad.yaml")])
        assert message in str(raised.value)
    with pytest.raises(JobError, match="there is no file") as raised:
        translation([Path("nowhere.yaml")])
    assert raised.value.problems[0].where == "shardwise init --from nowhere.yaml"
    Path("j.yaml").write_text("name: a\nmodel: {source: m}\ndata: {train: my_data.jsonl}\n")
    with pytest.raises(JobError, match="a job file already"):
        translation([Path("j.yaml")])
    assert main(["init", "--from"]) == 2
    assert main(["init", "lora", "full"]) == 2
    assert "it takes one preset, or --from and files" in capsys.readouterr().err


def test_the_verb_writes_the_job_and_check_names_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "--from", "mamba.yaml", "--out", "new.yaml"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("wrote new.yaml\nto do: data.train")
    assert out.endswith("next: shardwise plan new.yaml\n")
    assert Path("new.yaml").read_text().startswith("# made of mamba.yaml\n# to do: data.train")
    assert main(["init", "--from", "mamba.yaml", "--out", "new.yaml"]) == 2, "it exists"
    capsys.readouterr()
    assert main(["check", "mamba.yaml"]) == 2
    assert "`shardwise init --from mamba.yaml`" in capsys.readouterr().out


LOOP = """\
import argparse, torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-5)
parser.add_argument("--seed", type=int)
args = parser.parse_args()
SIZE_ONCE = 4
torch.manual_seed(args.seed)
tokenizer = AutoTokenizer.from_pretrained("other/tokenizer")
model = AutoModelForCausalLM.from_pretrained("a/b", torch_dtype=torch.bfloat16)
model.gradient_checkpointing_enable()
data = load_dataset("json", data_files="my_data.jsonl", split="train")
held = load_dataset("json", data_files="held.jsonl", split="validation")
rows = data.map(lambda one: tokenizer(one["text"], truncation=True, max_length=512))
other = DataLoader(eval_rows, batch_size=64)
loader = DataLoader(rows, batch_size=SIZE_ONCE, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
for epoch in range(3):
    for i, batch in enumerate(loader):
        model(**batch, labels=batch["input_ids"]).loss.backward()
        if (i + 1) % 8 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
"""


def test_a_loop_of_one_s_own(files: Path) -> None:
    Path("loop.py").write_text(LOOP)
    job, said = job_of(files, "loop.py")
    one = job.optimizer
    assert (one.learning_rate, one.beta1, one.beta2, one.epsilon) == (1e-5, 0.9, 0.98, 1e-6)
    assert (one.weight_decay, one.schedule, one.warmup_steps) == (0.01, "constant", 0), (
        "torch's, no scheduler"
    )
    assert (one.clip_norm, job.train.epochs, job.train.precision) == (0.5, 3, "bf16")
    assert (job.train.micro_batch, job.train.global_batch, job.train.checkpointing) == (4, 32, "full")
    assert (job.model.source, job.data.train) == ("a/b", str(files / "my_data.jsonl"))
    assert (job.data.sequence_length, job.data.loss_on) == (512, "all")
    text = "\n".join(said)
    assert "5e-5" not in text, "no default of a Trainer"
    assert "assumed, as torch's AdamW does: optimizer.weight_decay=0.01" in text
    assert "train.seed" not in text, "any is as good"
    assert "left out: shardwise does it itself: DataLoader.shuffle" in text
    fields = "class Flags:\n    rate: float = field(default=3e-4)\n    size: int = 16\nargs = parse(Flags)\n"
    flags = LOOP.replace("lr=args.lr", "lr=args.rate").replace("SIZE_ONCE, ", "args.size, ")
    Path("loop.py").write_text(fields + flags)
    job, _ = job_of(files, "loop.py")
    assert (job.optimizer.learning_rate, job.train.micro_batch) == (3e-4, 16), "fields of a class"
    Path("loop.py").write_text(LOOP.replace("lr=args.lr", "lr=args.rate"))
    job, said = job_of(files, "loop.py")
    asked = "its value could not be read; write optimizer.learning_rate; until then 2e-05"
    assert f"to do: loop.py:19: AdamW.lr: {asked}" in said
    assert job.optimizer.learning_rate == 2e-5, "shardwise's own, neither torch's nor the Trainer's"


ENGINE = """\
import deepspeed
LR = 3e-5
settings = {
    "train_micro_batch_size_per_gpu": 2, "train_batch_size": 16,
    "optimizer": {"type": "AdamW", "params": {"lr": LR}},
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
}
settings["gradient_clipping"] = 0.3
engine, *_ = deepspeed.initialize(model=model, config=settings)
"""


def test_deepspeed_settings_that_a_script_holds(files: Path) -> None:
    Path("engine.py").write_text(ENGINE)
    job, said = job_of(files, "engine.py")
    assert job.strategy == StrategySpec(engine="deepspeed", stage=3, offload_parameters="cpu")
    assert (job.optimizer.learning_rate, job.optimizer.clip_norm, job.optimizer.beta2) == (3e-5, 0.3, 0.999)
    assert (job.train.global_batch, job.train.micro_batch, job.train.precision) == (16, 2, "bf16")
    assert job.optimizer.schedule == "constant", "DeepSpeed has no scheduler where none is given"
    assert not any(one.startswith("left out") for one in said)
    Path("mine.json").write_text(zero(1))
    job, said = job_of(files, "engine.py", "mine.json")
    assert job.strategy == StrategySpec(engine="deepspeed", stage=1)
    assert "conflict: mine.json is used, not the DeepSpeed settings in engine.py:3" in said
    assert job.optimizer.learning_rate == 2e-5, "nothing of them is left"
    Path("engine.py").write_text(ENGINE.replace("config=settings", "config=args.config"))
    with pytest.raises(
        JobError, match=r"to do: engine.py:10: only a run knows config; add the JSON to --from"
    ):
        translation([Path("engine.py")])


@pytest.mark.parametrize("order", [("train.py", "mine.json"), ("mine.json", "train.py")])
def test_the_deepspeed_file_on_the_command_line_wins_over_the_script_s(
    files: Path, order: tuple[str, str]
) -> None:
    Path("mine.json").write_text(zero(3))
    job, said = job_of(files, *order)
    assert job.strategy == StrategySpec(engine="deepspeed", stage=3)
    assert "conflict: mine.json is used, not ds.json, which train.py:7 names" in said
    assert (job.train.precision, job.train.steps, job.train.global_batch) == ("bf16", None, 16)


def test_a_plugin_of_accelerate_in_a_script(files: Path) -> None:
    plugin = 'DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", **more)'
    Path("plug.py").write_text(f"from accelerate import DeepSpeedPlugin\n{plugin}\n")
    job, said = job_of(files, "plug.py")
    own = {"bucket": 500_000_000}  # DeepSpeed's default, ours is smaller
    assert job.strategy == StrategySpec(engine="deepspeed", stage=3, offload_optimizer="cpu", **own)
    assert "plug.py:2: **.DeepSpeedPlugin: its value could not be read" in "\n".join(said)
    assert job.train.precision == "bf16", "shardwise's own: Accelerate's comes from its launcher"
    Path("mine.json").write_text(zero(1))
    job, said = job_of(files, "mine.json", "plug.py")
    assert "conflict: mine.json is used, not the DeepSpeed settings in plug.py:2" in said
    assert job.strategy == StrategySpec(engine="deepspeed", stage=1)
    more = "DeepSpeedPlugin(zero_stage=2, gradient_clipping=0.5)"
    more = f"Accelerator(mixed_precision='fp16', deepspeed_plugin={more})"
    Path("plug.py").write_text(f"from accelerate import Accelerator, DeepSpeedPlugin\n{more}\n")
    job, _ = job_of(files, "plug.py")
    assert (job.strategy, job.train.precision, job.optimizer.clip_norm) == (
        StrategySpec(engine="deepspeed", stage=2),
        "fp16",
        0.5,
    )
    rest = plugin.replace("3", "args.stage")
    Path("plug.py").write_text(f"import accelerate\n{rest}\nTrainingArguments('o', bf16=True)\n")
    _, said = job_of(files, "plug.py")
    assert (
        "to do: plug.py:2: zero_stage: its value could not be read; write strategy; until then auto" in said
    )


def test_schedulers_of_the_script_and_of_deepspeed(files: Path) -> None:
    Path("train.py").write_text(SCRIPT.replace("optim=", 'lr_scheduler_type="cosine", optim='))
    job, said = job_of(files, "train.py")
    used = "ds.json:1: scheduler.type (optimizer.schedule=linear)"
    other = "train.py:7: lr_scheduler_type (optimizer.schedule=cosine)"
    assert f"conflict: {used} is used, not {other}" in said
    assert job.optimizer.schedule == "linear"


@pytest.mark.parametrize("keys", [("bf16", "fp16"), ("fp16", "bf16")])
def test_of_bf16_and_fp16_the_job_has_what_check_advises(files: Path, keys: tuple[str, str]) -> None:
    Path("both.json").write_text(json.dumps({key: {"enabled": True} for key in keys}))
    job, said = job_of(files, "both.json")
    assert job.train.precision == "bf16"
    (conflict,) = [one for one in said if one.startswith("conflict")]
    assert conflict.endswith("is used, not both.json:1: fp16.enabled (train.precision=fp16)")


TRL = """\
from trl import SFTConfig, SFTTrainer
args = SFTConfig(output_dir="out", per_device_train_batch_size=2)
SFTTrainer(model="a/b", args=args, train_dataset=load_dataset("trl-lib/Capybara", split="train"))
"""


def test_trl_has_defaults_of_its_own(files: Path) -> None:
    Path("sft.py").write_text(TRL)
    job, _ = job_of(files, "sft.py")
    assert (job.optimizer.learning_rate, job.data.sequence_length, job.data.loss_on) == (2e-5, 1024, "all")
    assert (job.train.checkpointing, job.data.train, job.data.split) == ("full", "trl-lib/Capybara", "train")
    Path("sft.py").write_text(TRL.replace("output_dir", "assistant_only_loss=True, output_dir"))
    assert job_of(files, "sft.py")[0].data.loss_on == "answers"


def test_the_collator_for_language_modeling_trains_on_all_tokens(files: Path) -> None:
    collator = "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
    Path("train.py").write_text(f"{SCRIPT}{collator}\n")
    assert job_of(files, "train.py")[0].data.loss_on == "all"
    Path("train.py").write_text(f"{SCRIPT}{collator}\n".replace("False)", "True)"))
    assert any("not masked ones" in one for one in job_of(files, "train.py")[1])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '{"zero_optimization": {"stagee": 3}}',
            "stagee (line 1): DeepSpeed has no such key; did you mean stage?",
        ),
        (
            '{"train_batch_sizee": 3, "gradient_clipping": 1}',
            "DeepSpeed has no such key; did you mean train_batch_size?",
        ),
        ("output_dir: a\nlearning_ratee: 1e-4\n", "a job has no such key; did you mean learning_rate?"),
        ("num_processes: 2\ndeepsped_config: {zero_stage: 2}\n", "did you mean deepspeed_config.zero_stage?"),
    ],
)
def test_an_unknown_key_is_called_that_with_the_nearest(files: Path, text: str, said: str) -> None:
    name = "a.json" if text.startswith("{") else "a.yaml"
    Path(name).write_text(text)
    assert said in "\n".join(translation([Path(name)])[1])


@pytest.mark.parametrize("text", ["{}", '{"foo": 1}', "foo: bar\n"])
def test_files_that_say_nothing_of_a_job_make_none(files: Path, text: str) -> None:
    Path("nothing.yaml").write_text(text)
    with pytest.raises(JobError, match="none of its settings is one of a job"):
        translation([Path("nothing.yaml")])


def test_a_broken_json_is_named_with_its_line(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.json").write_text('{"bf16": {"enabled": true},\n"zero_optimization": {"stage": 2}')
    assert main(["init", "--from", "broken.json"]) == 2
    assert "at:  broken.json:2" in capsys.readouterr().err
    assert not Path("job.yaml").exists()


def test_placeholders_are_called_placeholders(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("z.json").write_text(zero(2))
    assert main(["init", "--from", "z.json"]) == 0
    assert main(["config", "job.yaml"]) == 2
    text = capsys.readouterr().err
    for name in ("fill-in-the-data.jsonl", "fill-in-the-model"):
        assert f"{name} is the placeholder that `shardwise init --from` wrote" in text
    assert "a hub dataset such as" in text


@pytest.mark.parametrize("name", ["train.py", "absent.json", "absent.yaml"])
def test_a_file_without_from_is_no_preset(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", name]) == 2
    assert f"fix: shardwise init --from {name}" in capsys.readouterr().err
    assert main(["init", name, "ds.json"]) == 2
    assert f"fix: shardwise init --from {name} ds.json" in capsys.readouterr().err


MADE = """\
import argparse, deepspeed
from transformers import AutoModelForCausalLM
def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("-l", "--learning-rate", "--lr", type=float, default=9e-6)
    parser.add_argument("--batch", dest="rows", default=2)
    parser.add_argument("--stage", default=3)
    return parser.parse_args()
def settings(args, device="cpu"):
    zero = dict(stage=args.stage, offload_param={"device": device})
    made = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": args.rows, "bf16": {"enabled": True}}
    made["optimizer"] = {"type": "AdamW", "params": {"lr": args.learning_rate, "betas": (0.9, 0.95)}}
    return made
def changed(one):
    zero, args = {"stage": 1}, None
    one["gradient_clipping"] = 2
def main():
    args = arguments()
    config = {**settings(args, "none"), "gradient_clipping": 0.5}
    CHANGE
    deepspeed.initialize(model=AutoModelForCausalLM.from_pretrained("a/b"), config=config)
main()
"""


@pytest.mark.parametrize(
    ("change", "expected", "unsaid"),
    [
        ("pass", (3, 2, 9e-6, 0.5), ""),
        ("config['train_micro_batch_size_per_gpu'] = 4", (3, 4, 9e-6, 0.5), ""),
        ("if args.clip: config['gradient_clipping'] = args.clip", (3, 2, 9e-6, 1.0), "gradient_clipping"),
        ("changed(config)", (3, 2, 9e-6, 1.0), "gradient_clipping"),
        ("args.learning_rate *= 2", (3, 2, 2e-5, 0.5), "optimizer.params.lr"),
    ],
)
def test_settings_that_a_function_makes(
    files: Path, change: str, expected: tuple[float, ...], unsaid: str
) -> None:
    Path("made.py").write_text(MADE.replace("CHANGE", change))
    job, said = job_of(files, "made.py")
    one, strategy = job.optimizer, job.strategy
    assert isinstance(strategy, StrategySpec)
    found = (strategy.stage, job.train.micro_batch, one.learning_rate, one.clip_norm)
    assert (found, one.beta2) == (expected, 0.95)
    asked = [line for line in said if "could not be read" in line]
    assert len(asked) == bool(unsaid)
    assert all(f": {unsaid}: " in line for line in asked)


@pytest.mark.parametrize(
    "change",
    [
        "config.pop(name)",
        "imported(config)",
        "config['zero_optimization']['stage'] = args.other",
        "zero = config['zero_optimization']\n    zero['stage'] = 1",
        "config[a] = 1",
    ],
)
def test_settings_whose_keys_only_a_run_knows_are_not_guessed(files: Path, change: str) -> None:
    Path("made.py").write_text(MADE.replace("CHANGE", change))
    job, said = job_of(files, "made.py")
    assert job.strategy == "auto"
    assert any("only a run knows config; add the JSON to --from" in line for line in said)


def test_arguments_by_place_in_a_mapping_and_in_a_class(files: Path) -> None:
    text = 'KW = {"learning_rate": 3e-4, "bf16": True}\nKW["num_train_epochs"] = 2\n'
    text += 'args = TrainingArguments("my-run", **KW)\n'
    Path("train.py").write_text(f"from transformers import TrainingArguments\n{text}")
    job, said = job_of(files, "train.py")
    assert (job.name, job.optimizer.learning_rate, job.train.epochs) == ("my-run", 3e-4, 2)
    assert not any("in a mapping" in line for line in said)
    text = "class Mine(transformers.TrainingArguments):\n    learning_rate: float = field(default=4e-4)\n"
    Path("train.py").write_text(f"import transformers\n{text}transformers.Trainer(model, args)\n")
    assert job_of(files, "train.py")[0].optimizer.learning_rate == 4e-4


@pytest.mark.parametrize("of_the_file", [False, True])
def test_trl_trains_on_the_completions_of_pairs(files: Path, of_the_file: bool) -> None:
    Path("pairs.jsonl").write_text(
        '{"prompt": "a", "completion": "b"}\n' if of_the_file else '{"text": "a"}\n'
    )
    pair = 'data = data.map(lambda row: {"prompt": row["q"], "completion": row["a"]})\n'
    text = TRL.replace('"trl-lib/Capybara"', '"json", data_files="pairs.jsonl"') + pair * (not of_the_file)
    for given, loss in (("", "answers"), ("completion_only_loss=False, ", "all")):
        Path("sft.py").write_text(text.replace("output_dir", f"{given}output_dir"))
        assert job_of(files, "sft.py")[0].data.loss_on == loss
    Path("sft.py").write_text(text.replace(pair, ""))
    assert (job_of(files, "sft.py")[0].data.loss_on == "all") != of_the_file


PLAIN = """\
import torch, yaml
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
cfg = yaml.safe_load(open("other.yaml"))
model = AutoModelForCausalLM.from_pretrained("a/b", torch_dtype=torch.float32)
"""


def lines(said: list[str], start: str) -> str:
    return "\n".join(line for line in said if line.startswith(start))


@pytest.mark.parametrize(
    ("call", "precision"),
    [
        ("Accelerator(mixed_precision='bf16')", "bf16"),
        ("Trainer(model, TrainingArguments(bf16=True))", "bf16"),
        ("Trainer(model, TrainingArguments(fp16=True))", "fp16"),
        ("Accelerator(mixed_precision='no')", "fp32"),
        ("torch.autocast('cuda', dtype=torch.bfloat16)", "bf16"),
    ],
)
def test_masters_in_fp32_and_autocast_are_mixed_precision(files: Path, call: str, precision: str) -> None:
    Path("train.py").write_text(f"{PLAIN}{call}\n")
    job, said = job_of(files, "train.py")
    assert job.train.precision == precision
    assert not lines(said, "conflict")


def test_weights_in_halves_lose_to_the_tool_s_precision(files: Path) -> None:
    text = PLAIN.replace("float32", "float16")
    for given, used, conflicts in (("bf16=True", "bf16", 1), ("fp16=True", "fp16", 0), ("", "fp16", 0)):
        Path("train.py").write_text(f"{text}Trainer(model, TrainingArguments({given}))\n")
        job, said = job_of(files, "train.py")
        assert (job.train.precision, lines(said, "conflict").count("is used")) == (used, conflicts)


@pytest.mark.parametrize(
    ("call", "asked"),
    [
        ("Trainer(model, TrainingArguments('o', **cfg))", "learning_rate beta1 schedule epochs global_batch"),
        ("torch.optim.AdamW(x, lr=1e-4, betas=cfg['betas'])", "beta1 beta2"),
        ("torch.optim.AdamW(x, **cfg)", "beta1 beta2 learning_rate weight_decay"),
        ("Trainer(model, TrainingArguments(lr_scheduler_type=cfg['s']))", "schedule"),
        ("Trainer(model, TrainingArguments('o'), optimizers=(make(), None))", "learning_rate beta2 schedule"),
        ("torch.optim.AdamW(x)\nscheduler = build(optimizer)", "schedule warmup_steps"),
        ("torch.optim.AdamW(x)\nfor b in loader:\n    lr_sched.step()", "schedule warmup_steps"),
        ("Trainer(model, TrainingArguments('o', eval_strategy='steps'), eval_dataset=rows)", "eval"),
        ("torch.optim.AdamW(x)\nvalid = DataLoader(eval_rows, batch_size=8)", "eval"),
        ("Trainer(model, TrainingArguments('o'), **make())", "eval"),
    ],
)
def test_what_is_given_but_unreadable_is_a_to_do_and_never_assumed(
    files: Path, call: str, asked: str
) -> None:
    Path("train.py").write_text(f"{PLAIN}{call}\n")
    _, said = job_of(files, "train.py")
    wanted, known = lines(said, "to do"), {".".join(key) for key in json_schema.every_key()}
    for key in asked.split():
        (whole,) = {one for one in known if one.split(".")[1:] == [key]}
        assert whole in wanted
        assert f"{whole}=" not in lines(said, "assumed")
    assert "data.eval_fraction" not in lines(said, "assumed") or asked != "eval"
    asked_for = [
        one
        for line in said
        if "could not be read" in line
        for one in line.split("; write ")[1].split("; until")[0].split(", ")
    ]
    assert {*asked_for} <= known, "all are keys of a job"


def test_a_batch_with_an_unreadable_factor_has_no_total(files: Path) -> None:
    given = "per_device_train_batch_size=2, gradient_accumulation_steps=cfg['n']"
    Path("train.py").write_text(f"{PLAIN}Trainer(model, TrainingArguments({given}))\n")
    text, said = translation([Path("train.py")])
    assert "micro_batch: 2" in text
    assert "global_batch" not in text.split("\n\n")[1]
    assert "write train.micro_batch, train.global_batch" in lines(said, "to do")


def test_a_value_that_a_job_cannot_have_leaves_no_default(files: Path) -> None:
    given = "lr_scheduler_type='polynomial', max_steps=-1"
    Path("train.py").write_text(f"{PLAIN}Trainer(model, TrainingArguments({given}))\n")
    _, said = job_of(files, "train.py")
    assert "optimizer.schedule" not in lines(said, "assumed")
    assert "lr_scheduler_type" in lines(said, "changed")
    assert "train.epochs=3" in lines(said, "assumed"), "-1 means the epochs count"
    assert "steps" not in lines(said, "left out")


@pytest.mark.parametrize(("share", "fraction"), [("0.1", 0.1), ("args.held", 0.05), ("2000", None)])
def test_rows_that_are_split_off(files: Path, share: str, fraction: float | None) -> None:
    split = "both = data.train_test_split(test_size=SHARE)\nval_data = both['test']\n"
    flag = "parser.add_argument('--held', default=0.05)\nargs = parser.parse_args()\n"
    rest = "Trainer(model, TrainingArguments('o', eval_steps=200), eval_dataset=val_data)\n"
    Path("train.py").write_text(PLAIN + flag + split.replace("SHARE", share) + rest)
    job, said = job_of(files, "train.py")
    assert "data.eval_fraction" not in lines(said, "assumed")
    if fraction is None:
        assert "write data.eval_fraction" in lines(said, "to do")
    else:
        assert job.data.eval_fraction == fraction
        assert not lines(said, "to do: train.py")


def test_literals_of_a_script_are_read(files: Path) -> None:
    Path("train.py").write_text("""\
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
config = {"lr": 3e-5, "betas": (0.9, 0.95), "model": "a/b"}
class Flags:
    targets: list = field(default_factory=lambda: ["q_proj"])
def made(name, dtype=torch.bfloat16, *, rank=4):
    LoraConfig(r=rank, target_modules=flags.targets)
    return AutoModelForCausalLM.from_pretrained(name, torch_dtype=dtype)
def optimizer(model, lr, wd=0.2):
    return torch.optim.AdamW(model, lr=lr, weight_decay=wd, betas=config["betas"])
optimizer(made(config["model"]), config.get("lr"))
DataLoader(rows, batch_size=config.get("size", 3))
""")
    job, said = job_of(files, "train.py")
    one = job.optimizer
    assert (one.learning_rate, one.beta2, one.weight_decay, job.train.micro_batch) == (3e-5, 0.95, 0.2, 3)
    assert job.model.lora is not None
    assert (job.model.source, job.model.lora.rank, job.model.lora.targets) == ("a/b", 4, ["q_proj"])
    assert job.train.precision == "bf16"
    assert "could not be read" not in "\n".join(said)


@pytest.mark.parametrize("call", ["made(**more)", "made(*more)", "run(made)", "made(0.1)\nmade(0.2)"])
def test_a_default_of_a_function_counts_only_where_no_call_can_give_another(files: Path, call: str) -> None:
    text = "def made(wd=0.3):\n    torch.optim.AdamW(x, lr=1e-4, weight_decay=wd)\n"
    for given, rate in (("made()", 0.3), ("fire.Fire(made)", 0.3), (call, 0.0)):
        Path("train.py").write_text(f"{PLAIN}{text}{given}\n")
        assert job_of(files, "train.py")[0].optimizer.weight_decay == rate


WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-5, "warmup_num_steps": 7}}


@pytest.mark.parametrize("order", [("z.json", "train.py"), ("train.py", "z.json")])
@pytest.mark.parametrize(
    ("call", "schedule"),
    [
        ("Trainer(model, TrainingArguments(lr_scheduler_type='cosine'))", "constant"),
        ("Accelerator()\nget_scheduler('cosine')", "constant"),
        ("deepspeed.initialize(lr_scheduler=get_scheduler('cosine'))", "cosine"),
    ],
)
def test_whose_scheduler_is_used(files: Path, order: tuple[str, str], call: str, schedule: str) -> None:
    """transformers' deepspeed_optim_sched; DeepSpeed's _configure_lr_scheduler prefers the script's."""
    Path("z.json").write_text(json.dumps({"zero_optimization": {"stage": 1}, "scheduler": WARMUP}))
    Path("train.py").write_text(f"{PLAIN}{call}\n")
    job, said = job_of(files, *order)
    assert job.optimizer.schedule == schedule
    assert f"(optimizer.schedule={schedule}) is used" in lines(said, "conflict")


def test_every_dataset_of_axolotl(files: Path) -> None:
    rows = "datasets:\n  - {path: a/b, type: alpaca}\n  - {path: c.jsonl, type: alpaca}\n"
    held = "test_datasets:\n  - {path: held.jsonl, type: alpaca}\n"
    Path("a.yaml").write_text(f"base_model: a/b\n{rows}{held}")
    text, said = translation([Path("a.yaml")])
    assert "  train:\n  - a/b\n  - c.jsonl\n" in text
    assert "  eval: held.jsonl\n" in text
    assert "datasets.1" not in "\n".join(said)
    Path("a.yaml").write_text(f"base_model: a/b\n{rows.replace('alpaca}', 'sharegpt}', 1)}")
    assert "datasets.0.type" in lines(translation([Path("a.yaml")])[1], "to do")


def test_datasets_by_name_of_llama_factory(files: Path) -> None:
    Path("factory.yaml").write_text(FACTORY.replace("my_data.jsonl", "identity, alpaca_zh_demo"))
    text, said = translation([Path("factory.yaml")])
    assert "train: fill-in-the-data.jsonl" in text
    assert "files that data/dataset_info.json should name; write data.train" in lines(said, "to do")
    Path("data").mkdir()
    known = {"identity": {"file_name": "identity.json"}, "alpaca_zh_demo": {"hf_hub_url": "a/zh"}}
    Path("data/dataset_info.json").write_text(json.dumps(known))
    text, said = translation([Path("factory.yaml")])
    assert "  train:\n  - data/identity.json\n  - a/zh\n" in text
    assert "dataset_info" not in "\n".join(said)


def test_a_bucket_that_the_trainer_fills_in_is_left_out(files: Path) -> None:
    Path("z.json").write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}')
    text, said = translation([Path("z.json")])
    assert "bucket:" not in text
    assert "auto is the hidden size squared" in lines(said, "left out")


def test_lightning_s_trainer(files: Path) -> None:
    given = "devices=4, num_nodes=2, accumulate_grad_batches=3, precision='bf16-mixed', max_epochs=5"
    Path("train.py").write_text(
        f"import lightning as L, torch\ntorch.optim.AdamW(x, lr=2e-5)\nDataLoader(rows, batch_size=2)\n"
        f"L.Trainer({given}, gradient_clip_val=0.7, max_steps=-1, strategy=DeepSpeedStrategy(stage=3))\n"
    )
    job, said = job_of(files, "train.py")
    assert (job.train.global_batch, job.train.epochs, job.train.precision) == (4 * 2 * 3 * 2, 5, "bf16")
    assert (job.optimizer.clip_norm, job.strategy) == (0.7, "zero3")
    assert "train.steps" not in "\n".join(said)


def test_variables_of_a_shell_are_not_values(files: Path) -> None:
    Path("run.sh").write_text(
        "torchrun --nproc_per_node 8 --nnodes 2 train.py --model_name_or_path $M \\\n"
        "  --output_dir out --learning_rate $LR --per_device_train_batch_size 2\n"
    )
    Path("train.py").unlink()
    job, said = job_of(files, "run.sh")
    assert (job.model.source, job.train.global_batch) == ("gpt2", 8 * 2 * 2)
    assert "learning_rate: its value could not be read; write optimizer.learning_rate" in lines(said, "to do")
    assert "learning_rate" not in lines(said, "assumed")


def test_where_a_preset_or_a_placeholder_goes(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("qa.jsonl").write_text("mine\n")
    assert main(["init", "lora", "--out", "l.yaml"]) == 2
    error = capsys.readouterr().err
    assert "qa.jsonl exists already" in error
    assert "--out names a file in another folder, DIR/l.yaml" in error
    assert main(["init", "lora", "--out", "new/l.yaml"]) == 0, "the fix helps"
    Path("z.json").write_text(zero(2))
    assert main(["init", "--from", "z.json", "--out", "sub/l.yaml"]) == 0
    assert "train: fill-in-the-data.jsonl\n" in Path("sub/l.yaml").read_text()


def test_an_unreadable_first_call_is_not_replaced_by_the_next(files: Path) -> None:
    loaders = "a = DataLoader(rows, batch_size=int(cfg['n']))\nb = DataLoader(others, batch_size=32)\n"
    Path("train.py").write_text(f"{PLAIN}torch.optim.AdamW(x)\n{loaders}")
    text, said = translation([Path("train.py")])
    assert "micro_batch" not in text.split("\n\n")[1]
    assert "DataLoader.batch_size: its value could not be read" in lines(said, "to do")
