"""`python -m shardwise.doctor.probes EVENTS PROBE...`: answers each probe, a JSON line an event in EVENTS.

{"probe": "collective"}                                  it begins
{"probe": "collective", "stage": "joining"}              it has come to a place where it may hang
{"probe": "collective", "facts": {...}}                  its answer
{"probe": "collective", "error": "RuntimeError: ..."}    it raised
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

PROBES = {
    "torch": "torch_build:build",
    "formats": "torch_build:formats",
    "bitsandbytes": "low_bit:quantize",
    "cross_entropy": "kernels:cross_entropy",
    "attention": "kernels:attention",
    "mamba": "kernels:mamba",
    "liger": "kernels:liger",
    "collective": "collective:all_reduce",
    "deepspeed": "deepspeed_ops:ops",
    "cpu_adam": "deepspeed_ops:build_cpu_adam",
    "hub": "hub:reach",
    "nvml": "nvml:energy",
    "measure": "measure:measure",
}
"""Each probe's module and function. A function gets `stage`, which notes where it is, and returns facts."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ["SHARDWISE_PARENT"]):  # it died before the line above
        os._exit(1)


def main(events: str, names: list[str], probes: dict[str, str], package: str) -> None:
    """Answers `names`, each by the function that `probes` names in a module of `package`."""
    _die_with_parent()
    file = Path(events)

    def tell(**event: Any) -> None:
        with file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(event) + "\n")

    for name in names:
        tell(probe=name)
        module, function = probes[name].split(":")
        try:
            act = getattr(importlib.import_module(f"{package}.{module}"), function)
            tell(probe=name, facts=act(lambda stage, name=name: tell(probe=name, stage=stage)))
        except Exception as error:
            tell(probe=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:], PROBES, "shardwise.doctor.probes")
