"""Faults that a walker planted in public scripts, or that these had, each in other scripts too."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.lint.check import check, load, unreached
from shardwise.lint.finding import Finding
from shardwise.lint.setup import Setup

TRAINED = """import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("gpt2").cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = iter(DataLoader(rows, shuffle=True))
accum = 8
"""
MICRO = """for step in range(100):
    optimizer.zero_grad()
    for micro in range({count}):
        batch = next(loader)
        {zero}
        loss = model(**batch).loss{divided}
        loss.backward()
    optimizer.step()
"""


def setup_of(folder: Path, **texts: str) -> tuple[Setup, tuple[Finding, ...]]:
    """The files and all findings; `train_py` is train.py."""
    for name, text in texts.items():
        (folder / name.replace("_", ".")).write_text(text)
    documents, broken = load([folder / name.replace("_", ".") for name in texts])
    setup = Setup(documents=documents)
    return setup, check(setup, broken).findings


def of_rule(folder: Path, rule: str, **texts: str) -> list[Finding]:
    return [one for one in setup_of(folder, **texts)[1] if one.rule == rule]


def micro(count: str = "accum", divided: str = "", zero: str = "pass") -> str:
    return TRAINED + MICRO.format(count=count, divided=divided, zero=zero)


CLASS = """class Run:
    def __init__(self):
        self.model, self.micro_steps = model, 4
        self.optimizer = torch.optim.AdamW(model.parameters())
    def step(self):
        for _ in range(self.micro_steps):
            x = self.get_batch()
            self.model(**x).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
    def train(self):
        for _ in range(1000):
            self.step()
Run().train()
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (micro(), True),
        (micro("0, 4"), True),
        (TRAINED + CLASS, True),
        (micro() + "    print(loss)\n    total += loss.detach() / accum\n", True),
        (micro(divided=" / accum"), False),
        (micro("1"), False),
        (micro("n").replace("accum = 8", "n = 1"), False),
        (micro(divided="\n        loss = loss / 8"), False),
        (micro() + "for p in model.parameters():\n    p.grad /= accum\n", True),  # after the step
        (
            micro().replace(
                "    optimizer.step", "    for p in ps:\n        p.grad /= accum\n    optimizer.step"
            ),
            False,
        ),
        (micro().replace("next(loader)", "rows").replace("micro", "head").replace("accum", "heads"), False),
    ],
)
def test_the_loss_of_a_loop_of_micro_batches_is_divided(tmp_path: Path, text: str, found: bool) -> None:
    assert bool(of_rule(tmp_path, "loss-not-divided", train_py=text)) is found


@pytest.mark.parametrize(
    ("zero", "found"),
    [
        ("optimizer.zero_grad()", True),
        ("optimizer.zero_grad(set_to_none=True)", True),
        ("model.zero_grad()", True),
        ("pass", False),
        ("if micro == 0: optimizer.zero_grad()", False),
    ],
)
def test_gradients_are_not_cleared_between_the_micro_batches_of_a_step(
    tmp_path: Path, zero: str, found: bool
) -> None:
    text = micro(divided=" / accum", zero=zero)
    said = of_rule(tmp_path, "gradients-are-cleared", train_py=text)
    assert [one.severity for one in said] == ["error"] * found


def test_a_schedule_next_to_the_step_of_micro_batches_is_right(tmp_path: Path) -> None:
    made = (
        "total = len(rows) // accum\nscheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, total)\n"
    )
    right = TRAINED + made + MICRO.format(count="accum", divided=" / accum", zero="pass")
    assert not of_rule(tmp_path, "schedule-counts-otherwise", train_py=right + "    scheduler.step()\n")
    wrong = right.replace("loss.backward()\n", "loss.backward()\n        scheduler.step()\n")
    assert of_rule(tmp_path, "schedule-counts-otherwise", train_py=wrong)


def test_micro_batches_of_unknown_number_are_not_judged_and_said(tmp_path: Path) -> None:
    text = micro().replace("range(accum)", "batches").replace("next(loader)", "micro")
    setup, findings = setup_of(tmp_path, train_py=text)
    assert not [one for one in findings if one.rule == "loss-not-divided"]
    assert any("the number of micro-batches in batches" in one for one in unreached(setup))


