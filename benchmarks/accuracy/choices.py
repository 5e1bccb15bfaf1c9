"""What a plan chooses for a job, compared with all measured strategies of that job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from earlier import earlier_kernels, kernels_of
from predict import HERE, MEASURED, measured_rows, predict
from rows import GIB, Row, load_rows

from shardwise.hardware.parse import parse_hardware
from shardwise.planner.plan import in_words
from shardwise.planner.planning import make_plan
from shardwise.planner.sketch import sketch
from shardwise.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its rows and its resources; the plan chooses strategy, micro-batch and checkpointing."""

    model: str
    gpu: str = "H200"
    gpus: int = 4
    sequence_length: int = 2048
    global_batch: int
    lora: int = 0
    memory_cap_gib: float = 0.0

    def __str__(self) -> str:
        how = f"LoRA {self.lora}" if self.lora else "all weights"
        cap = f" of {self.memory_cap_gib:g} GiB" if self.memory_cap_gib else ""
        rows = f"{self.global_batch} rows of {self.sequence_length}"
        return f"{self.model}, {how}, {rows}, {self.gpus} GPU{'s' * (self.gpus > 1)}{cap}"

    @property
    def file(self) -> Path:
        """The measurements."""
        return HERE / "results" / "h100.jsonl" if self.gpu == "H100" else MEASURED

    @property
    def rows(self) -> list[Row]:
        """The measured rows that train this job."""
        file = HERE / ("h100.toml" if self.gpu == "H100" else "rows.toml")
        rows = [row for row in load_rows(file) if row.quantization == "none"]
        return [row for row in rows if _job_of(row, self.gpu) == self]

    @property
    def earlier(self) -> frozenset[str]:
        """Kernels as its rows were measured with, where other strategies fit with those of now."""
        found = measured_rows(self.file)
        return frozenset({"gelu", "logits"}).intersection(
            *(earlier_kernels(found[row.id]) for row in self.rows if row.id in found)
        )

    def choice(self) -> Strategy:
        """The first choice of `shardwise plan`, with the activation that the rows were measured with."""
        changes = [f"data.sequence_length={self.sequence_length}", f"train.global_batch={self.global_batch}"]
        changes += [f"model.lora.rank={self.lora}"] if self.lora else []
        hardware = parse_hardware(f"{self.gpus}x{self.gpu}")
        job = sketch(self.model, changes, world_size=hardware.world_size).job
        with kernels_of(self.earlier):
            plan = make_plan(job, hardware, memory_cap_bytes=int(self.memory_cap_gib * GIB) or None)
        if plan.chosen is None:
            raise ValueError(f"nothing fits: {self}")
        return plan.chosen.strategy


def _job_of(row: Row, gpu: str) -> Job:
    return Job(
        model=row.model,
        gpu=gpu,
        gpus=row.gpus,
        sequence_length=row.sequence_length,
        global_batch=row.global_batch,
        lora=row.lora,
        memory_cap_gib=row.memory_cap_gib,
    )


FASTEST = (
    Job(model="llama-2-7b", gpus=2, global_batch=4),
    Job(model="tinyllama-1.1b", gpus=2, global_batch=8),
)
"""Jobs with several measured strategies."""

CHANGED = (
    Job(model="llama-2-7b", global_batch=8),
    Job(model="tinyllama-1.1b", global_batch=32),
    Job(model="llama-3.1-8b", lora=16, sequence_length=4096, global_batch=16),
)
"""The same, of which the choice has changed since four GPUs were measured (decisions 0102 and 0103)."""

ON_H100 = (
    Job(model="qwen2.5-1.5b", gpu="H100", gpus=1, global_batch=16),
    Job(model="llama-3.1-8b", gpu="H100", gpus=1, lora=16, global_batch=8),
    Job(model="llama-3.2-3b", gpu="H100", gpus=1, global_batch=8),
    Job(model="gpt-neo-1.3b", gpu="H100", gpus=1, sequence_length=1024, global_batch=16),
    Job(model="llama-3.2-3b", gpu="H100", gpus=2, global_batch=16),
    Job(model="mistral-7b", gpu="H100", gpus=2, global_batch=8),
    Job(model="qwen3-8b", gpu="H100", gpus=2, lora=16, global_batch=16),
    Job(model="phi-3-mini", gpu="H100", gpus=2, global_batch=16),
)
"""Jobs of a card that no constant was fitted on: the choice of each, and five others that rank high."""

