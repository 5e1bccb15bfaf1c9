"""`python -m shardwise.diagnosis.probes EVENTS PROBE...`: answer each probe; a JSON line per event in EVENTS.

{"probe": "collective"}                                  it begins
{"probe": "collective", "stage": "joining"}              it comes to a call that may hang
{"probe": "collective", "facts": {...}}                  its answer
{"probe": "collective", "error": "RuntimeError: ..."}    it raised
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from shardwise.launch import die_with

PROBES = {
    "torch": "compute:build",
    "formats": "compute:formats",
    "bitsandbytes": "compute:quantize",
    "cross_entropy": "compute:cross_entropy",
    "attention": "compute:attention",
    "mamba": "compute:mamba",
    "liger": "compute:liger",
    "collective": "ranks:all_reduce",
    "deepspeed": "software:ops",
    "cpu_adam": "software:build_cpu_adam",
    "hub": "software:hub",
    "measure": "ranks:measure",
    "tiny": "tiny:run",
}
"""Each probe's module and function, which gets `stage`, to record its progress, and returns facts."""


def main(events: str, names: list[str], probes: dict[str, str], package: str) -> None:
    """Answer `names`, each by the function that `probes` names in a module of `package`."""
    die_with(int(os.environ["SHARDWISE_PARENT"]))

    def write(**event: Any) -> None:
        with Path(events).open("a", encoding="utf-8") as out:
            out.write(json.dumps(event) + "\n")

    for name in names:
        write(probe=name)
        module, function = probes[name].split(":")
        try:
            act = getattr(importlib.import_module(f"{package}.{module}"), function)
            write(probe=name, facts=act(lambda stage, name=name: write(probe=name, stage=stage)))
        except Exception as error:
            write(probe=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:400]}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:], PROBES, "shardwise.diagnosis.probes")
