# ruff: noqa: E501 - the files are text
"""What is dropped of files of other tools, what stops, and what only another file causes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checked_files import checked
from foreign_files import Case, check_case
from shardwise.lint.check import check, load
from shardwise.lint.finding import Finding
from shardwise.lint.setup import ModelFacts, Setup

AXOLOTL = "base_model: a/b\ndatasets:\n  - path: c/d\n    type: {}\nlearning_rate: 0.0002\n"
TRL = "from trl import SFTConfig, SFTTrainer\nargs = SFTConfig('o', {}=1)\nSFTTrainer('a/b', args=args).train()\n"
FACTORY = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ntemplate: qwen3\ndeepspeed: ds.json\n"
AUTO = '{"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}'


def severities(folder: Path, rule: str, **texts: str) -> list[str]:
    return [one.severity for one in checked(folder, **texts) if one.rule == rule]


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("alpacca", ["error"]),
        ("chat_tempalte", ["error"]),
        ("alpaca", []),
        ("alpaca_chat.load_qa", []),
        ("alpaca2", []),  # perhaps of a later version
        ("of_mine", []),
    ],
)
def test_types_of_rows_that_axolotl_has_not(tmp_path: Path, kind: str, found: list[str]) -> None:
    assert severities(tmp_path, "unknown-word", ax_yml=AXOLOTL.format(kind)) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [("max_lenght", ["error"]), ("dataset_text_feild", ["error"]), ("num_generation", ["warning"])],
)
def test_arguments_that_stop_are_errors(tmp_path: Path, name: str, found: list[str]) -> None:
    assert severities(tmp_path, "misspelt-argument", train_py=TRL.format(name)) == found


def test_fp16_is_judged_where_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(AUTO)

    def found(switches: str) -> list[Finding]:
        (tmp_path / "lf.yaml").write_text(FACTORY + switches)
        documents, _ = load([tmp_path / "lf.yaml"])
        setup = Setup(documents=documents, model=ModelFacts(name="Qwen/Qwen3-8B"))
        return [one for one in check(setup).findings if one.rule == "fp16-for-a-bf16-model"]

    assert found("fp16: true\nbf16: true\n") == []  # which the Trainer stops at
    (one,) = found("fp16: true\n")
    assert not one.changes
    assert "the Trainer's arguments" in one.fix


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it reads this")
@pytest.mark.parametrize(
    "text",
    [
        "type X[T] = list[T]",
        "type X = list[int]",
        "class A[T](B):\n    def f[K: dict[str, int]](self, x: list[K]):\n        return f'{x}'",
        "async def f[T: (int, str)](x: T) -> T: ...",
    ],
)
def test_types_of_a_newer_python_are_no_error(tmp_path: Path, text: str) -> None:
    (one,) = [f for f in checked(tmp_path, train_py=f"import torch\n{text}\n") if f.rule == "unreadable"]
    assert (one.severity, one.line) == ("warning", 2)
    assert one.fix.startswith("a newer Python")


def test_what_this_python_cannot_read_may_be_right(tmp_path: Path) -> None:
    for text in ("import torch\ntype = [\n", f"x = {'1 + ' * 6000}1\n"):
        (one,) = checked(tmp_path, train_py=text)
        assert "which runs check, cannot read it: " in one.what
        assert "run check with a newer Python" in one.fix


def deepspeed(total: int, every: int) -> dict[str, str]:
    rows = f'"train_batch_size": {total}, "train_micro_batch_size_per_gpu": 4'
    return {"ds.json": f'{{{rows}, "gradient_accumulation_steps": {every}, "bf16": {{"enabled": true}}}}'}


LAUNCH = {
    "a.yaml": "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {gradient_accumulation_steps: 4, deepspeed_config_file: ds.json}\n"
}
ROWS = "base_model: a/b\ndatasets:\n  - path: c/d\n    type: alpaca\nmicro_batch_size: 2\n"
STEPS = "gradient_accumulation_steps"
DROPPED: dict[str, Case] = {
    "rows of a step that the accumulation does not give": (
        LAUNCH | deepspeed(64, 8),
        {"train.global_batch": 64, "train.micro_batch": 4},
        (f"train_batch_size 64 is used, not ds.json:1: {STEPS} 8: 4 x 8 x 4 GPUs = 128",),
        (f"{STEPS} 8 is used", f"{STEPS} 4"),
    ),
    "all of them fit": (LAUNCH | deepspeed(64, 4), {"train.global_batch": 64}, (), ("conflict",)),
    "any number of GPUs": (deepspeed(64, 8), {"train.global_batch": 64}, (), ("conflict",)),
    "no number of GPUs": (
        deepspeed(50, 8),
        {"train.global_batch": 50},
        ("train_batch_size 50 is used, not ds.json:1: ", ": no multiple of 32", "left out: 4 rows of a GPU"),
        (),
    ),
    "Axolotl's rows of a step, which its accumulation decides": (
        {"ax.yml": f"{ROWS}batch_size: 16\n{STEPS}: 4\n"},
        {"train.global_batch": 8, "train.micro_batch": 2},
        (f"conflict: ax.yml:7: {STEPS} 4 is used, not ax.yml:6: batch_size 16",),
        ("no such key: batch_size",),
    ),
    "Axolotl's rows of a step alone": (
        {"ax.yml": f"{ROWS}batch_size: 16\n"},
        {"train.global_batch": 16, "train.micro_batch": 2},
        ("train.global_batch 16 is 2 x 8 x GPUs",),
        ("conflict",),
    ),
    "two warm-ups": (
        {"ax.yml": f"{ROWS}{STEPS}: 4\nwarmup_steps: 10\nwarmup_ratio: 0.1\n"},
        {"optimizer.warmup_steps": 10},
        ("conflict: ax.yml:7: warmup_steps 10 is used, not ax.yml:8: warmup_ratio 0.1",),
        (),
    ),
    "a share that is not given": (
        {"ax.yml": f"{ROWS}{STEPS}: 4\nwarmup_steps: 10\nwarmup_ratio: 0\n"},
        {"optimizer.warmup_steps": 10},
        (),
        ("conflict",),
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_is_dropped_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_case(DROPPED[name], tmp_path, monkeypatch)