REHEARSALS = (Job(model="llama-2-7b", lora=16, global_batch=16, memory_cap_gib=24),)
"""Smaller cards, simulated by a limit on the process's share of an H200."""

CHANGED_REHEARSALS = (
    Job(model="gpt-neo-2.7b", lora=16, global_batch=16, memory_cap_gib=16),
    Job(model="llama-2-7b", lora=16, global_batch=16, memory_cap_gib=16),
    Job(model="gpt3-1.3b", global_batch=16, memory_cap_gib=16),
    Job(model="gpt3-6.7b", global_batch=16, memory_cap_gib=24),
)
"""The same, of which the choice has changed since (decisions 0103 and 0112)."""


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A job's choice, and the measurements of it and of the other strategies."""

    job: Job
    strategy: Strategy
    measured: Mapping[str, Any] | None
    """The choice's row; None if it has not been measured."""
    others: tuple[tuple[Row, Mapping[str, Any]], ...]
    """All measured rows of the job, including the choice's."""

    @property
    def fastest(self) -> tuple[Row, Mapping[str, Any]]:
        ran = [(row, found) for row, found in self.others if not found["error"]]
        return min(ran, key=lambda pair: pair[1]["step_seconds"])

    @property
    def behind(self) -> float:
        """How much longer its step takes than the fastest measured one, as a share of it."""
        assert self.measured is not None
        return float(self.measured["step_seconds"] / self.fastest[1]["step_seconds"] - 1)

    @property
    def words(self) -> str:
        return in_words(self.strategy)


@cache
def chosen(job: Job) -> Chosen:
    """Plan the job and look up its choice in the ledger."""
    strategy, found = job.choice(), measured_rows(job.file)
    others = tuple((row, found[row.id]) for row in job.rows if row.id in found)
    mine = next((m for row, m in others if row.resolved() == strategy), None)
    return Chosen(job=job, strategy=strategy, measured=mine, others=others)


NOT_YET = "not measured yet"


def fastest_table(jobs: Sequence[Job]) -> list[list[str]]:
    """Lines of a table: the choice compared with the fastest measured strategy of its job."""
    lines = []
    for job in jobs:
        one = chosen(job)
        if one.measured is None:
            lines.append([str(job), one.words, NOT_YET, "", "", ""])
            continue
        row, found = one.fastest
        speed = _speed(job, one.measured), _speed(job, found)
        lines.append(
            [
                str(job),
                one.words,
                f"{speed[0]:,.0f}",
                in_words(row.resolved()),
                f"{speed[1]:,.0f}",
                f"{100 * one.behind:.1f} % of {len(one.others)}",
            ]
        )
    return lines


def rehearsal_table() -> list[list[str]]:
    """Lines of a table: whether the choice ran within its memory, and what else was tried."""
    lines = []
    for job in (*REHEARSALS, *CHANGED_REHEARSALS):
        one = chosen(job)
        others = [(row, m) for row, m in one.others if m is not one.measured]
        tried = [f"{in_words(row.resolved())}: {_predicted(row)}; {_ended(found)}" for row, found in others]
        lines.append([str(job), one.words, _ended(one.measured), "<br>".join(tried) or NOT_YET])
    return lines


def _speed(job: Job, found: Mapping[str, Any]) -> float:
    tokens: float = found["tokens_per_step"]
    return tokens / found["step_seconds"] / job.gpus


def _predicted(row: Row) -> str:
    memory = predict(row).memory
    if memory.cache_flushes:
        return "predicted to fit only if the allocator returns its cache"
    return "predicted to fit" if memory.fits else "predicted not to fit"


def _ended(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return NOT_YET
    if found["oom"]:
        return "out of memory"
    needed = found["peak_reserved_bytes"] + found["outside_allocator_bytes"]
    return f"ran, with {needed / GIB:.1f} GiB"
