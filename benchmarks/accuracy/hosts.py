"""The hardware that measured rows are predicted on, where it is more than a number of H200."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rows import Row

from shardwise.hardware.calibration import host_pace
from shardwise.hardware.hardware import Hardware, Link
from shardwise.hardware.parse import parse_hardware

HERE = Path(__file__).parent


def over_sockets(row: Row, measured: Mapping[str, Any]) -> Hardware:
    """H200 that NCCL joins over TCP, at the rate and latency that `doctor --calibrate` measured there.

    It counts as no NVLink; a plan on that machine itself would take it for a slow one (0110).
    """
    between = _link("slow", measured)["between"]
    sockets = Link(name="sockets", source="doctor --calibrate", measured=True, **between)
    return replace(parse_hardware(f"{row.gpus}xH200"), intra=sockets)


def two_nodes(row: Row, measured: Mapping[str, Any]) -> Hardware:
    """Two nodes of H200 that NCCL joins over TCP, at the rate that link.py measured for the row's groups.

    What FSDP2 replicates and a pipeline sends goes between pairs, one of each node, both at once. All else
    goes over one ring through all GPUs; its rate is that of all GPUs of a node together.
    """
    gpus, found, strategy = row.gpus // row.nodes, _link("two_nodes", measured), row.resolved()
    hardware = parse_hardware(f"{row.nodes}x{gpus}xH200+eth25")
    assert hardware.inter is not None
    if strategy.pipeline > 1 or (strategy.engine == "fsdp2" and strategy.shard_group):
        rate = found["both pairs"]["rate"]
    else:
        ring = found["all"]["rate"]
        rate = ring | {"bytes_per_second": ring["bytes_per_second"] / gpus}
    return replace(hardware, inter=replace(hardware.inter, **rate, measured=True))


def _link(name: str, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The latest measurement of a link before a row's: a call that measures rows measures the link first."""
    lines = (HERE / "results" / f"{name}_link.jsonl").read_text(encoding="utf-8").splitlines()
    before = [link for link in map(json.loads, lines) if link["date"] <= measured["date"]]
    return max(before, key=lambda link: str(link["date"]))


def paced(hardware: Hardware, measured: Mapping[str, Any]) -> Hardware:
    """`hardware` with the pace of the host that a row was measured on, if a call was timed there.

    Both readings, before all rows and during this one, are the best of a moment. The slower one counts.
    """
    calls = [measured.get(f"host_call_seconds{when}") for when in ("", "_meanwhile")]
    slower = max((call for call in calls if call is not None), default=None)
    return hardware if slower is None else replace(hardware, host_pace=host_pace(slower))
