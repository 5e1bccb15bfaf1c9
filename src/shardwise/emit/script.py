"""What a user's training script must do for the plan's prediction to hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from shardwise.engines import descriptor
from shardwise.job import schema
from shardwise.strategy import Strategy
from shardwise.units import count

_MOST = 2**53


@dataclass(frozen=True, kw_only=True)
class Script:
    """Settings that were simulated and that no launcher sets. ValueError for impossible values."""

    sequence_length: int
    lora_rank: int | None
    lora_targets: str = ""
    """In words; empty where only the plan is known."""
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
        numbers: tuple[object, ...] = (self.sequence_length, 1 if self.lora_rank is None else self.lora_rank)
        for number in numbers:  # a plan's JSON may hold anything, and these stand in shell scripts
            if not isinstance(number, int) or not 0 < number < _MOST:
                raise ValueError(number)
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