ACCELERATED = """from accelerate import Accelerator
accelerator = Accelerator()
stage = accelerator.state.deepspeed_plugin.zero_stage
model = accelerator.prepare(model)
if accelerator.is_main_process:
    {}
"""
STATE = "model.save_pretrained('o', is_main_process=True, x=accelerator.get_state_dict(model))"
ZERO_3 = "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 3\n  zero3_save_16bit_model: true\n"


@pytest.mark.parametrize(
    ("body", "hangs"),
    [
        (STATE, True),
        (f"if accelerator.state.deepspeed_plugin.zero_stage != 3: {STATE}", False),
        (f"if stage == 2: {STATE}", False),
        (f"if stage in (1, 2): {STATE}", False),
        (f"if stage < 3: {STATE}", False),
        (f"if stage == 3: {STATE}", True),
        (f"if args.push: {STATE}", True),
        ("if stage != 3: accelerator.wait_for_everyone()", True),
    ],
)
def test_a_call_that_other_stages_reach_only_does_not_hang(tmp_path: Path, body: str, hangs: bool) -> None:
    said = of_rule(tmp_path, "one-process-calls-for-all", train_py=ACCELERATED.format(body), z_yaml=ZERO_3)
    assert bool(said) is hangs


def test_calls_under_one_condition_are_one_finding(tmp_path: Path) -> None:
    body = "\n".join(f"    dist.all_reduce({name})" for name in "abc")
    (one,) = of_rule(tmp_path, "one-process-calls-for-all", train_py=f"if rank == 0:\n{body}\n")
    assert "`dist.all_reduce`, `dist.all_reduce` (line 3), `dist.all_reduce` (line 4) wait for" in one.what
    apart = f"if rank == 0:\n{body}\nx = 1\nif rank == 0:\n    dist.barrier()\n"
    assert len(of_rule(tmp_path, "one-process-calls-for-all", train_py=apart)) == 2


DDP = """import os
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from data import get_batch, rows
torch.distributed.init_process_group("nccl")
rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
model = DistributedDataParallel(torch.nn.Linear(4, 4).cuda(), device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters())
"""
DRAWS = """{}
for step in range(100):
    x = {}
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
GENERATOR = "gen = torch.Generator().manual_seed({})"


@pytest.mark.parametrize(
    ("seed", "batch", "found"),
    [
        (GENERATOR.format("1000"), "get_batch(rows, generator=gen)", True),
        ("torch.manual_seed(1000)", "rows[torch.randint(len(rows), (4,))]", True),
        ("import random\nrandom.seed(7)", "rows.take(random.sample(range(9), 4))", True),
        (GENERATOR.format("1000 + rank"), "get_batch(rows, generator=gen)", False),
        ("torch.manual_seed(1000 + rank)", "rows[torch.randint(len(rows), (4,))]", False),
        ("torch.manual_seed(0)\n" + GENERATOR.format("rank"), "get_batch(rows, generator=gen)", False),
        ("torch.manual_seed(1000)", "get_batch(rows)", False),  # which may know the rank
        ("", "rows[torch.randint(len(rows), (4,))]", False),
    ],
)
def test_processes_with_one_seed_draw_the_same_batches(
    tmp_path: Path, seed: str, batch: str, found: bool
) -> None:
    said = of_rule(tmp_path, "no-sampler", train_py=DDP + DRAWS.format(seed, batch))
    assert bool(said) is found
    assert not said or "draw the same batches" in said[0].what


SAMPLED = """sampler = DistributedSampler(rows, num_replicas=8, rank={})
for x in DataLoader(rows, sampler=sampler):
    model(x).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("rank", "command", "found"),
    [
        ("local_rank", "torchrun --nproc_per_node 8 train.py", False),  # of one node
        ("local_rank", "torchrun --nnodes 2 --nproc_per_node 8 train.py", True),
        ("int(os.environ['LOCAL_RANK'])", "torchrun --nnodes $N --nproc_per_node 8 train.py", True),
        ("local_rank", "torchrun --nnodes 1 --nproc_per_node 8 train.py", False),
        ("rank", "torchrun --nnodes 2 --nproc_per_node 8 train.py", False),
        ("torch.distributed.get_rank()", "torchrun --nnodes 2 --nproc_per_node 8 train.py", False),
    ],
)
def test_a_sampler_gets_the_rank_over_all_nodes(tmp_path: Path, rank: str, command: str, found: bool) -> None:
    said = of_rule(tmp_path, "no-sampler", train_py=DDP + SAMPLED.format(rank), run_sh=command + "\n")
    assert bool(said) is found
    assert not said or "are the same on each node" in said[0].what


