"""A checked configuration as DeepSpeed can run it on a CPU, and what cannot be tried there."""

import json
from dataclasses import dataclass
from typing import Any

from shardwise.lint.document import AUTO, Document
from shardwise.lint.finding import Finding
from shardwise.lint.rules.accelerate import DS, FILE, as_deepspeed
from shardwise.lint.rules.reader import FILLED
from shardwise.lint.schema import table
from shardwise.lint.setup import Setup

_FILLED = table("tiny_values")
_GPUS, _WRITES = "it needs GPUs, or their real number", "nothing is sent or written"
_DROPPED = dict.fromkeys(("train_batch_size", "sequence_parallel_size", "autotp_size"), _GPUS)
_SHARDS = ("hpz_partition_size", "quantized_weights", "quantized_gradients")
_DROPPED |= {f"zero_{name}": _GPUS for name in _SHARDS}
_DROPPED |= dict.fromkeys(("tensorboard", "wandb", "comet", "csv_monitor", "autotuning"), _WRITES)


@dataclass(frozen=True, kw_only=True)
class Tiny:
    """A tiny run; `refusal` is DeepSpeed's message, empty if it trained, and `losses` are of its steps."""

    file: str
    config: dict[str, Any]
    untried: tuple[str, ...] = ()
    refusal: str = ""
    losses: tuple[float, ...] = ()

    def findings(self) -> tuple[Finding, ...]:
        what = f"DeepSpeed itself stops on this file: {self.refusal}"
        one = Finding(rule="run-tiny", severity="error", file=self.file, what=what, fix="", source="a run")
        return (one,) if self.refusal else ()

    def lines(self) -> list[str]:
        losses = ", ".join(f"{loss:.3f}" for loss in self.losses)
        said = f"{len(self.losses)} steps of a made-up model, loss {losses} (it shows only that steps run)"
        said = "DeepSpeed stops" if self.refusal else said
        return [f"tiny run on the CPU: {said}", *(f"  not tried: {what}" for what in self.untried)]


def tiny_of(setup: Setup) -> Tiny | None:
    """The first DeepSpeed configuration of the setup, adapted to a CPU; None if there is none."""
    for document in (*setup.of("deepspeed"), *setup.of("accelerate")):
        if document.kind == "deepspeed" and not document.unknown:
            return _adapted(document, json.loads(json.dumps(document.values)), setup)
        if document.section(DS) and not document.get(DS, FILE):
            return _adapted(document, as_deepspeed(document), setup)
    return None


def _adapted(document: Document, config: dict[str, Any], setup: Setup) -> Tiny:
    untried: list[str] = []
    _adapt(config, "", untried, fill=setup.reader != "deepspeed")
    config.setdefault("train_micro_batch_size_per_gpu", 1)
    scripts = frozenset().union(*(one.uses for one in setup.of("training")))
    if "deepspeed.initialize" not in scripts or "deepspeed.initialize(optimizer)" in scripts:
        config.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-4}})  # the script's own
    optimizer = config.get("optimizer")
    if isinstance(optimizer, dict) and str(optimizer.get("type")).lower() in ("adam", "adamw"):
        optimizer.setdefault("params", {})["torch_adam"] = True  # DeepSpeed's own would be compiled first
    return Tiny(file=document.name, config=config, untried=tuple(untried))


def _adapt(values: dict[str, Any], above: str, untried: list[str], *, fill: bool) -> None:
    for name, value in list(values.items()):
        key = above + name
        if name in _DROPPED:
            untried += [f"{key}: {_DROPPED[name]}"] if values.pop(name) not in (None, 1, False, AUTO) else []
        elif isinstance(value, dict):
            _adapt(value, f"{key}.", untried, fill=fill)
        elif fill and value == AUTO and key in FILLED["trainer"]:
            del values[name]
            values |= {name: _FILLED[name]} if name in _FILLED else {}
        elif key == "fp16.enabled" and value is True:
            values[name] = False
            untried.append("fp16: a CPU has no such arithmetic; fp32 was used")
        elif name == "device" and value == "nvme":
            values[name] = "cpu"
            untried.append(f"{key}: host memory was used instead of NVMe")
