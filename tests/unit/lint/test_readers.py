"""What a file means depends on who opens it: judged as the real readers take it."""

from __future__ import annotations

import codecs
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from shardwise.lint.check import Checked, check, fix_files, load
from shardwise.lint.setup import READERS, Reader, Setup

TWICE = """{
  "train_micro_batch_size_per_gpu": 1,
  "gradient_accumulation_steps": 1,
  "gradient_clipping": 1.0,
  "bf16": {"enabled": true}, "timers": {"throughput": {"enabled": false}},
  "zero_optimization": {"stage": 3, "overlap_com": true},
  "zero_optimization": {
    "stage": 2,
    "overlap_comm": true,
    "offload_param": {"device": "cpu", "pin_memory": true}
  }
}
"""
ONCE = '{"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": true},\n '
ONCE += '"gradient_accumulation_steps": 1, "zero_optimization": {"stage": 2, "overlap_comm": true},\n '
ONCE += '"timers": {"throughput": {"enabled": false}}}\n'


def opened(file: Path, reader: Reader) -> Any:
    """What the installed reader makes of a file, or the name of its error."""
    from accelerate.utils.deepspeed import HfDeepSpeedConfig
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with warnings.catch_warnings(action="ignore", category=ResourceWarning):  # DeepSpeed leaves it open
        try:
            if reader == "deepspeed":
                return DeepSpeedConfig(str(file))._param_dict
            made = HfTrainerDeepSpeedConfig if reader == "trainer" else HfDeepSpeedConfig
            return made(str(file)).config
        except ValueError as error:
            return type(error).__name__


def checked(file: Path, reader: Reader | None) -> Checked:
    documents, broken = load([file])
    return check(Setup(documents=documents, asked_reader=reader), broken)


@pytest.mark.parametrize("reader", READERS)
def test_a_byte_order_mark_stops_those_that_open_the_file_as_utf_8(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(codecs.BOM_UTF8 + ONCE.encode())
    stops = opened(file, reader) == "JSONDecodeError"
    assert stops == (reader != "deepspeed")
    assert [(one.rule, one.line) for one in checked(file, reader).findings] == (
        [("byte-order-mark", 1)] if stops else []
    )


def test_nobody_named_makes_the_mark_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_bytes(codecs.BOM_UTF8 + ONCE.encode())
    assert [(one.severity, one.fixable) for one in checked(file, None).findings] == [("warning", False)]


def test_the_mark_goes_where_it_stops_the_reader_and_stays_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    written = codecs.BOM_UTF8 + ONCE.replace("overlap_comm", "overlap_com").encode()
    file.write_bytes(written)
    fix_files(Setup(documents=load([file])[0], asked_reader="deepspeed"), [file])
    assert file.read_bytes() == codecs.BOM_UTF8 + ONCE.encode()
    fix_files(Setup(documents=load([file])[0], asked_reader="trainer"), [file])
    assert file.read_bytes() == ONCE.encode()
    assert opened(file, "trainer") == json.loads(ONCE)


@pytest.mark.parametrize("reader", READERS)
def test_of_two_sections_the_one_that_is_read_is_judged(reader: Reader, tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(TWICE)
    taken = opened(file, reader)
    if reader == "deepspeed":
        assert taken == "ValueError"
    else:
        assert taken["zero_optimization"] == json.loads(TWICE)["zero_optimization"]
        assert taken["zero_optimization"]["stage"] == 2
    result = checked(file, reader)
    assert not result.setup.documents[0].has("zero_optimization", "overlap_com"), "of the first"
    found = {(one.rule, one.line) for one in result.findings}
    assert found == {("duplicate-key", 7), ("offload-param-needs-stage-3", 10)}


def test_the_two_say_what_becomes_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(TWICE)
    said = {reader: checked(file, reader).findings[0].what for reader in READERS}
    assert said["deepspeed"].endswith("DeepSpeed stops with a ValueError: Duplicate keys")
    assert said["trainer"].endswith("the Hugging Face Trainer uses this one, and silently ignores the first")


def test_what_is_given_twice_is_not_taken_out_once(tmp_path: Path) -> None:
    """The one before it would take its place."""
    file = tmp_path / "ds.json"
    twice = TWICE.replace('"stage": 2,', '"overlap_com": false, "stage": 2, "overlap_com": true,')
    twice = twice.replace('    "overlap_comm": true,\n', "")
    file.write_text(twice)
    fix_files(Setup(documents=load([file])[0], asked_reader="trainer"), [file])
    assert file.read_text().count('"overlap_com"') == 3
    assert '"overlap_comm"' not in file.read_text()


def test_an_accelerate_file_is_judged_by_its_last_section(tmp_path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_processes: 4\n"
        "num_machines: 1\ndeepspeed_config:\n  zero_stage: 3\n"
        "deepspeed_config:\n  zero_stage: 2\n  offload_param_device: cpu\n"
    )
    assert load_config_from_file(str(file)).deepspeed_config["zero_stage"] == 2
    found = {(one.rule, one.line) for one in checked(file, None).findings}
    assert found == {("accelerate-duplicate-key", 7), ("accelerate-offload-and-stage", 9)}


WARMUP = {"type": "WarmupLR"}
QUOTED = (
    ({"lr": "1e-5"}, None, ["optimizer.params.lr"]),
    ({"lr": 1e-5, "weight_decay": "0.01"}, None, ["optimizer.params.weight_decay"]),
    ({"lr": 1e-5, "betas": ["0.9", 0.95]}, None, ["optimizer.params.betas.0"]),
    ({"lr": "fast"}, None, ["optimizer.params.lr"]),
    ({"lr": 1e-5}, WARMUP | {"params": {"warmup_max_lr": "1e-5"}}, ["scheduler.params.warmup_max_lr"]),
    ({"lr": 1e-5}, WARMUP | {"params": {"warmup_type": "linear"}}, []),
    ({"lr": 1e-5, "eps": 1e-8, "betas": [0.9, 0.95], "amsgrad": True}, None, []),
)


@pytest.mark.parametrize(("params", "schedule", "keys"), QUOTED)
def test_a_number_in_quotes_stops_the_optimizer_and_the_schedule(
    params: dict[str, Any], schedule: dict[str, Any] | None, keys: list[str], tmp_path: Path
) -> None:
    """As DeepSpeed builds them: the parameters by name, from the file."""
    import torch
    from deepspeed.runtime import lr_schedules

    values = json.loads(ONCE) | {"optimizer": {"type": "AdamW", "params": params}}
    stops = ""
    try:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], **params)
        if schedule is not None:
            values["scheduler"] = schedule
            getattr(lr_schedules, schedule["type"])(optimizer, **schedule["params"])
    except (TypeError, ValueError) as error:
        stops = str(error)
    assert bool(stops) == bool(keys), stops
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(values, indent=1))
    found = [one for one in checked(file, "deepspeed").findings if one.severity == "error"]
    assert [(one.rule, one.key) for one in found] == [("text-for-a-number", key) for key in keys]


