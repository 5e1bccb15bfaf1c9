"""A plan: the chosen strategy, the ranked rest, what was left out and why. Frozen values, and their JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwise.hardware.hardware import Hardware
from shardwise.job.schema import Job, Quantization
from shardwise.planner.evidence import Evidence, evidence_of
from shardwise.simulate.prediction import Prediction
from shardwise.space.candidates import Refused
from shardwise.strategy import Strategy
from shardwise.units import gib

Objective = Literal["throughput", "memory", "energy"]

Fit = Literal["fits", "tight", "no"]
"""Within the capacity less the margin; within the capacity only; not within it."""

SCHEMA = 1
TOKENS_TO_COMPARE = 10**9
"""Training time is shown for this many tokens where the job's own number is not known."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The parts of a job that decide how it runs."""

    name: str
    model: str
    parameters: int
    trainable_parameters: int
    lora_rank: int | None
    quantization: Quantization = "none"
    """Format of the frozen base."""
    sequence_length: int
    global_batch: int
    precision: str
    total_tokens: int | None
    """Tokens of the entire training, padding included; None where the data's size is not known."""
    price_per_gpu_hour: float | None = None
    """In the user's currency."""
    assumed: tuple[str, ...] = ()
    """Defaults that were used, as the flags that change them."""
    notes: tuple[str, ...] = ()  # What building the model left out or changed

    @classmethod
    def of(
        cls,
        job: Job,
        *,
        parameters: int,
        trainable_parameters: int,
        epoch_tokens: int | None = None,
        assumed: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> Workload:
        """Summarize a job; `epoch_tokens`: of one pass over its data, None where not known."""
        rows_tokens = job.train.global_batch * job.data.sequence_length
        total = None if epoch_tokens is None else round((job.train.epochs or 1) * epoch_tokens)
        if job.train.steps is not None:
            total = job.train.steps * rows_tokens
        return cls(
            name=job.name,
            model=job.model.source,
            parameters=parameters,
            trainable_parameters=trainable_parameters,
            lora_rank=None if job.model.lora is None else job.model.lora.rank,
            quantization=job.model.quantization,
            sequence_length=job.data.sequence_length,
            global_batch=job.train.global_batch,
            precision=job.train.precision,
            total_tokens=total,
            price_per_gpu_hour=job.energy.price_per_gpu_hour,
            assumed=tuple(assumed),
            notes=tuple(notes),
        )


@dataclass(frozen=True, kw_only=True)
class Option:
    """A strategy that was simulated."""

    strategy: Strategy
    prediction: Prediction
    fit: Fit
    why: tuple[str, ...] = ()
    """Sentences with numbers, for and against it."""
    power_limit_watts: int | None = None
    """Of each GPU, where it is not the card's own; the prediction is for it."""

    def __repr__(self) -> str:
        size, seconds = gib(self.prediction.memory.needed_bytes), self.prediction.time.step_seconds
        return f"<Option: {in_words(self.strategy)}, {size}, {seconds:.3g} s/step, fit={self.fit!r}>"

    def seconds(self, tokens: int) -> float:
        """Training time in seconds for `tokens`."""
        time = self.prediction.time
        return tokens / (time.tokens_per_second_per_gpu * time.world_size)

    def to_json(self) -> dict[str, Any]:
        return {
            "strategy": self.strategy.to_json(),
            "power_limit_watts": self.power_limit_watts,
            "fits": self.fit != "no",
            "tight": self.fit == "tight",
            "why": list(self.why),
            "prediction": self.prediction.to_json(),
        }


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A strategy that was not simulated, because a leaner one does not fit."""

    strategy: Strategy
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"strategy": self.strategy.to_json(), "fits": False, "why": [self.reason]}


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The nearest change of the job or the hardware with which something fits."""

    what: str
    """For a person: `rows of 1024 tokens instead of 2048`."""
    how: str
    """As a flag: `--sequence 1024`."""
    option: Option

    def to_json(self) -> dict[str, Any]:
        return {"what": self.what, "how": self.how, **self.option.to_json()}


@dataclass(frozen=True, kw_only=True)
class AtLimit:
    """The chosen strategy at one power limit, against the card's own."""

    limit_watts: int
    time_ratio: float
    energy_ratio: float


@dataclass(frozen=True, kw_only=True)
class PowerChoice:
    """What power limits change, against what would be chosen for throughput at the card's own limit."""

    max_slowdown_fraction: float
    """The most that a token may take longer than with the fastest that fits."""
    curve: tuple[AtLimit, ...]
    """From the card's own limit on, descending; only that where its range is not known, or none binds."""
    default: Strategy
    """The choice for throughput, at the card's own limit."""
    slowdown_fraction: float
    energy_saved_fraction: float
    """Predicted, of the default's time and energy per token."""
    energy_error_fraction: float
    """The saving may be this much more or less; 0 where no limit is changed."""
    error_source: str
    """What the error is from, or that no sweep of the card was measured."""

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "default": self.default.to_json()}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan; all its numbers are predictions."""

    hardware: Hardware
    job: Workload
    objective: Objective
    margin: float
    """Share of the capacity that the choice leaves free."""
    memory_cap_bytes: int | None = None
    """The user's limit per process; None: all of the GPU."""
    chosen: Option | None
    """None where nothing fits."""
    alternatives: tuple[Option, ...]
    """The rest, best first: what fits, what is tight, and what does not fit by how little it misses."""
    skipped: tuple[Skipped, ...] = ()
    refused: tuple[Refused, ...] = ()
    nearest: Nearest | None = None
    """Searched only where nothing fits."""
    power: PowerChoice | None = None
    """Where power limits were chosen, too (planner/limits.py)."""
    pareto: tuple[Option, ...] = ()
    """Where it was asked for: what nothing else beats in time and energy per token, fastest first."""

    def __repr__(self) -> str:
        """Short, as a prompt shows it; `print` shows the table."""
        return f"<Plan of {self.job.model}: chosen={self.chosen}, {len(self.options)} simulated>"

    @property
    def options(self) -> tuple[Option, ...]:
        """Everything simulated, best first."""
        return self.alternatives if self.chosen is None else (self.chosen, *self.alternatives)

    @property
    def capacity_bytes(self) -> int:
        """GPU memory that a process may use."""
        return self.options[0].prediction.memory.capacity_bytes

    @property
    def evidence(self) -> Evidence:
        """How far predictions like that of the best option were off."""
        best = self.options[0]
        return evidence_of(best.strategy, best.prediction, self.hardware)

    @property
    def tokens(self) -> int:
        """The tokens that training time is shown for."""
        return self.job.total_tokens or TOKENS_TO_COMPARE

    def __str__(self) -> str:
        """The table that `shardwise plan` shows, 100 columns wide."""
        from shardwise.planner.table import as_text

        return as_text(self)

    def to_json(self) -> dict[str, Any]:
        """Schema 1: bytes, seconds, joules; a key that has nothing to say is null or empty, never absent."""
        return {
            "schema": SCHEMA,
            "hardware": self.hardware.to_json(),
            "job": asdict(self.job),
            "objective": self.objective,
            "margin_fraction": self.margin,
            "memory_cap_bytes": self.memory_cap_bytes,
            "chosen": None if self.chosen is None else self.chosen.to_json(),
            "alternatives": [option.to_json() for option in self.alternatives],
            "skipped": [skipped.to_json() for skipped in self.skipped],
            "refused": [
                {"strategy": refused.strategy.to_json(), "rule": refused.rule, "reason": refused.reason}
                for refused in self.refused
            ],
            "evidence": self.evidence.to_json(),
            "nearest": None if self.nearest is None else self.nearest.to_json(),
            "power": None if self.power is None else self.power.to_json(),
            "pareto": [option.to_json() for option in self.pareto],
        }


def in_words(strategy: Strategy) -> str:
    """`zero2 with micro-batch 4, accumulation 2, checkpointing every block`."""
    every = strategy.checkpoint_every
    recomputed = "every block" if every == 1 else f"one block in {every}"
    return (
        f"{strategy.name} with micro-batch {strategy.micro_batch}, accumulation {strategy.accumulation}, "
        f"{f'checkpointing {recomputed}' if every else 'no checkpointing'}"
    )
