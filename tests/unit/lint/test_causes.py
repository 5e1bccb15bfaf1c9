"""One finding a cause, stops that are certain, and what stands next to a fault and is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.app.check import check
from shardwise.lint.finding import Finding
from shardwise.lint.read import read
from shardwise.lint.setup import Setup

PLUGIN = """distributed_type: DEEPSPEED
num_processes: 4
deepspeed_config:
  deepspeed_config_file: ds.json
  zero_stage: 2
  gradient_clipping: 1.0
mixed_precision: bf16
"""
DS = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
DS |= {"zero_optimization": {"stage": 2, "overlap_comm": True}}
PARSER = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("rows", nargs="{}")
parser.add_argument("--lr", type=float)
parser.add_argument("--bf16", action="store_true")
args = parser.parse_args()
"""
OWN_TRAINER = """import os
import torch
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from mine import rows
{head}
class Base:
    def __init__(self, model):
        self.model = DDP(model, device_ids=[int(os.environ["LOCAL_RANK"])])
        self.loader = DataLoader(rows, shuffle=True)  # a sampler may follow
class OwnTrainer({base}):
    def train(self):
        for batch in self.loader:
            self.model(batch).backward()
OwnTrainer(torch.nn.Linear(3, 3)).train()
"""
LOOP = """import torch
from mine import model, loader
optimizer = torch.optim.AdamW(model.parameters())
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=len(loader){})
for step, batch in enumerate(loader):
    loss = model(batch) / 4
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
"""


def found(folder: Path, first: str, **texts: str) -> list[Finding]:
    """The findings, not notes, on a file, of those written here with `__` for the dot."""
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return [one for one in check([folder / first]).findings if one.severity != "note"]


def named(findings: list[Finding], rule: str) -> list[str]:
    return [one.severity for one in findings if one.rule == rule]


def test_one_cause_is_one_finding_with_all_its_keys(tmp_path: Path) -> None:
    findings = found(tmp_path, "acc.yaml", acc__yaml=PLUGIN, ds__json=json.dumps(DS))
    [one] = [one for one in findings if one.rule == "accelerate-file-and-keys"]
    assert one.what.startswith("`zero_stage`, `gradient_clipping`, `mixed_precision`: together")
    assert one.to_json()["keys"] == (
        "deepspeed_config.zero_stage",
        "deepspeed_config.gradient_clipping",
        "mixed_precision",
    )


def test_each_removal_of_a_fix_has_its_line(tmp_path: Path) -> None:
    (tmp_path / "acc.yaml").write_text(PLUGIN)
    (tmp_path / "ds.json").write_text(json.dumps(DS))
    text = check(tmp_path / "acc.yaml", fix=True).text()
    assert "`deepspeed_config.zero_stage`: 2 -> removed\n       `" in text
    assert "--fix made 3 changes" in text
    assert "zero_stage" not in (tmp_path / "acc.yaml").read_text()


def test_other_fixes_stay_other_findings(tmp_path: Path) -> None:
    ds = {**DS, "zero_optimization": {**DS["zero_optimization"], "overlap_com": True, "odd": 1}}  # type: ignore[dict-item]
    assert named(found(tmp_path, "ds.json", ds__json=json.dumps(ds)), "refused-key") == ["error"] * 2


@pytest.mark.parametrize(
    ("words", "nargs", "said"),
    [
        ("a/b rows", "+", []),
        ("a/b --lr 1 --bf16 rows", "+", []),
        ("--lr=1 a/b rows", "+", []),
        ("a/b", "*", []),
        ("$MODEL", "+", []),
        ("a/b --lr 1", "+", ["error"]),
        ("--bf16", "*", ["error"]),
    ],
)
def test_positional_arguments_are_counted(tmp_path: Path, words: str, nargs: str, said: list[str]) -> None:
    findings = found(
        tmp_path, "run.sh", run__sh=f"torchrun train.py {words}\n", train__py=PARSER.format(nargs)
    )
    assert named(findings, "flags-of-the-script") == said


def test_a_trainer_of_ones_own_divides_no_rows(tmp_path: Path) -> None:
    own = OWN_TRAINER.format(head="", base="Base")
    library = OWN_TRAINER.format(head="from transformers import Trainer", base="Trainer")
    assert named(found(tmp_path, "a.py", a__py=own), "no-sampler") == ["warning"]
    assert named(found(tmp_path, "b.py", b__py=library), "no-sampler") == []


@pytest.mark.parametrize(("more", "said"), [("", ["warning"]), (" // 4", [])])
def test_a_schedule_for_micro_batches_does_not_end(tmp_path: Path, more: str, said: list[str]) -> None:
    assert named(found(tmp_path, "a.py", a__py=LOOP.format(more)), "schedule-counts-otherwise") == said


def test_python_starts_one_process(tmp_path: Path) -> None:
    for command, said in (
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py --deepspeed ds.json", ["warning"]),
        ("CUDA_VISIBLE_DEVICES=0 python train.py --deepspeed ds.json", []),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py", []),
        ("export RANK=0\nCUDA_VISIBLE_DEVICES=0,1 python train.py --deepspeed ds.json", []),
    ):
        findings = found(tmp_path, "run.sh", run__sh=command + "\n", ds__json=json.dumps(DS))
        assert named(findings, "one-process-for-several-gpus") == said, command


