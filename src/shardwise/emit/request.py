"""What to write files for: a strategy, where it runs, what is known of the job, and what a script must do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, StrictInt, TypeAdapter
from pydantic.dataclasses import dataclass

from shardwise.engines import descriptor
from shardwise.job import schema
from shardwise.strategy import Precision, Strategy
from shardwise.units import count, gib

# a plan's JSON may hold anything, and these stand in shell scripts; below 2**53 they are exact as floats
Count = Annotated[StrictInt, Field(gt=0, lt=2**53)]
Amount = Annotated[float, Field(ge=0, lt=2**53, allow_inf_nan=False)]
Name = Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
_IN_SCRIPTS = TypeAdapter(tuple[Count, Count, StrictInt, Precision])


@dataclass(frozen=True, kw_only=True)
class Script:
    """Settings that were simulated and that no launcher sets. ValueError for impossible values."""

    sequence_length: Count
    lora_rank: Count | None
    lora_targets: str = ""  # In words; empty where only the plan is known
    quantization: schema.Quantization = "none"

    @classmethod
    def of_plan(cls, job: Mapping[str, Any], lora: schema.Lora | None) -> Script:
        """Of a plan's `job`, and of the job's adapters where it is known. KeyError where it is no plan."""
        return cls(
            sequence_length=job["sequence_length"],
            lora_rank=job["lora_rank"],
            lora_targets="" if lora is None else _targets(lora),
            quantization=job.get("quantization", "none"),
        )

    def duties(self, strategy: Strategy, *, trainable_parameters: int) -> Iterator[str]:
        """What the script does, a phrase each."""
        trained = f"({count(trainable_parameters)} parameters)"
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

    needed_bytes: Amount  # Of the fullest GPU
    capacity_bytes: Amount  # What a process may use of it
    tokens_per_second_per_gpu: Amount

    @classmethod
    def of_json(cls, prediction: Mapping[str, Any]) -> Predicted:
        """Of a plan's `prediction`. KeyError, TypeError or ValueError where it is none."""
        memory, time = prediction["memory"], prediction["time"]
        return cls(
            needed_bytes=memory["peak_reserved_bytes"] + memory["outside_allocator_bytes"],
            capacity_bytes=memory["capacity_bytes"],
            tokens_per_second_per_gpu=time["tokens_per_second_per_gpu"],
        )

    def __str__(self) -> str:
        memory = f"{gib(self.needed_bytes)} of {gib(self.capacity_bytes)} on the fullest GPU"
        return f"predicted: {memory}, {self.tokens_per_second_per_gpu:,.0f} tokens/s a GPU"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A strategy, where it runs and for which job. ValueError for an invalid job name or count."""

    name: Name  # Of the job; letters, digits, `.`, `_` and `-`
    strategy: Strategy
    nodes: Count
    gpus_per_node: Count
    trainable_parameters: Count
    predicted: Predicted
    script: Script
    folder: str  # Where the files will lie; an absolute path
    optimizer: schema.Optimizer | None = None  # None where only the plan is known: the script decides
    train: schema.Train | None = None  # None where only the plan is known
    job_text: str | None = None  # The job file for shardwise itself; None: for a script of the user's

    def __post_init__(self) -> None:
        one = self.strategy
        _IN_SCRIPTS.validate_python((one.micro_batch, one.accumulation, one.checkpoint_every, one.precision))

    @property
    def title(self) -> tuple[str, ...]:
        """Lines at the head of every file that takes comments."""
        gpus = self.nodes * self.gpus_per_node
        spread = f"{self.name}: {self.strategy.name} on {gpus} GPU{'' if gpus == 1 else 's'}"
        if self.job_text is not None:
            return spread, str(self.predicted)
        duties = [f"- {duty}" for duty in self.duties]
        return spread, str(self.predicted), "It holds for a script that", *duties

    @property
    def duties(self) -> tuple[str, ...]:
        """What the script has to do for the prediction to hold."""
        return tuple(self.script.duties(self.strategy, trainable_parameters=self.trainable_parameters))

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