LORA = """from peft import LoraConfig
from transformers import AutoModelForCausalLM
name = "{0}"
model = AutoModelForCausalLM.from_pretrained(name)
{1}
config = LoraConfig(target_modules={2})
"""


@pytest.mark.parametrize(
    ("model", "targets", "found"),
    [
        ("tiiuae/falcon-7b", ["q_proj", "v_proj", "lm_head"], True),
        ("tiiuae/falcon-7b", ["q_proj", "v_proj"], True),
        ("openai-community/gpt2", ["q_proj", "v_proj", "wte"], True),
        ("tiiuae/falcon-7b", ["query_key_value", "lm_head"], False),
        ("meta-llama/Llama-2-7b-hf", ["q_proj", "v_proj", "lm_head"], False),
    ],
)
@pytest.mark.parametrize("again", [False, True])  # as a notebook names its model once more
def test_targets_of_another_family(
    tmp_path: Path, model: str, targets: list[str], found: bool, again: bool
) -> None:
    text = LORA.format(model, f'name = "{model}"' if again else "", targets)
    assert bool(of_rule(tmp_path, "lora-targets", train_py=text)) is found


PADDED = """from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer
def load_tokenizer(name):
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokenizer.add_special_tokens({{"pad_token": "[PAD]"}})
    return tokenizer
def build(name):
    return AutoModelForCausalLM.from_pretrained(name)
def main(name="{}"):
    tokenizer = load_tokenizer(name)
    model = build(name)
    {}
    tokenized = rows.map(lambda x: tokenizer(x["text"]))
    steps = len(tokenized["train"])
    Trainer(model=model, train_dataset=tokenized["train"]).train()
main()
"""


@pytest.mark.parametrize(
    ("model", "line", "found"),
    [
        ("meta-llama/Llama-2-7b-hf", "pass", True),
        ("mistralai/Mistral-7B-v0.1", "pass", True),
        ("gpt2", "pass", True),
        ("gpt2", "model.resize_token_embeddings(len(tokenizer))", False),
        ("Qwen/Qwen2.5-7B", "pass", False),  # which has spare rows
        ("gpt2", "tokenizer.pad_token = tokenizer.eos_token", False),
    ],
)
def test_a_pad_token_that_a_helper_adds_needs_a_row(
    tmp_path: Path, model: str, line: str, found: bool
) -> None:
    said = of_rule(tmp_path, "new-tokens-without-rows", train_py=PADDED.format(model, line))
    assert bool(said) is found


