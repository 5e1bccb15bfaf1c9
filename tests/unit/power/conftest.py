"""The machine whose power limits the tests change."""

from __future__ import annotations

from pathlib import Path

import pytest

from power_machine import Machine
from shardwise.device.find import REPLAY
from shardwise.power.lease import FOLDER


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Also for the processes that the test starts."""
    found = Machine(tmp_path)
    monkeypatch.setenv(REPLAY, f"fake:{found.file}")
    monkeypatch.setenv(FOLDER, str(found.leases))
    return found
