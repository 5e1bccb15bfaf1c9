"""Lets the tests here, and what they start, import the helpers beside them and in tests/distributed."""

import os
import sys
from pathlib import Path

for _folder in (Path(__file__).parent, Path(__file__).parents[1] / "distributed"):
    sys.path.insert(0, str(_folder))
    os.environ["PYTHONPATH"] = f"{_folder}{os.pathsep}{os.environ['PYTHONPATH']}"

from fleet import fleet  # noqa: E402, F401 - a fixture