ROW = """import torch
def row(prompt, response, example, tokenizer):
    input_ids = prompt["input_ids"] + response["input_ids"]
    {}
    return dict(input_ids=input_ids, labels=labels)
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('labels = prompt["input_ids"] + [-100] * len(response["input_ids"])', True),
        ("labels = [tokenizer.bos_token_id] + prompt_ids + [IGNORE_INDEX] * len(answer_ids) + [2]", True),
        ("labels = torch.tensor(input_ids)\n    labels[prompt_len:] = -100", True),
        ("labels = torch.tensor(input_ids)\n    labels[0, len(prompt_ids):] = IGNORE_INDEX", True),
        ("labels = torch.tensor(input_ids)\n    labels[-answer_len:] = -100", True),
        ('labels = [-100] * len(prompt["input_ids"]) + response["input_ids"]', False),
        ("labels = torch.tensor(input_ids)\n    labels[:prompt_len] = -100", False),
        ("labels = torch.tensor(input_ids)\n    labels[total_len:] = -100", False),
        ("labels = torch.tensor(input_ids)\n    labels[input_len:] = -100", False),  # padding
        ("labels = prompt_ids + answer_ids + [-100] * (512 - len(answer_ids))", False),
        ("labels = input_ids + [-100] * len(padding)", False),
        ("labels = list(input_ids)\n    input_ids = input_ids[:512]", True),
        ("labels = input_ids[:512]\n    input_ids = input_ids[:512]", False),
        ("input_ids = input_ids[:512]\n    labels = list(input_ids)", False),
        ("labels = list(input_ids)\n    input_ids = input_ids[:512]\n    labels = labels[:512]", False),
        ("labels = list(input_ids)\n    input_ids = input_ids[1:]", False),
        (
            "labels = 0\n    example['labels'] = list(input_ids)\n    example['input_ids'] = input_ids"
            "\n    example['input_ids'] = example['input_ids'][:512]",
            True,
        ),
    ],
)
def test_labels_are_the_answer_and_as_long_as_the_row(tmp_path: Path, line: str, found: bool) -> None:
    said = of_rule(tmp_path, "labels-do-not-fit", train_py=ROW.format(line))
    assert [one.severity for one in said] == ["error"] * found


@pytest.mark.parametrize(
    ("made", "use", "found"),
    [
        ("params = model.parameters()", "params", True),
        ("params = filter(lambda p: p.requires_grad, model.parameters())", "params", True),
        ("self.params = self.net.parameters()", "self.params", True),
        ("params = list(model.parameters())", "params", False),
        ("params = [p for p in model.parameters()]", "params", False),
        ("params = model.parameters()", "model.parameters()", False),
        ("params = model.parameters()", "params := model.parameters()", False),
    ],
)
def test_a_generator_of_parameters_is_read_once(tmp_path: Path, made: str, use: str, found: bool) -> None:
    name = made.partition(" = ")[0]
    text = f"import torch\n{made}\no = torch.optim.AdamW({name})\nfor x in rows:\n"
    text += f"    model(x).backward()\n    torch.nn.utils.clip_grad_norm_({use}, 1.0)\n    o.step()\n"
    said = of_rule(tmp_path, "parameters-are-used-up", train_py=text)
    assert [one.line for one in said] == [6] * found


@pytest.mark.parametrize(
    ("row", "asks", "found"),
    [
        ("[{'role': 'user', 'content': q}, {'role': 'assistant', 'content': a}]", True, True),
        ("[*before, {'role': 'assistant', 'content': a}]", True, True),
        ("[{'role': 'user', 'content': q}, {'role': 'assistant', 'content': a}]", False, False),
        ("[{'role': 'assistant', 'content': a}, {'role': 'user', 'content': q}]", True, False),
        ("[{'role': 'user', 'content': q}]", True, False),
    ],
)
def test_a_row_that_ends_with_its_answer_begins_no_other(
    tmp_path: Path, row: str, asks: bool, found: bool
) -> None:
    text = (
        f"import trl\nrows = {row}\nt = tokenizer.apply_chat_template(rows, add_generation_prompt={asks})\n"
    )
    said = of_rule(tmp_path, "another-answer-begins", train_py=text + "trainer.train()\n")
    assert bool(said) is found


MASKED = """from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
def mask(labels, prompt, ids):
    {}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("for i in range(prompt): labels[i] = -100", True),
        ("labels[:prompt] = -100", True),
        ("labels['labels'][:prompt] = IGNORE_INDEX", True),
        ("labels = ids", False),
    ],
)
def test_a_collator_that_makes_labels_of_its_own(tmp_path: Path, line: str, found: bool) -> None:
    assert bool(of_rule(tmp_path, "collator-replaces-labels", train_py=MASKED.format(line))) is found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("def compute_loss(self, model, inputs):\n        return 0", True),
        ("pass", True),
        ("def __init__(self, *a, tokenizer=None, **k):\n        super().__init__(*a, **k)", False),
    ],
)
def test_a_trainer_of_its_own_takes_what_its_base_does(tmp_path: Path, body: str, found: bool) -> None:
    text = f"from transformers import Trainer\nclass Mine(Trainer):\n    {body}\nMine(model=m, tokenizer=t)\n"
    assert bool(of_rule(tmp_path, "argument-was-removed", train_py=text)) is found


