"""What a job runs on: GPUs, the links between them, and the host behind them, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.hardware.catalog import Adapters, Fabric, Gpu, Pcie


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link as the alpha-beta model sees it: n bytes take `latency_seconds + n / bytes_per_second`."""

    name: str
    latency_seconds: float
    """Of one message; a ring all-reduce over N GPUs sends 2 (N - 1) of them."""
    bytes_per_second: float
    """What one GPU sends, and receives as well, while all GPUs that share the link do so."""
    source: str
    measured: bool = False
    """On this machine, by `doctor --calibrate`; otherwise it is the catalog's."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes of equal GPUs."""

    gpu: Gpu
    gpus_per_node: int
    nodes: int
    intra: Link
    """Between the GPUs of one node."""
    inter: Link | None
    """Between nodes; None where there is one node."""
    host_link: Link
    """Between pinned host memory and one GPU, in one direction."""
    host_memory_bytes: int | None = None
    """Of one node; None where it is not known."""
    cpu_cores: int | None = None
    """Of one node that a process may use; None where it is not known."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    def to_json(self) -> dict[str, Any]:
        """All of it, so that a plan reads the same under a later catalog; bytes, seconds, FLOP/s, watts."""
        values = asdict(self)
        values["gpu"] = {**values["gpu"], "assumed": self.gpu.assumed_from is not None}
        return {"world_size": self.world_size, **values}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Hardware:
        """The value that `to_json` wrote."""
        inter = values["inter"]
        return cls(
            gpu=_gpu(values["gpu"]),
            gpus_per_node=values["gpus_per_node"],
            nodes=values["nodes"],
            intra=Link(**values["intra"]),
            inter=None if inter is None else Link(**inter),
            host_link=Link(**values["host_link"]),
            host_memory_bytes=values["host_memory_bytes"],
            cpu_cores=values["cpu_cores"],
        )


def _gpu(values: Mapping[str, Any]) -> Gpu:
    rest = {key: value for key, value in values.items() if key != "assumed"}
    fabric, network = rest["fabric"], rest["network"]
    return Gpu(
        **{
            **rest,
            "driver_names": tuple(rest["driver_names"]),
            "pcie": Pcie(**rest["pcie"]),
            "fabric": None if fabric is None else Fabric(**fabric),
            "network": None if network is None else Adapters(**network),
        }
    )
