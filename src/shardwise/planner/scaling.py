"""One job on several numbers of GPUs: how speed, time, cost and energy grow, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from shardwise.planner.plan import Option, Plan
from shardwise.planner.table import batch
from shardwise.units import JOULES_PER_KWH, SECONDS_PER_HOUR, count

SCHEMA = 1
SECONDS_PER_DAY = 24 * SECONDS_PER_HOUR


@dataclass(frozen=True, kw_only=True)
class Size:
    """The job on one number of GPUs."""

    gpus: str
    """As `--gpus` takes it."""
    world_size: int
    plan: Plan | None
    """None where no strategy is allowed."""
    problem: str = ""
    """Why nothing was chosen; empty where something was."""

    @property
    def chosen(self) -> Option | None:
        return None if self.plan is None else self.plan.chosen


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The sizes in the order asked for; all numbers are predictions."""

    sizes: tuple[Size, ...]
    price_per_gpu_hour: float | None
    """In the user's currency; None where the job has none."""

    @property
    def plan(self) -> Plan | None:
        """The plan of the first size on which something fits: what the others are compared with."""
        return next((size.plan for size in self.sizes if size.chosen is not None), None)

    def to_json(self) -> dict[str, Any]:
        """Seconds, joules, tokens; a value that is not known is null."""
        rows = [self._row(size) for size in self.sizes]
        tokens = None if self.plan is None else self.plan.tokens
        return {
            "schema": SCHEMA,
            "tokens": tokens,
            "price_per_gpu_hour": self.price_per_gpu_hour,
            "sizes": rows,
        }

    def _row(self, size: Size) -> dict[str, Any]:
        row: dict[str, Any] = {
            "gpus": size.gpus,
            "world_size": size.world_size,
            "problem": size.problem or None,
        }
        if size.chosen is None:
            names = ("strategy", "step_seconds", "tokens_per_second", "efficiency_fraction", "seconds")
            return row | dict.fromkeys((*names, "cost", "joules"))
        time = size.chosen.prediction.time
        return row | {
            "strategy": size.chosen.strategy.to_json(),
            "step_seconds": time.step_seconds,
            "tokens_per_second": time.tokens_per_second_per_gpu * time.world_size,
            "efficiency_fraction": self.efficiency(size.chosen),
            "seconds": self.seconds(size.chosen),
            "cost": self.cost(size.chosen),
            "joules": self.joules(size.chosen),
        }

    def efficiency(self, option: Option) -> float:
        """Tokens/s of a GPU, as a share of those on the first size on which something fits."""
        assert self.plan is not None
        assert self.plan.chosen is not None
        first = self.plan.chosen.prediction.time.tokens_per_second_per_gpu
        return option.prediction.time.tokens_per_second_per_gpu / first

    def seconds(self, option: Option) -> float:
        """Of the job's tokens."""
        assert self.plan is not None
        return option.seconds(self.plan.tokens)

    def cost(self, option: Option) -> float | None:
        """Price of all GPUs for that time."""
        if self.price_per_gpu_hour is None:
            return None
        hours = self.seconds(option) / SECONDS_PER_HOUR
        return self.price_per_gpu_hour * hours * option.prediction.time.world_size

    def joules(self, option: Option) -> float:
        """Of all GPUs for the job's tokens."""
        assert self.plan is not None
        return option.prediction.energy.joules_per_token * self.plan.tokens


def show_scaling(scaling: Scaling, *, console: Console | None = None) -> None:
    """Print a row for each size; at most 100 columns."""
    console = console or Console()
    if scaling.plan is not None:
        console.print(Text(_heading(scaling.plan)))
        console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim", highlight=False)
    names = ["\nGPUs", "\nstrategy", "micro ×\naccum.", "ckpt\n", "tokens/s\n", "effi-\nciency", "days\n"]
    priced = scaling.price_per_gpu_hour is not None
    for name in (*names, *(["cost\n"] if priced else []), "energy\nkWh"):
        table.add_column(name, justify="left" if name.startswith("\n") else "right", no_wrap=True)
    for size in scaling.sizes:
        table.add_row(*_cells(scaling, size))
    console.print(table)
    for size in scaling.sizes:
        if size.problem:
            console.print(
                Padding(Text(f"{size.gpus}: {size.problem}", style="dim"), (0, 0, 0, 2), expand=False)
            )


def _heading(plan: Plan) -> str:
    known = "the job's" if plan.job.total_tokens is not None else "an assumed"
    return (
        f"{plan.job.model} · {plan.job.global_batch} rows of {plan.job.sequence_length} tokens a step · "
        f"days, cost and energy for {known} {count(plan.tokens)} tokens"
    )


def _cells(scaling: Scaling, size: Size) -> Sequence[str]:
    option = size.chosen
    if option is None:
        return [size.gpus, "nothing fits" if size.plan else "not possible"]
    time = option.prediction.time
    cost = scaling.cost(option)
    return [
        size.gpus,
        option.strategy.name + (" (tight)" if option.fit == "tight" else ""),
        *batch(option.strategy),
        f"{time.tokens_per_second_per_gpu * time.world_size:,.0f}",
        f"{scaling.efficiency(option):.1%}",
        f"{scaling.seconds(option) / SECONDS_PER_DAY:,.3g}",
        *([] if cost is None else [f"{cost:,.0f}"]),
        f"{scaling.joules(option) / JOULES_PER_KWH:,.3g}",
    ]
