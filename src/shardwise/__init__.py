"""Plan, run and measure the training of language models: `import shardwise; shardwise.plan("job.yaml")`.

Importing this costs nothing: each name loads what it needs when it is first used, and torch only when a model
has to be built.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.app.bench import bench
    from shardwise.app.check import check
    from shardwise.app.jobs import load_job
    from shardwise.app.machine import doctor
    from shardwise.app.plan import plan
    from shardwise.app.tables import tables
    from shardwise.app.train import Run, train
    from shardwise.hardware.hardware import Hardware
    from shardwise.job.schema import Job
    from shardwise.planner.plan import Plan
    from shardwise.strategy import Strategy

__version__ = "0.1.0"

__all__ = ["Hardware", "Job", "Plan", "Run", "Strategy", "bench", "check", "doctor", "load_job"]
__all__ += ["plan", "tables", "train"]

_HOMES = {
    "Hardware": "hardware.hardware",
    "Job": "job.schema",
    "Plan": "planner.plan",
    "Run": "app.train",
    "Strategy": "strategy",
    "bench": "app.bench",
    "check": "app.check",
    "doctor": "app.machine",
    "load_job": "app.jobs",
    "plan": "app.plan",
    "tables": "app.tables",
    "train": "app.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