YAML = "model_name_or_path: {}\nstage: {}\nfinetuning_type: lora\ntemplate: {}\ncutoff_len: 9\ndataset: a\n"


@pytest.mark.parametrize(
    ("model", "stage", "template", "right"),
    [
        ("/data/Qwen2.5-32B-Instruct", "pt", "llama3", "qwen"),
        ("/data/Qwen2.5-32B-Instruct", "pt", "mistral", ""),  # of which pt uses nothing
        ("Qwen/Qwen3-8B", "sft", "llama3", "qwen3"),
        ("Qwen/Qwen2.5-7B", "sft", "llama3", "qwen"),
        ("Qwen/Qwen3-8B", "sft", "qwen3", ""),
    ],
)
def test_templates_of_llama_factory(
    tmp_path: Path, model: str, stage: str, template: str, right: str
) -> None:
    said = of_rule(tmp_path, "template-of-another-family", a_yaml=YAML.format(model, stage, template))
    assert [one.fix.partition(",")[0] for one in said] == [f"template: {right}"] * bool(right)


@pytest.mark.parametrize(
    ("chosen", "found"), [("", True), ('eval_strategy: "no"\n', False), ("eval_strategy: steps\n", False)]
)
def test_no_evaluation_is_a_choice_where_the_file_says_it(tmp_path: Path, chosen: str, found: bool) -> None:
    text = YAML.format("a/b", "sft", "qwen") + f"output_dir: o\neval_steps: 500\nval_size: 0\n{chosen}"
    said = of_rule(tmp_path, "contradicting-arguments", a_yaml=text)
    assert bool([one for one in said if "nothing is evaluated" in one.what]) is found


def test_data_sets_of_llama_factory_are_known(tmp_path: Path) -> None:
    (tmp_path / "dataset_info.json").write_text('{"mine": {"file_name": "a.json"}}')
    documents, broken = load([tmp_path / "dataset_info.json"])
    assert (documents[0].kind, broken) == ("rows", ())


@pytest.mark.parametrize(
    ("section", "severity", "says"),
    [
        (
            "zero_optimization:\n    offload_optimizer:\n      device: cpu",
            "error",
            "offload_optimizer_device: cpu",
        ),
        ("zero_optimisation:\n    offload_param:\n      device: nvme", "error", "offload_param_device: nvme"),
        ("zero_allow_untested_optimizer: true", "warning", "remove it"),
        ("gradient_clip: 1.0", "error", "did you mean"),
    ],
)
def test_what_an_unknown_key_of_accelerate_loses_is_said(
    tmp_path: Path, section: str, severity: str, says: str
) -> None:
    (one,) = of_rule(tmp_path, "accelerate-unknown-key", z_yaml=f"{ZERO_3}  {section}\n")
    assert one.severity == severity
    assert says in one.fix


@pytest.mark.parametrize("command", ["deepspeed train.py", "torchrun --master_port ${port} train.py"])
def test_a_missing_file_is_the_same_error_in_every_command(tmp_path: Path, command: str) -> None:
    (one,) = of_rule(
        tmp_path,
        "named-file-is-missing",
        train_py="import torch\n",
        run_sh=f"{command} --deepspeed ds.json\n",
    )
    assert one.severity == "error"


def test_removed_names_of_one_file_are_one_finding(tmp_path: Path) -> None:
    text = "from transformers import Trainer, TrainingArguments\n"
    text += "a = TrainingArguments(output_dir='o', warmup_ratio=0.1)\nTrainer(model=m, args=a, tokenizer=t)\n"
    (one,) = of_rule(tmp_path, "argument-was-removed", train_py=text)
    assert one.keys == ("warmup_ratio", "tokenizer")
    assert one.fix.splitlines()[0].startswith("line 2: warmup_ratio -> warmup_steps")
    assert one.fix.splitlines()[1].strip().startswith("line 3: tokenizer -> processing_class")


