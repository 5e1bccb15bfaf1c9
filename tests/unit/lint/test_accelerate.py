"""Accelerate's files: what is wrong with them, as accelerate itself sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shardwise.lint.check import check, fix_files, load
from shardwise.lint.finding import Finding
from shardwise.lint.model import blocks_of
from shardwise.lint.setup import ModelFacts, Setup

BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 4,
    "num_machines": 1,
    "deepspeed_config": {"zero_stage": 2},
}


def findings(folder: Path, values: dict[str, Any], **setup: Any) -> list[Finding]:
    file = folder / "accelerate.yaml"
    file.write_text(yaml.safe_dump({**BASE, **values}))
    documents, broken = load([file])
    assert broken == ()
    return list(check(Setup(documents=documents, **setup)).findings)


def environment_of(folder: Path) -> str:
    """What `accelerate launch` says of the file before it starts anything; empty where it would start."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    asked = launch_command_parser().parse_args(["--config_file", str(folder / "accelerate.yaml"), "train.py"])
    try:
        arguments, _, _ = _validate_launch_command(asked)
        section = yaml.safe_load((folder / "accelerate.yaml").read_text())["deepspeed_config"]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(section.keys())
        _, environment = prepare_deepspeed_cmd_env(arguments)
        int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 0))
        int(arguments.num_processes)
    except (TypeError, ValueError, AttributeError) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"num_processes": "x"}, "num_processes"),
        ({"num_processes": "4"}, None),
        ({"num_machines": "1"}, "num_machines"),
        ({"num_machines": "one"}, "num_machines"),
        ({"main_process_port": "29500"}, "main_process_port"),
        ({"deepspeed_config": 3}, "deepspeed_config"),
        ({"deepspeed_config": "ds.json"}, "deepspeed_config"),
        ({"deepspeed_config": {"zero_stage": "two"}}, "deepspeed_config.zero_stage"),
        ({"deepspeed_config": {"zero_stage": "2"}}, None),
    ],
)
def test_what_is_no_number_and_no_section_stops_the_launch(
    values: dict[str, Any], key: str | None, tmp_path: Path
) -> None:
    found = [(one.rule, one.key) for one in findings(tmp_path, values) if one.severity == "error"]
    assert found == ([] if key is None else [("accelerate-kind-of-value", key)])
    assert bool(environment_of(tmp_path)) == (key is not None)


@pytest.mark.parametrize(
    "values",
    [
        {"num_processes": 2.5},
        {"num_processes": 0},
        {"deepspeed_config": {"zero_stage": 5}},
        {"deepspeed_config": {"gradient_accumulation_steps": "some"}},
    ],
)
def test_counts_are_whole_and_in_range(values: dict[str, Any], tmp_path: Path) -> None:
    errors = [one for one in findings(tmp_path, values) if one.severity == "error"]
    assert [one.rule for one in errors] == ["accelerate-kind-of-value"]


def test_a_count_in_quotes_is_mended(tmp_path: Path) -> None:
    findings(tmp_path, {"num_machines": "1"})
    file = tmp_path / "accelerate.yaml"
    fix_files(Setup(documents=load([file])[0]), [file])
    assert yaml.safe_load(file.read_text())["num_machines"] == 1
    assert environment_of(tmp_path) == ""


def test_fsdp_without_a_section_runs_as_fsdp_1(tmp_path: Path) -> None:
    values = {"distributed_type": "FSDP", "deepspeed_config": None, "fsdp_config": "fsdp.yaml"}
    (one,) = [one for one in findings(tmp_path, values) if one.severity == "error"]
    assert (one.rule, one.key) == ("accelerate-kind-of-value", "fsdp_config")
    assert "FSDP1 runs with its defaults" in one.what


def test_a_file_is_named_by_its_path(tmp_path: Path) -> None:
    def said(value: Any) -> list[tuple[str, str]]:
        found = findings(tmp_path, {"deepspeed_config": {"deepspeed_config_file": value}})
        return [(one.severity, one.rule) for one in found if one.file.endswith(".yaml")]

    assert said(3) == [("error", "accelerate-names-a-file")]
    assert said("gone.json") == [("warning", "accelerate-names-a-file")]
    assert said("x" * 5000 + ".json") == [("warning", "accelerate-names-a-file")]
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert said("ds.json") == [], "beside it"
    assert said(str(tmp_path / "ds.json")) == []


TYPES = ("llama", "gpt2", "mamba", "qwen3_moe", "gemma3_text", "gpt_neox")


@pytest.mark.parametrize("model_type", TYPES)
def test_blocks_are_those_that_transformers_does_not_split(model_type: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, num_hidden_layers=2))
    found = blocks_of((model_type,))
    assert found is not None
    assert set(model._no_split_modules) <= set(found.blocks)
    assert {type(module).__name__ for module in model.modules()} >= set(model._no_split_modules)


def test_a_model_that_is_not_known_has_no_blocks() -> None:
    assert blocks_of(()) is None
    assert blocks_of(("llama", "somebody_s_own")) is None
    assert blocks_of(("../../llama",)) is None
    parts = blocks_of(("llava", "llama", "clip_vision_model"))
    assert parts is not None
    assert "LlamaDecoderLayer" in parts.blocks


@pytest.mark.parametrize(
    ("wraps", "config", "severity"),
    [
        ("LlamaDecoderLayer", {"model_type": "llama"}, None),
        ("Qwen3DecoderLayer", {"model_type": "llama"}, "error"),
        (
            "LlamaDecoderLayer, LlamaMLP",
            {"model_type": "llama"},
            "error",
        ),  # split at the comma, not the space
        ("LlamaMLP", {"model_type": "llama"}, "warning"),
        ("OwnBlock", {"model_type": "llama", "auto_map": {"AutoModel": "own.Own"}}, None),
        ("LlamaDecoderLayer", {"model_type": "llava", "text_config": {"model_type": "llama"}}, None),
        (None, {"model_type": "llama"}, None),
    ],
)
def test_the_class_to_wrap_is_one_of_the_model(
    wraps: str | None, config: dict[str, Any], severity: str | None, tmp_path: Path
) -> None:
    section = {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": wraps,
    }
    values = {"distributed_type": "FSDP", "deepspeed_config": None, "fsdp_config": section}
    found = findings(tmp_path, values, model=ModelFacts.of_config("m", config))
    assert [(one.rule, one.severity) for one in found] == (
        [] if severity is None else [("fsdp-block-class", severity)]
    )
    if severity == "error":
        assert found[0].fix == "LlamaDecoderLayer, or remove it: this is the default"
        assert found[0].fixable
