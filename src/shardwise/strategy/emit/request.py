"""What is to be emitted: a strategy, where it runs, and what of the job is known."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.job import schema
from shardwise.strategy.strategy import Strategy

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A strategy, where it runs and what for. ValueError for a name that is none of a job."""

    name: str
    """Of the job; letters, digits, `.`, `_` and `-`."""
    strategy: Strategy
    nodes: int
    gpus_per_node: int
    trainable_parameters: int
    optimizer: schema.Optimizer | None = None
    """None where only the plan is known: the script decides."""
    folder: str = "."
    """Where the files will lie, from where the script is started."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(self.name)

    @property
    def title(self) -> str:
        gpus = self.nodes * self.gpus_per_node
        return f"{self.name}: {self.strategy.name} on {gpus} GPU{'' if gpus == 1 else 's'}"

    def path(self, file: str) -> str:
        return file if self.folder == "." else f"{self.folder}/{file}"

    @classmethod
    def of_plan(cls, plan: Mapping[str, Any], folder: str) -> Request | None:
        """The choice of a plan's JSON; None where nothing fits.

        Raises:
            KeyError, TypeError, ValueError: it is no such JSON.
        """
        chosen, hardware, job = plan["chosen"], plan["hardware"], plan["job"]
        if chosen is None:
            return None
        return cls(
            name=job["name"],
            strategy=Strategy.from_json(chosen["strategy"]),
            nodes=int(hardware["nodes"]),
            gpus_per_node=int(hardware["gpus_per_node"]),
            trainable_parameters=int(job["trainable_parameters"]),
            folder=folder,
        )
