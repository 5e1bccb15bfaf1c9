"""The accuracy benchmark's modules, for the tests of what they say."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "benchmarks" / "accuracy"


def module(name: str) -> ModuleType:
    """One of them, which imports its neighbours by their plain names."""
    sys.path.insert(0, str(FOLDER))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(FOLDER))
