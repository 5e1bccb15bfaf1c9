"""What `shardwise doctor --calibrate` measured on a machine, kept in the cache folder for the planner.

There is a file for each kind and number of GPUs and each driver. In what hardware/detect.py finds, measured
links replace those of the catalog, and the measured call of torch sets the pace of the host; other
measurements change nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter

from shardwise.device.find import find
from shardwise.folders import cache_root, replace_json
from shardwise.hardware.hardware import Hardware

SCHEMA = 1
HOST_CALL_SECONDS, HOST_EXPONENT = 2.7e-6, 0.7
"""A call of torch on the hosts that the table of times was fitted on, and how the rest of a host's work
follows it: fitted to measurements of the accuracy ledger on H200, tried on those on H100 (decision 0094)."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A link as the alpha-beta model sees it, as `Link` does."""

    latency_seconds: Annotated[float, Field(ge=0)]
    bytes_per_second: Annotated[float, Field(gt=0)]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One transfer. `bytes` are those of the full tensor: after a gather, before a scatter."""

    what: str  # `all_reduce`, `all_gather`, `reduce_scatter`, `send_to_neighbour`, or a copy: `pinned_to_gpu`
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of two square matrices in bf16."""

    side: int
    flops_per_second: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The slowest GPU's rates, measured while all GPUs of the machine worked at once."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    device: str  # the GPU's name in the catalog, or the driver's; `CPU` on a machine without one
    count: int  # GPUs, or processes of a CPU
    driver: str | None
    date: str  # of the measurement, as 2026-08-31
    versions: Mapping[str, str]
    link: str | None  # what joined the GPUs, as `Link.name`; others may be joined differently
    between: Rate | None  # between the GPUs, fitted to the all-gathers and reduce-scatters; None for one GPU
    host: Rate | None  # between pinned host memory and each GPU, fitted to the copies in both directions
    memory_bytes_per_second: float  # read and written by a copy within the GPU's memory, or the host's
    host_call_seconds: float  # one call of torch on the CPU, an addition of two numbers
    products: tuple[Product, ...]
    samples: tuple[Sample, ...]
    skipped: tuple[str, ...]  # what was not measured, and why

    @property
    def host_pace(self) -> float:
        return host_pace(self.host_call_seconds)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """The value that `to_json` wrote. ValueError where it is something else."""
        rest = dict(values)
        if rest.pop("schema", None) != SCHEMA:
            raise ValueError("another version wrote it")
        return TypeAdapter(cls).validate_python(rest)


def save(calibration: Calibration) -> Path:
    """Write it, complete or not at all, where `load` finds it. OSError where the cache cannot be written."""
    path = _path(calibration.device, calibration.count, calibration.driver)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    replace_json(path, calibration.to_json())
    return path


def load(device: str, count: int, driver: str | None) -> Calibration | None:
    """The calibration of such a machine; None where there is none that can be read."""
    try:
        return Calibration.from_json(json.loads(_path(device, count, driver).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def of_hardware(hardware: Hardware) -> Calibration | None:
    """What was measured with this machine's GPUs, their present driver and link."""
    driver = find().driver_version()
    found = load(hardware.gpu.name, hardware.gpus_per_node, driver if isinstance(driver, str) else None)
    return found if found is not None and found.link in (None, hardware.intra.name) else None


def host_pace(call_seconds: float) -> float:
    """`Hardware.host_pace` of a host on which a call of torch takes `call_seconds`."""
    return float((call_seconds / HOST_CALL_SECONDS) ** HOST_EXPONENT)


def calibrated(hardware: Hardware) -> Hardware:
    """The same machine with the links and the host's pace that were measured on it, if they were."""
    found = of_hardware(hardware)
    if found is None:
        return hardware
    hardware = replace(hardware, host_pace=found.host_pace)
    source = f"shardwise doctor --calibrate on this machine, {found.date}"
    for name, rate in (("intra", found.between), ("host_link", found.host)):
        if rate is not None:
            how = {"source": source, "pair_share": 1.0, "pair_gather_share": 1.0, "measured": True}
            link = replace(getattr(hardware, name), **asdict(rate), **how)
            hardware = replace(hardware, **{name: link})
    return hardware


def _path(device: str, count: int, driver: str | None) -> Path:
    names = [re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-") for text in (device, driver or "none")]
    return cache_root() / "calibration" / f"{names[0]}-x{count}-{names[1]}.json"
