"""kill -9 of everything, at every event: the limits from before are always back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLING = Path(__file__).with_name("killing.py")


@pytest.mark.parametrize(
    ("mode", "least_events"),
    [("owner", 40), ("launcher", 40), ("guardian", 40), ("both", 40), ("settling", 10)],
)
def test_limits_are_back_whatever_is_killed_when(mode: str, least_events: int, tmp_path: Path) -> None:
    """`both`: the owner and its guardian at once; `settling`: the guardian at its work."""
    command = [sys.executable, str(KILLING), str(tmp_path / "runs"), mode]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["bad"] == []
    assert found["events"] >= least_events
