"""What to write files for: a strategy, where it runs, and what is known of the job."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shardwise.emit.script import Script
from shardwise.job import schema
from shardwise.strategy import Precision, Strategy
from shardwise.units import gib

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")

_MOST = 2**53
"""Counts below this are exact as floats."""


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The plan's prediction for the strategy. ValueError for impossible numbers."""

    needed_bytes: int
    """Of the fullest GPU."""
    capacity_bytes: int
    """What a process may use of it."""
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
        return (
            f"predicted: {gib(self.needed_bytes)} of {gib(self.capacity_bytes)} on the fullest GPU, "
            f"{self.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """A strategy, where it runs and for which job.

    Raises ValueError for an invalid job name or count.
    """

    name: str
    """Of the job; letters, digits, `.`, `_` and `-`."""
    strategy: Strategy
    nodes: int
    gpus_per_node: int
    trainable_parameters: int
    predicted: Predicted
    script: Script
    folder: str
    """Where the files will lie; an absolute path."""
    optimizer: schema.Optimizer | None = None
    """None where only the plan is known: the script decides."""
    train: schema.Train | None = None
    """None where only the plan is known."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(self.name)
        strategy = self.strategy
        counts: tuple[object, ...] = (  # a plan's JSON may hold anything
            self.nodes,
            self.gpus_per_node,
            self.trainable_parameters,
            strategy.micro_batch,
            strategy.accumulation,
        )
        for count in counts:
            if not isinstance(count, int) or not 0 < count < _MOST:
                raise ValueError(count)
        every: object = strategy.checkpoint_every
        if not (isinstance(every, int) and strategy.precision in get_args(Precision)):
            raise ValueError((every, strategy.precision))

    @property
    def title(self) -> tuple[str, ...]:
        """Lines at the head of every file that takes comments."""
        gpus = self.nodes * self.gpus_per_node
        spread = f"{self.name}: {self.strategy.name} on {gpus} GPU{'' if gpus == 1 else 's'}"
        return (
            spread,
            str(self.predicted),
            "It holds for a script that",
            *(f"- {duty}" for duty in self.duties),
        )

    @property
    def duties(self) -> tuple[str, ...]:
        """What the script has to do for the prediction to hold."""
        return self.script.duties(self.strategy, trainable_parameters=self.trainable_parameters)

    def path(self, file: str) -> str:
        """Where a file will lie."""
        return f"{self.folder}/{file}"

    @classmethod
    def of_plan(
        cls,
        plan: Mapping[str, Any],
        folder: str,
        *,
        job: schema.Job | None = None,
    ) -> Request | None:
        """The choice of a plan's JSON; None where nothing fits. `job`: the plan's, where more of it is known.

        Raises:
            KeyError, TypeError, ValueError, OverflowError: it is no such JSON.
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
