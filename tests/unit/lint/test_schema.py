"""The schemas that the rules go by, against the DeepSpeed and the accelerate that are installed."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from enum import Enum
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from shardwise.lint.rules import keys as key_rules
from shardwise.lint.rules.accelerate import IN_THE_FILE
from shardwise.lint.rules.optimizer import SCHEDULES
from shardwise.lint.schema import accelerate_keys, deepspeed_schema, names, table

SCHEMA = deepspeed_schema()


class Recorder(dict[str, Any]):
    """A configuration that notes which of its keys are asked for."""

    def __init__(self, values: Mapping[str, Any], asked: set[str]) -> None:
        super().__init__(values)
        self.asked = asked

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recorder:
        return self


def models() -> dict[tuple[str, ...], Any]:
    """DeepSpeed's sections that refuse unknown keys."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPConfig, TPTrainingConfig
    from deepspeed.runtime.zenflow.zenflow_config import ZenFlowConfig
    from deepspeed.runtime.zero import config as zero
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    inner = ("zero_optimization",)
    return {
        inner: zero.DeepSpeedZeroConfig,
        (*inner, "offload_param"): zero.DeepSpeedZeroOffloadParamConfig,
        (*inner, "offload_optimizer"): zero.DeepSpeedZeroOffloadOptimizerConfig,
        (*inner, "zenflow"): ZenFlowConfig,
        (*inner, "leaf_module"): zero.DeepSpeedZeroLeafModuleConfig,
        ("bf16",): DeepSpeedBF16Config,
        ("bfloat16",): DeepSpeedBF16Config,
        ("fp16",): DeepSpeedFP16Config,
        ("tensor_parallel",): TPTrainingConfig,
        ("tensor_parallel", "tp"): TPConfig,
        ("compile",): CompileConfig,
        ("comms_logger",): CommsLoggerConfig,
        ("tensorboard",): monitor.TensorBoardConfig,
        ("wandb",): monitor.WandbConfig,
        ("csv_monitor",): monitor.CSVConfig,
        ("comet",): monitor.CometConfig,
        ("hybrid_engine",): HybridEngineConfig,
        ("timers", "throughput"): DeepSpeedThroughputTimerConfig,
        ("weight_quantization",): WeightQuantConfig,
    }


def test_the_schema_is_that_of_the_installed_version() -> None:
    assert version("deepspeed") == SCHEMA.version
    assert {key for key, section in SCHEMA.sections.items() if section.refuses} == set(models())


@pytest.mark.parametrize("section", sorted(models()), ids=".".join)
def test_sections_that_refuse_keys_have_these(section: tuple[str, ...]) -> None:
    model = models()[section]
    fields = model.model_fields
    names = {*fields, *(field.alias for field in fields.values() if field.alias)}
    assert set(SCHEMA.sections[section].keys) == names
    for name, field in fields.items():
        kind = SCHEMA.sections[section].keys[field.alias or name]
        kinds = {"bool": bool, "int": int, "float": float, "str": str}
        arguments = typing.get_args(field.annotation)
        assert kind.nullable == (type(None) in arguments), name
        of = [a for a in arguments if a is not type(None)] or [field.annotation]
        if kind.kind in kinds and isinstance(of[0], type):
            wanted = Path if of[0] is Path else kinds[kind.kind]
            assert issubclass(of[0], wanted), name
        if kind.words and isinstance(of[0], type) and issubclass(of[0], Enum):
            assert set(kind.words) == {member.value for member in of[0]}, name
        bounds = {
            (sign, float(getattr(limit, attribute)))
            for limit in field.metadata
            for sign, attribute in ((">", "gt"), (">=", "ge"), ("<", "lt"), ("<=", "le"))
            if hasattr(limit, attribute)
        }
        if name != "stage":  # an enumeration from 0 to 3
            assert set(kind.bounds) == bounds, name


def test_the_keys_of_the_top_are_those_that_deepspeed_asks_for() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()
    DeepSpeedConfig(Recorder({"train_batch_size": 1, "zero_optimization": {}}, asked))
    read_elsewhere = {
        "sequence_parallel_size": "__init__.py",
        "data_parallel_size": "__init__.py",
        "allgather_size": "runtime/zero/config.py",
    }
    import deepspeed

    for name, file in read_elsewhere.items():
        assert f'"{name}"' in (Path(deepspeed.__path__[0]) / file).read_text(encoding="utf-8")
    asked -= {key[0] for key in key_rules.REMOVED if len(key) == 1}
    asked -= {"autotuning_model_info", "model_info"}  # inside autotuning, asked for at the top by mistake
    known = set(SCHEMA.sections[()].keys) - set(read_elsewhere)
    assert asked - set(read_elsewhere) == known