def test_parameters_that_are_asked_for_again_are_there(tmp_path: Path) -> None:
    text = (
        "import torch\ndef made():\n    params = model.parameters()\n    return torch.optim.AdamW(params)\n"
    )
    text += "def step():\n    params = model.parameters()\n    torch.nn.utils.clip_grad_norm_(params, 1.0)\n"
    assert not of_rule(tmp_path, "parameters-are-used-up", train_py=text)


CLIPS = """import torch
for x in rows:
    if scaler.is_enabled():
        scaler.scale(loss).backward()
        {}
        scaler.step(optimizer)
    else:
        loss.backward()
        {}
        optimizer.step()
    optimizer.zero_grad()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(("scaled", "plain", "found"), [("pass", CLIP, False), (CLIP, "pass", True)])
def test_a_branch_without_the_scaler_clips_as_it_says(
    tmp_path: Path, scaled: str, plain: str, found: bool
) -> None:
    said = of_rule(tmp_path, "clips-wrong-gradients", train_py=CLIPS.format(scaled, plain))
    assert bool(said) is found


@pytest.mark.parametrize(
    "name", ["HfArgumentParser", "HfArgumentParser as Parser", "HfArgumentParser as HfArgs"]
)
def test_a_parser_has_its_classes_flags_by_whatever_name(tmp_path: Path, name: str) -> None:
    text = "from dataclasses import dataclass\nimport transformers\n"
    text += f"from transformers import {name}\n@dataclass\nclass Mine:\n    rank: int = 8\n"
    text += f"a = {name.rpartition(' ')[2]}((Mine,)).parse_args_into_dataclasses()\n"
    command = "python train.py --rank 4 --rows a\n"
    said = of_rule(tmp_path, "flags-of-the-script", train_py=text, run_sh=command)
    assert [one.key for one in said] == ["rows"]


@pytest.mark.parametrize(("name", "found"), [("model", True), ("ema_model", False), ("teacher", False)])
def test_eval_mode_of_what_is_not_trained_may_stay(tmp_path: Path, name: str, found: bool) -> None:
    text = f"import torch\nfor x in rows:\n    model(x).backward()\n    o.step()\n    {name}.eval()\n"
    assert bool(of_rule(tmp_path, "eval-mode-stays", train_py=text)) is found


SKIPS = """for i, x in enumerate(loader):
    loss = model(**x).loss / accum
    if {}:
        optimizer.zero_grad()
        continue
    loss.backward()
    if i % accum == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_gradients_that_are_cleared_where_a_batch_is_left_out(tmp_path: Path) -> None:
    text = TRAINED + SKIPS.format("torch.isnan(loss).any()")
    assert not of_rule(tmp_path, "gradients-are-cleared", train_py=text)


def test_gradients_that_each_batch_clears(tmp_path: Path) -> None:
    text = TRAINED + SKIPS.replace(
        "    if {}:\n        optimizer.zero_grad()\n        continue\n", "    o()\n"
    )
    assert not of_rule(tmp_path, "gradients-are-cleared", train_py=text)
    assert of_rule(tmp_path, "gradients-are-cleared", train_py=text.replace("o()", "optimizer.zero_grad()"))


BEFORE_SHARDING = """if rank == 0:
    keys = model.state_dict().keys()
model = FullyShardedDataParallel(model)
if rank == 0:
    {}
model.state_dict()
"""


@pytest.mark.parametrize(("line", "hangs"), [("pass", False), ("torch.save(model.state_dict(), 'o')", True)])
def test_a_model_that_is_not_sharded_yet_waits_for_nobody(tmp_path: Path, line: str, hangs: bool) -> None:
    text = BEFORE_SHARDING.format(line)
    said = of_rule(tmp_path, "one-process-calls-for-all", train_py=text)
    assert [one.line for one in said] == [5] * hangs
