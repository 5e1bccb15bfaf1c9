"""Lets the tests here run whole jobs with the helpers of tests/distributed; which attention they take."""

import sys
from pathlib import Path

import pytest

from shardwise.kernels import flash4

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(autouse=True)
def _attention_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Predictions that are compared here are those without flash attention 4."""
    monkeypatch.setattr(flash4, "installed", lambda: False)


@pytest.fixture
def flash_attention_4(_attention_of_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test is skipped where the package is not installed."""
    pytest.importorskip("flash_attn.cute")
    monkeypatch.setattr(flash4, "installed", lambda: True)