def test_quotes_are_taken_off_where_a_number_is_in_them(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    values = json.loads(ONCE) | {"optimizer": {"type": "AdamW", "params": {"lr": "1e-5"}}}
    file.write_text(json.dumps(values))
    fix_files(Setup(documents=load([file])[0]), [file])
    assert json.loads(file.read_text())["optimizer"]["params"] == {"lr": 1e-5}
    assert file.read_text() == json.dumps(values).replace('"1e-5"', "1e-05")


def test_a_text_that_says_no_means_yes(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    params = {"lr": 1e-5, "adam_w_mode": "false"}
    file.write_text(json.dumps(json.loads(ONCE) | {"optimizer": {"type": "AdamW", "params": params}}))
    (one,) = checked(file, "deepspeed").findings
    assert one.what == '`adam_w_mode` is the text "false": Python counts any text as true, also this one'
    assert one.fix == "write false"


@pytest.mark.parametrize(
    ("loop", "severity", "says"),
    [
        ("engine, _, _, _ = INIT\nfor x in data:\n  inner.step()", "error", "nothing is trained"),
        ("engine, inner, _, _ = INIT\nfor x in data:\n  inner.step()", "warning", "bypasses the engine"),
        ("self.e, self.o, *_ = INIT\nfor x in data:\n  self.o.step()", "warning", "bypasses the engine"),
        ("engine, _, _, lr = INIT\nfor x in data:\n  engine.step()\n  lr.step()", None, ""),
        ("engine = INIT[0]\nfor x in data:\n  inner.step()", None, ""),  # not followed that far
    ],
)
def test_who_steps_in_a_loop_of_deepspeed(tmp_path: Path, loop: str, severity: str | None, says: str) -> None:
    file = tmp_path / "train.py"
    made = "deepspeed.initialize(model=m, optimizer=inner, config=c)"
    file.write_text(f"import deepspeed\n{loop.replace('INIT', made)}\n")
    found = [one for one in checked(file, None).findings if one.rule == "engine-steps-itself"]
    assert [(one.severity, one.line) for one in found] == ([] if severity is None else [(severity, 4)])
    assert all(says in one.what for one in found)


def test_a_script_that_is_no_python_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("import deepspeed\nfor x in data\n    pass\n")
    (one,) = checked(file, None).findings
    assert (one.line, one.severity) == (2, "error")
    assert f"Python 3.{sys.version_info[1]}, which runs check, cannot read it: expected ':'" in one.what
    file.write_text(f"x = {'-' * 100_000}1\n")  # Python 3.11's MemoryError says nothing
    (one,) = checked(file, None).findings
    assert one.what.partition(": ")[2].strip()
