"""`check --run-tiny`: DeepSpeed itself, in two processes, says what it does with a user's file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from forked_command import forked_shardwise

from shardwise.app.check import check
from shardwise.errors import JobError
from shardwise.lint.setup import Setup
from shardwise.lint.text import read_json
from shardwise.lint.tiny import tiny_of

FILE: dict[str, Any] = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "bf16": {"enabled": "auto"},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "wandb": {"enabled": True},
}


def test_what_deepspeed_takes_is_trained_and_what_it_refuses_is_its_message(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FILE))
    asked = ("check", "ds.json", "--run-tiny", "--json")
    _, out, err = forked_shardwise(*asked, cwd=tmp_path)
    tiny = json.loads(out)["tiny"]
    assert tiny["refusal"] == "", err
    assert len(tiny["losses"]) == 3
    assert tiny["losses"][0] > tiny["losses"][2] > 0
    assert {one.partition(":")[0] for one in tiny["untried"]} == {"train_batch_size", "wandb"}
    # No rule of check knows the limits of an optimizer's parameters: only DeepSpeed's run shows them.
    file.write_text(json.dumps(FILE | {"optimizer": {"type": "AdamW", "params": {"lr": -1.0}}}))
    code, out, _ = forked_shardwise(*asked, cwd=tmp_path)
    assert code == 2
    findings = json.loads(out)["findings"]
    assert [one["rule"] for one in findings if one["severity"] == "error"] == ["run-tiny"]
    assert "Invalid learning rate: -1.0" in findings[0]["what"]


def test_the_file_is_adapted_to_a_cpu_and_nothing_else_is_changed() -> None:
    values = FILE | {"fp16": {"enabled": True, "loss_scale": 0}, "steps_per_print": 7}
    values["zero_optimization"] = {
        "stage": 3,
        "offload_param": {"device": "nvme"},
        "reduce_bucket_size": "auto",
    }
    tiny = tiny_of(Setup(documents=(read_json(json.dumps(values), "ds.json"),)))
    assert tiny is not None
    assert tiny.config == {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999], "torch_adam": True}},
        "bf16": {},
        "fp16": {"enabled": False, "loss_scale": 0},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "steps_per_print": 7,
    }
    assert len(tiny.untried) == 4


def test_a_script_without_an_optimizer_gets_none() -> None:
    from shardwise.lint.read import read

    script = "import deepspeed\nengine, *_ = deepspeed.initialize(model=m)\n"
    file = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}'
    for text, given in ((script, False), (script.replace("=m", "=m, optimizer=o"), True)):
        tiny = tiny_of(Setup(documents=(read(text, "t.py"), read_json(file, "ds.json"))))
        assert tiny is not None
        assert ("optimizer" in tiny.config) == given


def test_there_is_nothing_to_run(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("import torch\n")
    with pytest.raises(JobError, match="no file is a DeepSpeed configuration"):
        check(tmp_path / "t.py", tiny=True)