def test_a_file_is_certainly_missing_where_its_script_is_found(tmp_path: Path) -> None:
    command, script = "torchrun train.py --deepspeed none.json\n", "import torch\n"
    rule = "named-file-is-missing"
    assert named(found(tmp_path, "run.sh", run__sh=command), rule) == ["warning"]  # it may start elsewhere
    assert named(found(tmp_path, "run.sh", run__sh=command, train__py=script), rule) == ["error"]
    writes = script + 'open("none.json", "w")\n'
    assert named(found(tmp_path, "run.sh", run__sh=command, train__py=writes), rule) == []
    copies = "cp ../x none.json\n" + command
    assert named(found(tmp_path, "run.sh", run__sh=copies, train__py=script), rule) == ["warning"]


def test_a_config_that_is_read_somewhere_is_used(tmp_path: Path) -> None:
    lora = "from peft import LoraConfig\nfrom mine import go, trainer\nlora = LoraConfig(r=8)\n"
    for more, said in (("", ["error"]), ("go(lora)\n", []), ("go(globals())\n", [])):
        text = f"{lora}{more}trainer.train()\n"
        assert named(found(tmp_path, "a.py", a__py=text), "adapters-given-wrongly") == said


def test_a_checkpoint_with_a_name_is_right_where_the_script_reads_it(tmp_path: Path) -> None:
    run = "torchrun train.py --output_dir o --resume_from_checkpoint latest\n"
    script = "from transformers import Trainer\nfrom mine import args, m\nTrainer(m).train({})\n"
    own = script.format("args.path if args.path != 'latest' else None")
    assert named(found(tmp_path, "run.sh", run__sh=run, train__py=own), "no-such-checkpoint") == []
    plain = script.format("args.path")
    assert named(found(tmp_path, "run.sh", run__sh=run, train__py=plain), "no-such-checkpoint") == ["error"]


def test_a_misspelt_variable_stops_and_a_snippet_may_be_a_part(tmp_path: Path) -> None:
    script = "from mine import rows\ndef main():\n    optimizer = rows\n    {}\nmain()\n"
    rule = "undefined-name"
    assert named(found(tmp_path, "a.py", a__py=script.format("optimiser.step()")), rule) == ["error"]
    assert named(found(tmp_path, "a.py", a__py=script.format("engine.step()")), rule) == ["warning"]
    tried = script.format("try:\n        optimiser.step()\n    except NameError:\n        pass")
    assert named(found(tmp_path, "a.py", a__py=tried), rule) == ["warning"]


def test_a_smallest_rate_is_found_behind_a_flag(tmp_path: Path) -> None:
    text = "import argparse\nfrom transformers import TrainingArguments\nparser = argparse.ArgumentParser()\n"
    text += "parser.add_argument('--least', type=float, default={})\nargs = parser.parse_args()\n"
    text += "TrainingArguments('o', lr_scheduler_kwargs={{'min_lr_rate': args.least}})\n"
    for least, said in (("1e-6", ["warning"]), ("0.1", [])):
        assert named(found(tmp_path, "a.py", a__py=text.format(least)), "schedule-and-its-arguments") == said


def test_small_findings_say_what_to_do(tmp_path: Path) -> None:
    load = "from transformers import AutoModel\nAutoModel.from_pretrained('gpt2', {})\n"
    both = found(tmp_path, "a.py", a__py=load.format("load_in_8bit=True, use_auth_token='x'"))
    (one,) = [one for one in both if one.rule == "argument-was-removed"]
    assert "no `load_in_8bit`, `use_auth_token`" in one.what
    assert one.fix.splitlines()[1].strip() == "use_auth_token -> token; or an earlier version"
    words = "from transformers import TrainingArguments\nTrainingArguments('o', optim='adamw_hf')\n"
    (one,) = [one for one in found(tmp_path, "a.py", a__py=words) if one.rule == "unknown-word"]
    assert one.fix == "did you mean 'adamw_torch'?"
    own = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--gradient_accumulation_steps')\n"
    own += "args = p.parse_args()\n"
    run = "python a.py --gradient_acumulation_steps 4\n"
    (one,) = [
        one for one in found(tmp_path, "run.sh", run__sh=run, a__py=own) if one.rule == "flags-of-the-script"
    ]
    assert one.fixable
    yaml = "model_name_or_path: {path}/Qwen\noutput_dir: x\n"
    (one,) = found(tmp_path, "a.yaml", a__yaml=yaml)
    assert (one.line, one.fix) == (1, "fill in the placeholder, or use quotes")


@pytest.mark.parametrize(
    ("include", "count"),
    [("localhost:0,1,2,3", 4), ("a-0:0,1@a-1:0,1", 4), ("a-0@a-1", None), ("localhost:$GPUS", None)],
)
def test_include_counts_gpus(include: str, count: int | None) -> None:
    text = f"deepspeed --include {include} train.py --deepspeed_config ds.json\n"
    assert Setup(documents=(read(text, "run.sh"),)).world_size == count
