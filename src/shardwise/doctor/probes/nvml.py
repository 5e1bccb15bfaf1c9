"""Whether the driver's management library tells the energy of a GPU (energy/meter.py needs it to)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def energy(stage: Callable[[str], None]) -> dict[str, Any]:
    """Which of energy and power the first GPU tells. ImportError where nvidia-ml-py is missing."""
    import pynvml

    stage("starting NVML")
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    told = []
    for name, ask in (
        ("energy", pynvml.nvmlDeviceGetTotalEnergyConsumption),
        ("power", pynvml.nvmlDeviceGetPowerUsage),
    ):
        try:
            ask(handle)
            told.append(name)
        except pynvml.NVMLError:
            continue
    return {"tells": told}
