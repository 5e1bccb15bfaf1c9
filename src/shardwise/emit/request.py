"""What to write files for: a strategy, where it runs, what is known of the job, and what a script must do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shardwise.engines import descriptor
from shardwise.job import schema
from shardwise.strategy import Precision, Strategy
from shardwise.units import count, gib

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_MOST = 2**53
"""Counts below this are exact as floats."""


def _check_counts(*counts: object) -> None:
    """Raise ValueError: a plan's JSON may hold anything, and these stand in shell scripts."""
    for number in counts:
        if not isinstance(number, int) or not 0 < number < _MOST:
            raise ValueError(number)


@dataclass(frozen=True, kw_only=True)
class Script:
    """Settings that were simulated and that no launcher sets. ValueError for impossible values."""

    sequence_length: int
    lora_rank: int | None
    lora_targets: str = ""  # In words; empty where only the plan is known
    quantization: str = "none"

    @classmethod
    def of_plan(cls, job: Mapping[str, Any], lora: schema.Lora | None) -> Script:
        """Of a plan's `job`, and of the job's adapters where it is known. KeyError where it is no plan."""
        return cls(
            sequence_length=job["sequence_length"],
            lora_rank=job["lora_rank"],
            lora_targets="" if lora is None else _targets(lora),
            quantization=job.get("quantization", "none"),
        )

    def __post_init__(self) -> None:
        _check_counts(self.sequence_length, 1 if self.lora_rank is None else self.lora_rank)
        if self.quantization not in get_args(schema.Quantization):
            raise ValueError(self.quantization)

    def duties(self, strategy: Strategy, *, trainable_parameters: int) -> tuple[str, ...]:
        """What the script does, a phrase each."""
        return tuple(self._duties(strategy, f"({count(trainable_parameters)} parameters)"))

    def _duties(self, strategy: Strategy, trained: str) -> Iterator[str]:
        if self.lora_rank is None:
            yield f"trains all weights {trained}"
        else:
            targets = f" on {self.lora_targets}" if self.lora_targets else ""
            yield f"trains LoRA adapters of rank {self.lora_rank}{targets} {trained}"
        if self.quantization != "none":
            yield f"keeps the frozen weights in {self.quantization}"
        yield f"takes rows of {self.sequence_length} tokens, {strategy.micro_batch} at a time"
        yield f"computes in {strategy.precision}"
        yield _recomputation(strategy)
        yield "fuses the output head with the loss: one that keeps the logits needs more memory"


def _targets(lora: schema.Lora) -> str:
    if lora.targets == "all-linear":
        return "all linear modules but the output head"
    return ", ".join(" ".join(name.split()) for name in lora.targets)  # one line of a comment


def _recomputation(strategy: Strategy) -> str:
    every = strategy.checkpoint_every
    if every == 0:
        return "recomputes no activations"
    blocks = "every block" if every == 1 else f"one block in {every}"
    how = "" if descriptor(strategy).sets_checkpointing else ": model.gradient_checkpointing_enable()"
    return f"recomputes the activations of {blocks}{how if every == 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The plan's prediction for the strategy. ValueError for impossible numbers."""

    needed_bytes: int  # Of the fullest GPU
    capacity_bytes: int  # What a process may use of it
    tokens_per_second_per_gpu: float

    @classmethod
    def of_json(cls, prediction: Mapping[str, Any]) -> Predicted:
        """Of a plan's `prediction`. KeyError, TypeError or ValueError where it is none."""
        memory, time = prediction["memory"], prediction["time"]
        return cls(
            needed_bytes=memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"],
            capacity_bytes=memory["capacity_bytes"],
            tokens_per_second_per_gpu=float(time["tokens_per_second_per_gpu"]),
        )

    def __post_init__(self) -> None:
        for value in (self.needed_bytes, self.capacity_bytes, self.tokens_per_second_per_gpu):
            if not 0 <= value < _MOST:
                raise ValueError(value)

    def __str__(self) -> str:
        memory = f"{gib(self.needed_bytes)} of {gib(self.capacity_bytes)} on the fullest GPU"
        return f"predicted: {memory}, {self.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A strategy, where it runs and for which job. ValueError for an invalid job name or count."""

    name: str  # Of the job; letters, digits, `.`, `_` and `-`
    strategy: Strategy
    nodes: int
    gpus_per_node: int
    trainable_parameters: int
    predicted: Predicted
    script: Script
    folder: str  # Where the files will lie; an absolute path
    optimizer: schema.Optimizer | None = None  # None where only the plan is known: the script decides
    train: schema.Train | None = None  # None where only the plan is known

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(self.name)
        strategy = self.strategy
        _check_counts(self.nodes, self.gpus_per_node, self.trainable_parameters)
        _check_counts(strategy.micro_batch, strategy.accumulation)
        every: object = strategy.checkpoint_every
        if not (isinstance(every, int) and strategy.precision in get_args(Precision)):
            raise ValueError((every, strategy.precision))

    @property
    def title(self) -> tuple[str, ...]:
        """Lines at the head of every file that takes comments."""
        gpus = self.nodes * self.gpus_per_node
        spread = f"{self.name}: {self.strategy.name} on {gpus} GPU{'' if gpus == 1 else 's'}"
        duties = [f"- {duty}" for duty in self.duties]
        return spread, str(self.predicted), "It holds for a script that", *duties

    @property
    def duties(self) -> tuple[str, ...]:
        """What the script has to do for the prediction to hold."""
        return self.script.duties(self.strategy, trainable_parameters=self.trainable_parameters)

    def path(self, file: str) -> str:
        """Where a file will lie."""
        return f"{self.folder}/{file}"

    @classmethod
    def of_plan(
        cls, plan: Mapping[str, Any], folder: str, *, job: schema.Job | None = None
    ) -> Request | None:
        """The choice of a plan's JSON; None where nothing fits. `job`: the plan's, where more of it is known.

        KeyError, TypeError, ValueError or OverflowError where it is no such JSON.
        """
        chosen, hardware, planned = plan["chosen"], plan["hardware"], plan["job"]
        if chosen is None:
            return None
        return cls(
            name=planned["name"],
            strategy=Strategy.from_json(chosen["strategy"]),
            nodes=hardware["nodes"],
            gpus_per_node=hardware["gpus_per_node"],
            trainable_parameters=planned["trainable_parameters"],
            optimizer=None if job is None else job.optimizer,
            train=None if job is None else job.train,
            predicted=Predicted.of_json(chosen["prediction"]),
            script=Script.of_plan(planned, None if job is None else job.model.lora),
            folder=folder,
        )
