"""A recorded machine, and probes that answer at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recorded import install, values
from shardwise.device.find import REPLAY
from shardwise.device.nvml import CLOCK_REASONS

HERE = Path(__file__).parent


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the recorded machine `name` this one's; `readings` and `facts` change each of its GPUs."""

    def record(
        name: str = "h200x8",
        *,
        of: int = 4,
        version: str = "580.95.05",
        facts: dict[str, Any] | None = None,
        **readings: Any,
    ) -> None:
        recorded = values(name, of=of)
        recorded["driver"] = version
        recorded["clock_reasons"] = CLOCK_REASONS
        usual = {
            "memory_used_bytes": 4 << 20,
            "energy_joules": 1.0,
            "power_watts": 77.5,
            "power_limit_watts": 700.0,
            "power_default_watts": 700.0,
            "power_min_watts": 200.0,
            "power_max_watts": 700.0,
            "clock_reasons": 1,
        }
        for gpu in recorded["gpus"]:
            gpu.update(facts or {}, readings={**usual, **readings})
        install(recorded, tmp_path, monkeypatch)

    return record


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLAY, "none")


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> str:
    """The module to run instead of the real probes."""
    monkeypatch.setenv("PYTHONPATH", f"{HERE}:{os.environ['PYTHONPATH']}")
    return "fake_probes"
