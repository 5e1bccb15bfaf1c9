"""The accuracy benchmark's modules, for the tests of what they say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from scripts import script

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"


def module(name: str) -> ModuleType:
    """One of them, which imports its neighbours by their plain names."""
    return script(f"benchmarks/accuracy/{name}.py")
