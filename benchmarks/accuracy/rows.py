"""The rows of rows.toml, each one configuration of model, strategy and batch."""

from __future__ import annotations

import tomllib
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardwise.job.schema import Job
from shardwise.models.catalog import Shape, lookup
from shardwise.models.families import FAMILIES, Family
from shardwise.space.auto import resolve
from shardwise.strategy import Strategy

GIB = 1024**3
SETS = ("fit", "held-out", "choices", "families", "attention")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One configuration; its id contains all of it."""

    model: str
    """Name of a shape in the package's catalog; weights are random."""
    layers: int = 0
    """Transformer blocks instead of the shape's; 0: as published."""
    gpus: int = 1
    """Of all nodes."""
    nodes: int = 1
    """Launchers that meet at a rendezvous. All are on this machine; NCCL takes each for another host."""
    strategy: str | dict[str, Any] = "single"
    """As in a job; a name of the file's `strategies` has been replaced by its parts."""
    strategy_name: str = ""
    sequence_length: int = 2048
    micro_batch: int = 1
    accumulation: int = 1
    checkpointing: str | int = "none"
    lora: int = 0
    """Rank of adapters on all linear layers; 0 trains all weights."""
    variants: str = ""
    """LoRA's variants, joined by `+`."""
    optimizer: str = "adamw"
    quantization: str = "none"
    """Format of the base below adapters: `int8` or `nf4`."""
    precision: str = "bf16"
    attention: str = ""
    """`flash4`: the package flash-attn-4 is installed."""
    memory_cap_gib: float = 0.0
    """Limit of the process's GPU memory; 0: none."""
    set: str = "fit"
    """`fit`: constants may have been found with it. `held-out`: first compared after they were fixed.
    `choices`: neither, measured for choices.py. `families`: neither; Mamba, quantised bases and tensor
    parallelism. `attention`: neither; one row for each kind of attention, and mixtures of experts."""

    @property
    def id(self) -> str:
        parts = [
            f"{self.model}{f'-{self.layers}l' if self.layers else ''}",
            f"{f'{self.nodes}x' if self.nodes > 1 else ''}{self.gpus // self.nodes}gpu",
            self.strategy_name,
            "-".join([f"lora{self.lora}", *self.variants.split("+")]).rstrip("-") if self.lora else "full",
            f"s{self.sequence_length}",
            f"b{self.micro_batch}x{self.accumulation}",
            f"ck{ {'none': 0, 'full': 1}.get(str(self.checkpointing), self.checkpointing) }",
        ]
        parts += [self.quantization] if self.quantization != "none" else []
        parts += [self.optimizer] if self.optimizer != "adamw" else []
        parts += [self.precision] if self.precision != "bf16" else []
        parts += [self.attention] if self.attention else []
        parts += [f"cap{self.memory_cap_gib:g}"] if self.memory_cap_gib else []
        return ".".join(parts)

    @property
    def offloads(self) -> bool:
        """Whether the optimizer is DeepSpeed's for CPUs, which is compiled when first used."""
        return self.resolved().engine == "deepspeed" and self.resolved().offload_optimizer != "none"

    @property
    def global_batch(self) -> int:
        """Rows of a step. GPUs that share a layer, or the layers, have the same ones."""
        parts = self.strategy if isinstance(self.strategy, dict) else {}
        together = int(parts.get("tensor_parallel", 1)) * int(parts.get("pipeline", 1))
        return self.micro_batch * self.accumulation * self.gpus // together

    @property
    def memory_cap_bytes(self) -> int | None:
        return int(self.memory_cap_gib * GIB) or None

    @cached_property
    def shape(self) -> Shape:
        shape = lookup(self.model)
        if shape is None:
            raise SystemExit(f"{self.model} is not in the catalog")
        return shape

    @property
    def config(self) -> dict[str, Any]:
        """The job's `model.config`: what differs from the published shape."""
        if not self.layers:
            return {}
        if self.shape.model_type == "gpt2":
            return {"n_layer": self.layers}
        if self.shape.model_type == "gpt_neo":
            return {"num_layers": self.layers, "attention_types": [[["global", "local"], self.layers // 2]]}
        return {"num_hidden_layers": self.layers}

    def job(self, *, source: str, text: str, output: str) -> Job:
        """The job to run. `source`: folder with the shape's config and a tokenizer."""
        model: dict[str, Any] = {"source": source, "weights": "random", "config": self.config}
        if self.lora:
            model["lora"] = {"rank": self.lora, "alpha": 2.0 * self.lora, "targets": "all-linear"}
            model["lora"]["variants"] = list(filter(None, self.variants.split("+")))
            model["quantization"] = self.quantization
        return Job.model_validate(
            {
                "name": "row",
                "output": output,
                "model": model,
                "data": {
                    "train": text,
                    "format": "text",
                    "sequence_length": self.sequence_length,
                    "packing": bool(FAMILIES.get(self.shape.model_type, Family()).packing),
                    "eval_fraction": 0.0,
                },
                "optimizer": {
                    "name": self.optimizer,
                    "learning_rate": 1e-5,
                    "schedule": "constant",
                    "warmup_steps": 0,
                },
                "train": {
                    "steps": 1,  # measure.py sets the number
                    "global_batch": self.global_batch,
                    "micro_batch": self.micro_batch,
                    "precision": self.precision,
                    "checkpointing": self.checkpointing,
                    "eval_every": 0,
                    "save_every": 0,
                    "worst_case_first": False,
                },
                "strategy": self.strategy,
                "tracking": [],
            }
        )

    def resolved(self, *, devices: str = "cuda") -> Strategy:
        """The complete strategy; raises JobError where the rules refuse it."""
        job = self.job(source=self.model, text="text.txt", output="runs")
        strategy, _ = resolve(job, world_size=self.gpus, devices=devices)  # type: ignore[arg-type]
        return strategy

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "config": self.config}


def load_rows(path: Path) -> list[Row]:
    """The rows of a file, in its order; ids are unique."""
    with path.open("rb") as file:
        content = tomllib.load(file)
    named: dict[str, Any] = content.get("strategies", {})
    rows = []
    for values in content["rows"]:
        name = values.get("strategy", "single")
        rows.append(Row(**{**values, "strategy": named.get(name, name), "strategy_name": name}))
    ids = [row.id for row in rows]
    twice = sorted({id_ for id_ in ids if ids.count(id_) > 1})
    if twice:
        raise SystemExit(f"{path} has these rows twice: {', '.join(twice)}")
    return rows
