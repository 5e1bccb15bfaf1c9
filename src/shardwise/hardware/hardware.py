"""What a job runs on: GPUs, the links between them, and the host behind them, as frozen values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from shardwise.hardware.catalog import Gpu


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link as the alpha-beta model sees it: n bytes take `latency_seconds + n / bytes_per_second`."""

    name: str
    latency_seconds: float  # of one message; a ring all-reduce over N GPUs sends 2 (N - 1) of them
    bytes_per_second: float  # what one GPU sends, and also receives, while all that share it do so
    source: str
    pair_share: float = 1.0  # of that rate, in an all-reduce between two GPUs
    pair_gather_share: float = 1.0  # the same in an all-gather or a reduce-scatter
    measured: bool = False  # measured on this machine by `doctor --calibrate`; otherwise the catalog's


SPREAD = 0.015
"""Of equal GPUs of several nodes. Sinha et al. (SC 2022, arXiv 2208.11035) name 8 % between the GPUs of a
cluster, outliers apart; taken for the 5.4 standard deviations of a box plot's whiskers."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    intra: Link  # between the GPUs of one node
    inter: Link | None  # between nodes; None where there is one node
    host_link: Link  # between pinned host memory and one GPU, in one direction
    host_memory_bytes: int | None = None  # of one node; None where it is not known
    cpu_cores: int | None = None  # of one node that a process may use; None where it is not known
    straggler_fraction: float | None = None  # stated; see `spread`
    host_pace: float = 1.0
    """How long Python and torch take for a call, as a multiple of what they take on the ledger's hosts."""

    def __str__(self) -> str:
        return f"{self.nodes} x {self.gpus_per_node} x {self.gpu.name}".removeprefix("1 x ")

    @staticmethod
    def parse(text: str) -> Hardware:
        """`4xRTX4080`, `2x8xH100`, `4x24GB@pcie4`; JobError for a text that names no hardware."""
        from shardwise.hardware.parse import parse_hardware

        return parse_hardware(text)

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def spread(self) -> float:
        """Standard deviation of a GPU's step time, as a share of it.

        Within a node nothing is assumed: the measured rows that the rates come from include it.
        """
        if self.straggler_fraction is not None:
            return self.straggler_fraction
        return SPREAD if self.nodes > 1 else 0.0

    def to_json(self) -> dict[str, Any]:
        """All of it, so that a plan reads the same under a later catalog; bytes, seconds, FLOP/s, watts."""
        values = asdict(self)
        values["gpu"] = {**values["gpu"], "assumed": self.gpu.assumed_from is not None}
        return {"world_size": self.world_size, **values}
