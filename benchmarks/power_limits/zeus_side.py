"""Zeus' GlobalPowerLimitOptimizer on its own records, for replay.py; runs in an environment with zeus 0.16.0.

    python zeus_side.py FOLDER SELECTOR...

A selector is energy, time, eta:KNOB or slowdown:FACTOR. Prints JSON: for each record, the optimizer steps
until the state is Done, and the chosen limit for each selector. The optimizer, its selectors and
ReplayZeusMonitor are Zeus' own. Replaced are NVML (limits, and the calls that set them), and torch, of which
it only asks whether several processes run.
"""

from __future__ import annotations

import csv
import json
import sys
import types
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from unittest import mock

import zeus.device.gpu as gpu_module
from zeus.optimizer import power_limit as zeus
from zeus.utils.testing import ReplayZeusMonitor


def fake_nvml(limits: list[int], gpus: int) -> dict[str, Callable[..., object]]:
    """The calls that the optimizer makes, on GPUs whose limits are remembered."""
    now = dict.fromkeys(range(gpus), max(limits) * 1000)
    return {
        "nvmlDeviceGetCount": lambda: gpus,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetC2cModeInfoV": lambda _: types.SimpleNamespace(isC2cEnabled=False),
        "nvmlDeviceGetName": lambda _: "replayed",
        "nvmlDeviceGetPowerManagementLimitConstraints": lambda _: (min(limits) * 1000, max(limits) * 1000),
        "nvmlDeviceGetPowerManagementLimit": lambda index: now[index],
        "nvmlDeviceSetPowerManagementLimit": now.__setitem__,
        "nvmlDeviceGetPersistenceMode": lambda _: 1,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
    }


def selector(text: str, gpus: int) -> zeus.OptimumSelector:
    name, _, number = text.partition(":")
    if name == "eta":
        return zeus.ZeusCost(float(number), world_size=gpus)
    if name == "slowdown":
        return zeus.MaxSlowdownConstraint(float(number))
    return {"energy": zeus.Energy, "time": zeus.Time}[name]()


def sweep(record: Path, choose: str) -> tuple[int, int]:
    """Steps until Done with the optimizer's defaults, and the chosen limit in watts."""
    with record.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    limits = [int(row["window_name"].rpartition("_")[2]) for row in rows]
    gpus = sum(name.endswith("_energy") for name in rows[0])
    gpu_module._gpus = None
    nvml = "zeus.device.gpu.nvidia.pynvml"
    with (
        mock.patch("zeus.device.gpu.nvml_is_available", return_value=True),
        mock.patch.multiple(nvml, **fake_nvml(limits, gpus)),
        mock.patch("zeus.optimizer.power_limit.atexit"),
    ):
        monitor = ReplayZeusMonitor(log_file=record, ignore_sync_execution=True)
        optimizer = zeus.GlobalPowerLimitOptimizer(monitor, selector(choose, gpus))
        steps = 0
        while not isinstance(optimizer.state, zeus.Done):
            optimizer.on_step_begin()
            steps += 1
    return steps, optimizer.state.optimal_power_limit // 1000


def main() -> None:
    torch = types.ModuleType("torch")
    vars(torch).update(
        cuda=types.SimpleNamespace(is_available=lambda: False),
        distributed=types.SimpleNamespace(is_available=lambda: False),
    )
    sys.modules["torch"] = torch
    folder, selectors = Path(sys.argv[1]), sys.argv[2:]
    records = {}
    for record in sorted(folder.glob("*.csv")):
        found = {choose: sweep(record, choose) for choose in selectors}
        records[record.stem] = {
            "steps": next(iter(found.values()))[0],
            "watts": {choose: watts for choose, (_, watts) in found.items()},
        }
    print(json.dumps({"zeus": version("zeus"), "records": records}))


if __name__ == "__main__":
    main()