@pytest.mark.parametrize(
    "section",
    [
        ("activation_checkpointing",),
        ("aio",),
        ("checkpoint",),
        ("checkpoint", "writer"),
        ("checkpoint", "parallel_write"),
        ("data_types",),
        ("flops_profiler",),
        ("torch_autocast",),
    ],
    ids=".".join,
)
def test_sections_that_ignore_keys_are_asked_for_these(section: tuple[str, ...]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: set[str] = set()
    inside: Any = Recorder({"enabled": False} if section == ("torch_autocast",) else {}, asked)
    if section == ("torch_autocast",):
        inside.update(enabled=True, dtype="bfloat16", lower_precision_safe_modules=[])
    for name in reversed(section):
        inside = {name: inside}
    DeepSpeedConfig({"train_batch_size": 1, **inside})
    assert asked == set(SCHEMA.sections[section].keys)


def test_removed_keys_are_those_that_deepspeed_rejects() -> None:
    from deepspeed.runtime import config

    assert {key[0] for key in key_rules.REMOVED if len(key) == 1} == set(
        config._REMOVED_TOP_LEVEL_CONFIG_KEYS
    )
    assert {key[1] for key in key_rules.REMOVED if len(key) == 2} == set(config._REMOVED_ZERO_CONFIG_KEYS)


def test_dtypes_schedules_and_deprecations_are_deepspeeds() -> None:
    from deepspeed.runtime import lr_schedules
    from deepspeed.runtime.config import DtypeEnum
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    words = {value for member in DtypeEnum for value in member._all_values if isinstance(value, str)}
    assert set(SCHEMA.sections["torch_autocast",].keys["dtype"].words) == words
    for name, needed in SCHEDULES.items():
        parameters = inspect.signature(getattr(lr_schedules, name)).parameters
        required = [p.name for p in parameters.values() if p.default is p.empty and p.name != "optimizer"]
        assert required == needed, name
    assert set(SCHEDULES) == set(lr_schedules.VALID_LR_SCHEDULES)
    deprecated = {
        name
        for name, field in DeepSpeedZeroConfig.model_fields.items()
        if (field.json_schema_extra or {}).get("deprecated")  # type: ignore[union-attr]
    }
    assert deprecated == {
        "cpu_offload",
        "cpu_offload_param",
        "cpu_offload_use_pin_memory",
        "stage3_gather_fp16_weights_on_model_save",
    }


def test_accelerates_keys_are_those_of_the_installed_version() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    top, deepspeed, fsdp = accelerate_keys()
    assert set(top) == {*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend"}
    flags = {action.dest for action in launch_command_parser()._actions}
    assert set(fsdp) - {"fsdp_ignored_modules"} == {flag for flag in flags if flag.startswith("fsdp_")}
    assert set(deepspeed) <= flags
    checks = inspect.getsource(DeepSpeedPlugin._deepspeed_config_checks)
    refused = {
        name.replace("DEEPSPEED_", "").lower() for name in re.findall(r'"ACCELERATE_(\w+)"', checks)
    } - {"mixed_precision", "config_ds_fields"}
    assert set(IN_THE_FILE) == refused


def test_the_trainers_words_are_those_of_the_installed_version() -> None:
    from transformers import trainer_utils, training_args

    enums = {
        "lr_scheduler_type": trainer_utils.SchedulerType,
        "optim": training_args.OptimizerNames,
        "eval_strategy": trainer_utils.IntervalStrategy,
        "logging_strategy": trainer_utils.IntervalStrategy,
        "save_strategy": trainer_utils.SaveStrategy,
        "hub_strategy": trainer_utils.HubStrategy,
    }
    words = {name: {member.value for member in enum} for name, enum in enums.items()}
    assert {name: {*said.split()} for name, said in table("words_of_the_trainer").items()} == words
    assert not {*names("earlier_optimizers")} & words["optim"]
